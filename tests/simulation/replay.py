"""Plays an exported incident again: the same nodes, the same faults at the same places; the same must come of it.

`elastic-agent incident export` writes the file. It becomes a scenario (`scenario.py`), line by line, in a
form that can be kept as one. While it is played all invariants are checked; at the end the cause, the nodes that it is
about, and the members of the next group must be those of the record.

What came before the group that trained (budgets, flaps, older groups) is not in the file: the job begins with it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import msgspec
from simulation.scenario import Scenario

from agent.core.incident import Incident, IncidentMember
from agent.core.model import Group
from agent.observe.incident_export import ExportedFault, ExportedIncident, Kind, nodes_of
from agent.observe.messages import describe

_TRAINS_S = 5.0
"""The group before trains for so long: longer than a lease."""

_ABOUT_NODES = {"failed", "lost", "wait", "drain", "port"}
"""Causes whose reasons name nodes."""
_LINES: dict[Kind, tuple[str, ...]] = {
    "worker failed": ("end {name} {code} {rank}",),
    "hang": ("hang {name} {rank}",),
    "connection lost": ("lose-peer {name}",),
    "port taken": ("port-taken {name}",),
    "node lost": ("kill {name}",),
    "node silent": ("kill-host {name}",),
    "node returned": ("kill {name}", "{start}"),
    "drain": ("stop {name}",),
    "exclude": ("exclude {name}",),
    "join": ("{start}",),
    "scale": ("scale {np}",),
    "restart": ("restart-job",),
}


@dataclass(frozen=True)
class Replayed:
    """What came of it this time."""

    events: tuple[str, ...]
    """Events of a scenario, one per line."""
    log: tuple[str, ...]
    """What happened, with times, for people."""
    group: Group
    """The one that followed the first fault."""


def read(path: Path) -> ExportedIncident:
    """An exported incident. Raises `ValueError` if it is none."""
    return msgspec.json.decode(path.read_bytes(), type=ExportedIncident)


def replay(situation: ExportedIncident) -> Replayed:
    """Play it; raises `AssertionError` with the transcript if something else comes of it, or an invariant breaks."""
    lines = list(_beginning(situation))
    scenario = Scenario(lines[0].split()[1:])
    cluster = scenario.cluster
    for line in lines[1:]:
        scenario.do(*line.split())
    number = cluster.max_group
    after = list(_faults(situation))
    for line in after:
        scenario.do(*line.split())
    cluster.run_until(lambda: cluster.max_group > number, within_s=120.0)
    group = cluster.invariants.groups[number + 1]
    _compare(situation, group, cluster.log_text())
    members = sorted(place.node_id for place in situation.incident.members)
    if members:
        cluster.run_until(lambda: cluster.is_begun and sorted(cluster.training_nodes) == members)
    cluster.run(_TRAINS_S)
    return Replayed((*lines, *after), tuple(cluster.log), group)


def _beginning(situation: ExportedIncident) -> Iterator[str]:
    """Up to the group that trained before."""
    options = {" handoff": situation.commits, " moves": situation.in_place}
    yield f"job {situation.np}" + "".join(option for option, is_given in options.items() if is_given)
    yield from (_start(place) for place in situation.nodes)
    if situation.nodes:
        yield f"expect training {' '.join(place.node_id for place in situation.nodes)}"
    yield from (_start(place) for place in situation.spares)
    if situation.nodes:
        yield f"run {_TRAINS_S:g}"


def _start(place: IncidentMember) -> str:
    return f"start {place.node_id}" + (f" nproc={place.nproc}" if place.nproc != 1 else "")


def _faults(situation: ExportedIncident) -> Iterator[str]:
    """What befell it, as far apart as it was."""
    now_s = 0.0
    places = {place.node_id: place for place in situation.incident.members}
    for fault in situation.faults:
        if fault.after_s > now_s:
            yield f"run {fault.after_s - now_s:g}"
            now_s = fault.after_s
        yield from _fault(fault, places)


def _fault(fault: ExportedFault, places: dict[str, IncidentMember]) -> list[str]:
    """Its lines in a scenario."""
    place = places.get(fault.node_id)
    return [
        line.format(
            name=fault.node_id,
            code=fault.exit_code if fault.signal is None else -fault.signal,
            rank=fault.local_rank,
            np=fault.np,
            start=_start(place) if place is not None else "",
        )
        for line in _LINES[fault.kind]
    ]


def _compare(situation: ExportedIncident, group: Group, log: str) -> None:
    """The same must have come of it."""
    incident = situation.incident
    wanted, got = _outcome(situation, incident), _outcome(situation, group)
    assert got == wanted, (
        f"{group.cause}: {describe(group.reason)}, not {incident.cause}: {describe(incident.reason)}\n{log}"
    )


def _outcome(situation: ExportedIncident, outcome: Incident | Group) -> tuple[object, ...]:
    """Of a group: why it is, which nodes that is about, and its members."""
    known = {place.node_id for place in (*situation.nodes, *situation.spares)}
    about = sorted(known & nodes_of(outcome.reason)) if outcome.cause in _ABOUT_NODES else []
    # One that was started again is let in a moment sooner or later.
    returned = {fault.node_id for fault in situation.faults if fault.kind == "node returned"}
    members = sorted(member.node_id for member in outcome.members if member.node_id not in returned)
    return outcome.cause, about, members
