"""The next map of shards: who serves what, when servers come and go. Pure: a map, and who is there, to a map.

The rules, for each shard:

1. A primary that is lost is followed by its replica, which has all that was ever answered.
2. Where both are lost, the shard's own server (of its number) begins with what it kept on disk.
3. Who is lost is no replica any more; the first other server that is there joins, and is a replica when it has a copy.

What a server says of its replicas counts only for the map that it goes by, so that two changes at once do not mix.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace

from trainer_runtime.shard_map import ShardMap, ShardPlace, ShardServer


@dataclass(frozen=True)
class ReplicaReport:
    """What a primary says of the other copy of its shard."""

    number: int
    """Of the map that it goes by."""
    shard: int
    is_whole: bool
    """True: who joins has all of it. False: the replica does not answer."""


def first_map(servers: int, *, replicas: int) -> ShardMap:
    """Where all begins: each server has its own, with what it finds on disk, and gives the next one a copy."""
    firsts = [ShardServer(server, 1) for server in range(servers)]
    joining = [firsts[(shard + 1) % servers] if replicas and servers > 1 else None for shard in range(servers)]
    return ShardMap(1, tuple(ShardPlace(1, firsts[shard], None, joining[shard]) for shard in range(servers)))


def next_map(
    current: ShardMap, there: Mapping[int, int], may_join: Collection[int] | None = None, *, replicas: int
) -> ShardMap:
    """The map that follows; the same one where nothing changes.

    Args:
        current: the newest.
        there: of each server that is there, which incarnation.
        may_join: which of them are surely there. None: all.
        replicas: how many each shard is to have.
    """
    number = current.number + 1
    joinable = {server: there[server] for server in sorted(there if may_join is None else may_join)}
    found = (_next(shard, place, there, number) for shard, place in enumerate(current.places))
    places = tuple(
        _with_copy(shard, place, joinable, there) if replicas else place for shard, place in enumerate(found)
    )
    return current if places == current.places else ShardMap(number, places)


def heard(current: ShardMap, said: ReplicaReport) -> ShardMap:
    """The map that follows from what a primary says; the same one if it goes by an older one."""
    if said.number != current.number or not 0 <= said.shard < len(current.places):
        return current
    place = current.places[said.shard]
    if said.is_whole:
        changed = replace(place, replica=place.joining, joining=None) if place.joining else place
    else:
        changed = replace(place, replica=None, joining=place.replica)
    if changed == place:
        return current
    places = (*current.places[: said.shard], changed, *current.places[said.shard + 1 :])
    return ShardMap(current.number + 1, places)


def _next(shard: int, place: ShardPlace, there: Mapping[int, int], number: int) -> ShardPlace:
    def left(holder: ShardServer | None) -> ShardServer | None:
        return holder if holder is not None and there.get(holder.server) == holder.incarnation else None

    era, primary, replica = place.era, left(place.primary), left(place.replica)
    if primary is None:
        primary, replica = replica, None
    if primary is None:
        if shard not in there:
            return ShardPlace(era, place.primary)  # nobody has it until its own server is back
        era, primary = number, ShardServer(shard, there[shard])
    joining = left(place.joining) if replica is None else None
    return ShardPlace(era, primary, replica, joining if joining != primary else None)


def _with_copy(shard: int, place: ShardPlace, joinable: Mapping[int, int], there: Mapping[int, int]) -> ShardPlace:
    """Let somebody join where there is no copy, and a primary to give it."""
    primary = place.primary
    if place.replica or place.joining or there.get(primary.server) != primary.incarnation:
        return place
    servers = sorted(joinable, key=lambda server: (server < shard, server))
    joining = next((ShardServer(server, joinable[server]) for server in servers if server != primary.server), None)
    return replace(place, joining=joining)
