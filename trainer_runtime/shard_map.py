"""Which server has which shard: what an agent tells its processes of a parameter-server job. Standard library only.

A shard is served by its **primary**. What that is asked to change its **replica** has done too before it is answered,
so that either may be lost. Who is **joining** is being given a copy, and becomes the replica when it has all of it.

Maps are numbered. One with a higher number takes the place of the others, and who goes by an older one is refused.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple


class ShardServer(NamedTuple):
    """One server process."""

    server: int
    """Its index among the servers."""
    incarnation: int
    """Which of those that were started there."""


@dataclass(frozen=True)
class ShardPlace:
    """Where one shard is."""

    era: int
    """Number of the map with which its rows began anew, from what was kept on disk: copies of an older era are none."""
    primary: ShardServer
    replica: ShardServer | None = None
    joining: ShardServer | None = None


@dataclass(frozen=True)
class ShardMap:
    """Where all of them are."""

    number: int
    places: tuple[ShardPlace, ...]
    """By the shards' numbers."""

    def to_json(self) -> dict[str, Any]:
        """What `map_of` reads."""
        return {
            "number": self.number,
            "places": [[place.era, place.primary, place.replica, place.joining] for place in self.places],
        }


def map_of(told: dict[str, Any]) -> ShardMap:
    """The map that `ShardMap.to_json` wrote. Raises `ValueError`."""
    try:
        places = tuple(place_of(*place) for place in told["places"])
        return ShardMap(int(told["number"]), places)
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"this is no map of shards: {error}") from None


def place_of(
    era: int, primary: Sequence[int], replica: Sequence[int] | None, joining: Sequence[int] | None
) -> ShardPlace:
    """A place, as JSON and records have it."""
    return ShardPlace(
        era,
        ShardServer(*primary),
        ShardServer(*replica) if replica else None,
        ShardServer(*joining) if joining else None,
    )
