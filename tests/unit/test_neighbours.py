"""Who is left out of a ring in which some neighbours do not hear each other."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent.core.model import ClusterView, Group, Member, Stored, Suspect
from agent.core.neighbours import cut_off


def view_of(size: int, silent: set[tuple[int, int]], *, was_up: bool = True) -> ClusterView:
    """A group in which each first one of these says that it does not hear the second."""
    members = tuple(
        Member(node_id=f"n{rank}", incarnation="i", address="10.0.0.1", nproc=1, port=1, link=rank)
        for rank in range(size)
    )
    group = Group(run="r", number=1, members=members, cause="start", reason="", restarts=0, step=0, reached=size)
    told = tuple(
        Suspect(
            node_id=f"n{other}",
            incarnation="i",
            by_node_id=f"n{rank}",
            by_incarnation="i",
            is_lost=False,
            was_up=was_up,
            why="",
        )
        for rank, other in sorted(silent)
    )
    return ClusterView(9, is_whole=True, group=Stored(group, 2, 2), suspects=tuple(Stored(each, 3, 3) for each in told))


def both_ways(size: int, gaps: set[int]) -> set[tuple[int, int]]:
    """Neither of two neighbours hears the other, after each of these ranks."""
    pairs = {(rank, (rank + 1) % size) for rank in gaps}
    return pairs | {(other, rank) for rank, other in pairs}


def ranks_out(view: ClusterView) -> list[int]:
    return [member.link for member in cut_off(view)]


@pytest.mark.parametrize(
    ("size", "gaps", "out"),
    [
        (2, {0}, [1]),
        (3, {1}, [2]),
        (3, {2}, [2]),
        (3, {0, 2}, [0]),
        (3, {0, 1, 2}, [1, 2]),
        (4, {1, 3}, [2, 3]),
        (5, {1, 4}, [0, 1]),
        (6, {0, 3}, [1, 2, 3]),
        (6, {5, 0, 2}, [0, 1, 2]),
    ],
)
def test_the_longest_piece_goes_on(size: int, gaps: set[int], out: list[int]) -> None:
    assert ranks_out(view_of(size, both_ways(size, gaps))) == sorted(out)


@given(st.integers(2, 12), st.sets(st.integers(0, 11)))
def test_nobody_who_goes_on_has_a_neighbour_that_it_does_not_hear(size: int, gaps: set[int]) -> None:
    silent = both_ways(size, {gap for gap in gaps if gap < size})
    out = set(ranks_out(view_of(size, silent)))
    assert len(out) < size
    assert not [pair for pair in silent if not out & set(pair)]
    assert bool(out) == bool(silent)


def test_what_one_alone_says_or_who_was_never_heard_leaves_nobody_out() -> None:
    assert ranks_out(view_of(4, {(1, 2)})) == []
    assert ranks_out(view_of(4, both_ways(4, {1}), was_up=False)) == []
    assert cut_off(ClusterView(9, is_whole=True)) == ()
