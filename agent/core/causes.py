"""Causes: which failure on any node was the first, and which others are its consequences.

Each node reports times of its own wall clock, and how the clocks of its neighbours compare to it. These comparisons are
chained from node to node, and their errors add up. So it can be decided which of two failures came first, or that they
are too close together. (F. Cristian, Probabilistic clock synchronization, 1989: a clock that answers a request can be
compared to within half of a round trip.)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from agent.core.failures import Clock, ExitReport, Failure
from agent.core.incident import TransitionReport
from agent.core.model import Group
from agent.core.records import Identity

_TAIL_CHARACTERS = 400
"""Characters of output that are kept of each failure but the first, since there may be many."""
_BETWEEN_RANKS = {
    "torch.distributed.DistBackendError",
    "torch.distributed.DistNetworkError",
    "torch.distributed.DistStoreError",
    "trainer_runtime.dist.PeerError",
}
"""Exceptions that process groups, and the store by which ranks meet, raise when a connection breaks."""

Reporter = ExitReport | TransitionReport


@dataclass(frozen=True)
class ReferenceOffset:
    """The offset of a node's wall clock from the reference clock."""

    ahead_s: float
    error_s: float


def first_failure(reports: Sequence[ExitReport]) -> tuple[ExitReport, Failure] | None:
    """The earliest failure. Causes precede consequences."""
    ahead = compare_clocks(reports)
    failures = [(report, report.failure) for report in reports if report.failure is not None]
    return min(failures, key=lambda each: order_of(each[0], each[1], ahead), default=None)


def in_short(failure: Failure) -> Failure:
    """Shorten a failure that was not the first: only the end of its output is kept."""
    return msgspec.structs.replace(failure, tail=failure.tail[-_TAIL_CHARACTERS:], traceback="")


def is_between_ranks(error: str) -> bool:
    """Whether the connection that broke led to another rank. `error`: the exception, on one line."""
    kind, _, words = error.partition(":")
    # gloo has no exception class of its own, but its messages name its source. Any other `RuntimeError` may come from
    # the script, for instance from an upload.
    return kind in _BETWEEN_RANKS or (kind == "RuntimeError" and "gloo" in words.lower())


def with_early_end(group: Group, reports: Sequence[ExitReport]) -> tuple[ExitReport, ...]:
    """Count the end of a node's ranks with code 0 as a failure, if all failures are connections that then broke.

    Within one node its agent decides this (`local_workers.py`). The reports are returned unchanged until all nodes have
    reported, because a node that has not may have the cause.
    """
    failures = [report.failure for report in reports if report.failure is not None]
    places = group.node_ranks
    done = sorted((places[each.identity], each) for each in reports if each.failure is None and each.identity in places)
    are_lost = all(failure.is_peer_lost and is_between_ranks(failure.error) for failure in failures)
    if not done or not failures or not are_lost or not places.keys() <= {each.identity for each in reports}:
        return tuple(reports)
    place, accused = done[0]
    ended = Failure(
        rank=group.first_rank(place),
        local_rank=0,
        exit_code=0,
        signal=None,
        is_peer_lost=False,
        tail="",
        at=min(failure.at for failure in failures),
        last_step=accused.step,
    )
    found = msgspec.structs.replace(accused, failure=ended)
    return tuple(found if each is accused else each for each in reports)


def _remoteness(failure: Failure) -> int:
    """0: a failure of its own. 1: an early end, which broke the connections of others. 2: a broken connection."""
    return 2 if failure.is_peer_lost else 1 if failure.is_early_end else 0


def order_of(report: Reporter, failure: Failure, ahead: dict[Identity, ReferenceOffset]) -> tuple[int, float, int]:
    """Sort key of a failure: causes before consequences, each in the order of time."""
    offset = ahead.get(report.identity)
    return _remoteness(failure), failure.at - (offset.ahead_s if offset is not None else 0.0), failure.rank


def compare_clocks(reporters: Sequence[Reporter]) -> dict[Identity, ReferenceOffset]:
    """Compare clocks with the clock of the first reporter, each over as few other nodes as possible."""
    if not reporters:
        return {}
    links: dict[Identity, list[Clock]] = {}
    for report in reporters:
        for clock in report.clocks:
            links.setdefault(report.identity, []).append(clock)
            back = Clock(who=report.identity, ahead_s=-clock.ahead_s, error_s=clock.error_s)
            links.setdefault(clock.who, []).append(back)
    found = {reporters[0].identity: ReferenceOffset(0.0, 0.0)}
    queue = [reporters[0].identity]
    for here in queue:  # the loop appends to the queue
        for clock in sorted(links.get(here, ()), key=lambda each: each.error_s):
            if clock.who not in found:
                known = found[here]
                found[clock.who] = ReferenceOffset(known.ahead_s + clock.ahead_s, known.error_s + clock.error_s)
                queue.append(clock.who)
    return found
