"""The cost of a run's incidents: goodput, and the summary that a job prints at its end.

Goodput is the share of the time since the first step of the first group that was not downtime. Downtime is the time
between a fault and the next first step, and the time for replayed steps. Goodput is computed from the totals of the
run. Each incident continues the totals of the one before, so they include incidents that are no longer stored.
"""

from __future__ import annotations

from agent.core.incident import Incident, Totals


def training_since(incident: Incident) -> float:
    """When the first group of the run made its first step, as far as known from this incident. Wall clock."""
    if not incident.is_first_start:
        return incident.began_at
    phases = incident.phases
    parts = (phases.stop_s, phases.start_s, phases.join_s, phases.load_s, phases.first_step_s)
    return incident.at + sum(part or 0.0 for part in parts)


def goodput(totals: Totals, began_at: float, now: float) -> float:
    """The share of the time from `began_at` to `now` that was not downtime, from 0 to 1."""
    whole_s = now - began_at
    if whole_s <= 0.0:
        return 1.0
    return min(1.0, max(0.0, 1.0 - totals.downtime_s / whole_s))


def summary(totals: Totals, began_at: float, now: float, *, has_failed: bool = False, commits: bool = True) -> str:
    """`3 incidents cost 14.2 s; goodput 97.1 %; 12 replayed steps`.

    Args:
        totals: totals of the run, including its last incident.
        began_at: when its first step was made (`training_since`): wall clock, seconds since 1970.
        now: when the job ended, on the same clock.
        has_failed: the job failed. The totals do not include what the last group lost, so goodput is not known.
        commits: the script commits steps. Otherwise the number of replayed steps is not known.
    """
    if totals.incidents == 0:
        return "no incidents before that" if has_failed else "no incidents; goodput 100.0 %"
    parts = [f"{count(totals.incidents, 'incident')} {'before that ' if has_failed else ''}cost"]
    parts[0] += f" {duration(totals.downtime_s)}"
    if not has_failed:
        share = percent(goodput(totals, began_at, now))
        parts.append(f"goodput {share}" if commits else f"goodput {share} at most")
    if totals.replayed_steps:
        parts.append(replayed(totals.replayed_steps))
    else:
        parts.append("no step was lost" if commits else "replayed steps are not known: the script commits no steps")
    return "; ".join(parts)


def percent(share: float) -> str:
    """`97.1 %`. Rounded down, so that 100 % means no downtime."""
    return f"{int(share * 1000 + 1e-6) / 10:.1f} %"


def count(number: int, what: str) -> str:
    """`1 step`, `2 steps`."""
    return f"{number} {what}" if number == 1 else f"{number} {what}s"


def replayed(steps: int) -> str:
    """`1 replayed step`, `2 replayed steps`."""
    return count(steps, "replayed step")


def duration(seconds: float) -> str:
    """`0.04 s`, `14.2 s`, `2 min 05 s`, `1 h 02 min`, `3 d 04 h`."""
    if seconds < 0.095:
        return f"{seconds:.2f} s"
    if seconds < 99.95:
        return f"{seconds:.1f} s"
    minutes, rest_s = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest_s:02d} s"
    hours, minutes = divmod(round(seconds / 60), 60)
    if hours < 24:
        return f"{hours} h {minutes:02d} min"
    days, hours = divmod(round(seconds / 3600), 24)
    return f"{days} d {hours:02d} h"
