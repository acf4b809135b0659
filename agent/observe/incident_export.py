"""An incident in a form that the simulator can replay: the group before, the faults in order, and the outcome.

All functions are pure and read records only. `elastic-agent incident export` writes the result;
`tests/simulation/replay.py` replays it. Where a record lacks a fact, it is derived from other facts: how a node was
lost follows from how long the detection took, and np is the present one, widened so that both groups were possible.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Literal

import msgspec

from agent.core.incident import Incident, IncidentMember, WorkerEnd
from agent.core.model import Spec
from agent.core.reasons import (
    CheckpointOnDisk,
    DataLost,
    GroupReason,
    NodesJoined,
    NodesLost,
    NodesThere,
    NodesUnreachable,
    NotRetried,
    Requested,
    WorkersFailed,
)
from agent.core.records import Record

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
"""Kind of a fault.

*node lost*: its neighbours detected the loss. *node silent*: only its expired lease showed the loss. *node returned*:
its agent was started again under the same id. *connection lost*: workers failed because a connection broke, for an
unknown reason.
"""

_SILENT_S = 2.0
"""Detection times from here on are a lease's expiry: neighbours detect a loss much faster, and no lease is shorter."""


class ExportedFault(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A fault, or a change that an operator asked for."""

    kind: Kind
    node_id: str = ""
    """Empty: the fault concerns no single node."""
    after_s: float = 0.0
    """Seconds after the first fault."""
    local_rank: int = 0
    """Of the failed worker, as are the next two fields."""
    exit_code: int | None = None
    signal: int | None = None
    np: str = ""
    """The new np, if the job was scaled."""


class ExportedIncident(Record, frozen=True, kw_only=True):
    """One incident, and the state of the job before it."""

    job_id: str
    np: str
    commits: bool
    """Whether the script commits steps, so that a handoff is possible."""
    in_place: bool = False
    """Whether groups of this job are entered in place."""
    nodes: tuple[IncidentMember, ...]
    """Members of the previous group in rank order. Empty: nobody trained."""
    spares: tuple[IncidentMember, ...]
    """Registered nodes that were not members."""
    faults: tuple[ExportedFault, ...]
    """In the order in which they happened."""
    incident: Incident
    """The outcome."""


def exported_incident(job_id: str, spec: Spec, incident: Incident, before: Incident | None) -> ExportedIncident:
    """Build the replayable form of an incident.

    Args:
        job_id: the job.
        spec: the job's present spec.
        incident: the incident to export.
        before: the incident of the previous group. None: unknown, or there was none.
    """
    old = before.members if before is not None and before.run == incident.run else ()
    faults = tuple(_faults(incident, old))
    new = _without(incident.members, old)
    is_joined = any(fault.kind == "join" for fault in faults)
    return ExportedIncident(
        job_id=job_id,
        np=_np(spec, incident, old, faults),
        commits=incident.step > 0 or incident.step_s > 0.0,
        in_place=spec.in_place,
        nodes=old,
        spares=() if is_joined else new,
        faults=faults,
        incident=incident,
    )


def _faults(incident: Incident, old: Sequence[IncidentMember]) -> Iterator[ExportedFault]:
    cause = incident.cause
    if cause in {"join", "start"} or not old:
        yield from (ExportedFault(kind="join", node_id=member.node_id) for member in _without(incident.members, old))
    elif cause == "scale":
        size = len(incident.members)
        yield ExportedFault(kind="scale", np=str(size))
    elif cause == "restart":
        yield ExportedFault(kind="restart")
    elif cause == "port":
        yield ExportedFault(kind="port taken", node_id=old[0].node_id)
    elif cause == "drain":
        kind: Kind = "exclude" if _is_exclusion(incident.reason) else "drain"
        yield from (ExportedFault(kind=kind, node_id=name) for name in _affected(incident, old))
    else:
        yield from _broken(incident, old)


def _broken(incident: Incident, old: Sequence[IncidentMember]) -> Iterator[ExportedFault]:
    failed = [each for each in incident.ended if not each.failure.is_peer_lost]
    lost = _affected(incident, old) if incident.cause in {"lost", "wait"} else ()
    lost = tuple(name for name in lost if name not in {each.node_id for each in failed})
    if not failed and not lost:
        failed = list(incident.ended[:1])
    now = {member.node_id for member in incident.members}
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


def nodes_of(reason: GroupReason) -> frozenset[str]:
    """Return the ids of the nodes that a reason names."""
    match reason:
        case NodesLost(node_ids=node_ids, unfit=unfit):
            return frozenset((*node_ids, *(node_id for node_id, _ in unfit)))
        case WorkersFailed(first=first, unreachable=unreachable, left_out=left_out):
            return frozenset((first.node_id, *unreachable, *left_out))
        case NotRetried(first=first):
            return frozenset((first.node_id,))
        case NodesJoined(node_ids=node_ids) | NodesUnreachable(node_ids=node_ids) | Requested(node_ids=node_ids):
            return frozenset(node_ids)
        case CheckpointOnDisk(node_id=node_id):
            return frozenset((node_id,))
        case NodesThere() | DataLost():
            return frozenset()


def _is_exclusion(reason: GroupReason) -> bool:
    return isinstance(reason, Requested) and reason.what == "exclude"


def _affected(incident: Incident, old: Sequence[IncidentMember]) -> tuple[str, ...]:
    """Return the nodes of the previous group that the incident's reason names; if none, those that are missing."""
    named = nodes_of(incident.reason)
    affected = tuple(member.node_id for member in old if member.node_id in named)
    return affected or tuple(each.node_id for each in _without(old, incident.members))


def _without(members: Sequence[IncidentMember], others: Sequence[IncidentMember]) -> tuple[IncidentMember, ...]:
    gone = {member.node_id for member in others}
    return tuple(member for member in members if member.node_id not in gone)


def _np(spec: Spec, incident: Incident, old: Sequence[IncidentMember], faults: Sequence[ExportedFault]) -> str:
    """Return an np under which the previous group could train and the next one could be formed."""
    size, after = len(old) or len(incident.members), len(incident.members)
    high = max(spec.np_max, size) if incident.cause != "scale" else size
    low = min(spec.np_min, size)
    if incident.cause in {"join", "start"}:
        high = max(high, after)
    elif after:
        low = min(low, after)
        high = size if _without(incident.members, old) else high  # the new members were spares
    elif old:  # too few nodes were left
        gone = sum(fault.kind in {"node lost", "node silent", "drain", "exclude"} for fault in faults)
        low = max(low, size - gone + 1)
    return str(high) if low == high else f"{low}:{high}"
