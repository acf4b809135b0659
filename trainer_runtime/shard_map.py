"""Which server has which shard: the map that an agent sends to its processes of a parameter-server job.

Standard library only. A shard is served by its **primary**. The **replica** applies every change before the primary
answers the request, so that either of the two may be lost. A **joining** server is receiving a copy of the shard, and
becomes the replica when the copy is complete.

Maps are numbered. A map with a higher number replaces the others, and requests that follow an older map are refused.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple


class ShardServer(NamedTuple):
    """One server process."""

    server: int
    """Index among the servers."""
    incarnation: int
    """Which of the processes that were started in this place."""


@dataclass(frozen=True)
class ShardPlace:
    """The servers of one shard."""

    era: int
    """Number of the map with which the shard was last loaded from disk; copies of an older era are invalid."""
    primary: ShardServer
    replica: ShardServer | None = None
    joining: ShardServer | None = None


@dataclass(frozen=True)
class ShardMap:
    """The places of all shards."""

    number: int
    places: tuple[ShardPlace, ...]
    """Indexed by shard number."""

    def to_json(self) -> dict[str, Any]:
        """Return the map as JSON for `map_of`."""
        return {
            "number": self.number,
            "places": [[place.era, place.primary, place.replica, place.joining] for place in self.places],
        }


def map_of(record: dict[str, Any]) -> ShardMap:
    """Return the map that `ShardMap.to_json` wrote. Raises `ValueError`."""
    try:
        places = tuple(place_of(*place) for place in record["places"])
        return ShardMap(int(record["number"]), places)
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"wanted a map of shards, got something else: {error}") from None


def place_of(
    era: int, primary: Sequence[int], replica: Sequence[int] | None, joining: Sequence[int] | None
) -> ShardPlace:
    """Return a place from its form in JSON and records."""
    return ShardPlace(
        era,
        ShardServer(*primary),
        ShardServer(*replica) if replica else None,
        ShardServer(*joining) if joining else None,
    )
