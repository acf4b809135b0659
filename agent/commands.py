"""The operator's commands: each is about one job, and does what it does through etcd.

elastic-agent scale --np=4
elastic-agent status [--json]
elastic-agent pause | resume | reset
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import click

from agent.config import parse_np
from agent.errors import ConfigError
from agent.operate.target import Target
from agent.options import CONTEXT, JOB_OPTIONS, JSON, NP, YES, read_server, with_options

_QUICK_TIMEOUT_S = 5.0

Options = tuple[Callable[[Any], Any], ...]


def about_a_job(name: str, *options: Callable[[Any], Any]) -> Callable[[Callable[..., int]], click.Command]:
    """Make a command of a function that takes the job that is meant, and the options given here by name.

    Args:
        name: of the command; its help is the function's docstring.
        options: beside those that say which job, and `--json`, which every such command has.
    """

    def make(function: Callable[..., int]) -> click.Command:
        def invoke(**given: Any) -> int:  # noqa: ANN401 - click passes the options by name
            own = {key: value for key, value in given.items() if key not in _OF_THE_JOB}
            return function(_target(given), **own)

        command = click.command(f"elastic-agent {name}", context_settings=CONTEXT, help=function.__doc__)
        return command(with_options((*JOB_OPTIONS, *options, JSON))(invoke))

    return make


def _names(options: Options) -> frozenset[str]:
    """What click calls them."""
    command = click.command("any")(with_options(options)(lambda: None))
    return frozenset(parameter.name for parameter in command.params if parameter.name is not None)


_OF_THE_JOB = _names(JOB_OPTIONS)


def _target(options: dict[str, Any]) -> Target:
    timeout_s: float = options["store_timeout"]
    return Target(read_server(options), options["job_id"], min(timeout_s, _QUICK_TIMEOUT_S))


@about_a_job("scale", NP)
def scale(target: Target, *, np: str | None, json: bool) -> int:
    """Change the number of nodes of a running job."""
    from agent.operate.changes import scale_job  # noqa: PLC0415 - loads the etcd client: only when needed

    if np is None:
        raise ConfigError("scale needs the new number of nodes: elastic-agent scale --np=N (or MIN:MAX)")
    return scale_job(target, parse_np(np), as_json=json)


@about_a_job("status")
def status(target: Target, *, json: bool) -> int:
    """Show a job: its nodes, ranks, and why it does what it does."""
    from agent.operate.show import show_status  # noqa: PLC0415 - as above

    return show_status(target, as_json=json)


@about_a_job("pause")
def pause(target: Target, *, json: bool) -> int:
    """Change nothing in a running job by itself, for maintenance: it trains on as it is."""
    from agent.operate.changes import pause_job  # noqa: PLC0415 - as above

    return pause_job(target, is_paused=True, as_json=json)


@about_a_job("resume")
def resume(target: Target, *, json: bool) -> int:
    """End a pause."""
    from agent.operate.changes import pause_job  # noqa: PLC0415 - as above

    return pause_job(target, is_paused=False, as_json=json)


@about_a_job("reset", YES)
def reset(target: Target, *, yes: bool, json: bool) -> int:
    """Let an ended job begin anew when its agents are started again."""
    from agent.operate.changes import reset_job  # noqa: PLC0415 - as above

    return reset_job(target, is_agreed=yes, as_json=json)
