"""What can happen to an agent: what `lifecycle.step` is told, through the loop's inbox. Its answer: `effects.py`."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Literal

from agent.core.effects import NodeIdHolder, StoreEffect
from agent.core.incident import RankStall
from agent.core.member_status import WrittenStatus
from agent.core.model import Checkpoint, ClusterView, Identity, LinkState, Replica


class Outcome(Enum):
    """How an effect on the store ended."""

    DONE = "done"
    REFUSED = "refused"
    """A compare did not hold: somebody else was first. Look again."""
    UNKNOWN = "unknown"
    """No answer in time: it may have landed or not. Look again."""


@dataclass(frozen=True)
class ViewChanged:
    """A whole new view of the job's keys."""

    view: ClusterView


@dataclass(frozen=True)
class StoreLost:
    """The store cannot be reached. The next `ViewChanged` says that it can be again."""


@dataclass(frozen=True)
class WriteAnswered:
    """The store's answer to an effect."""

    effect: StoreEffect
    outcome: Outcome
    revision: int = 0
    """Of the write or read that was done."""
    reason: str = ""
    """Why there is no answer."""
    holder: NodeIdHolder | None = None
    """Of a refused `Register`: who has the node id."""
    status: WrittenStatus | None = None
    """Of a refused `WriteStatus`: the record that is there."""


@dataclass(frozen=True)
class PortReserved:
    """A port on this node is held for the next group's master."""

    port: int


@dataclass(frozen=True)
class WorkerExited:
    """One local rank process ended. Its descendants may live for a moment: see `WorkersGone`."""

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
    """Its last word: it could not read the checkpoint that it must begin from; which, and why."""
    error: str = ""
    """The exception that ended it, on one line; empty: none is known."""
    traceback: str = ""
    """Of that: as the script recorded it (torch's `@record`), or where `stderr_tail` does not hold all of it."""
    why: str = ""
    """What the system knows of it: that memory ran out, or a GPU failed."""
    mistake: str = ""
    """What in the script itself ended it, and where, before any process group existed; empty: it may be another
    cause."""


@dataclass(frozen=True)
class WorkersGone:
    """No process of this group's workers is left on this node, descendants included."""

    group: int


@dataclass(frozen=True)
class LeaseRenewed:
    """A renewal of our lease was answered: the lease surely lives until then, on the clock of `now`."""

    until: float


@dataclass(frozen=True)
class LinkChanged:
    """The link to a neighbour went up, fell silent, or was lost."""

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
    """What this node holds in memory of the training's state, once no process can change it any more."""

    copies: tuple[Replica, ...]


@dataclass(frozen=True)
class RestorePointAsked:
    """A local rank of this group asked where to begin: its script commits."""

    group: int


@dataclass(frozen=True)
class RanksStarted:
    """All local ranks of this group have made their first step. Times of the last of them, on the clock of `now`."""

    group: int
    entered: float
    """It had imported our runtime."""
    joined: float
    """It was in a process group."""
    loaded: float
    """It had what it begins from."""
    stepped: float
    step: int
    """The number of that step."""


@dataclass(frozen=True)
class StepTimeChanged:
    """What a step takes in this group, whenever that has changed by something."""

    group: int
    step_s: float
    """The usual time from step to step."""
    own_s: tuple[float, ...]
    """Of each local rank, what it needs for itself; empty: not known."""


@dataclass(frozen=True)
class RanksStalled:
    """Local ranks of this group make no step, for longer than is usual; or, at stage "over", one has come after all."""

    group: int
    stage: Literal["over", "suspicious", "still", "certain"]
    for_s: float
    limit_s: float
    ranks: tuple[RankStall, ...]


@dataclass(frozen=True)
class HealthChecked:
    """This node was examined."""

    trouble: str
    """What is wrong with it; empty: it can train."""


@dataclass(frozen=True)
class StandbyChanged:
    """This node has other standby processes than before."""

    told: str
    """What it has, or why it has none."""
    is_warming: bool
    """The first ones, or those that follow others, are being prepared. That has an end, whatever becomes of them."""


@dataclass(frozen=True)
class PublishAsked:
    """A worker of this group has written a checkpoint's files and asks whether they count."""

    group: int
    checkpoint: Checkpoint
    """Its `number` and `run` are still to be given."""


@dataclass(frozen=True)
class RanksQuiesced:
    """All local ranks of this group stand still for a handoff, with a snapshot of this step in memory."""

    group: int
    number: int
    """Of the handoff."""
    step: int
    is_shared: bool
    """The neighbours have what these ranks alone have of it. Told again once they do."""


@dataclass(frozen=True)
class StopAsked:
    """A signal asks this agent to leave."""

    signal: int


@dataclass(frozen=True)
class Ticked:
    """The time has come that the core asked to be woken at, or it is just time to look."""


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
    | RanksQuiesced
    | PortReserved
    | WorkerExited
    | WorkersGone
    | StopAsked
    | Ticked
)
