"""What ended a group: the first failure in time over all nodes, and those that died of it.

Each node tells times by its own wall clock, and how its neighbours' clocks compare to it. Comparisons are chained from
node to node, and their errors add up; so of two failures it can be said which came first, or that it is too close to
call. (Cristian, Probabilistic clock synchronization, 1989: a clock that answers is compared to within half of a round
trip.)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from agent.core.incident import TransitionReport, WorkerEnd
from agent.core.model import Clock, ExitReport, Failure, Group, Identity

_TAIL_CHARACTERS = 400
"""Of those that were not the first: there may be many of them."""
_OTHERS = 64
"""So many are kept."""

_BETWEEN_RANKS = {
    "torch.distributed.DistBackendError",
    "torch.distributed.DistNetworkError",
    "torch.distributed.DistStoreError",
    "trainer_runtime.dist.PeerError",
}
"""Exceptions by which process groups, and the store by which they meet, tell that a connection broke."""

Teller = ExitReport | TransitionReport


@dataclass(frozen=True)
class _ClockOffset:
    """A node's wall clock against that of the one all are compared with."""

    ahead_s: float
    error_s: float


def first_failure(reports: Sequence[ExitReport]) -> tuple[ExitReport, Failure] | None:
    """The earliest failure, a cause before a consequence."""
    ahead = _compare(reports)
    failures = [(report, report.failure) for report in reports if report.failure is not None]
    return min(failures, key=lambda told: _order(told[0], told[1], ahead), default=None)


def in_order(reports: Sequence[ExitReport]) -> tuple[WorkerEnd, ...]:
    """How workers of a group ended: causes before consequences, each in the order of time."""
    ahead = _compare(reports)
    told = [(report, report.failure) for report in reports if report.failure is not None]
    told.sort(key=lambda each: _order(each[0], each[1], ahead))
    return tuple(_ended(each, told[0], ahead) for each in told[: _OTHERS + 1])


def with_late(ended: tuple[WorkerEnd, ...], accounts: Sequence[TransitionReport]) -> tuple[WorkerEnd, ...]:
    """Add those that ended too late to be reported before the next group was written; its members' accounts tell."""
    known = {(each.node_id, each.failure.rank) for each in ended}
    late = [(told, failure) for told in accounts for failure in told.ended if (told.node_id, failure.rank) not in known]
    ahead = _compare(accounts)
    late.sort(key=lambda each: _order(each[0], each[1], ahead))
    first = next((account for account in accounts if ended and _tells_of(account, ended[0])), None)
    if first is not None:
        added = [_ended(each, (first, ended[0].failure), ahead) for each in late]
    else:  # the first one's agent is gone, or nobody reported anything
        added = [_ended(each, late[0], ahead) for each in late]
        added = [msgspec.structs.replace(each, error_s=None) for each in added] if ended else added
    return (*ended, *added)[: _OTHERS + 1]


def _tells_of(account: TransitionReport, ended: WorkerEnd) -> bool:
    """Whether this is the agent that told of that end; another under the same node id may go by another clock."""
    has_told = ended.failure.rank in {failure.rank for failure in account.ended}
    return account.node_id == ended.node_id and (has_told or bool(ended.failure.hang))


def in_short(failure: Failure) -> Failure:
    """Of one that was not the first: without its last words but the very last."""
    return msgspec.structs.replace(failure, tail=failure.tail[-_TAIL_CHARACTERS:], traceback="")


def is_between_ranks(error: str) -> bool:
    """Whether the connection that broke was one to another rank; `error`: the exception, on one line."""
    kind, _, words = error.partition(":")
    # gloo has none of its own, and names its source: a script's own words may be of an upload, say.
    return kind in _BETWEEN_RANKS or (kind == "RuntimeError" and "gloo" in words.lower())


def early_end(step: int) -> str:
    """What a rank that ended with code 0 is to blame for, in words; `step`: the last that it committed, or 0."""
    return f"{f'it ended after step {step}' if step else 'it ended'}, before the other ranks were done"


def with_early_end(group: Group, reports: Sequence[ExitReport]) -> tuple[ExitReport, ...]:
    """The reports; if one node's ranks had all ended with code 0 when the others lost their connections, as a failure.

    Each node knows that of its own ranks (`local_workers.py`). Nothing is changed before all nodes have reported: one
    that has not may have the cause.
    """
    failures = [report.failure for report in reports if report.failure is not None]
    places = {member.identity: place for place, member in enumerate(group.members)}
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
        why=early_end(accused.step),
    )
    found = msgspec.structs.replace(accused, failure=ended)
    return tuple(found if each is accused else each for each in reports)


def _remoteness(failure: Failure) -> int:
    """How far it is from the cause: a failure of its own, an end that broke others' connections, one of those."""
    return 2 if failure.is_peer_lost else 1 if failure.is_early_end else 0


def _order(told: Teller, failure: Failure, ahead: dict[Identity, _ClockOffset]) -> tuple[int, float, int]:
    by = ahead.get(told.identity)
    return _remoteness(failure), failure.at - (by.ahead_s if by is not None else 0.0), failure.rank


def _ended(
    each: tuple[Teller, Failure], first: tuple[Teller, Failure], ahead: dict[Identity, _ClockOffset]
) -> WorkerEnd:
    (told, failure), (first_told, earliest) = each, first
    after_s, error_s = failure.at - earliest.at, None
    mine, its = ahead.get(told.identity), ahead.get(first_told.identity)
    if earliest.hang:  # it ended at no time
        after_s = 0.0
    elif told.identity == first_told.identity:  # one clock
        error_s = 0.0
    elif mine is not None and its is not None:
        after_s, error_s = after_s - mine.ahead_s + its.ahead_s, mine.error_s + its.error_s
    if failure is not earliest:
        failure = in_short(failure)
    return WorkerEnd(node_id=told.node_id, failure=failure, after_s=after_s, error_s=error_s)


def _compare(tellers: Sequence[Teller]) -> dict[Identity, _ClockOffset]:
    """All clocks that can be compared with the first teller's, by as few comparisons as possible."""
    if not tellers:
        return {}
    links: dict[Identity, list[Clock]] = {}
    for told in tellers:
        for clock in told.clocks:
            links.setdefault(told.identity, []).append(clock)
            back = Clock(who=told.identity, ahead_s=-clock.ahead_s, error_s=clock.error_s)
            links.setdefault(clock.who, []).append(back)
    found = {tellers[0].identity: _ClockOffset(0.0, 0.0)}
    queue = [tellers[0].identity]
    for here in queue:  # grows as it goes
        for clock in sorted(links.get(here, ()), key=lambda each: each.error_s):
            if clock.who not in found:
                known = found[here]
                found[clock.who] = _ClockOffset(known.ahead_s + clock.ahead_s, known.error_s + clock.error_s)
                queue.append(clock.who)
    return found
