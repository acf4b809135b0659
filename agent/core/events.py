"""Events: the input of `lifecycle.step`, which the loop takes from the agent's inbox. Its output is in `effects.py`."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Literal

from agent.core.effects import NodeIdHolder, StoreEffect
from agent.core.incident import RankStall
from agent.core.member_status import WrittenStatus
from agent.core.model import LinkState
from agent.core.records import Identity
from agent.core.saved_states import Checkpoint, Replica
from agent.core.view import ClusterView


class Outcome(Enum):
    """How an effect on the store ended."""

    DONE = "done"
    REFUSED = "refused"
    """A compare failed, because another write came first. The agent must read again."""
    UNKNOWN = "unknown"
    """There was no answer in time, so the write may or may not have been applied. The agent must read again."""


@dataclass(frozen=True)
class ViewChanged:
    """A new view of the job's keys, which replaces the one before."""

    view: ClusterView


@dataclass(frozen=True)
class StoreLost:
    """The store cannot be reached. The next `ViewChanged` shows that it can be reached again."""


@dataclass(frozen=True)
class WriteAnswered:
    """The answer of the store to an effect."""

    effect: StoreEffect
    outcome: Outcome
    revision: int = 0
    """The store revision of the write or read, if it was done."""
    reason: str = ""
    """Why there is no answer."""
    holder: NodeIdHolder | None = None
    """After a refused `Register`: the agent that holds the node id."""
    status: WrittenStatus | None = None
    """After a refused `WriteStatus`: the record that is in etcd."""


@dataclass(frozen=True)
class PortReserved:
    """A port on this node is held for the next group's master."""

    port: int


@dataclass(frozen=True)
class WorkerExited:
    """A local rank process ended. Its descendants may live on for a moment: see `WorkersGone`."""

    group: int
    local_rank: int
    exit_code: int | None
    """None: killed by `signal`."""
    signal: int | None
    stderr_tail: str
    step: int
    """Highest step that it committed; 0 if none."""
    at: float
    """Wall clock, seconds since 1970."""
    unreadable: str = ""
    """Which checkpoint it could not read, and why; it had to begin from that one. Empty: it was something else."""
    error: str = ""
    """The exception that ended it, on one line. Empty: none is known."""
    traceback: str = ""
    """Its traceback, if the script recorded one (torch's `@record`) or `stderr_tail` has only a part. Else empty."""
    why: str = ""
    """The cause as the system reports it: memory ran out, or a GPU failed. Empty: none is known."""
    script_error: str = ""
    """The error in the script that ended it before any process group existed, and its place. Empty: the cause may be
    another one."""


@dataclass(frozen=True)
class WorkersGone:
    """No process of this group's workers, nor a descendant of one, is left on this node."""

    group: int


@dataclass(frozen=True)
class WorkersMoved:
    """All local ranks of this group were sent into the next one. They act for that one from now on."""

    group: int
    """Number of the group that they left."""
    step: int
    """Highest step that they had committed."""
    at: float
    """When that was, on the clock of `now`."""


@dataclass(frozen=True)
class WorkersReady:
    """All local processes that set up before they are let in have done so, and wait."""

    group: int
    """Number of the group that ran as they were started."""


@dataclass(frozen=True)
class WorkersCannotMove:
    """The local ranks of this group cannot enter the next one: they are not quiesced, or one of them has ended."""

    group: int


@dataclass(frozen=True)
class LeaseRenewed:
    """A renewal of our lease was answered, so the lease lives at least until then, on the clock of `now`."""

    until: float


@dataclass(frozen=True)
class LinkChanged:
    """The link to a neighbour came up, fell silent, or was lost."""

    who: Identity
    state: LinkState
    why: str


@dataclass(frozen=True)
class ClockCompared:
    """A neighbour's wall clock was compared with ours over the link to it."""

    who: Identity
    ahead_s: float
    error_s: float


@dataclass(frozen=True)
class InventoryChanged:
    """The snapshots that this node holds in memory. Sent once no process can change them any more."""

    copies: tuple[Replica, ...]


@dataclass(frozen=True)
class RestorePointAsked:
    """A local rank of this group asked where to begin, which shows that its script commits steps."""

    group: int


@dataclass(frozen=True)
class RanksStarted:
    """All local ranks of this group have made their first step. Times are of the last rank, on the clock of `now`."""

    group: int
    entered: float
    """It had imported `trainer_runtime`."""
    joined: float
    """It had joined a process group."""
    set_up: float
    """It had set up the script, and asked for the state that it begins from."""
    loaded: float
    """It had loaded the state that it begins from."""
    stepped: float
    step: int
    """The number of that step."""
    can_move: bool = False
    """They can enter the next group without a new process."""


@dataclass(frozen=True)
class StepTimeChanged:
    """The duration of a step in this group has changed noticeably."""

    group: int
    step_s: float
    """The usual time from one step to the next."""
    own_s: tuple[float, ...]
    """The part of it that each local rank needs for itself, without waiting for others. Empty: not known."""


@dataclass(frozen=True)
class RanksStalled:
    """Local ranks of this group have made no step for unusually long; or, at stage "over", have made one after all."""

    group: int
    stage: Literal["over", "suspicious", "still", "certain"]
    for_s: float
    limit_s: float
    ranks: tuple[RankStall, ...]


@dataclass(frozen=True)
class HealthChecked:
    """The health check of this node has ended."""

    trouble: str
    """What is wrong with the node. Empty: it can train."""


@dataclass(frozen=True)
class StandbyChanged:
    """The standby processes of this node have changed."""

    summary: str
    """Which standby processes it has, or why it has none."""
    is_warming: bool
    """Standby processes are being prepared. This always ends, whether or not the preparation succeeds."""


@dataclass(frozen=True)
class PublishAsked:
    """A worker of this group has written a checkpoint's files and asks for it to be committed."""

    group: int
    checkpoint: Checkpoint
    """Its `number` and `run` are not set yet."""


@dataclass(frozen=True)
class SaveEnded:
    """The process that wrote a checkpoint from a snapshot in memory has ended, whether or not it succeeded."""


@dataclass(frozen=True)
class RanksQuiesced:
    """All local ranks of this group have stopped for a handoff, with a snapshot of this step in memory."""

    group: int
    number: int
    """Number of the handoff request."""
    step: int
    is_shared: bool
    """The neighbours hold copies of the parts that only these ranks have. The event is sent again once they do."""
    is_with_next_only: bool = False
    """Of the neighbours, only the next member holds them, because they are large."""


@dataclass(frozen=True)
class StopAsked:
    """A signal asked this agent to leave."""

    signal: int


@dataclass(frozen=True)
class Ticked:
    """The time at which the core asked to be woken has come, or a regular check is due."""


Event = (
    ViewChanged
    | StoreLost
    | WriteAnswered
    | LeaseRenewed
    | LinkChanged
    | ClockCompared
    | InventoryChanged
    | RestorePointAsked
    | RanksStarted
    | StepTimeChanged
    | RanksStalled
    | HealthChecked
    | StandbyChanged
    | PublishAsked
    | SaveEnded
    | RanksQuiesced
    | PortReserved
    | WorkerExited
    | WorkersGone
    | WorkersMoved
    | WorkersCannotMove
    | WorkersReady
    | StopAsked
    | Ticked
)
