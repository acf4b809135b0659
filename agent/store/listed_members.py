"""The stored form of large groups: members are named by their places in a list that earlier groups wrote.

All agents read the record of each new group. A change of a large group usually takes or adds a few members, so the
record says only what is different: the ranges of the list that the group keeps, in rank order, with new or changed
members between them. Then a change costs each agent some hundred bytes, however many nodes there are. The list is
written anew, in one transaction with the group, when there is too much to say.
"""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from agent.core.bounds import Count
from agent.core.model import Group, Member
from agent.core.records import Record

LISTED_FROM = 64
"""Groups of so many members or more are stored in this form. Smaller ones can be read with etcdctl as a whole."""

Range = tuple[Count, Count]
"""Places from the first up to, and without, the second."""


class MemberList(Record, frozen=True, kw_only=True):
    """The members of a group, to which the records of later groups refer."""

    group: Count
    """Number of the group that it was written with."""
    members: tuple[Member, ...]


class ListedGroup(Record, frozen=True, kw_only=True):
    """A large group as it is stored."""

    listed_by: Count
    """Number of the group that the list was written with."""
    members: tuple[Range | Member, ...]
    """In rank order: ranges of the list, and members that it does not have."""
    group: Group
    """Everything else. It has no members."""


def pack(group: Group, listed: MemberList | None) -> tuple[Group | ListedGroup, MemberList | None]:
    """Return the stored form of a group, and the list to write with it. None: the list stays.

    Args:
        group: the group to write.
        listed: the present list. None: there is none that can be read.
    """
    size = len(group.members)
    if size < LISTED_FROM:
        return group, None
    rest = msgspec.structs.replace(group, members=())
    if listed is not None:
        parts = tuple(_parts(group.members, listed.members))
        if len(parts) <= size // 8 + 2:
            return ListedGroup(listed_by=listed.group, members=parts, group=rest), None
    whole = ListedGroup(listed_by=group.number, members=((0, size),), group=rest)
    return whole, MemberList(group=group.number, members=group.members)


def unpack(stored: ListedGroup, listed: MemberList | None) -> Group:
    """Return the group of a stored form. Raises `ValueError` if the list is another one, or has too few members."""
    if listed is None or listed.group != stored.listed_by:
        raise ValueError(f"it refers to the list of members of group {stored.listed_by}, which is not there")
    members = list[Member]()
    for part in stored.members:
        if isinstance(part, Member):
            members.append(part)
            continue
        first, end = part
        if not first < end <= len(listed.members):
            raise ValueError(f"it refers to places {first} to {end} of a list of {len(listed.members)} members")
        members += listed.members[first:end]
    return msgspec.structs.replace(stored.group, members=tuple(members))


def _parts(members: tuple[Member, ...], listed: tuple[Member, ...]) -> Iterator[Range | Member]:
    places = {member.node_id: place for place, member in enumerate(listed)}
    first = end = 0
    for member in members:
        place = places.get(member.node_id)
        is_listed = place is not None and listed[place] == member
        if first < end and not (is_listed and place == end):
            yield first, end
            first = end = 0
        if not is_listed or place is None:
            yield member
        elif first < end:
            end += 1
        else:
            first, end = place, place + 1
    if first < end:
        yield first, end
