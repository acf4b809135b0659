"""The records of a parameter-server job in etcd, and a view of all of them.

| key, under the job's prefix | lease | record |
|---|---|---|
| `roles/spec` | no | `RoleSpec` |
| `roles/nodes/{node_id}` | yes | `RoleNode` |
| `roles/processes/{kind}-{index}` | no | `RoleProcessRecord` |
| `roles/map` | no | `MapRecord` |
| `roles/result` | no | `RoleResult` |
"""

from __future__ import annotations

from dataclasses import dataclass, field

from agent.core.bounds import Count, Port, Run
from agent.core.records import Record
from agent.roles.plan import Kind, RolePlan, RoleProcess
from trainer_runtime.shard_map import ShardMap, place_of

_Server = tuple[Count, Count]
"""Index among the servers, and incarnation."""


class RoleSpec(Record, frozen=True, kw_only=True):
    """The processes of the job. Written by the first agent, and never changed."""

    run: Run
    """Random id of this run."""
    secret: str
    """Shared secret by which the processes of the job authenticate each other."""
    processes: tuple[tuple[Kind, str, Port], ...]
    """Kind, machine and port of each process, in the order of the plan."""
    heter_device: str
    http_port: Port
    replicas: Count = 0
    """Replicas of each server's rows on another server."""

    def plan(self) -> RolePlan:
        """Return the spec as a plan."""
        counts: dict[Kind, int] = {}
        processes = []
        for kind, machine, port in self.processes:
            index = counts.get(kind, 0)
            counts[kind] = index + 1
            processes.append(RoleProcess(kind, index, machine, port))
        return RolePlan(tuple(processes), self.heter_device, self.http_port, self.replicas)


class MapRecord(Record, frozen=True, kw_only=True):
    """A `ShardMap` as a record: which server has which shard."""

    number: Count
    places: tuple[tuple[Count, _Server, _Server | None, _Server | None], ...]
    """For each shard: era, primary, replica, joining server."""

    def shard_map(self) -> ShardMap:
        """Return the record as a map."""
        return ShardMap(self.number, tuple(place_of(*place) for place in self.places))


def map_record(made: ShardMap) -> MapRecord:
    """Return a map as a record."""
    places = tuple((place.era, place.primary, place.replica, place.joining) for place in made.places)
    return MapRecord(number=made.number, places=places)


class RoleNode(Record, frozen=True, kw_only=True):
    """The agent of a machine; the record exists while the agent's lease lives."""

    machine: str
    incarnation: str


class RoleProcessRecord(Record, frozen=True, kw_only=True):
    """The state of a process. Written by its agent at the start of each incarnation, and when none is to follow."""

    incarnation: Count
    """Number of the last incarnation, from 1."""
    code: Count | None = None
    """Exit code of the last incarnation. None: it runs, or another one follows."""
    reason: str = ""
    """Why it failed, in words; empty if `code` is 0 or None."""


class RoleResult(Record, frozen=True, kw_only=True):
    """How the job ended; its last record."""

    code: Count
    sentence: str
    is_reset: bool = False
    """The job was reset: it may start again."""
    is_stopped: bool = False
    """An operator stopped the job before it was done; it counts as ended well."""

    @property
    def has_succeeded(self) -> bool:
        """Whether the job has done all of its work."""
        return self.code == 0 and not self.is_stopped


@dataclass(frozen=True)
class RoleView:
    """All records of the job at one revision."""

    revision: int = 0
    spec: RoleSpec | None = None
    nodes: tuple[RoleNode, ...] = ()
    processes: dict[str, RoleProcessRecord] = field(default_factory=dict)
    """Records by the names of the processes."""
    result: RoleResult | None = None
    map: ShardMap | None = None
    map_revision: int = 0
    """Revision at which the map was written; 0: there is none."""
