"""A run's incidents for people and for programs: the table of `history`, the text of `explain`, the JSON of both."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from datetime import datetime
from itertools import accumulate
from typing import Any, TextIO

import msgspec
from rich.console import Console
from rich.table import Table
from rich.text import Text

from agent.core.incident import Incident, IncidentMember, Phases, WorkerEnd
from agent.core.reasons import NotRetried, Requested
from agent.observe.messages import (
    REPLAY_NOT_KNOWN,
    SHOWN_S,
    cause_of,
    consequences,
    describe,
    describe_hang,
    how_it_ended,
    how_near,
    listed,
    rivals,
    spent,
    why_it_ended,
)
from agent.observe.quantities import count, duration, replayed

_PHASES = tuple(name.removesuffix("_s").replace("_", " ") for name in Phases.__struct_fields__)
_MAX_MEMBERS_NAMED = 4
"""A group with more members shows their number."""
_WIDTH = 160
"""Width of the table in characters if the output is not a terminal."""


def incident_json(incident: Incident) -> dict[str, Any]:
    """Return an incident as programs read it: its record, and what follows from it.

    Its reason, why workers ended, and how they hung, are sentences. `seconds` is the sum of its phases; `is_complete`
    says whether the group's first step was observed, and `is_at_least` whether perhaps more steps were replayed.
    """
    data: dict[str, Any] = msgspec.to_builtins(incident)
    data["reason"] = describe(incident.reason)
    for ended, shown in zip(incident.ended, data["ended"], strict=True):
        failure, hang = shown["failure"], ended.failure.hang
        failure["why"], failure["hang"] = why_it_ended(ended.failure), describe_hang(hang) if hang is not None else ""
    data["seconds"] = incident.phases.total_s
    data["is_complete"] = incident.phases.is_complete
    data["is_at_least"] = incident.is_at_least
    return data


# The table of `history`


def print_history(incidents: Sequence[Incident], out: TextIO, *, with_phases: bool) -> None:
    """Print incidents as a table, in the given order."""
    table = Table("group", f"when ({datetime.now().astimezone():%Z})", "cause", "reason")
    phases = _PHASES if with_phases else ()
    for heading in (*phases, "seconds", "replayed"):
        table.add_column(heading, justify="right")
    table.add_column("members")
    for incident in incidents:
        table.add_row(*_cells(incident, phases))
    console = Console(file=out, highlight=False, width=None if out.isatty() else _WIDTH)
    console.print(table)


def _cells(incident: Incident, phases: Sequence[str]) -> list[Text]:
    """Return a row. The cells are `Text`, since a reason may contain rich's markup characters."""
    known = dict(spent(incident.phases))
    names = [member.node_id for member in incident.members]
    cells = [
        str(incident.group),
        f"{datetime.fromtimestamp(incident.at).astimezone():%m-%d %H:%M:%S}",
        incident.cause,
        cause_of(incident),
        *(f"{known[name]:.2f}" if name in known else "" for name in phases),
        f"{incident.phases.total_s:.2f}" + ("" if incident.phases.is_complete else "+") if known else "",
        "?" if incident.is_at_least else str(incident.replayed_steps or ""),
        ", ".join(names) if len(names) <= _MAX_MEMBERS_NAMED else count(len(names), "node"),
    ]
    return [Text(cell) for cell in cells]


# The text of `explain`

_PHASE_MEANING = {
    "detect": "to detect it",
    "agree": "to agree on the new group",
    "stop": "to stop the old workers",
    "start": "to start the new workers",
    "join": "for all ranks to join the process group",
    "set up": "for the script to set up",
    "load": "to load the restore point",
    "first step": "for the first step",
}
_CAUSE_MEANING = {
    "start": "enough nodes were there",
    "lost": "a node was lost",
    "failed": "a worker failed",
    "join": "nodes joined",
    "scale": "np was changed",
    "drain": "nodes were to leave",
    "restart": "an operator asked for a restart",
    "port": "the master's port was taken",
    "wait": "too few nodes were left",
}


def explain(incident: Incident, before: Incident | None) -> list[str]:
    """Explain an incident: its first cause, the workers that failed as a result, its phases, where training resumed.

    Args:
        incident: the incident in question.
        before: the incident of the previous group, if known: shows which nodes left and joined.

    Returns:
        Sentences; a sentence may end with an indented block, for instance a traceback.
    """
    when = datetime.fromtimestamp(incident.at).astimezone()
    is_stop = isinstance(incident.reason, Requested) and incident.reason.what == "stop"
    cause = "the job was to stop" if is_stop else _CAUSE_MEANING[incident.cause]
    head = f"Group {incident.group} was formed at {when:%Y-%m-%d %H:%M:%S %Z}, because {cause}."
    parts = [head, *_what_happened(incident)]
    has_waited = before is not None and before.run == incident.run and not before.members
    if before is not None and has_waited:
        parts.append(f"Since group {before.group} no node had trained: {describe(before.reason)}.")
    parts += _membership(incident, before)
    if incident.members:
        parts.append(_phases(incident, has_waited=has_waited))
    if incident.phases.is_complete:
        parts.append(_where_it_resumed(incident))
    return [*parts, *_totals(incident)]


