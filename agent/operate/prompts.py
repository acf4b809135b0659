"""Questions that a command asks its user, and the results that it prints."""

from __future__ import annotations

import sys
from typing import Any

import click
import msgspec

from agent.errors import ConfigError, ElasticAgentError


class AnswerDeclined(ElasticAgentError):  # noqa: N818 - a decision of the user, not an error
    """The user declined; nothing was changed."""


def confirm(question: str, *, is_agreed: bool) -> None:
    """Ask before something is interrupted or lost.

    Args:
        question: what would be done, and to what; ends with a question mark.
        is_agreed: whether `--yes` was given; then nothing is asked.

    Raises:
        ConfigError: standard input is no terminal, so nobody can be asked.
        AnswerDeclined: the answer was no.
    """
    if is_agreed:
        return
    if not sys.stdin.isatty():
        raise ConfigError(f"{question} Nothing was changed: standard input is no terminal, so confirm with --yes")
    if not click.confirm(question, err=True):
        raise AnswerDeclined("nothing was changed")


def print_result(job_id: str, command: str, message: str, *, as_json: bool, **details: Any) -> int:  # noqa: ANN401
    """Print what a command has done; return the exit code.

    Args:
        job_id: the job.
        command: the command's name.
        message: for people.
        as_json: print a JSON object with all arguments instead.
        details: further fields, for programs.
    """
    if as_json:
        print_json({"job_id": job_id, "command": command, "message": message, **details})
    else:
        click.echo(f"job {job_id}: {message}")
    return 0


def print_json(value: object) -> None:
    """Print a value as indented JSON."""
    click.echo(msgspec.json.format(msgspec.json.encode(value)))
