"""Reasons: why the core decided something, as data.

Each decision carries a reason: a plan, a group, a handoff request, the job's result, a refused checkpoint, the end of
an agent. A record keeps its reason in the form that it has here, with the name of its kind in the field `kind`. A
record with an unknown kind of reason, or with other fields than those of its kind, is refused like any malformed
record. Nothing is decided from a reason.

`agent/observe/messages.py` turns reasons into sentences.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from agent.core.bounds import Count, NodeId, NpRange, Seconds

NodeIds = tuple[NodeId, ...]

Doing = Literal["runs", "sleeps", "waits", "stopped", "disk", "exited"]
"""What a rank does that makes no step: it computes, sleeps, waits for other ranks, is stopped by a signal, hangs in the
kernel (state D), or has ended with code 0 while others have not."""


class Hang(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, omit_defaults=True):
    """A rank makes no step, and the other ranks wait for it."""

    doing: Doing
    where: str = ""
    """The innermost frame outside libraries: `train.py:33 in load`. Empty: the stack could not be read."""
    step: Count
    """The last step that it committed."""
    for_s: Count
    """How long no rank has made a step, in whole seconds."""
    waiting: Count = 0
    """How many of the other ranks wait for others."""
    others: Count = 0
    """How many other ranks have reported what they do."""
    elsewhere: tuple[str, ...] = ()
    """If all ranks wait: the other places where they wait."""


class FailedWorker(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, omit_defaults=True):
    """How a worker failed, in short. `Failure` in `model.py` has the meaning of the fields."""

    node_id: NodeId
    rank: Count
    exit_code: Count | None = None
    signal: Count | None = None
    is_port_taken: bool = False
    is_peer_lost: bool = False
    unreadable: str = ""
    error: str = ""
    why: str = ""
    script_error: str = ""
    last_step: Count = 0
    hang: Hang | None = None


class _Reason(
    msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, omit_defaults=True, tag_field="kind"
):
    """Base of the kinds of reasons."""


# Why a node cannot train


class ProcessesLeft(_Reason, frozen=True, kw_only=True, tag="processes left"):
    """Processes of a group survive SIGKILL."""

    group: Count


class HealthCheckFailed(_Reason, frozen=True, kw_only=True, tag="health check failed"):
    """The health check of the node failed."""

    trouble: str
    """What it reported."""


class SetUpFailed(_Reason, frozen=True, kw_only=True, tag="set-up failed"):
    """A process of the node, which was to join, has ended in the set-up of the script, before it entered a group."""

    exit_code: Count | None
    """None: it was killed by `signal`."""
    signal: Count | None
    error: str
    """The exception that ended it, on one line. Empty: none is known."""


UnfitReason = ProcessesLeft | HealthCheckFailed | SetUpFailed
"""Why a node cannot train although its agent is alive."""


# Why a group is formed, and why a handoff is requested


class NodesThere(_Reason, frozen=True, kw_only=True, tag="nodes there"):
    """Enough nodes are there."""

    nodes: Count
    np: NpRange
    is_all: bool = False
    """These are the most nodes that the job wants."""


class NodesJoined(_Reason, frozen=True, kw_only=True, tag="nodes joined"):
    """Nodes joined, and the job now has the most nodes that it wants."""

    node_ids: NodeIds
    np: NpRange


class NodesLost(_Reason, frozen=True, kw_only=True, tag="nodes lost"):
    """Members are gone or cannot train."""

    node_ids: NodeIds
    unfit: tuple[tuple[NodeId, UnfitReason], ...] = ()
    """All nodes that cannot train, and why."""


class NodesUnreachable(_Reason, frozen=True, kw_only=True, tag="nodes unreachable"):
    """These members and the others do not reach each other."""

    node_ids: NodeIds


class WorkersFailed(_Reason, frozen=True, kw_only=True, tag="workers failed"):
    """Workers failed."""

    first: FailedWorker
    """The failure that came first."""
    unreachable: NodeIds = ()
    """Members that are left out because they and the others do not reach each other."""
    left_out: NodeIds = ()
    """Nodes that are left out from now on, because their ranks alone failed twice before their first step."""


class Requested(_Reason, frozen=True, kw_only=True, tag="requested"):
    """Somebody asked for it: an operator, or a signal to an agent."""

    what: Literal["np", "leave", "exclude", "restart", "pause", "stop", "reset", "start over"]
    node_ids: NodeIds = ()
    """The members that leave or are excluded. After a stop: the nodes that hold steps that could not be saved."""
    np: NpRange | None = None
    """The new np."""
    by: str = ""
    """The user who asked for a pause, stop or reset."""
    saved: Count | None = None
    """The step of the newest checkpoint, if steps could not be saved after a stop. 0: there is none."""


class CheckpointOnDisk(_Reason, frozen=True, kw_only=True, tag="checkpoint on disk"):
    """Only this node has the committed checkpoint, on its own disk."""

    node_id: NodeId
    checkpoint: str
    """Name of its directory."""


class DataLost(_Reason, frozen=True, kw_only=True, tag="data lost"):
    """Etcd has lost records of the job."""

    state: Literal["unknown", "collecting", "restored"]
    """`unknown`: no node has cached them. `collecting`: members have time to publish what they have cached. `restored`:
    all members are back."""


class NotRetried(_Reason, frozen=True, kw_only=True, tag="not retried"):
    """A worker failed, and there is no further try."""

    first: FailedWorker
    why: Literal["asked", "script error", "budget"]
    """`asked`: the worker asked for no restart. `script error`: every rank ended by the same error in the script,
    twice in a row. `budget`: the restart budget is spent."""
    restarts: Count = 0
    """Restarts without progress, if the budget is spent."""


GroupReason = (
    NodesThere
    | NodesJoined
    | NodesLost
    | NodesUnreachable
    | WorkersFailed
    | NotRetried
    | Requested
    | CheckpointOnDisk
    | DataLost
)
"""Why a group is formed, or a handoff requested."""


# What a job waits for, and what it does


class NodesMissing(_Reason, frozen=True, kw_only=True, tag="nodes missing"):
    """No group can be formed: too few nodes are there."""

    missing: Count
    needed: Count
    here: NodeIds
    last: GroupReason | None = None
    """Why the job began to wait. None: it has not trained yet."""
    left_out: NodeIds = ()
    """Nodes that are there, but left out because of failures."""


class Training(_Reason, frozen=True, kw_only=True, tag="training"):
    """A group trains."""

    nodes: Count
    np: NpRange | None = None
    missing: Count | None = None
    """How many more nodes are needed to reach np. None: the group is large enough."""
    left_out: NodeIds = ()
    """Nodes that are there, but left out because of failures."""


class Beginning(_Reason, frozen=True, kw_only=True, tag="beginning"):
    """A group gets its restore point."""

    group: Count
    step: Count | None
    """The step after which it begins. None: at the start of the training."""


class Finishing(_Reason, frozen=True, kw_only=True, tag="finishing"):
    """Some members of a group have finished."""

    group: Count
    done: Count
    nodes: Count


class Waiting(_Reason, frozen=True, kw_only=True, tag="waiting"):
    """A decision waits."""

    what: Literal[
        "nodes",
        "return",
        "newer records",
        "leave",
        "lease",
        "same error",
        "retry",
        "warm",
        "set up",
        "inventory",
        "checkpoint",
        "handoff",
        "save",
    ]
    """`nodes`: more nodes may arrive in a moment. `return`: these nodes may return after an outage of etcd. `newer
    records`: these nodes, which were there before the leader started, may have cached more than etcd shows. `leave`:
    these nodes were asked to leave, and may be saving what their memory holds. `lease`: a lease may end and show the
    cause. `same error`: ranks of these nodes may fail by the same error. `retry`: the time between two tries has not
    passed. `warm`: these nodes prepare standby processes. `set up`: processes of these nodes run the script as far as
    `State.run`. `inventory`: these nodes have not reported their snapshots. `checkpoint`: only this node has the
    checkpoint. `handoff`: the ranks are to stop. `save`: this node saves what its memory holds, before the job ends."""
    node_ids: NodeIds = ()
    because: GroupReason | Training | None = None
    """What was decided, or is the case."""
    failures: Count = 0
    """Failures without progress. 0: they are not counted."""
    within_s: Seconds = 0.0
    """Seconds within which a retry comes."""


# How a job ends


class Finished(_Reason, frozen=True, kw_only=True, tag="finished"):
    """All ranks finished."""

    ranks: Count
    group: Count


class GaveUp(_Reason, frozen=True, kw_only=True, tag="gave up"):
    """Too few nodes were there for too long."""

    after_s: Seconds
    waiting: NodesMissing


class AgentEnded(_Reason, frozen=True, kw_only=True, tag="agent ended"):
    """The only agent of the job ended, and the job's etcd with it, before the job had ended."""

    exit_code: Count | None
    """None: the agent was killed."""
    advice: str = ""
    """How to continue the job."""


