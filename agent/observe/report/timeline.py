"""What each node did over time, from the records of a run's incidents. Pure.

A record names the members of its group from the moment it is written. What a node outside of all groups does is not
recorded (it may be a spare, or gone), and left blank.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from agent.core.incident import Incident
from agent.observe.goodput import Outage

State = Literal["training", "stopped", "recovering", "waiting"]


@dataclass(frozen=True)
class Span:
    """A period in which a node was in one state. Wall clock, seconds since 1970."""

    node_id: str
    state: State
    began_at: float
    ended_at: float


@dataclass(frozen=True)
class FaultMark:
    """A fault on one node."""

    node_id: str
    at: float
    incident: Incident


def rows(outages: Sequence[Outage]) -> tuple[str, ...]:
    """Return all nodes that were ever members of a group, in the order in which they first were."""
    return tuple(dict.fromkeys(node_id for outage in outages for node_id in _members(outage.incident)))


def spans(outages: Sequence[Outage], end: float, present: frozenset[str]) -> tuple[Span, ...]:
    """Return what the nodes did.

    Args:
        outages: the run's outages.
        end: the present time, or the job's end.
        present: ids of the registered nodes.
    """
    found = (span for index in range(len(outages)) for span in _spans_until_next(outages, index, end, present))
    return tuple(span for span in found if span.ended_at > span.began_at)


def _spans_until_next(outages: Sequence[Outage], index: int, end: float, present: frozenset[str]) -> Iterator[Span]:
    """Return the spans from one fault to the next."""
    outage = outages[index]
    until = outages[index + 1].began_at if index + 1 < len(outages) else end
    before = _members(outages[index - 1].incident) if index else ()
    members = _members(outage.incident)
    if not members:
        until = outages[index + 1].incident.at if index + 1 < len(outages) else end
        for node_id in _waiting(outages, index, present):
            yield Span(node_id, "waiting", outage.began_at, until)
        return
    stopped_at = min(outage.stopped_at, until)
    back_at = min(until if outage.ended_at is None else outage.ended_at, until)
    for node_id in members:
        began_at = outage.incident.at
        if node_id in before:
            yield Span(node_id, "stopped", outage.began_at, stopped_at)
            began_at = stopped_at
        yield Span(node_id, "recovering", began_at, back_at)
        yield Span(node_id, "training", back_at, until)


def _waiting(outages: Sequence[Outage], index: int, present: frozenset[str]) -> tuple[str, ...]:
    """Return the nodes that wait while there is no group.

    They were members of the last group, and are members of the next one, or still registered.
    """
    earlier = next((_members(each.incident) for each in reversed(outages[:index]) if each.incident.members), ())
    later = next((_members(each.incident) for each in outages[index + 1 :] if each.incident.members), None)
    stayed = present if later is None else later
    return tuple(node_id for node_id in earlier if node_id in stayed)


def fault_marks(outages: Sequence[Outage], present: frozenset[str]) -> tuple[FaultMark, ...]:
    """Return where each fault was: the node of the first failed worker, and the nodes that were lost."""
    found: list[FaultMark] = []
    for index, outage in enumerate(outages):
        first = tuple(each.node_id for each in outage.incident.ended[:1])
        both = dict.fromkeys((*first, *_lost(outages, index, present)))
        found += [FaultMark(node_id, outage.began_at, outage.incident) for node_id in both]
    return tuple(found)


def _lost(outages: Sequence[Outage], index: int, present: frozenset[str]) -> tuple[str, ...]:
    incident = outages[index].incident
    if not index or incident.cause not in {"lost", "wait"}:
        return ()
    before = outages[index - 1].incident
    stayed = _members(incident) or _waiting(outages, index, present)
    return tuple(node_id for node_id in _members(before) if node_id not in stayed)


def left(before: Incident, after: Incident) -> tuple[str, ...]:
    """Return the members of the previous group that are not members of the next."""
    return tuple(node_id for node_id in _members(before) if node_id not in _members(after))


def joined(before: Incident, after: Incident) -> tuple[str, ...]:
    """Return the members that were not members of the previous group."""
    return left(after, before)


def _members(incident: Incident) -> tuple[str, ...]:
    return tuple(member.node_id for member in incident.members)
