"""What a run's incidents cost: each incident placed on the time axis, and its downtime by phase.

Downtime is the time without progress: from a fault to the first step after it, and the time that replayed steps take.
Goodput is the share of the time since the first step of the first group that was not downtime.

All functions are pure. The sums over the run are carried by the records themselves, so they include incidents that are
no longer kept; the figures by cause and by phase cover only the incidents that are kept.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import get_args

import msgspec

from agent.core.incident import Incident, Phases, Totals
from agent.core.model import Cause
from agent.observe.quantities import count, duration, percent, replayed

REPLAY = "replay_s"
"""Name of the time spent on replayed steps, beside the names of the phases."""
DOWNTIME_PHASES = (*Phases.__struct_fields__, REPLAY)
"""Everything that downtime is divided into, in the order in which it happens."""


@dataclass(frozen=True)
class Outage:
    """An incident on the time axis: wall clock of the leaders, seconds since 1970."""

    incident: Incident
    began_at: float
    """When the fault happened, or the planned change was decided."""
    stopped_at: float
    """When nothing of the previous group was left."""
    ended_at: float | None
    """First step of the new group, or the next fault if that came first. None: neither has happened yet."""
    downtime_by_phase: dict[str, float]
    """Seconds by the names in `DOWNTIME_PHASES`."""

    @property
    def downtime_s(self) -> float:
        """Sum over all phases."""
        return sum(self.downtime_by_phase.values())


@dataclass(frozen=True)
class CauseCost:
    """What all incidents of one cause cost."""

    cause: Cause
    incidents: int
    downtime_s: float
    replayed_steps: int


@dataclass(frozen=True)
class RunStatistics:
    """What the incidents of a run cost."""

    incidents: int
    """Changes of group after the first start."""
    downtime_s: float
    replayed_steps: int
    is_at_least: bool
    """Downtime and replayed steps are at least these, and the goodput is at most that."""
    goodput: float
    """0 to 1."""
    by_cause: tuple[CauseCost, ...]
    """Highest downtime first."""
    downtime_by_phase: dict[str, float]
    """All outages together, in seconds, by the names in `DOWNTIME_PHASES`."""


def outages(incidents: Sequence[Incident], now: float) -> tuple[Outage, ...]:
    """Place a run's incidents, given in the order of their groups, on the time axis.

    The last incident may still be open; it then lasts until `now`.
    """
    reports_steps = any(each.phases.is_complete for each in incidents)
    following: list[Incident | None] = [*incidents[1:], None]
    return tuple(
        _outage(each, then, now, reports_steps=reports_steps) for each, then in zip(incidents, following, strict=False)
    )


def _outage(incident: Incident, following: Incident | None, now: float, *, reports_steps: bool) -> Outage:
    """Place one incident in time.

    Args:
        incident: the incident.
        following: the next one. None: there is none.
        now: wall clock.
        reports_steps: whether the script commits steps, so that a first step can be observed. Without it only the
            phases before the workers start are known.
    """
    phases = incident.phases
    stopped_at = incident.at + (phases.stop_s or 0.0)
    started = (phases.start_s, phases.join_s, phases.set_up_s, phases.load_s, phases.first_step_s)
    ended_at: float | None = stopped_at + sum(part or 0.0 for part in started)
    by_phase = {name: getattr(phases, name) or 0.0 for name in Phases.__struct_fields__}
    if not phases.is_complete and (reports_steps or not incident.members):
        ended_at = began_at(following) if following is not None else None
        # The rest belongs to the first phase that is not known: it was under way when the next fault came, or still is.
        after = Phases.__struct_fields__[2:] if incident.members else ("agree_s",)
        unknown = next(name for name in after if getattr(phases, name) is None or not incident.members)
        until = now if ended_at is None else ended_at
        by_phase[unknown] += max(0.0, until - began_at(incident) - phases.total_s)
    return Outage(
        incident=incident,
        began_at=began_at(incident),
        stopped_at=stopped_at,
        ended_at=ended_at,
        downtime_by_phase={**by_phase, REPLAY: incident.replayed_steps * incident.step_s},
    )


def began_at(incident: Incident) -> float:
    """Return when the fault happened or the change was decided; a run begins with its first group.

    Wall clock, like `Incident.at`.
    """
    if incident.is_first_start:
        return incident.at
    return incident.at - (incident.phases.detect_s or 0.0) - (incident.phases.agree_s or 0.0)


def run_statistics(incidents: Sequence[Incident], now: float, *, has_ended: bool) -> RunStatistics:
    """Add up what a run's incidents cost. `now`: the time of the run's end, if it has ended."""
    if not incidents:
        return RunStatistics(0, 0.0, 0, False, 1.0, (), dict.fromkeys(DOWNTIME_PHASES, 0.0))
    counted = [each for each in outages(incidents, now) if not each.incident.is_first_start]
    totals = incidents[-1].totals
    last = counted[-1] if counted else None
    if last is not None and last.ended_at is None and not has_ended:
        open_s = last.downtime_s - last.incident.phases.total_s - last.downtime_by_phase[REPLAY]
        totals = msgspec.structs.replace(totals, downtime_s=totals.downtime_s + max(0.0, open_s))
    newest = incidents[-1]
    # Of an incident that goes on, the time until now is counted.
    is_at_least = totals.is_at_least if has_ended else newest.before.is_at_least or newest.is_at_least
    return RunStatistics(
        incidents=totals.incidents,
        downtime_s=totals.downtime_s,
        replayed_steps=totals.replayed_steps,
        is_at_least=is_at_least,
        goodput=goodput(totals, training_since(newest) or incidents[0].at, now),
        by_cause=_by_cause(counted),
        downtime_by_phase={name: sum(each.downtime_by_phase[name] for each in counted) for name in DOWNTIME_PHASES},
    )


def _by_cause(counted: Sequence[Outage]) -> tuple[CauseCost, ...]:
    costs = []
    for cause in get_args(Cause):
        same = [each for each in counted if each.incident.cause == cause]
        if same:
            replayed = sum(each.incident.replayed_steps for each in same)
            costs.append(CauseCost(cause, len(same), sum(each.downtime_s for each in same), replayed))
    return tuple(sorted(costs, key=lambda each: (-each.downtime_s, each.cause)))


# Goodput, and the summary that a job prints at its end


def training_since(incident: Incident) -> float:
    """When the first group of the run made its first step, as far as known from this incident. Wall clock."""
    if not incident.is_first_start:
        return incident.began_at
    phases = incident.phases
    return incident.at + phases.after_s


def goodput(totals: Totals, began_at: float, now: float) -> float:
    """The share of the time from `began_at` to `now` that was not downtime, from 0 to 1."""
    whole_s = now - began_at
    if whole_s <= 0.0:
        return 1.0
    return min(1.0, max(0.0, 1.0 - totals.downtime_s / whole_s))


def summary(
    totals: Totals,
    began_at: float | None,
    now: float,
    *,
    has_failed: bool = False,
    commits: bool = True,
    resumed_after: int = 0,
) -> str:
    """`3 incidents cost 14.2 s; goodput 97.1 %; 12 replayed steps`.

    Args:
        totals: totals of the run, including its last incident.
        began_at: when its first step was made (`training_since`): wall clock, seconds since 1970. None: not
            known.
        now: when the job ended, on the same clock.
        has_failed: the job failed. The totals do not include what the last group lost, so goodput is not known.
        commits: the script commits steps. Otherwise the number of replayed steps is not known.
        resumed_after: the step after which a run without incidents began. What was before is in no record of it.
    """
    if totals.incidents == 0 and resumed_after:
        return f"no incidents {'' if not has_failed else 'before that '}since it resumed after step {resumed_after}"
    if totals.incidents == 0:
        return "no incidents before that" if has_failed else "no incidents; goodput 100.0 %"
    parts = [f"{count(totals.incidents, 'incident')} {'before that ' if has_failed else ''}cost"]
    parts[0] += f"{' at least' if totals.is_at_least else ''} {duration(totals.downtime_s)}"
    if began_at is not None and not has_failed:
        share = percent(goodput(totals, began_at, now))
        parts.append(f"goodput {share} at most" if totals.is_at_least or not commits else f"goodput {share}")
    parts.append(_replayed_in_all(totals, commits=commits))
    return "; ".join(parts)


def _replayed_in_all(totals: Totals, *, commits: bool) -> str:
    if not commits:
        return "replayed steps are not known: no step was committed"
    if not totals.is_at_least:
        return replayed(totals.replayed_steps) if totals.replayed_steps else "no step was replayed"
    steps = f"at least {replayed(totals.replayed_steps)}" if totals.replayed_steps else "replayed steps are not known"
    return f"{steps}, since after an incident nobody could count them"