EndingReason = GaveUp | NotRetried | Requested
"""Why a job is to end before its ranks have finished."""
ResultReason = Finished | AgentEnded | EndingReason
"""Why a job has ended."""


class Ended(_Reason, frozen=True, kw_only=True, tag="ended"):
    """The job has ended."""

    result: ResultReason


class Hanging(_Reason, frozen=True, kw_only=True, tag="hanging"):
    """While something else is the case, a rank makes no step."""

    because: PlanReason
    first: FailedWorker


PlanReason = GroupReason | ResultReason | NodesMissing | Training | Beginning | Finishing | Waiting | Ended | Hanging
"""Why a leader does something now, or nothing."""


# Why an agent ends


class JobOver(_Reason, frozen=True, kw_only=True, tag="job over"):
    """The agent's job has ended."""

    job_id: str
    state: Literal["succeeded", "stopped", "failed"]
    result: ResultReason
    summary: str = ""
    """What the incidents of the job cost."""
    was_over: bool = False
    """The job had ended before the agent joined it."""


class NodeIdTaken(_Reason, frozen=True, kw_only=True, tag="node id taken"):
    """A living agent has the node id that the operator chose for this agent."""

    node_id: NodeId
    pid: Count
    """Process id of the other agent."""
    address: str
    """Address of its node."""


