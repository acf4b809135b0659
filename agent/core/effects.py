"""Effects: what `lifecycle.step` returns for the agent to carry out. Its input is in `events.py`.

Effects are data. The loop carries them out in the order in which they were returned. Effects on the store run one after
another on a thread of their own, and each is answered by a `WriteAnswered` event.
"""

from __future__ import annotations

from dataclasses import dataclass

from agent.core.incident import GroupChange
from agent.core.member_status import MemberStatus
from agent.core.model import Group, HandoffRequest, Leader, Member, Node, Result, Spec, Suspicion
from agent.core.reasons import CommitRefused, LeaveReason, UnsavedSteps
from agent.core.records import Identity
from agent.core.saved_states import Checkpoint, RestorePoint, StateId

# Effects on the store


@dataclass(frozen=True)
class NodeIdHolder:
    """The agent that holds a node id that another agent wants to register."""

    node: Node
    lease_id: int
    is_alive: bool | None
    """Whether its process is alive. None: it runs on another host, so only its lease can show that."""


@dataclass(frozen=True)
class CreateSpec:
    """Create the job's spec, unless there is one."""

    spec: Spec


@dataclass(frozen=True)
class StartOver:
    """Replace the keys of a finished job by a new spec, unless another agent already did."""

    spec: Spec
    group: Group
    """A group without members, numbered after the last group of the old run: numbers also grow across fresh starts."""
    result_revision: int


@dataclass(frozen=True)
class Register:
    """Take a lease and write this agent's node record. Refused while another agent holds the node id."""

    node: Node


@dataclass(frozen=True)
class TakeOver:
    """Revoke the lease of a dead agent that held our node id, which deletes all records under that lease."""

    holder: NodeIdHolder


@dataclass(frozen=True)
class UpdateNode:
    """Rewrite this agent's own node record."""

    node: Node
    create_revision: int


@dataclass(frozen=True)
class Campaign:
    """Become the leader, if there is none."""

    leader: Leader


@dataclass(frozen=True)
class RestoredRecords:
    """The records that are written again after etcd has lost data."""

    spec: Spec
    restore_point: RestorePoint | None
    checkpoint: Checkpoint | None


@dataclass(frozen=True)
class WriteGroup:
    """Write the next group, if the last group, the spec and the leadership have not changed."""

    group: Group
    change: GroupChange | None
    """Why and when the group was formed: its incident is made from this. None: the group is an old record that is
    written again."""
    restored: RestoredRecords | None
    """Written in the same transaction, if etcd has lost these records."""
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
class WriteRestorePoint:
    """Write where the group begins, if the group and the leadership have not changed."""

    restore_point: RestorePoint
    group_revision: int
    leader_revision: int


@dataclass(frozen=True)
class WriteSpec:
    """Change the spec, if it, the group and the leadership have not changed."""

    spec: Spec
    spec_revision: int
    group_revision: int
    leader_revision: int


@dataclass(frozen=True)
class WriteHandoff:
    """Request a handoff, if the group and the leadership have not changed."""

    handoff: HandoffRequest
    group_revision: int
    leader_revision: int


@dataclass(frozen=True)
class WriteCheckpoint:
    """Commit a checkpoint, if the group and the last commit have not changed: the fence."""

    checkpoint: Checkpoint
    group_revision: int
    checkpoint_revision: int


@dataclass(frozen=True)
class WriteSuspicion:
    """Report a neighbour whose link is broken or silent. The record is bound to our lease."""

    suspect: Suspicion


@dataclass(frozen=True)
class ClearSuspicion:
    """Delete such a report."""

    suspect: Suspicion


@dataclass(frozen=True)
class Evict:
    """Revoke the lease of a lost member, which deletes its node record."""

    who: Identity
    lease_id: int


@dataclass(frozen=True)
class WriteResult:
    """Write the job's result, if the group and the leadership have not changed and there is no result yet.

    The runtime adds a summary of the incidents.
    """

    result: Result
    group_revision: int
    leader_revision: int


