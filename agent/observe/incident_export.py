"""An incident as a situation that can be played again: who trained, what failed where and when, what came of it.

Pure: from records. `elastic-agent incident export` writes it; `tests/simulation/replay.py` plays it. What a record does
not tell is not made up: which way a node was lost is taken from how long it took to notice, and np is what it is now,
widened to what it must have been for the two groups to be possible.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Literal

import msgspec

from agent.core.incident import Incident, IncidentMember, WorkerEnd
from agent.core.model import Record, Spec

Kind = Literal[
    "worker failed",
    "hang",
    "connection lost",
    "port taken",
    "node lost",
    "node silent",
    "node returned",
    "drain",
    "exclude",
    "join",
    "scale",
    "restart",
]
"""Of a fault. A node is lost if its neighbours noticed, silent if only its lease told; it returned if its agent was
started again under its id. A connection was lost where workers died of one, and nobody knows why."""

_SILENT_S = 2.0
"""Neighbours notice in a fraction of this, and leases do not end so soon."""


class ExportedFault(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What befell the job, or was asked of it."""

    kind: Kind
    node_id: str = ""
    """Empty: it was not about one node."""
    after_s: float = 0.0
    """After the first of them."""
    local_rank: int = 0
    """Of a worker, as are the next two."""
    exit_code: int | None = None
    signal: int | None = None
    np: str = ""
    """To which the job was scaled."""


class ExportedIncident(Record, frozen=True, kw_only=True):
    """One incident, and what preceded it."""

    job_id: str
    np: str
    commits: bool
    """The script commits steps, so that its ranks can be handed off."""
    nodes: tuple[IncidentMember, ...]
    """That trained before, in rank order; empty: nobody did."""
    spares: tuple[IncidentMember, ...]
    """That were there, and did not train."""
    faults: tuple[ExportedFault, ...]
    """In the order of time."""
    incident: Incident
    """What came of it."""


def situation(job_id: str, spec: Spec, incident: Incident, before: Incident | None) -> ExportedIncident:
    """What led to an incident.

    Args:
        job_id: whose it is.
        spec: as it is now.
        incident: the one.
        before: that of the group before it; None: it is not known, or there was none.
    """
    then = before.members if before is not None and before.run == incident.run else ()
    faults = tuple(_faults(incident, then))
    came = _without(incident.members, then)
    is_joined = any(fault.kind == "join" for fault in faults)
    return ExportedIncident(
        job_id=job_id,
        np=_np(spec, incident, then, faults),
        commits=incident.step > 0 or incident.step_s > 0.0,
        nodes=then,
        spares=() if is_joined else came,
        faults=faults,
        incident=incident,
    )


def _faults(incident: Incident, then: Sequence[IncidentMember]) -> Iterator[ExportedFault]:
    cause = incident.cause
    if cause in {"join", "start"} or not then:
        yield from (ExportedFault(kind="join", node_id=place.node_id) for place in _without(incident.members, then))
    elif cause == "scale":
        size = len(incident.members)
        yield ExportedFault(kind="scale", np=str(size))
    elif cause == "restart":
        yield ExportedFault(kind="restart")
    elif cause == "port":
        yield ExportedFault(kind="port taken", node_id=then[0].node_id)
    elif cause == "drain":
        kind: Kind = "exclude" if " excluded " in incident.reason else "drain"
        yield from (ExportedFault(kind=kind, node_id=name) for name in _named(incident, then))
    else:
        yield from _broken(incident, then)


def _broken(incident: Incident, then: Sequence[IncidentMember]) -> Iterator[ExportedFault]:
    failed = [each for each in incident.ended if not each.failure.is_peer_lost]
    lost = _named(incident, then) if incident.cause in {"lost", "wait"} else ()
    lost = tuple(name for name in lost if name not in {each.node_id for each in failed})
    if not failed and not lost:
        failed = list(incident.ended[:1])
    now = {place.node_id for place in incident.members}
    is_silent = (incident.phases.detect_s or 0.0) >= _SILENT_S
    for name in lost:
        yield ExportedFault(
            kind="node returned" if name in now else "node silent" if is_silent else "node lost", node_id=name
        )
    for each in sorted(failed, key=lambda each: each.after_s):
        yield _failure(each)


def _failure(ended: WorkerEnd) -> ExportedFault:
    failure = ended.failure
    kind: Kind = "hang" if failure.hang else "connection lost" if failure.is_peer_lost else "worker failed"
    return ExportedFault(
        kind=kind,
        node_id=ended.node_id,
        after_s=max(0.0, ended.after_s),
        local_rank=failure.local_rank,
        exit_code=failure.exit_code,
        signal=failure.signal,
    )


def named(reason: str, node_ids: Sequence[str]) -> tuple[str, ...]:
    """Which of these nodes a reason speaks of."""
    words = set(re.findall(r"[A-Za-z0-9._-]+", reason)) | set(re.findall(r"[A-Za-z0-9._-]*[A-Za-z0-9_-]", reason))
    return tuple(node_id for node_id in node_ids if node_id in words)


def _named(incident: Incident, then: Sequence[IncidentMember]) -> tuple[str, ...]:
    """Nodes of the group before that the incident's reason names; none: those that are missing."""
    names = [place.node_id for place in then]
    return named(incident.reason, names) or tuple(each.node_id for each in _without(then, incident.members))


def _without(places: Sequence[IncidentMember], others: Sequence[IncidentMember]) -> tuple[IncidentMember, ...]:
    gone = {place.node_id for place in others}
    return tuple(place for place in places if place.node_id not in gone)


def _np(spec: Spec, incident: Incident, then: Sequence[IncidentMember], faults: Sequence[ExportedFault]) -> str:
    """Such that the group before trained, and the next one was possible."""
    size, after = len(then) or len(incident.members), len(incident.members)
    high = max(spec.np_max, size) if incident.cause != "scale" else size
    low = min(spec.np_min, size)
    if incident.cause in {"join", "start"}:
        high = max(high, after)
    elif after:
        low = min(low, after)
        high = size if _without(incident.members, then) else high  # those that came were spares
    elif then:  # too few were left
        gone = sum(fault.kind in {"node lost", "node silent", "drain", "exclude"} for fault in faults)
        low = max(low, size - gone + 1)
    return str(high) if low == high else f"{low}:{high}"
