"""The operator's commands: each is about one job, and does what it does through etcd.

Most only change the job's `spec`, which its agents follow. What they do is in `agent/operate/`, which is imported only
when a command is run: it loads the etcd client.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
from click.shell_completion import CompletionItem

from agent.cli.options import CONTEXT, JOB_OPTIONS, JSON, LOGS, NP, YES, with_options
from agent.config import parse_np
from agent.errors import ConfigError
from agent.operate.target import Target, read_target

Options = tuple[Callable[[Any], Any], ...]


def _complete_node(context: click.Context, _parameter: click.Parameter, word: str) -> list[CompletionItem]:
    from agent.operate.jobs import suggest_node_ids  # noqa: PLC0415 - see the module's words

    known = suggest_node_ids(context.params)
    return [CompletionItem(node_id) for node_id in known if node_id.startswith(word)]


def _bounded(_context: click.Context, _option: click.Parameter, seconds: float | None) -> float | None:
    if seconds is not None and not seconds <= threading.TIMEOUT_MAX:  # nor NaN
        raise click.BadParameter(f"wanted seconds, {threading.TIMEOUT_MAX:.0f} at most, got {seconds:g}")
    return seconds


WATCH = click.option("--watch", is_flag=True, help="Show it again at each change, until the job ends.")
PHASES = click.option("--phases", is_flag=True, help="Show where the time of each went, too.")
WAIT = click.option(
    "--wait",
    type=click.FloatRange(min=0.0),
    metavar="S",
    callback=_bounded,
    help="Wait until it is done, S seconds at most.",
)
NODES = click.argument("nodes", nargs=-1, required=True, metavar="NODE…", shell_complete=_complete_node)
GROUP = click.argument("group", type=click.IntRange(min=1), required=False)


def about_a_job(
    name: str, *options: Callable[[Any], Any], changes: bool = False
) -> Callable[[Callable[..., int]], click.Command]:
    """Make a command of a function that takes the job that is meant, and the options given here by name.

    Args:
        name: of the command; its help is the function's docstring.
        options: beside those that say which job, and `--json`, which every such command has.
        changes: it changes the job: which one must be said, if several run here.
    """

    def make(function: Callable[..., int]) -> click.Command:
        def invoke(**given: Any) -> int:  # noqa: ANN401 - click passes the options by name
            own = {key: value for key, value in given.items() if key not in _OF_THE_JOB}
            return function(read_target(given, changes=changes), **own)

        command = click.command(f"elastic-agent {name}", context_settings=CONTEXT, help=function.__doc__)
        return command(with_options((*JOB_OPTIONS, *options, JSON))(invoke))

    return make


def _names(options: Options) -> frozenset[str]:
    """What click calls them."""
    command = click.command("any")(with_options(options)(lambda: None))
    return frozenset(parameter.name for parameter in command.params if parameter.name is not None)


_OF_THE_JOB = _names(JOB_OPTIONS)


@about_a_job("scale", NP, changes=True)
def scale(target: Target, *, np: str | None, json: bool) -> int:
    """Change the number of nodes of a running job."""
    from agent.operate.changes import scale_job  # noqa: PLC0415 - as above

    if np is None:
        raise ConfigError("scale needs the new number of nodes: elastic-agent scale --np=N (or MIN:MAX)")
    return scale_job(target, parse_np(np), as_json=json)


@about_a_job("status", WATCH)
def status(target: Target, *, watch: bool, json: bool) -> int:
    """Show a job: its nodes, ranks, and why it does what it does."""
    from agent.operate.show import show_status  # noqa: PLC0415 - as above

    return show_status(target, watch=watch, as_json=json)


@about_a_job("page")
def page(target: Target, *, json: bool) -> int:
    """Tell where a job's web page is served, with the token that it asks for."""
    from agent.operate.show import show_pages  # noqa: PLC0415 - as above

    return show_pages(target, as_json=json)


@about_a_job("history", PHASES)
def history(target: Target, *, phases: bool, json: bool) -> int:
    """List a job's changes of group: why, how long each took, and what was done again."""
    from agent.operate.show import show_history  # noqa: PLC0415 - as above

    return show_history(target, with_phases=phases, as_json=json)


