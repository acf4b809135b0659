"""A run in numbers: its incidents on one axis of time, and what each of them has cost.

Pure: incidents and the time now make numbers. The totals are those that the records carry on, so they hold for
incidents that are no longer kept; what is told by cause and by phase is of those that are.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import get_args

from agent.core.incident import Incident, Phases, Totals
from agent.core.model import Cause
from agent.core.totals import goodput, training_since

REDONE = "redone_s"
"""Stands beside the names of the phases: time that went into steps which were done again."""
PARTS = (*Phases.__struct_fields__, REDONE)
"""Where lost time can have gone, in the order in which it goes."""


@dataclass(frozen=True)
class Outage:
    """An incident on the axis of time: wall clock of the leaders, seconds since 1970."""

    incident: Incident
    began_at: float
    """The fault, or the decision."""
    stopped_at: float
    """Nothing of the older group was left."""
    ended_at: float | None
    """The first step of the group, or the next fault if that came first. None: it has not come yet."""
    parts: dict[str, float]
    """Where the time went, in seconds, by the names in `PARTS`."""

    @property
    def cost_s(self) -> float:
        """All that was lost."""
        return sum(self.parts.values())


@dataclass(frozen=True)
class CauseCost:
    """What the incidents of one cause have cost."""

    cause: Cause
    incidents: int
    lost_s: float
    redone: int


@dataclass(frozen=True)
class Numbers:
    """What a run's incidents have cost."""

    totals: Totals
    goodput: float
    """0 to 1."""
    by_cause: tuple[CauseCost, ...]
    """The dearest first."""
    parts: dict[str, float]
    """Of all outages together, in seconds, by the names in `PARTS`."""


def outages(incidents: Sequence[Incident], now: float) -> tuple[Outage, ...]:
    """Place a run's incidents, in the order of their groups, in time. The last may go on until now."""
    tells = any(each.phases.is_complete for each in incidents)
    following: list[Incident | None] = [*incidents[1:], None]
    return tuple(_outage(each, then, now, tells=tells) for each, then in zip(incidents, following, strict=False))


def _outage(incident: Incident, following: Incident | None, now: float, *, tells: bool) -> Outage:
    """`tells`: the script commits, so that a first step is seen. Of others only what precedes the start is known."""
    phases = incident.phases
    stopped_at = incident.at + (phases.stop_s or 0.0)
    ended_at: float | None = stopped_at + sum(
        part or 0.0 for part in (phases.start_s, phases.join_s, phases.load_s, phases.first_step_s)
    )
    parts = {name: getattr(phases, name) or 0.0 for name in Phases.__struct_fields__}
    if not phases.is_complete and (tells or not incident.members):
        ended_at = began_at(following) if following is not None else None
        # It belongs to what went on when the next fault came, or goes on now: the first phase that is not known.
        after = Phases.__struct_fields__[2:] if incident.members else ("agree_s",)
        unknown = next(name for name in after if getattr(phases, name) is None or not incident.members)
        until = now if ended_at is None else ended_at
        parts[unknown] += max(0.0, until - began_at(incident) - phases.total_s)
    return Outage(
        incident=incident,
        began_at=began_at(incident),
        stopped_at=stopped_at,
        ended_at=ended_at,
        parts={**parts, REDONE: incident.redone * incident.step_s},
    )


def began_at(incident: Incident) -> float:
    """When the fault came, or the change was decided on; a run begins with its first group. Wall clock, as `at`."""
    if incident.is_first_start:
        return incident.at
    return incident.at - (incident.phases.detect_s or 0.0) - (incident.phases.agree_s or 0.0)


def numbers(incidents: Sequence[Incident], now: float, *, has_ended: bool) -> Numbers:
    """Add up what a run's incidents have cost. `now`: the time of its end, if it has ended."""
    if not incidents:
        return Numbers(Totals(), 1.0, (), dict.fromkeys(PARTS, 0.0))
    costly = [each for each in outages(incidents, now) if not each.incident.is_first_start]
    totals = incidents[-1].totals
    last = costly[-1] if costly else None
    if last is not None and last.ended_at is None and not has_ended:
        going_on_s = last.cost_s - last.incident.phases.total_s - last.parts[REDONE]
        totals = Totals(incidents=totals.incidents, lost_s=totals.lost_s + max(0.0, going_on_s), redone=totals.redone)
    since = training_since(incidents[-1])
    return Numbers(
        totals=totals,
        goodput=goodput(totals, since, now),
        by_cause=_by_cause(costly),
        parts={name: sum(each.parts[name] for each in costly) for name in PARTS},
    )


def _by_cause(costly: Sequence[Outage]) -> tuple[CauseCost, ...]:
    found = []
    for cause in get_args(Cause):
        of_it = [each for each in costly if each.incident.cause == cause]
        if of_it:
            redone = sum(each.incident.redone for each in of_it)
            found.append(CauseCost(cause, len(of_it), sum(each.cost_s for each in of_it), redone))
    return tuple(sorted(found, key=lambda each: (-each.lost_s, each.cause)))