class AskedToEnd(_Reason, frozen=True, kw_only=True, tag="asked to end"):
    """A signal, or an operator of the job, asked the agent to end."""

    signal: Count | None = None
    """A signal that ends the agent at once. None: it has left the job in order."""


LeaveReason = JobOver | NodeIdTaken | AskedToEnd
"""Why an agent ends."""


class UnsavedSteps(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Steps that no checkpoint has, and that are lost with the last agent of a job."""

    reached: Count
    """The last step that was made."""
    saved: Count
    """The step of the newest checkpoint. 0: there is no checkpoint."""
    were_ranks_signalled: bool = False
    """The ranks got SIGTERM from somebody else than their agent, which ended them before they could save."""


# Why a checkpoint is not committed


class CommitRefused(_Reason, frozen=True, kw_only=True, tag="commit refused"):
    """A checkpoint that a worker has written is not committed."""

    why: Literal["group", "history", "fork", "not older", "committed"]
    """`group`: this newer group has been formed. `history`: the state is not in the job's history. `fork`: neither, it
    continues another copy. `not older`: it is to replace a damaged checkpoint, and is not older. `committed`: this
    state is committed already."""
    group: Count
    step: Count = 0
    save: Count = 0
    """Group, step and save of the state, as in `StateId`."""


Reason = UnfitReason | PlanReason | LeaveReason | CommitRefused
"""All reasons that the core gives."""
