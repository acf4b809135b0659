"""What the agents of a parameter-server job write for each other, and what they see of it together.

| key, under the job's prefix | lease | record |
|---|---|---|
| `roles/spec` | no | `RoleSpec` |
| `roles/nodes/{node_id}` | yes | `RoleNode` |
| `roles/posts/{kind}-{index}` | no | `RoleProcessRecord` |
| `roles/map` | no | `MapRecord` |
| `roles/result` | no | `RoleResult` |
"""

from __future__ import annotations

from dataclasses import dataclass, field

from agent.core.model import Count, Port, Record, Run
from agent.roles.plan import Kind, RolePlan, RoleProcess
from trainer_runtime.shard_map import ShardMap, place_of

_Server = tuple[Count, Count]
"""Its place in the list of servers, and which of its processes."""


class RoleSpec(Record, frozen=True, kw_only=True):
    """Which processes the job has. Written by the first agent, and never changed."""

    run: Run
    """Random id of this run."""
    secret: str
    """By which the job's processes know each other."""
    posts: tuple[tuple[Kind, str, Port], ...]
    """Kind, machine and port of each, as they are listed."""
    heter_device: str
    http_port: Port
    replicas: Count = 0
    """Copies of each server's rows on another one."""

    def plan(self) -> RolePlan:
        """The same as a plan."""
        counts: dict[Kind, int] = {}
        posts = []
        for kind, machine, port in self.posts:
            index = counts.get(kind, 0)
            counts[kind] = index + 1
            posts.append(RoleProcess(kind, index, machine, port))
        return RolePlan(tuple(posts), self.heter_device, self.http_port, self.replicas)


class MapRecord(Record, frozen=True, kw_only=True):
    """Which server has which shard: a `ShardMap`."""

    number: Count
    places: tuple[tuple[Count, _Server, _Server | None, _Server | None], ...]
    """Of each shard its era, primary, replica, and who is joining."""

    def shard_map(self) -> ShardMap:
        """The same as a map."""
        return ShardMap(self.number, tuple(place_of(*place) for place in self.places))


def map_record(made: ShardMap) -> MapRecord:
    """A map as a record."""
    places = tuple((place.era, place.primary, place.replica, place.joining) for place in made.places)
    return MapRecord(number=made.number, places=places)


class RoleNode(Record, frozen=True, kw_only=True):
    """An agent that is here, and for which machine."""

    machine: str
    incarnation: str


class RoleProcessRecord(Record, frozen=True, kw_only=True):
    """What has become of a post: written by its agent when a process begins there, and when there is to be none."""

    incarnation: Count
    """Counts its processes."""
    code: Count | None = None
    """With which the last one ended. None: it runs, or another follows."""
    reason: str = ""
    """In words, of a code that is not 0."""


class RoleResult(Record, frozen=True, kw_only=True):
    """How the job ended."""

    code: Count
    sentence: str
    is_reset: bool = False
    """It may begin anew."""
    is_stopped: bool = False
    """Somebody ended it, well, before it was done."""

    @property
    def has_succeeded(self) -> bool:
        """Whether all is done: nothing is left to go on with."""
        return self.code == 0 and not self.is_stopped


@dataclass(frozen=True)
class RoleView:
    """All of it at one revision."""

    revision: int = 0
    spec: RoleSpec | None = None
    nodes: tuple[RoleNode, ...] = ()
    posts: dict[str, RoleProcessRecord] = field(default_factory=dict)
    """By the posts' names."""
    result: RoleResult | None = None
    map: ShardMap | None = None
    map_revision: int = 0
    """At which it was written; 0: it was not."""
