"""The events that the core of a parameter-server job decides on, and the effects that it returns."""

from __future__ import annotations

from dataclasses import dataclass

from agent.core.effects import Announce, Exit
from agent.core.events import StopAsked, StoreLost, Ticked
from agent.roles.model import RoleProcessRecord, RoleResult, RoleView
from agent.roles.plan import RoleProcess
from agent.roles.shards import ReplicaReport
from trainer_runtime.shard_map import ShardMap

# Events


@dataclass(frozen=True)
class RoleViewChanged:
    """The records in etcd have changed."""

    view: RoleView


@dataclass(frozen=True)
class ProcessExited:
    """An incarnation of a process has ended, and all of its descendants."""

    process: RoleProcess
    incarnation: int
    code: int
    """As in a shell: 128 + the number of the signal, if a signal killed it."""
    reason: str
    """Why it ended, in words; empty: it ended with 0."""


@dataclass(frozen=True)
class ReplicaReported:
    """A server of this machine has reported whether the replica of a shard is complete."""

    report: ReplicaReport


RoleEvent = RoleViewChanged | ReplicaReported | ProcessExited | StopAsked | StoreLost | Ticked


# Effects, to be carried out in the order in which `step` returns them


@dataclass(frozen=True)
class StartProcess:
    """Start an incarnation of a process."""

    process: RoleProcess
    incarnation: int


@dataclass(frozen=True)
class TerminateProcess:
    """Send a process SIGTERM, and SIGKILL after the grace period."""

    process: RoleProcess
    is_done: bool = False
    """The job has succeeded: the next run must not continue from what a server has on disk."""


@dataclass(frozen=True)
class WriteRecord:
    """Write the record of a process."""

    process: RoleProcess
    record: RoleProcessRecord


@dataclass(frozen=True)
class WriteShardMap:
    """Write which server has which shard, unless the map was written after this revision; 0: unless there is one."""

    map: ShardMap
    after_revision: int


@dataclass(frozen=True)
class SendShardMap:
    """Send the map of shards to all processes of this machine."""

    map: ShardMap


@dataclass(frozen=True)
class WriteRoleResult:
    """Write how the job ended, unless there is a result."""

    result: RoleResult


RoleStoreEffect = WriteRecord | WriteShardMap | WriteRoleResult

RoleEffect = RoleStoreEffect | StartProcess | TerminateProcess | SendShardMap | Announce | Exit
