"""What each node did and when, from the records of a run's incidents. Pure.

A record tells who is in a group from its first moment; what a node outside of all groups does (a spare, one that is
gone) is not recorded, and left blank.
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
    """A node does one thing for a while. Wall clock, seconds since 1970."""

    node_id: str
    state: State
    began_at: float
    ended_at: float


@dataclass(frozen=True)
class Mark:
    """A fault on one node."""

    node_id: str
    at: float
    incident: Incident


def rows(outages: Sequence[Outage]) -> tuple[str, ...]:
    """All nodes that were ever in a group, in the order of their coming."""
    return tuple(dict.fromkeys(node_id for outage in outages for node_id in _members(outage.incident)))


def spans(outages: Sequence[Outage], end: float, present: frozenset[str]) -> tuple[Span, ...]:
    """What the nodes did.

    Args:
        outages: of the run.
        end: the time now, or that of the job's end.
        present: nodes that are there now.
    """
    found = (span for index in range(len(outages)) for span in _around(outages, index, end, present))
    return tuple(span for span in found if span.ended_at > span.began_at)


def _around(outages: Sequence[Outage], index: int, end: float, present: frozenset[str]) -> Iterator[Span]:
    """From one fault to the next."""
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
    """Nodes that were in a group before nobody trained, and are in the next one, or there still."""
    earlier = next((_members(each.incident) for each in reversed(outages[:index]) if each.incident.members), ())
    later = next((_members(each.incident) for each in outages[index + 1 :] if each.incident.members), None)
    stayed = present if later is None else later
    return tuple(node_id for node_id in earlier if node_id in stayed)


def marks(outages: Sequence[Outage], present: frozenset[str]) -> tuple[Mark, ...]:
    """Where each fault was: with the first of its failed workers, and the nodes that were lost."""
    found: list[Mark] = []
    for index, outage in enumerate(outages):
        first = tuple(each.node_id for each in outage.incident.ended[:1])
        both = dict.fromkeys((*first, *_lost(outages, index, present)))
        found += [Mark(node_id, outage.began_at, outage.incident) for node_id in both]
    return tuple(found)


def _lost(outages: Sequence[Outage], index: int, present: frozenset[str]) -> tuple[str, ...]:
    incident = outages[index].incident
    if not index or incident.cause not in {"lost", "wait"}:
        return ()
    before = outages[index - 1].incident
    stayed = _members(incident) or _waiting(outages, index, present)
    return tuple(node_id for node_id in _members(before) if node_id not in stayed)


def left(before: Incident, after: Incident) -> tuple[str, ...]:
    """Nodes of the group before that are not in the next."""
    return tuple(node_id for node_id in _members(before) if node_id not in _members(after))


def joined(before: Incident, after: Incident) -> tuple[str, ...]:
    """Nodes that were not in the group before."""
    return left(after, before)


def _members(incident: Incident) -> tuple[str, ...]:
    return tuple(place.node_id for place in incident.members)
