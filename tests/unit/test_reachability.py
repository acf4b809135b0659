"""Which nodes can train together if some cannot reach each other."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from reasons import LOST

from agent.core.model import Group, Member, Suspicion
from agent.core.reachability import (
    choose_connected,
    is_examined,
    partitioned,
    reported_silent,
    unreachable_from_outside,
)
from agent.core.records import Identity, Stored
from agent.core.view import ClusterView

NAMES = "abcdefghijkl"


def members(names: str) -> tuple[Member, ...]:
    return tuple(
        Member(node_id=name, incarnation="i", address="10.0.0.1", nproc=1, port=1, link=place)
        for place, name in enumerate(names)
    )


def pairs(*names: str) -> frozenset[frozenset[Identity]]:
    return frozenset(frozenset(Identity(name, "i") for name in pair) for pair in names)


def view_of(names: str, *said: str, has_had_link: str = NAMES) -> ClusterView:
    """A group of these nodes, in which the first of each pair reports that it cannot reach the second."""
    group = Group(
        run="r",
        number=1,
        members=members(names),
        cause="start",
        reason=LOST,
        restarts=0,
        step=0,
        reached=len(names),
    )
    told = (
        Suspicion(
            node_id=whom,
            incarnation="i",
            by_node_id=who,
            by_incarnation="i",
            is_lost=False,
            has_had_link=who in has_had_link,
            why="",
        )
        for who, whom in said
    )
    return ClusterView(9, is_whole=True, group=Stored(group, 2, 2), suspects=tuple(Stored(each, 3, 3) for each in told))


def going_on(
    names: str,
    apart: frozenset[frozenset[Identity]],
    *,
    kept: str = NAMES,
    need: int = 1,
    doubts: frozenset[frozenset[Identity]] = frozenset(),
) -> str:
    found = choose_connected(members(names), apart, {Identity(name, "i") for name in kept}, need, doubts)
    return "".join(member.node_id for member in found)


def split(*pieces: str) -> frozenset[frozenset[Identity]]:
    """A network that has fallen into pieces."""
    apart = [(one, other) for place, piece in enumerate(pieces) for one in piece for other in "".join(pieces[:place])]
    return pairs(*("".join(pair) for pair in apart))


def test_members_are_parted_by_what_both_say_of_each_other() -> None:
    assert partitioned(view_of("abc", "ab", "ba", "bc")) == pairs("ab")
    assert partitioned(view_of("abc", "ab", "ba", has_had_link="b")) == pairs("ab")
    assert partitioned(view_of("abc", "ab", "ba", has_had_link="c")) == frozenset(), (
        "a firewall may be all that is wrong"
    )
    assert partitioned(ClusterView(9, is_whole=True)) == frozenset()


def test_a_node_outside_the_group_is_unreachable_by_its_own_report() -> None:
    view = view_of("ab", "ca", "cd", "ac", "ab")
    assert unreachable_from_outside(view) == pairs("ca")
    assert partitioned(view) == frozenset()
    assert unreachable_from_outside(ClusterView(9, is_whole=True)) == frozenset()
    lost = tuple(replace(each, value=msgspec.structs.replace(each.value, is_lost=True)) for each in view.suspects)
    assert unreachable_from_outside(replace(view, suspects=lost)) == frozenset(), (
        "that one is gone, and not unreachable"
    )


def test_all_nodes_measure_reachability_while_a_member_is_silent_to_another_and_there_are_not_too_many() -> None:
    for view, expected in ((view_of("abc", "ab"), True), (view_of("abc", "da"), False), (view_of("abc"), False)):
        assert view.group is not None
        assert is_examined(view.group.value, view) == expected
        assert not is_examined(view.group.value, None)
    many = view_of("".join(chr(0x4E00 + place) for place in range(33)), "\u4e00\u4e01")
    assert many.group is not None
    assert not is_examined(many.group.value, many)


@pytest.mark.parametrize(
    ("pool", "apart", "kept", "need", "expected"),
    [
        ("abc", split("a", "bc"), "abc", 1, "bc"),
        ("abcdef", split("abc", "def"), "abcdef", 1, "abc"),
        ("abcdef", split("ace", "bdf"), "abcdef", 3, "ace"),
        ("abcd", pairs("bc"), "abcd", 1, "abd"),
        ("abc", split("a", "bc"), "ab", 1, "bc"),
        ("abc", split("a", "bc"), "ab", 2, "bc"),
        ("abc", pairs("ab"), "ab", 2, "ac"),
        ("abcdef", split("ab", "cdef"), "ab", 1, "ab"),
        ("abcdef", split("ab", "cdef"), "abc", 4, "cdef"),
        ("abcd", split("ab", "cd"), "bcd", 2, "cd"),
        ("", split("ab", "cd"), "ab", 1, ""),
    ],
)
def test_enough_then_the_most_members_then_the_most_then_the_first_go_on(
    pool: str, apart: frozenset[frozenset[Identity]], kept: str, need: int, expected: str
) -> None:
    assert going_on(pool, apart, kept=kept, need=need) == expected


def test_of_two_nodes_that_accuse_each_other_the_one_that_the_others_cannot_reach_is_left_out() -> None:
    send_only_b = view_of("abcd", "bc", "cb", "ab", "db")
    assert partitioned(send_only_b) == pairs("bc")
    assert reported_silent(send_only_b) == pairs("bc", "ab", "bd")
    assert going_on("abcd", partitioned(send_only_b), doubts=reported_silent(send_only_b)) == "acd"
    assert going_on("abcd", partitioned(send_only_b)) == "abd", "the first, where nobody else says anything"


@pytest.mark.parametrize(
    ("apart", "kept", "need", "doubts", "expected"),
    [
        (split("ab", "cde"), "abcde", 1, pairs("cd", "de", "ce"), "cde"),
        (split("ab", "cde"), "ab", 1, pairs("ab"), "ab"),
        (split("ab", "cde"), "ab", 3, pairs("cd"), "cde"),
    ],
)
def test_doubts_weigh_less_than_how_many_can_go_on(
    apart: frozenset[frozenset[Identity]], kept: str, need: int, doubts: frozenset[frozenset[Identity]], expected: str
) -> None:
    assert going_on("abcde", apart, kept=kept, need=need, doubts=doubts) == expected


@settings(deadline=None)
@given(st.sets(st.tuples(st.sampled_from(NAMES), st.sampled_from(NAMES))), st.integers(0, 12))
def test_all_that_continue_reach_each_other_and_no_larger_set_does(apart: set[tuple[str, str]], need: int) -> None:
    told = pairs(*(one + other for one, other in apart if one != other))
    found = going_on(NAMES, told, need=need)
    assert found
    assert not [pair for pair in told if pair <= {Identity(name, "i") for name in found}]
    left = set(NAMES) - set(found)
    assert all(any(frozenset((Identity(name, "i"), Identity(each, "i"))) in told for each in found) for name in left)