@about_a_job("explain", GROUP)
def explain(target: Target, *, group: int | None, json: bool) -> int:
    """Say why GROUP was formed: what came first, who died of it, where the time went. Default: the newest."""
    from agent.operate.show import explain_group  # noqa: PLC0415 - as above

    return explain_group(target, group, as_json=json)


@about_a_job("logs", *LOGS)
def logs(
    target: Target,
    *,
    rank: int | None,
    group: int | None,
    follow: bool,
    lines: int | None,
    log_dir: str | None,
    json: bool,
) -> int:
    """Show what the ranks have said, from the nodes where it lies."""
    from agent.operate.logs import show_logs  # noqa: PLC0415 - as above
    from agent.operate.node_logs import LogSelection  # noqa: PLC0415 - as above

    own_dir = None if log_dir is None else Path(log_dir)
    return show_logs(target, LogSelection(rank, group, lines, is_followed=follow, log_dir=own_dir, as_json=json))


@about_a_job("drain", NODES, WAIT, YES, changes=True)
def drain(target: Target, *, nodes: tuple[str, ...], wait: float | None, yes: bool, json: bool) -> int:
    """Ask the agents of nodes to leave: all ranks stop after one step and save it, and the others go on."""
    from agent.operate.nodes import drain_nodes  # noqa: PLC0415 - as above

    return drain_nodes(target, nodes, wait_s=wait, is_agreed=yes, as_json=json)


@about_a_job("exclude", NODES, YES, changes=True)
def exclude(target: Target, *, nodes: tuple[str, ...], yes: bool, json: bool) -> int:
    """Leave nodes out of all groups to come. Their agents stay."""
    from agent.operate.nodes import exclude_nodes  # noqa: PLC0415 - as above

    return exclude_nodes(target, nodes, is_agreed=yes, as_json=json)


@about_a_job("include", NODES, changes=True)
def include(target: Target, *, nodes: tuple[str, ...], json: bool) -> int:
    """Let excluded nodes back in."""
    from agent.operate.nodes import include_nodes  # noqa: PLC0415 - as above

    return include_nodes(target, nodes, as_json=json)


@about_a_job("restart", YES, changes=True)
def restart(target: Target, *, yes: bool, json: bool) -> int:
    """Start all workers of a running job anew, on the same nodes, after a handoff."""
    from agent.operate.changes import restart_job  # noqa: PLC0415 - as above

    return restart_job(target, is_agreed=yes, as_json=json)


@about_a_job("stop", WAIT, YES, changes=True)
def stop(target: Target, *, wait: float | None, yes: bool, json: bool) -> int:
    """End a running job once its training is saved. Its agents exit with code 0."""
    from agent.operate.changes import stop_job  # noqa: PLC0415 - as above

    return stop_job(target, wait_s=wait, is_agreed=yes, as_json=json)


@about_a_job("pause", changes=True)
def pause(target: Target, *, json: bool) -> int:
    """Change nothing in a running job by itself, for maintenance: it trains on as it is."""
    from agent.operate.changes import pause_job  # noqa: PLC0415 - as above

    return pause_job(target, is_paused=True, as_json=json)


@about_a_job("resume", changes=True)
def resume(target: Target, *, json: bool) -> int:
    """End a pause."""
    from agent.operate.changes import pause_job  # noqa: PLC0415 - as above

    return pause_job(target, is_paused=False, as_json=json)


@about_a_job("reset", YES, changes=True)
def reset(target: Target, *, yes: bool, json: bool) -> int:
    """Let an ended job begin anew when its agents are started again."""
    from agent.operate.changes import reset_job  # noqa: PLC0415 - as above

    return reset_job(target, is_agreed=yes, as_json=json)


BY_NAME = {
    "status": status,
    "page": page,
    "history": history,
    "explain": explain,
    "logs": logs,
    "scale": scale,
    "drain": drain,
    "exclude": exclude,
    "include": include,
    "pause": pause,
    "resume": resume,
    "restart": restart,
    "stop": stop,
    "reset": reset,
}
