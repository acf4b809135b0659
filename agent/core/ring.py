"""The ring of a group: the order in which each member has links to the two beside it, and keeps copies for the next."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from agent.core.model import Member


def ring(members: tuple[Member, ...]) -> tuple[Member, ...]:
    """The members of a group, given in rank order, in the order in which each has links to the two beside it.

    If nobody has more than half of them in its fault domain, no two neighbours are in the same one: domains take every
    second place, the largest first, and then the places between.
    """
    domains = Counter(member.domain for member in members)
    if len(domains) < 2:
        return members
    together = sorted(members, key=lambda member: (-domains[member.domain], member.domain))
    half = (len(members) + 1) // 2
    places = list(members)
    places[0::2], places[1::2] = together[:half], together[half:]
    return tuple(places)
