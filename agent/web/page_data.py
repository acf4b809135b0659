"""What the page shows, made from a job's records. Pure: the browser only draws it.

The present changes all the time, and is small; the past is not, and changes with the incidents.
"""

from __future__ import annotations

import msgspec

from agent.core.model import ClusterView
from agent.observe.explain import explain
from agent.observe.goodput import Outage
from agent.observe.report.palette import is_planned
from agent.observe.report.story import Story
from agent.observe.status import JobStatus, job_status

TOLD = 50
"""So many incidents are shown, the newest."""


class Stretch(msgspec.Struct, frozen=True, array_like=True):
    """Some nodes do one thing for a while: seconds since 1970."""

    state: str
    began_at: float
    ended_at: float | None
    """None: they still do."""
    rows: list[tuple[int, int]]
    """From the first to the last of each block."""


class PageFault(msgspec.Struct, frozen=True, array_like=True):
    """A mark on a node's row."""

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
    cost_s: float
    step: int
    redone: int
    members: int
    parts: dict[str, float]
    """Seconds by phase."""
    sentences: list[str]
    """What came first, with the last that it said, what died of it, and where the time went."""


class Present(msgspec.Struct, frozen=True, kw_only=True):
    """The job as it is, but for what its ranks do at this moment."""

    status: JobStatus
    goodput: float
    """0 to 1."""
    lost_s: float
    redone: int
    incidents: int
    """Of the run, those included that are not told."""


class Past(msgspec.Struct, frozen=True, kw_only=True):
    """What happened: it changes with the incidents only."""

    begin: float
    end: float | None
    """None: it goes on."""
    rows: list[str]
    """Ids of nodes."""
    stretches: list[Stretch]
    faults: list[PageFault]
    told: list[PageIncident]
    """The newest first."""


def present(told: Story, view: ClusterView) -> Present:
    """The job as it is. It must have a spec."""
    totals = told.numbers.totals
    return Present(
        status=job_status(told.job_id, view),
        goodput=told.numbers.goodput,
        lost_s=totals.lost_s,
        redone=totals.redone,
        incidents=totals.incidents,
    )


def past(told: Story) -> Past:
    """What happened to it."""
    places = {node_id: row for row, node_id in enumerate(told.rows)}
    pairs = list(zip(told.outages, [None, *told.outages], strict=False))
    return Past(
        begin=told.begin,
        end=told.end if told.result is not None else None,
        rows=list(told.rows),
        stretches=_stretches(told, places),
        faults=[PageFault(places[each.node_id], each.at, each.incident.group) for each in told.marks],
        told=[_told(outage, before) for outage, before in reversed(pairs[-TOLD:])],
    )


def _stretches(told: Story, places: dict[str, int]) -> list[Stretch]:
    """Nodes that do the same at the same time are told of together: most do, and there may be hundreds."""
    together: dict[tuple[str, float, float | None], list[int]] = {}
    for each in told.spans:
        is_open = each.ended_at == told.end and told.result is None
        key = (each.state, each.began_at, None if is_open else each.ended_at)
        together.setdefault(key, []).append(places[each.node_id])
    return [Stretch(*key, _blocks(sorted(rows))) for key, rows in together.items()]


def _blocks(rows: list[int]) -> list[tuple[int, int]]:
    blocks: list[tuple[int, int]] = []
    for row in rows:
        if blocks and blocks[-1][1] == row - 1:
            blocks[-1] = (blocks[-1][0], row)
        else:
            blocks.append((row, row))
    return blocks


def _told(outage: Outage, before: Outage | None) -> PageIncident:
    incident = outage.incident
    return PageIncident(
        group=incident.group,
        cause=incident.cause,
        is_planned=is_planned(incident.cause),
        reason=incident.reason,
        at=incident.at,
        began_at=outage.began_at,
        cost_s=0.0 if incident.is_first_start else outage.cost_s,
        step=incident.step,
        redone=incident.redone,
        members=len(incident.members),
        parts={name: seconds for name, seconds in outage.parts.items() if seconds > 0.0},
        sentences=list(explain(incident, before.incident if before is not None else None)),
    )
