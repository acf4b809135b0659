"""Ranks that make no step: which rank the others wait for, and when the group is ended because of it.

The agent of each node reports what its ranks are doing once they have made no step for longer than usual. The rank at
fault is the one that did not get as far as the others: of the ranks with the fewest steps, one that does not wait for
other ranks. If all ranks wait, a rank is taken that only has a collective under way, while others stand still for one.
If there is none, they wait at different places, and the place with the fewest ranks is taken.

A group is ended when a node has waited for twice the limit, or for one and a half times the limit if no stack has
changed since and a rank waits for the one at fault. Before this is decided, the other nodes have a moment to report.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from agent.core.failures import ExitReport, Failure
from agent.core.incident import RankStall, StallReport
from agent.core.model import Group
from agent.core.reasons import Hang

REPORT_WITHIN_S = 3.0
"""Nodes look at their ranks about once a second."""

_WORST = ("exited", "stopped", "disk", "sleeps", "runs", "waits")


def is_due(stalls: Sequence[StallReport]) -> bool:
    """Whether a group has made no step for long enough to be ended."""
    stands = standing(stalls)
    if any(stall.stage == "certain" for stall in stands):
        return True
    found = suspects(stands)
    if not found or _all_wait(stands) or not any(rank.doing == "waits" for rank in _ranks(stands)):
        return False
    return _of(found[0], stands).stage == "still"


def standing(stalls: Sequence[StallReport]) -> tuple[StallReport, ...]:
    """The stalls that are not over."""
    return tuple(stall for stall in stalls if stall.stage != "over")


def in_group(group: Group, stalls: Sequence[StallReport], reports: Sequence[ExitReport]) -> tuple[StallReport, ...]:
    """All stalls, and, if there are any, the ranks of finished nodes, whose agents no longer watch them."""
    places = group.node_ranks
    done = {report.identity: report for report in reports if report.failure is None and report.identity in places}
    stands = tuple(stall for stall in standing(stalls) if stall.identity not in done)
    finished = tuple(_finished(group, places[who], report) for who, report in done.items())
    return stands + finished if stands else ()


def _finished(group: Group, place: int, report: ExitReport) -> StallReport:
    first = group.first_rank(place)
    ranks = range(first, first + group.members[place].nproc)
    return StallReport(
        group=group.number,
        node_id=report.node_id,
        incarnation=report.incarnation,
        stage="suspicious",
        for_s=0.0,
        limit_s=0.0,
        ranks=tuple(RankStall(rank=rank, step=report.step, doing="exited", where="", stack="") for rank in ranks),
    )


def suspects(stalls: Sequence[StallReport]) -> tuple[RankStall, ...]:
    """The ranks that the others wait for, the most likely cause first."""
    ranks = _ranks(stalls)
    if not ranks:
        return ()
    if _all_wait(stalls):
        places = Counter(rank.where for rank in ranks)
        at_work = tuple(rank for rank in ranks if rank.stack_shows is not None)
        if 0 < len(at_work) < len(ranks):
            return tuple(sorted(at_work, key=lambda rank: (rank.step, places[rank.where], rank.rank)))
        fewest = min(places.values())
        return tuple(rank for rank in ranks if places[rank.where] == fewest)
    ended = [rank for rank in ranks if rank.doing == "exited"]
    least = min((rank.step for rank in ranks if rank.doing != "exited"), default=0)
    behind = [rank for rank in ranks if rank.step == least and rank.doing not in {"waits", "exited"}]
    slow = behind or [rank for rank in ranks if rank.doing not in {"waits", "exited"}]
    return tuple(sorted(slow or ended, key=lambda rank: (_WORST.index(rank.doing), rank.rank)))


def as_report(group: Group, stalls: Sequence[StallReport]) -> ExitReport:
    """The hang as an exit report of the node at fault."""
    rank = suspects(stalls)[0]
    stall = _of(rank, stalls)
    first = group.first_rank(next(i for i, m in enumerate(group.members) if m.identity == stall.identity))
    failure = Failure(
        rank=rank.rank,
        local_rank=rank.rank - first,
        exit_code=None,
        signal=None,
        is_peer_lost=False,
        tail=rank.stack,
        at=0.0,
        hang=hang_of(stalls),
    )
    return ExitReport(
        group=group.number,
        node_id=stall.node_id,
        incarnation=stall.incarnation,
        step=max(each.step for each in _ranks(stalls)),
        failure=failure,
        after_s=max(each.for_s for each in stalls),
        step_s=max(each.step_s for each in stalls),
    )


def hang_of(stalls: Sequence[StallReport]) -> Hang:
    """The hang of the rank at fault."""
    rank = suspects(stalls)[0]
    others = [each for each in _ranks(stalls) if each.rank != rank.rank]
    elsewhere = {each.where for each in others if each.where and each.where != rank.where}
    is_alike = all(each.stack_shows is not None for each in others)
    doing = rank.doing if rank.stack_shows is None or is_alike else rank.stack_shows
    return Hang(
        doing=doing,
        where=rank.where,
        step=rank.step,
        for_s=max(0, round(max(stall.for_s for stall in stalls))),
        waiting=sum(each.doing == "waits" for each in others),
        others=len(others),
        elsewhere=tuple(sorted(elsewhere)) if doing == "waits" else (),
    )


def _of(rank: RankStall, stalls: Sequence[StallReport]) -> StallReport:
    """The report that has this rank."""
    return next(stall for stall in stalls if rank in stall.ranks)


def _ranks(stalls: Sequence[StallReport]) -> list[RankStall]:
    return sorted((rank for stall in stalls for rank in stall.ranks), key=lambda rank: rank.rank)


def _all_wait(stalls: Sequence[StallReport]) -> bool:
    return all(rank.doing == "waits" for rank in _ranks(stalls))
