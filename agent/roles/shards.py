"""The next map of shards, when servers come and go. Pure functions from a map and the running servers to a map.

The rules, for each shard:

1. When the primary is lost, its replica becomes the primary: it has every write that was acknowledged.
2. When both are lost, the server with the shard's number becomes the primary, with what it has on disk.
3. A replica that is lost is removed. The first other server that runs joins, and becomes the replica once it has a
   complete copy.

A server's report on a replica counts only for the map that the server uses, so that two concurrent changes do not mix.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace

from trainer_runtime.shard_map import ShardMap, ShardPlace, ShardServer


@dataclass(frozen=True)
class ReplicaReport:
    """What the primary of a shard reports on its replica."""

    number: int
    """Number of the map that the primary uses."""
    shard: int
    is_complete: bool
    """True: the joining server has a complete copy. False: the replica does not answer."""


def first_map(servers: int, *, replicas: int) -> ShardMap:
    """Return the first map: each server is primary of its own shard, from disk, and the next server joins."""
    firsts = [ShardServer(server, 1) for server in range(servers)]
    joining = [firsts[(shard + 1) % servers] if replicas and servers > 1 else None for shard in range(servers)]
    return ShardMap(1, tuple(ShardPlace(1, firsts[shard], None, joining[shard]) for shard in range(servers)))


def next_map(
    current: ShardMap, running: Mapping[int, int], joinable: Collection[int] | None = None, *, replicas: int
) -> ShardMap:
    """Return the next map, or the current one if nothing changes.

    Args:
        current: the newest map.
        running: the servers that run, with their incarnations.
        joinable: those of them that are known to run, and may become replicas. None: all.
        replicas: of each shard.
    """
    number = current.number + 1
    candidates = {server: running[server] for server in sorted(running if joinable is None else joinable)}
    found = (_next(shard, place, running, number) for shard, place in enumerate(current.places))
    places = tuple(
        _with_replica(shard, place, candidates, running) if replicas else place for shard, place in enumerate(found)
    )
    return current if places == current.places else ShardMap(number, places)


def apply_report(current: ShardMap, report: ReplicaReport) -> ShardMap:
    """Return the map that follows from a primary's report; the current one if the report is on another map."""
    if report.number != current.number or not 0 <= report.shard < len(current.places):
        return current
    place = current.places[report.shard]
    if report.is_complete:
        changed = replace(place, replica=place.joining, joining=None) if place.joining else place
    else:
        changed = replace(place, replica=None, joining=place.replica)
    if changed == place:
        return current
    places = (*current.places[: report.shard], changed, *current.places[report.shard + 1 :])
    return ShardMap(current.number + 1, places)


def _next(shard: int, place: ShardPlace, running: Mapping[int, int], number: int) -> ShardPlace:
    def if_running(holder: ShardServer | None) -> ShardServer | None:
        return holder if holder is not None and running.get(holder.server) == holder.incarnation else None

    era, primary, replica = place.era, if_running(place.primary), if_running(place.replica)
    if primary is None:
        primary, replica = replica, None
    if primary is None:
        if shard not in running:
            return ShardPlace(era, place.primary)  # no server has it until its own is back
        era, primary = number, ShardServer(shard, running[shard])
    joining = if_running(place.joining) if replica is None else None
    return ShardPlace(era, primary, replica, joining if joining != primary else None)


def _with_replica(
    shard: int, place: ShardPlace, candidates: Mapping[int, int], running: Mapping[int, int]
) -> ShardPlace:
    """Let a server join a shard that has no replica, if its primary runs and can send a copy."""
    primary = place.primary
    if place.replica or place.joining or running.get(primary.server) != primary.incarnation:
        return place
    servers = sorted(candidates, key=lambda server: (server < shard, server))
    joining = next((ShardServer(server, candidates[server]) for server in servers if server != primary.server), None)
    return replace(place, joining=joining)