def _what_happened(incident: Incident) -> list[str]:
    ended = incident.ended
    if incident.cause != "failed" or not ended:
        others = [_unordered_failure(each) for each in ended if not each.failure.is_peer_lost]
        return [f"Reason: {describe(incident.reason)}.", *_lost_connections(ended), *others]
    first, later = ended[0], consequences(ended)
    text = [f"First failure: {how_it_ended(first.node_id, first.failure)}.{_quoted_output(first)}"]
    text += [_possible_first(each) for each in rivals(ended)]
    return [
        *text,
        *_lost_connections(later),
        *(_later_failure(each) for each in later if not each.failure.is_peer_lost),
    ]


def _lost_connections(ended: Sequence[WorkerEnd]) -> list[str]:
    """Name the workers that failed because their connection to another rank broke."""
    failed = [
        f"rank {each.failure.rank} on {each.node_id} ({_when(each.after_s)}: its connection broke)"
        for each in ended
        if each.failure.is_peer_lost
    ]
    return [f"Failed as a result: {listed(failed)}."] if failed else []


def _unordered_failure(ended: WorkerEnd) -> str:
    """Describe a failure beside a cause that was not a worker's end: the order of the two is not known."""
    return f"{_capitalized(how_it_ended(ended.node_id, ended.failure))} too.{_quoted_output(ended)}"


def _possible_first(ended: WorkerEnd) -> str:
    what = _capitalized(how_it_ended(ended.node_id, ended.failure))
    if ended.error_s is None:
        text = "too; the clocks were never compared, so either may be the cause."
        return f"{what} {text}{_quoted_output(ended)}"
    return f"{what}, {how_near([ended])} of the first; either may be the cause.{_quoted_output(ended)}"


def _later_failure(ended: WorkerEnd) -> str:
    what = _capitalized(how_it_ended(ended.node_id, ended.failure))
    return f"{what}, {_when(ended.after_s)}.{_quoted_output(ended)}"


def _when(after_s: float) -> str:
    """When a worker ended, counted from the first failure; whose broken connection was seen first may be earlier."""
    return f"{duration(abs(after_s))} {'later' if after_s >= 0.0 else 'earlier'}"


def _quoted_output(ended: WorkerEnd) -> str:
    """Return the traceback, or the last lines, as an indented block."""
    output = ended.failure.traceback or ended.failure.tail
    return f"\n{textwrap.indent(output.rstrip(), '    ')}" if output.strip() else ""


def _membership(incident: Incident, before: Incident | None) -> list[str]:
    now = [member.node_id for member in incident.members]
    then = [member.node_id for member in before.members] if before is not None and before.run == incident.run else []
    left, joined = [each for each in then if each not in now], [each for each in now if then and each not in then]
    gone = [f"No longer in the group: {listed(left)}."] if left else []
    moved = [*gone, *([f"{listed(joined)} joined."] if joined else [])]
    if not now:
        is_stop = isinstance(incident.reason, Requested) and incident.reason.what == "stop"
        is_ending = is_stop or isinstance(incident.reason, NotRetried)
        why = "the job ends" if is_ending else "the job waits for nodes"
        return [*moved, f"The group has no members: {why}."]
    world = count(sum(member.nproc for member in incident.members), "rank")
    return [*moved, f"The group has {world} on {count(len(now), 'node')}: {listed(_with_ranks(incident.members))}."]


def _with_ranks(members: tuple[IncidentMember, ...]) -> list[str]:
    """`node-a (0-1)`."""
    ends = accumulate(member.nproc for member in members)
    return [f"{each.node_id} ({_range(end - each.nproc, end - 1)})" for each, end in zip(members, ends, strict=True)]


def _range(first: int, last: int) -> str:
    return str(first) if first == last else f"{first}-{last}"


def _phases(incident: Incident, *, has_waited: bool) -> str:
    phases = incident.phases
    if not spent(phases):
        return "The duration is not known."
    meanings = {**_PHASE_MEANING, "agree": "until enough nodes were there"} if has_waited else _PHASE_MEANING
    parts = [f"{duration(each_s)} {meanings[name]}" for name, each_s in spent(phases) if each_s >= SHOWN_S]
    known = f"{duration(phases.total_s)} {{}}{': ' if parts else ''}{listed(parts) if parts else ''}."
    if phases.detect_s is None and phases.agree_s is None:
        known += " How long it took to detect it and to agree on the new group is not known."
    if phases.is_complete:
        return "It took " + known.format("until every rank had made a step")
    return "Not every rank has been seen to make a step (yet); " + known.format("are known")


def _where_it_resumed(incident: Incident) -> str:
    resumed = f"Training resumed after step {incident.step}" if incident.step else "Training began at the start"
    if incident.is_at_least:
        return f"{resumed}; {REPLAY_NOT_KNOWN}."
    if incident.is_first_start and incident.step:
        return f"{resumed}; what happened before is in no record of this run."
    if incident.reached is None:
        return f"{resumed}."
    if not incident.replayed_steps:
        return f"{resumed}; no step was replayed."
    work = f" ({duration(incident.replayed_steps * incident.step_s)} of work)" if incident.step_s else ""
    return f"{resumed}; {replayed(incident.replayed_steps)}{work}."


def _totals(incident: Incident) -> list[str]:
    if incident.is_first_start:
        return []
    totals = incident.totals
    least = "at least " if totals.is_at_least else ""
    steps = f" and {least}{replayed(totals.replayed_steps)}" if totals.replayed_steps else ""
    cost = f"{least}{duration(totals.downtime_s)} of downtime"
    return [f"The run so far: {count(totals.incidents, 'incident')}, {cost}{steps}."]


def _capitalized(sentence: str) -> str:
    return sentence[:1].upper() + sentence[1:]
