"""What an agent can do: what `lifecycle.step` answers with (what it is told: `events.py`).

Effects are data; the loop carries them out in the order returned. Effects on the store are run one after another on
their own thread, and each is answered by an `Answered`.
"""

from __future__ import annotations

from dataclasses import dataclass

from agent.core.incident import Incident
from agent.core.member_status import MemberStatus
from agent.core.model import (
    Checkpoint,
    Group,
    HandoffRequest,
    Identity,
    Leader,
    Member,
    Node,
    RestorePoint,
    Result,
    Spec,
    StateId,
    Stored,
    Suspicion,
)

# Effects on the store


@dataclass(frozen=True)
class NodeIdHolder:
    """The agent that holds a node id which another wants."""

    node: Node
    lease_id: int
    is_alive: bool | None
    """Whether its process lives; None: on another host, so that only its lease can tell."""


@dataclass(frozen=True)
class CreateSpec:
    """Write the job's spec if there is none."""

    spec: Spec


@dataclass(frozen=True)
class StartOver:
    """Replace the keys of a finished job by a new spec, unless somebody else did."""

    spec: Spec
    group: Group
    """A wait, under the number after the old run's last: numbers grow over fresh starts too."""
    result_revision: int


@dataclass(frozen=True)
class Register:
    """Take a lease and this agent's place among the nodes. Refused while another holds the id."""

    node: Node


@dataclass(frozen=True)
class TakeOver:
    """End the lease of a dead agent that had our node id, and with it all that was its own."""

    holder: NodeIdHolder


@dataclass(frozen=True)
class UpdateNode:
    """Rewrite this agent's own node record."""

    node: Node
    create_revision: int


@dataclass(frozen=True)
class Campaign:
    """Become the leader if there is none."""

    leader: Leader


@dataclass(frozen=True)
class RestoredRecords:
    """What is written again after etcd has lost data."""

    spec: Spec
    resume: RestorePoint | None
    checkpoint: Checkpoint | None


@dataclass(frozen=True)
class WriteGroup:
    """Write the next group, if the last one and its incident, the spec and the leadership are as seen."""

    group: Group
    incident: Incident | None
    """Why it was formed. None: it is an old record that is written again."""
    restored: RestoredRecords | None
    """Written with it when etcd has lost its own."""
    last: Stored[Incident] | None
    """That of the last group: what the run has lost is carried on from it."""
    group_revision: int
    spec_revision: int
    leader_revision: int
    """create_revision of the leader key."""


@dataclass(frozen=True)
class WriteStatus:
    """Report on this node's workers, if the group is still current and the record as it was last known."""

    status: MemberStatus
    group_revision: int
    status_revision: int
    """mod_revision of this node's record about the group; 0: there is none yet."""


@dataclass(frozen=True)
class WriteIncident:
    """Complete the record of what made the group, if group and leadership are as seen."""

    incident: Incident
    group_revision: int
    leader_revision: int


@dataclass(frozen=True)
class WriteRestorePoint:
    """Say where the group begins, if group and leadership are as seen."""

    resume: RestorePoint
    group_revision: int
    leader_revision: int


@dataclass(frozen=True)
class WriteHandoff:
    """Wish for a handoff, if group and leadership are as seen."""

    handoff: HandoffRequest
    group_revision: int
    leader_revision: int


@dataclass(frozen=True)
class WriteCheckpoint:
    """Commit a checkpoint, if the group and the last commit are as seen: the fence."""

    checkpoint: Checkpoint
    group_revision: int
    checkpoint_revision: int


@dataclass(frozen=True)
class WriteSuspicion:
    """Tell of a neighbour whose link is broken or silent, for as long as we live."""

    suspect: Suspicion


@dataclass(frozen=True)
class ClearSuspicion:
    """Take that back."""

    suspect: Suspicion


@dataclass(frozen=True)
class Evict:
    """End a lost member's lease, and with it its place."""

    who: Identity
    lease_id: int


@dataclass(frozen=True)
class WriteResult:
    """End the job, if group and leadership are as seen and it has not ended."""

    result: Result
    group_revision: int
    leader_revision: int


@dataclass(frozen=True)
class Refresh:
    """Read everything that is watched again: a write was refused, or its answer was lost."""


@dataclass(frozen=True)
class Deregister:
    """Revoke the lease: leave at once, visibly."""


StoreEffect = (
    CreateSpec
    | StartOver
    | Register
    | TakeOver
    | UpdateNode
    | Campaign
    | WriteGroup
    | WriteStatus
    | WriteIncident
    | WriteRestorePoint
    | WriteHandoff
    | WriteCheckpoint
    | WriteSuspicion
    | ClearSuspicion
    | Evict
    | WriteResult
    | Refresh
    | Deregister
)


# Other effects


@dataclass(frozen=True)
class WatchKeys:
    """Watch the whole job (a leader does), or only what concerns this follower."""

    node_id: str
    is_whole: bool


@dataclass(frozen=True)
class HoldLinks:
    """Hold links to these members, and to no others."""

    me: Identity
    secret: str
    peers: tuple[Member, ...]


@dataclass(frozen=True)
class SendRestorePoint:
    """Tell the local workers where their group begins."""

    resume: RestorePoint


@dataclass(frozen=True)
class AnswerPublish:
    """Tell the worker that asked whether its checkpoint counts. If not, its files may be deleted."""

    group: int
    copy: StateId
    checkpoint: Checkpoint | None
    """As committed. None: it does not count."""
    reason: str


@dataclass(frozen=True)
class RequestHandoff:
    """Tell the local workers that a handoff is wanted. Those that commit stop at a common step, save it and wait."""

    group: int
    number: int
    in_memory: bool
    """A snapshot in memory is enough."""


@dataclass(frozen=True)
class StartWorkers:
    """Start this node's rank processes for a group. No worker of an older group is alive."""

    group: Group
    node_rank: int
    spec: Spec


@dataclass(frozen=True)
class SetHangThreshold:
    """Take ranks that make no step for suspicious after so long already: a neighbour that answered does not."""

    after_s: float | None
    """None: only after what is too long at any time."""


@dataclass(frozen=True)
class TerminateWorkers:
    """Ask the local workers to end: those that stopped for a handoff over their channel, the others by SIGTERM."""

    group: int


@dataclass(frozen=True)
class KillWorkers:
    """Kill the local workers and all their descendants."""

    group: int


@dataclass(frozen=True)
class Announce:
    """Tell the operator, in a sentence."""

    sentence: str


@dataclass(frozen=True)
class Exit:
    """End the agent. Nothing of it is left running."""

    code: int
    sentence: str


LocalEffect = (
    StartWorkers | SendRestorePoint | RequestHandoff | AnswerPublish | SetHangThreshold | TerminateWorkers | KillWorkers
)

Effect = StoreEffect | LocalEffect | WatchKeys | HoldLinks | Announce | Exit
