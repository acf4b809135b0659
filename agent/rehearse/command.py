"""`elastic-agent rehearse`: its checks and its output."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path

import click

from agent.config import check_script
from agent.errors import ConfigError
from agent.local_etcd.embedded import EmbeddedEtcd
from agent.observe.log import configure
from agent.rehearse.cleanup import exit_on_signals
from agent.rehearse.job import ScriptEnded, WaitTimeout
from agent.rehearse.rehearsal import NeverCommits, Rehearsal
from agent.rehearse.report import RehearsalReport


def rehearse(command: Sequence[str], np: int, steps: int | None) -> int:
    """Rehearse a script on this machine; return exit code 0 if nothing is missing, else 1.

    Raises:
        ConfigError: no script was given, or it does not exist or is not a Python script.
    """
    if not command:
        raise ConfigError("no script was given: elastic-agent rehearse [--np=2] [--steps=N] script.py [arguments]")
    check_script(command[0], "; rehearse runs Python scripts")
    configure("rehearse")
    exit_on_signals()
    scratch = tempfile.TemporaryDirectory(prefix="elastic-agent-rehearsal-", ignore_cleanup_errors=True)
    with scratch as directory, EmbeddedEtcd() as etcd:
        try:
            found = Rehearsal(etcd.endpoint, Path(directory), command, np, steps, click.echo).run()
        except NeverCommits:
            click.echo("MISSING: the script has a State, but does not call state.commit() after each step")
            return 1
        except (ScriptEnded, WaitTimeout) as failure:
            click.echo(_cannot_rehearse(failure))
            return 1
    report = RehearsalReport(found)
    click.echo("")
    for line in report.lines():
        click.echo(line)
    return 0 if report.is_clean else 1


def _cannot_rehearse(failure: ScriptEnded | WaitTimeout) -> str:
    if isinstance(failure, WaitTimeout):
        return f"given up: {failure}"
    if failure.code == 0:
        return f"the script ended without an optimizer step; its last lines:\n{failure}"
    return f"the script fails by itself, undisturbed (exit code {failure.code}); its last lines:\n{failure}"
