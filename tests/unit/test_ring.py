"""The ring in which members have links: by rank, or such that nodes of one fault domain are not beside each other."""

from __future__ import annotations

from collections import Counter

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from nodes import NODE

from agent.core.model import Group
from agent.core.neighbours import neighbours, next_member, ring
from agent.core.reasons import NodesThere


def group_of(domains: list[str]) -> Group:
    """A group of nodes in these fault domains, in rank order."""
    members = [
        msgspec.structs.replace(NODE, node_id=f"n{place}", domain=domain).member for place, domain in enumerate(domains)
    ]
    return Group(
        run="r",
        number=1,
        members=tuple(members),
        cause="start",
        reason=NodesThere(nodes=1, np="1"),
        restarts=0,
        step=0,
        reached=len(members),
    )


@given(st.lists(st.sampled_from("wxyz"), min_size=1, max_size=24))
def test_nobody_is_beside_a_node_of_its_own_fault_domain_unless_too_many_are_in_one(domains: list[str]) -> None:
    group = group_of(domains)
    members = ring(group.members)
    assert sorted(members, key=group.members.index) == [*group.members]
    for place, member in enumerate(members):
        after = next_member(group, member.identity)
        assert after == (members[(place + 1) % len(members)] if len(members) > 1 else None)
        beside = neighbours(group, member.identity)
        assert set(beside) == {members[place - 1], members[(place + 1) % len(members)]} - {member}
        if max(Counter(domains).values()) <= len(domains) / 2:
            assert member.domain not in {each.domain for each in beside}


@pytest.mark.parametrize("domains", [[""] * 5, ["x"] * 5])
def test_without_fault_domains_it_is_in_rank_order(domains: list[str]) -> None:
    group = group_of(domains)
    assert ring(group.members) == group.members


def test_a_node_outside_has_no_neighbours() -> None:
    group, outside = group_of(["w", "x"]), msgspec.structs.replace(NODE, node_id="z").identity
    assert neighbours(group, outside) == ()
    assert next_member(group, outside) is None
