"""Messages: English descriptions of how workers ended, of the first cause, and of the phases of an incident."""

from __future__ import annotations

import math
import signal
from collections.abc import Sequence

from agent.core.incident import Incident, Phases, WorkerEnd
from agent.core.model import Failure
from agent.core.totals import duration, replayed

SHOWN_S = 0.005
"""Shorter phases are not shown."""


def signal_name(number: int) -> str:
    """The name of a signal: `SIGKILL`. For a signal without a name: `signal 63`."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def how_it_ended(node_id: str, failure: Failure) -> str:
    """Describe the failure of a worker: `rank 1 on node-b was killed by SIGKILL: memory ran out`."""
    why = f": {failure.why}" if failure.why else ""
    return f"{_rank(node_id, failure)} {_how(failure)}{why}"


def _rank(node_id: str, failure: Failure) -> str:
    return f"rank {failure.rank} on {node_id}"


def _how(failure: Failure) -> str:
    if failure.hang:
        return failure.hang
    if failure.unreadable:
        return f"could not read {failure.unreadable}"
    if failure.is_port_taken:
        return "found the master's port taken"
    how = f"exited with code {failure.exit_code}"
    if failure.signal is not None:
        how = f"was killed by {signal_name(failure.signal)}"
    return f"{how} ({failure.error})" if failure.error else how


def cause_of(incident: Incident) -> str:
    """Describe the cause of an incident, with other failures that may have been first by the clocks of their nodes."""
    if incident.cause != "failed" or not incident.ended:
        return incident.reason
    first, others = incident.ended[0], rivals(incident.ended)
    cause = how_it_ended(first.node_id, first.failure)
    if not others:
        return cause
    named = listed([_rank(each.node_id, each.failure) for each in others])
    return f"{cause} (or {named} first, {how_near(others)})"


def rivals(ended: Sequence[WorkerEnd]) -> tuple[WorkerEnd, ...]:
    """The failures that may have come before the first one by the clocks of their nodes, and are not consequences."""
    return tuple(each for each in ended[1:] if not _is_later(each.failure) and _may_be_first(each))


def _is_later(failure: Failure) -> bool:
    return failure.is_peer_lost or failure.is_early_end


def consequences(ended: Sequence[WorkerEnd]) -> tuple[WorkerEnd, ...]:
    """The failures that are consequences of the first one, or later than it."""
    either = rivals(ended)
    return tuple(each for each in ended[1:] if each not in either)


def _may_be_first(ended: WorkerEnd) -> bool:
    return ended.error_s is None or ended.after_s <= ended.error_s


def how_near(others: Sequence[WorkerEnd]) -> str:
    """How close these failures are to the first one: `within 12 ms`."""
    furthest_s = max((each.after_s + each.error_s for each in others if each.error_s is not None), default=None)
    if furthest_s is None or any(each.error_s is None for each in others):
        return "by clocks that were never compared"
    if furthest_s < 1.0:
        return f"within {math.ceil(furthest_s * 1000)} ms"
    return f"within {duration(furthest_s)}"


def listed(names: Sequence[str], most: int = 8) -> str:
    """List names: `a, b and c`. If there are more than `most`: `a, b and 3 more`."""
    shown, more = list(names[:most]), len(names) - most
    if more > 0:
        shown.append(f"{more} more")
    return shown[0] if len(shown) == 1 else f"{', '.join(shown[:-1])} and {shown[-1]}"


def time_of(phases: Phases) -> str:
    """List the known phases: `detect 0.02, agree 0.01, stop 0.1 s`. Empty: none is known."""
    parts = [f"{name} {_seconds(spent_s)}" for name, spent_s in spent(phases) if spent_s >= SHOWN_S]
    return f"{', '.join(parts)} s" if parts else ""


def spent(phases: Phases) -> list[tuple[str, float]]:
    """The names and durations of the known phases, in seconds, in their order."""
    known = ((name, getattr(phases, name)) for name in phases.__struct_fields__)
    return [(name.removesuffix("_s").replace("_", " "), each) for name, each in known if each is not None]


def _seconds(value: float) -> str:
    return f"{value:.2f}" if value < 0.095 else f"{value:.1f}"


def one_line(incident: Incident) -> str:
    """Describe an incident on one line.

    `group 4 after 3.4 s: rank 1 on node-b was killed by SIGKILL; detect 0.02, …, first step 0.7 s; 3 replayed steps`.
    """
    after = f" after {duration(incident.phases.total_s)}" if incident.phases.is_complete else ""
    replay = replayed(incident.replayed_steps) if incident.replayed_steps else ""
    details = (time_of(incident.phases), replay)
    return "; ".join([f"group {incident.group}{after}: {cause_of(incident)}", *filter(None, details)])
