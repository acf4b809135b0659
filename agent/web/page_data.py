"""The data that the page shows, made from a job's records. Pure: the browser only draws it.

`Present` is small and changes all the time. `Past` may be large, and changes with incidents only.
"""

from __future__ import annotations

import msgspec

from agent.core.view import ClusterView
from agent.observe.goodput import Outage
from agent.observe.incidents import explain
from agent.observe.messages import describe
from agent.observe.report.palette import is_planned
from agent.observe.report.run_history import RunHistory
from agent.observe.status import JobStatus, job_status

MAX_INCIDENTS = 50
"""Number of the newest incidents that are listed."""


class NodeSpan(msgspec.Struct, frozen=True, array_like=True):
    """A period in which some nodes were in one state. Wall clock, seconds since 1970."""

    state: str
    began_at: float
    ended_at: float | None
    """None: they are still in it."""
    rows: list[tuple[int, int]]
    """First and last row of each block of adjacent rows."""


class PageFault(msgspec.Struct, frozen=True, array_like=True):
    """A fault on a node's row."""

    row: int
    at: float
    group: int


class PageIncident(msgspec.Struct, frozen=True, kw_only=True):
    """An incident."""

    group: int
    cause: str
    is_planned: bool
    reason: str
    at: float
    began_at: float
    downtime_s: float
    step: int
    replayed_steps: int
    is_at_least: bool
    """Perhaps more steps were replayed, and more time was lost."""
    members: int
    downtime_by_phase: dict[str, float]
    """In seconds."""
    sentences: list[str]
    """What `elastic-agent explain` prints."""


class Present(msgspec.Struct, frozen=True, kw_only=True):
    """The present state of the job, except for the live state of its ranks."""

    status: JobStatus
    goodput: float
    """0 to 1."""
    downtime_s: float
    replayed_steps: int
    is_at_least: bool
    """Downtime and replayed steps are at least these, and the goodput is at most that."""
    incidents: int
    """Of the whole run, including incidents that are not listed."""


class Past(msgspec.Struct, frozen=True, kw_only=True):
    """What happened so far."""

    begin: float
    end: float | None
    """None: the job has not ended."""
    rows: list[str]
    spans: list[NodeSpan]
    faults: list[PageFault]
    incidents: list[PageIncident]
    """The newest first."""


def present(history: RunHistory, view: ClusterView) -> Present:
    """Return the present state of a job that has a spec."""
    statistics = history.statistics
    return Present(
        status=job_status(history.job_id, view),
        goodput=statistics.goodput,
        downtime_s=statistics.downtime_s,
        replayed_steps=statistics.replayed_steps,
        is_at_least=statistics.is_at_least,
        incidents=statistics.incidents,
    )


def past(history: RunHistory) -> Past:
    """Return what happened to a job so far."""
    row_of = {node_id: row for row, node_id in enumerate(history.rows)}
    pairs = list(zip(history.outages, [None, *history.outages], strict=False))
    return Past(
        begin=history.begin,
        end=history.end if history.result is not None else None,
        rows=list(history.rows),
        spans=_node_spans(history, row_of),
        faults=[PageFault(row_of[each.node_id], each.at, each.incident.group) for each in history.fault_marks],
        incidents=[_incident(outage, before) for outage, before in reversed(pairs[-MAX_INCIDENTS:])],
    )


def _node_spans(history: RunHistory, row_of: dict[str, int]) -> list[NodeSpan]:
    """Merge equal spans of different nodes: most nodes do the same, and there may be hundreds."""
    merged: dict[tuple[str, float, float | None], list[int]] = {}
    for each in history.spans:
        is_open = each.ended_at == history.end and history.result is None
        key = (each.state, each.began_at, None if is_open else each.ended_at)
        merged.setdefault(key, []).append(row_of[each.node_id])
    return [NodeSpan(*key, _blocks(sorted(rows))) for key, rows in merged.items()]


def _blocks(rows: list[int]) -> list[tuple[int, int]]:
    blocks: list[tuple[int, int]] = []
    for row in rows:
        if blocks and blocks[-1][1] == row - 1:
            blocks[-1] = (blocks[-1][0], row)
        else:
            blocks.append((row, row))
    return blocks


def _incident(outage: Outage, before: Outage | None) -> PageIncident:
    incident = outage.incident
    return PageIncident(
        group=incident.group,
        cause=incident.cause,
        is_planned=is_planned(incident.cause),
        reason=describe(incident.reason),
        at=incident.at,
        began_at=outage.began_at,
        downtime_s=0.0 if incident.is_first_start else outage.downtime_s,
        step=incident.step,
        replayed_steps=incident.replayed_steps,
        is_at_least=incident.is_at_least,
        members=len(incident.members),
        downtime_by_phase={name: seconds for name, seconds in outage.downtime_by_phase.items() if seconds > 0.0},
        sentences=list(explain(incident, before.incident if before is not None else None)),
    )