@dataclass(frozen=True)
class Refresh:
    """Read everything that is watched again, because a write was refused or its answer was lost."""


@dataclass(frozen=True)
class Deregister:
    """Revoke our lease, so that all others see at once that this agent has left."""


StoreEffect = (
    CreateSpec
    | StartOver
    | Register
    | TakeOver
    | UpdateNode
    | Campaign
    | WriteGroup
    | WriteStatus
    | WriteRestorePoint
    | WriteSpec
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
    """Watch all keys of the job, as a leader does, or only those that a follower needs."""

    node_id: str
    is_whole: bool


@dataclass(frozen=True)
class HoldLinks:
    """Keep links open to these members, and to no others."""

    me: Identity
    secret: str
    peers: tuple[Member, ...]


@dataclass(frozen=True)
class SendRestorePoint:
    """Send the restore point to the local workers."""

    restore_point: RestorePoint


@dataclass(frozen=True)
class AnswerPublish:
    """Answer the worker that asked to commit a checkpoint. If it is not committed, its files may be deleted."""

    group: int
    copy: StateId
    checkpoint: Checkpoint | None
    """The committed record. None: it was not committed."""
    reason: CommitRefused | None
    """Why it was not committed. None: it was."""


@dataclass(frozen=True)
class SaveSnapshot:
    """Let a process write a checkpoint from this snapshot in memory, which no rank does any more.

    The process asks for the commit like a worker, and its end is reported by `SaveEnded`.
    """

    copy: StateId
    group: int
    """Number of the current group, for the commit."""
    committed: Checkpoint | None
    """The committed checkpoint, which the new one follows. None: there is none."""


@dataclass(frozen=True)
class RequestHandoff:
    """Request a handoff from the local workers. Ranks that commit stop after a common step, save it and wait."""

    group: int
    number: int
    in_memory: bool
    """A snapshot in memory is enough; no checkpoint is needed."""


@dataclass(frozen=True)
class StartWorkers:
    """Start this node's rank processes for a group. No worker of an older group is alive here."""

    group: Group
    node_rank: int
    spec: Spec


@dataclass(frozen=True)
class SetUpWorkers:
    """Start this node's processes for the set-up of the script. They wait before they enter a group.

    Answered by `WorkersReady`.
    """

    group: Group
    """The current group, as if this node had joined it."""
    node_rank: int
    spec: Spec


@dataclass(frozen=True)
class MoveWorkers:
    """Send this node's living rank processes into another group.

    Answered by `WorkersMoved`, or by `WorkersCannotMove`.
    """

    from_group: int
    """Number of the group that they belong to."""
    group: Group
    node_rank: int
    spec: Spec
    is_planned: bool
    """The ranks are quiesced for a handoff. If False, a rank was lost, and the others must break their connections."""


@dataclass(frozen=True)
class SetHangThreshold:
    """Lower the hang threshold to `after_s` while a neighbour that answered before is silent."""

    after_s: float | None
    """None: use the usual threshold."""


@dataclass(frozen=True)
class TerminateWorkers:
    """Ask the local workers to end: over their channel if they stopped for a handoff, else by SIGTERM."""

    group: int


@dataclass(frozen=True)
class KillWorkers:
    """Kill the local workers and all of their descendants."""

    group: int


@dataclass(frozen=True)
class Announce:
    """Print a sentence for the operator. Only the core of parameter-server jobs returns it."""

    sentence: str


@dataclass(frozen=True)
class Exit:
    """End the agent process. None of its workers is left running."""

    code: int
    reason: LeaveReason | str
    """A sentence, if a part of the agent other than the core ends it, or the core of a parameter-server job."""
    unsaved: UnsavedSteps | None = None
    """Steps that are given up with it."""


LocalEffect = (
    StartWorkers
    | SetUpWorkers
    | MoveWorkers
    | SendRestorePoint
    | RequestHandoff
    | AnswerPublish
    | SaveSnapshot
    | SetHangThreshold
    | TerminateWorkers
    | KillWorkers
)

Effect = StoreEffect | LocalEffect | WatchKeys | HoldLinks | Exit
