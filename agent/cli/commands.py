"""The operator's commands. Each is about one job, and works through etcd.

Most commands only change the job's `spec`, which its agents follow. They are implemented in `agent/operate/`, which is
imported when a command runs, because it loads the etcd client.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
from click.shell_completion import CompletionItem

from agent.cli.options import CONTEXT, JOB_OPTIONS, JSON, LOGS, NEW_NP, YES, parameters_of, with_options
from agent.config import parse_np
from agent.errors import ConfigError
from agent.operate.target import Target, read_target


def _complete_node(context: click.Context, _parameter: click.Parameter, word: str) -> list[CompletionItem]:
    from agent.operate.jobs import suggest_node_ids  # noqa: PLC0415 - see the module's docstring

    known = suggest_node_ids(context.params)
    return [CompletionItem(node_id) for node_id in known if node_id.startswith(word)]


def _bounded(_context: click.Context, _option: click.Parameter, seconds: float | None) -> float | None:
    if seconds is not None and not seconds <= threading.TIMEOUT_MAX:  # nor NaN
        raise click.BadParameter(f"wanted seconds, {threading.TIMEOUT_MAX:.0f} at most, got {seconds:g}")
    return seconds


def _refuse_words(_context: click.Context, _argument: click.Parameter, words: tuple[str, ...]) -> None:
    if words:
        raise ConfigError(f"scale takes the number of nodes as an option: elastic-agent scale --np={words[0]}")


WATCH = click.option("--watch", is_flag=True, help="Show the status again at each change, until the job ends.")
PHASES = click.option("--phases", is_flag=True, help="Also show how long each phase took.")
WAIT = click.option(
    "--wait",
    type=click.FloatRange(min=0.0),
    metavar="SECONDS",
    callback=_bounded,
    help="Wait until the change is complete, but no longer than this.",
)
NODES = click.argument("nodes", nargs=-1, required=True, metavar="NODE…", shell_complete=_complete_node)
GROUP = click.argument("group", type=click.IntRange(min=1), required=False)
NO_WORDS = click.argument("words", nargs=-1, metavar="", expose_value=False, callback=_refuse_words)
_FILE = click.Path(dir_okay=False, path_type=Path)


def about_a_job(
    name: str, *options: Callable[[Any], Any], changes: bool = False
) -> Callable[[Callable[..., int]], click.Command]:
    """Turn a function into a command. The function takes the job, and the options given here by name.

    Args:
        name: of the command. The function's docstring is its help.
        options: beside the options that identify the job, and `--json`, which every such command has.
        changes: whether the command changes the job. If several jobs run here, the user must then name one.
    """

    def make(function: Callable[..., int]) -> click.Command:
        def invoke(**given: Any) -> int:  # noqa: ANN401 - click passes the options by name
            own = {key: value for key, value in given.items() if key not in _JOB_OPTION_NAMES}
            return function(read_target(given, changes=changes), **own)

        command = click.command(f"elastic-agent {name}", context_settings=CONTEXT, help=function.__doc__)
        return command(with_options((*JOB_OPTIONS, *options, JSON))(invoke))

    return make


_JOB_OPTION_NAMES = frozenset(parameter.name for parameter in parameters_of(JOB_OPTIONS))


@about_a_job("scale", NEW_NP, NO_WORDS, changes=True)
def scale(target: Target, *, np: str | None, json: bool) -> int:
    """Change the number of nodes of a running job."""
    from agent.operate.changes import scale_job  # noqa: PLC0415 - as above

    if np is None:
        raise ConfigError("scale needs the new number of nodes: elastic-agent scale --np=N (or MIN:MAX)")
    return scale_job(target, parse_np(np), as_json=json)


@about_a_job("status", WATCH)
def status(target: Target, *, watch: bool, json: bool) -> int:
    """Show a job: its nodes, its ranks, its state and the reason for that."""
    from agent.operate.show import show_status  # noqa: PLC0415 - as above

    return show_status(target, watch=watch, as_json=json)


@about_a_job("page")
def page(target: Target, *, json: bool) -> int:
    """Print the addresses of a job's web page, with its access token."""
    from agent.operate.show import show_pages  # noqa: PLC0415 - as above

    return show_pages(target, as_json=json)


@about_a_job("history", PHASES)
def history(target: Target, *, phases: bool, json: bool) -> int:
    """List a job's changes of group: the cause, the duration and the replayed steps of each."""
    from agent.operate.show import show_history  # noqa: PLC0415 - as above

    return show_history(target, with_phases=phases, as_json=json)


