"""Large groups are stored by what is different from a list of members that an earlier group wrote."""

from __future__ import annotations

from random import Random

import msgspec
import pytest
from reasons import LOST

from agent.core.model import Group, Member
from agent.errors import RecordError
from agent.store.api import KeyValue, Snapshot
from agent.store.keys import JobKeys, encode, group_in, view_of
from agent.store.listed_members import LISTED_FROM, ListedGroup, MemberList, pack, unpack

KEYS = JobKeys("job")


def member(number: int, port: int = 1) -> Member:
    return Member(node_id=f"node-{number}", incarnation="i", address="10.0.0.1", nproc=8, port=port, link=2)


def group_of(number: int, *members: Member) -> Group:
    return Group(run="r", number=number, members=members, cause="lost", reason=LOST, restarts=0, step=0, reached=1)


def many(count: int = 1000) -> tuple[Member, ...]:
    return tuple(map(member, range(count)))


def stored_in(*records: tuple[str, object]) -> dict[str, KeyValue]:
    return {key: KeyValue(key, encode(record), 4, 5, 0) for key, record in records}  # type: ignore[arg-type]


def test_a_small_group_is_stored_as_it_is() -> None:
    group = group_of(3, *many(LISTED_FROM - 1))
    assert pack(group, None) == (group, None)


def test_a_loss_of_one_of_many_takes_a_few_hundred_bytes_and_no_new_list() -> None:
    first, listed = pack(group_of(3, *many()), None)
    assert listed == MemberList(group=3, members=many())
    changed = (*many()[:500], *many()[501:], member(5000))
    group = group_of(4, member(0, port=9), *changed[1:])
    second, another = pack(group, listed)
    assert another is None
    assert len(encode(second)) < 1000
    assert isinstance(first, ListedGroup)
    assert isinstance(second, ListedGroup)
    assert second.members == (member(0, port=9), (1, 500), (501, 1000), member(5000))
    assert (unpack(first, listed), unpack(second, listed)) == (group_of(3, *many()), group)


def test_a_list_that_no_longer_fits_is_written_anew() -> None:
    _, listed = pack(group_of(3, *many()), None)
    others = tuple(member(number, port=7) for number in range(1000))
    stored, another = pack(group_of(9, *others), listed)
    assert another == MemberList(group=9, members=others)
    assert isinstance(stored, ListedGroup)
    assert unpack(stored, another) == group_of(9, *others)


@pytest.mark.parametrize("seed", range(50))
def test_whatever_the_order_is_the_group_comes_back(seed: int) -> None:
    """Nodes leave, come back with another port, and change their order."""
    chance = Random(seed)
    listed: MemberList | None = None
    members = list(many(100))
    for number in range(1, 20):
        chance.shuffle(members) if chance.random() < 0.1 else None
        del members[chance.randrange(len(members))]
        members.insert(chance.randrange(len(members)), member(chance.randrange(100, 10**6), port=number))
        group = group_of(number, *members)
        stored, another = pack(group, listed)
        listed = another or listed
        assert isinstance(stored, ListedGroup)
        assert unpack(stored, listed) == group


def test_a_view_has_the_members_themselves() -> None:
    group = group_of(3, *many())
    stored, listed = pack(group, None)
    items = stored_in((KEYS.group, stored), (KEYS.members, listed))
    for found in (group_in(items, KEYS), view_of(Snapshot(9, items), KEYS, is_whole=False).group):
        assert found is not None
        assert (found.value, found.create_revision, found.mod_revision) == (group, 4, 5)
    assert group_in({}, KEYS) is None


@pytest.mark.parametrize(
    ("part", "listed", "wrong"),
    [
        ((0, 2), None, "list of members of group 3, which is not there"),
        ((0, 2), MemberList(group=2, members=many(2)), "list of members of group 3, which is not there"),
        ((0, 3), MemberList(group=3, members=many(2)), "places 0 to 3 of a list of 2 members"),
        ((1, 1), MemberList(group=3, members=many(2)), "places 1 to 1 of a list of 2 members"),
    ],
)
def test_a_group_whose_list_is_not_there_is_an_error_that_names_the_key(
    part: tuple[int, int], listed: MemberList | None, wrong: str
) -> None:
    stored = ListedGroup(listed_by=3, members=(part,), group=group_of(3))
    items = stored_in((KEYS.group, stored), *([(KEYS.members, listed)] if listed else []))
    with pytest.raises(RecordError, match=f"/elastic-agent/job/shared/group cannot be read: .*{wrong}"):
        group_in(items, KEYS)


def test_a_large_record_is_recognised_although_it_is_compressed() -> None:
    members = tuple(msgspec.structs.replace(member(number), address=f"10.1.{number}.9") for number in range(1000))
    stored, listed = pack(group_of(3, *members), None)
    assert isinstance(stored, ListedGroup)
    again, _ = pack(group_of(4, *members[::2]), None)
    padded = msgspec.structs.replace(again, members=members) if isinstance(again, ListedGroup) else again
    items = stored_in((KEYS.group, padded), (KEYS.members, MemberList(group=4, members=members)))
    assert items[KEYS.group].value[:1] == b"\x78"
    found = group_in(items, KEYS)
    assert found is not None
    assert found.value.members == members
    assert listed is not None