@about_a_job("explain", GROUP)
def explain(target: Target, *, group: int | None, json: bool) -> int:
    """Explain why GROUP was formed: first failure, affected ranks, duration of each phase. Default: the newest."""
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
    """Print the output of the ranks, from the nodes that have it."""
    from agent.operate.logs import show_logs  # noqa: PLC0415 - as above
    from agent.operate.node_logs import LogSelection  # noqa: PLC0415 - as above

    own_dir = None if log_dir is None else Path(log_dir)
    return show_logs(target, LogSelection(rank, group, lines, is_followed=follow, log_dir=own_dir, as_json=json))


@about_a_job("drain", NODES, WAIT, YES, changes=True)
def drain(target: Target, *, nodes: tuple[str, ...], wait: float | None, yes: bool, json: bool) -> int:
    """Ask the agents of these nodes to leave: all ranks stop after the same step and save it; the others go on."""
    from agent.operate.nodes import drain_nodes  # noqa: PLC0415 - as above

    return drain_nodes(target, nodes, wait_s=wait, is_agreed=yes, as_json=json)


@about_a_job("exclude", NODES, YES, changes=True)
def exclude(target: Target, *, nodes: tuple[str, ...], yes: bool, json: bool) -> int:
    """Leave nodes out of all later groups. Their agents keep running."""
    from agent.operate.nodes import exclude_nodes  # noqa: PLC0415 - as above

    return exclude_nodes(target, nodes, is_agreed=yes, as_json=json)


@about_a_job("include", NODES, changes=True)
def include(target: Target, *, nodes: tuple[str, ...], json: bool) -> int:
    """Allow excluded nodes in later groups again."""
    from agent.operate.nodes import include_nodes  # noqa: PLC0415 - as above

    return include_nodes(target, nodes, as_json=json)


@about_a_job("restart", YES, changes=True)
def restart(target: Target, *, yes: bool, json: bool) -> int:
    """Restart all workers of a running job on the same nodes, after a handoff."""
    from agent.operate.changes import restart_job  # noqa: PLC0415 - as above

    return restart_job(target, is_agreed=yes, as_json=json)


@about_a_job("stop", WAIT, YES, changes=True)
def stop(target: Target, *, wait: float | None, yes: bool, json: bool) -> int:
    """End a running job after saving its training. Its agents exit with code 0, or 74 if steps could not be saved."""
    from agent.operate.changes import stop_job  # noqa: PLC0415 - as above

    return stop_job(target, wait_s=wait, is_agreed=yes, as_json=json)


@about_a_job("pause", changes=True)
def pause(target: Target, *, json: bool) -> int:
    """Suspend automatic changes of a running job, for maintenance. It trains on as it is."""
    from agent.operate.changes import pause_job  # noqa: PLC0415 - as above

    return pause_job(target, is_paused=True, as_json=json)


@about_a_job("resume", changes=True)
def resume(target: Target, *, json: bool) -> int:
    """End a pause."""
    from agent.operate.changes import pause_job  # noqa: PLC0415 - as above

    return pause_job(target, is_paused=False, as_json=json)


@about_a_job("reset", YES, changes=True)
def reset(target: Target, *, yes: bool, json: bool) -> int:
    """Let an ended job begin a new run when its agents are started again."""
    from agent.operate.changes import reset_job  # noqa: PLC0415 - as above

    return reset_job(target, is_agreed=yes, as_json=json)


@about_a_job(
    "report",
    click.option(
        "--out", type=_FILE, default="report.html", show_default=True, metavar="FILE", help="File for the page."
    ),
    click.option("--png", type=_FILE, metavar="FILE", help="File for the same as a picture.  [default: none]"),
)
def report(target: Target, *, out: Path, png: Path | None, json: bool) -> int:
    """Write a report of a job as an HTML page: its incidents, how its time was spent, and what was lost."""
    from agent.operate.exports import report_job  # noqa: PLC0415 - as above

    return report_job(target, out, png, as_json=json)


@about_a_job(
    "incident",
    click.argument("action", type=click.Choice(["export"])),
    GROUP,
    click.option("--out", type=_FILE, metavar="FILE", help="Output file.  [default: standard output]"),
)
def incident(target: Target, *, action: str, group: int | None, out: Path | None, json: bool) -> int:  # noqa: ARG001
    """Export the incident that led to GROUP, as a file that the simulation can replay. Default: the newest."""
    from agent.operate.exports import export_incident  # noqa: PLC0415 - as above

    return export_incident(target, group, out, as_json=json)


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
    "report": report,
    "incident": incident,
}
