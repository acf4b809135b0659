"""The values that decisions are made from: records in etcd, and a whole view of them.

Records are what agents write for each other; `agent/store/keys.py` says under which key, and is their only codec.
Everything here is immutable, and every tuple has a defined order: nothing may depend on the order of a set.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum
from functools import cached_property
from typing import TYPE_CHECKING, Annotated, Generic, Literal, TypeVar

import msgspec

if TYPE_CHECKING:
    from collections.abc import Iterable

    from agent.core.incident import Incident, StallReport, TransitionReport
    from agent.core.member_status import MemberStatus


MAX_NP = 100_000
MAX_NPROC = 10_000

# What numbers in records may be. Whoever writes by hand, or into a worker's memory, must not bring one that a decision
# counts up to, that fits no field of 64 bits, or that no calendar has.
Count = Annotated[int, msgspec.Meta(ge=0, le=2**62)]
Np = Annotated[int, msgspec.Meta(ge=1, le=MAX_NP)]
Nproc = Annotated[int, msgspec.Meta(ge=0, le=MAX_NPROC)]
WorldSize = Annotated[int, msgspec.Meta(ge=0, le=2**24)]
Port = Annotated[int, msgspec.Meta(ge=0, le=65535)]
Seconds = Annotated[float, msgspec.Meta(ge=-1e10, le=1e10)]
"""A duration. Below 0 where clocks of two nodes were compared."""
WallClock = Annotated[float, msgspec.Meta(ge=-6e10, le=2.5e11)]
"""Seconds since 1970: the years 68 to 9892, for a node's clock may be wrong."""
Run = Annotated[str, msgspec.Meta(pattern=r"^[A-Za-z0-9_][A-Za-z0-9._-]{0,127}\Z")]
"""Part of the paths of logs and checkpoints."""
NodeId = Annotated[str, msgspec.Meta(pattern=r"^[A-Za-z0-9._-]{1,128}\Z")]
"""Part of the names of logs."""

Fingerprint = Annotated[str, msgspec.Meta(pattern=r"^(?:[0-9a-f]{64})?\Z")]
"""SHA-256 of a certificate, in hexadecimal digits; empty: there is none."""


class Record(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What every record has: the version of its form."""

    v: Literal[1] = 1


class MemberRecord(Record, frozen=True, kw_only=True):
    """What is about one member."""

    node_id: NodeId
    incarnation: str

    @property
    def identity(self) -> Identity:
        """Who it is: the same node id under another incarnation is another member."""
        return Identity(self.node_id, self.incarnation)


class Spec(Record, frozen=True, kw_only=True):
    """What the job is asked to be. Written by the first agent, then by `scale`."""

    run: Run
    """Random id, new at each fresh start of the job; in every checkpoint's name."""
    np_min: Np
    np_max: Np
    """Desired nodes. Equal to `np_min`: exactly that many."""
    revision: Count = 1
    """Grows with each change of np: tells a newer spec from one that an old backup brought back."""
    first_group: Count = 1
    """Number of the run's first group."""
    fresh: bool = False
    """Checkpoints of other runs are not to be resumed from."""
    paused_by: str = ""
    """Who asked that nothing changes by itself; empty: nobody."""
    stopped_by: str = ""
    """Who asked that the job ends, once its training is saved; empty: nobody."""
    restart_after: Count = 0
    """The group that an operator wants replaced by another of the same members; 0: none."""
    excluded: tuple[str, ...] = ()
    """Ids of nodes that no next group may have."""
    drained: tuple[Identity, ...] = ()
    """Agents that were asked to leave."""
    secret: str
    """By which the job's agents know each other on their links. Never shown, and never given to workers."""
    changed_by: str
    changed_at: WallClock
    """Wall clock, seconds since 1970, for people; never compared."""

    @property
    def is_fixed(self) -> bool:
        """Exactly N nodes, so a lost one must be replaced."""
        return self.np_min == self.np_max

    @property
    def np(self) -> str:
        """As a user writes it: `2` or `1:3`."""
        return str(self.np_max) if self.is_fixed else f"{self.np_min}:{self.np_max}"


class Timing(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """How fast a node notices, in seconds: what is in effect, derived or chosen."""

    detect_within_s: Seconds
    lease_ttl_s: Seconds
    link_heartbeat_s: Seconds
    settle_s: Seconds


class NodeInfo(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What a node tells of itself for people, and for no decision."""

    page: str = ""
    """Where the web page is that it serves. Empty: it serves none."""
    page_has_own_token: bool = False
    """Not the one that is derived from the job's secret."""
    facts: tuple[tuple[str, str], ...] = ()
    """Versions of what it runs, and a digest of the script and what lies beside it: they should be the same on all."""


UNTOLD = NodeInfo()


class Node(MemberRecord, frozen=True, kw_only=True):
    """One agent's place in the job, kept alive by its lease."""

    address: str
    """Where other nodes reach this one's workers."""
    nproc: Nproc
    """Rank processes on this node."""
    port: Port
    """Reserved for the group's master, should rank 0 be here."""
    link: Port
    """Port on which the agent answers its neighbours."""
    link_cert: Fingerprint = ""
    """Of the certificate that it shows there. Empty: nothing is encrypted."""
    host: str
    """Boot id and pid namespace: within one, pids can be compared."""
    pid: Count
    pid_started: Count
    """Start of that process in clock ticks since boot: tells it from a later one with the same pid."""
    timing: Timing
    is_draining: bool = False
    """It was asked to leave, and does so once the group goes on without it."""
    unfit: str = ""
    """Why it cannot train, although its agent lives; empty: it can."""
    known: CachedRecords | None = None
    """What the agent remembers of the job, while etcd has lost some of it."""
    resumed: Count = 0
    """The last group in which a local rank asked where to begin: its script commits, and can be handed off."""
    own_s: tuple[Seconds, ...] = ()
    """Seconds of a step that each local rank needs for itself, without waiting for others. Empty: not known."""
    is_warming: bool = False
    """Its standby processes are still being prepared: soon it could start its ranks much sooner than now."""
    standby: str = ""
    """What standby processes it has, or why it has none. Empty: not said."""
    heard: Count = 0
    """The last group of whose members, being none of them, it has heard all that it would be beside."""
    position: Count = 0
    """In the operator's list of machines: among those that come at once, the ranks go by it. 0: there is no list."""
    about: NodeInfo = UNTOLD

    @property
    def is_eligible(self) -> bool:
        """Whether a next group can have it."""
        return not self.is_draining and not self.unfit

    @property
    def identity(self) -> Identity:
        """As of its member."""
        return Identity(self.node_id, self.incarnation)

    @property
    def member(self) -> Member:
        """The node as a group names it."""
        return Member(
            node_id=self.node_id,
            incarnation=self.incarnation,
            address=self.address,
            nproc=self.nproc,
            port=self.port,
            link=self.link,
            link_cert=self.link_cert,
        )


class Member(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A node's place in a group. The pair (node_id, incarnation) is its identity."""

    node_id: NodeId
    incarnation: str
    address: str
    nproc: Nproc
    port: Port
    link: Port
    link_cert: Fingerprint = ""

    @property
    def identity(self) -> Identity:
        """Who it is: the same node id under another incarnation is another member."""
        return Identity(self.node_id, self.incarnation)


@dataclass(frozen=True, order=True)
class Identity:
    """(node_id, incarnation)."""

    node_id: NodeId
    incarnation: str


Cause = Literal["start", "lost", "failed", "join", "scale", "drain", "restart", "port", "wait"]


class Group(Record, frozen=True, kw_only=True):
    """Which nodes train together. Numbers only grow; a record is never rewritten under its number."""

    run: Run
    """Whose group it is: a follower may see it before the spec that was written with it."""
    number: Count
    members: tuple[Member, ...]
    """In rank order. Empty: a wait, which also closes the door on all older groups."""
    cause: Cause
    reason: str
    restarts: Count
    """Worker failures since the last progress: what the restart budget has been used for."""
    step: Count
    """Highest step committed by any rank when this record was written."""
    counted_from: Count = 0
    """The highest committed step when `restarts` was last set to 0: from there on progress is counted."""
    reached: Count
    """Nodes in the largest group since np was last changed: what a fixed np binds to."""
    grown_by: tuple[str, ...] = ()
    """The nodes that have joined with it."""
    flaps: Count = 0
    """How often in a row one of these was soon lost again: each doubles the wait before the next growth."""
    last: tuple[str, ...] = ()
    """Nodes that come last in rank order, the worst last: it is always their workers that fail, of late."""
    failed: str = ""
    """The node whose workers, and no other's, failed before this group, without progress since; empty: none."""
    early: str = ""
    """The node whose ranks, and no other's, failed before this group, and before a first step; empty: none."""
    left_out: tuple[Identity, ...] = ()
    """Nodes that did that twice in a row, where the others were enough: no group has them, until they start again."""
    unread: Count = 0
    """How often in a row the checkpoint could not be read: each doubles the wait before the next try."""
    mistake: str = ""
    """What in the script itself has ended every rank of the group before. Empty: not all ended so."""

    @property
    def world_size(self) -> int:
        """Rank processes on all nodes."""
        return sum(member.nproc for member in self.members)

    def node_rank(self, who: Identity) -> int | None:
        """Place of a member, None if it is not one."""
        for rank, member in enumerate(self.members):
            if member.node_id == who.node_id and member.incarnation == who.incarnation:
                return rank
        return None

    def first_rank(self, node_rank: int) -> int:
        """Rank of the first local rank process on that node."""
        return sum(member.nproc for member in self.members[:node_rank])


class StateId(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A state of the training: the step that it was committed at, and in which group of which run.

    Equal steps of two groups are two copies: a group that was cut off and its successor may both have made step 105.
    So are two saves of one step: what a script does after its last commit, and saves, is newer than that commit.
    """

    run: Run
    group: Count
    step: Count
    save: Count = 0
    """Times that a save closed the epoch since that step was committed."""


class Replica(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A copy, or a part of one, that a node holds in memory."""

    copy: StateId
    world_size: WorldSize
    has_common: bool
    """The part that is equal on all ranks."""
    parts: tuple[Count, ...]
    """Ranks whose own parts are held here."""


class Checkpoint(Record, frozen=True, kw_only=True):
    """The committed checkpoint: what may be resumed from, and the only file names that may be deleted.

    Written by the agent whose worker wrote the files, through the fence: only while `group`, and this record, are
    still those that the decision rested on.
    """

    number: Count = 0
    """Counts the writes of this record; 0: not yet written."""
    run: Run = ""
    """The job's. The copy's own may be an older one, which was adopted."""
    copy: StateId
    name: str
    """Its directory's name, once in place."""
    private: str
    """Its directory's name before that; empty if it was in place already."""
    manifest_sha256: str
    kept: tuple[str, ...]
    """Private names of older checkpoints of this run that are kept, oldest first."""
    superseded: tuple[str, ...]
    """Private names of those that may be deleted now."""
    is_rollback: bool = False
    """The one before was damaged: this is an older one."""
    handoff: Count = 0
    """Number of the handoff that it was made for: all ranks stand still after this step. 0: none."""
    is_late: bool = False
    """They have trained on, since this could not be committed in time."""
    node: str = ""
    """Id of the node whose own disk has it. Empty: all nodes see the directory."""
    size_bytes: Count = 0
    """Of all its files; this and the next two are for people, and 0 where they are not known."""
    took_s: Seconds = 0.0
    """Until they were on disk; training goes on meanwhile, but for hooks and shards."""
    at: WallClock = 0.0
    """When it was begun: wall clock of the writer, seconds since 1970."""


class RestorePoint(Record, frozen=True, kw_only=True):
    """Where a group begins. No rank takes a step before this is written."""

    group: Count
    copy: StateId | None
    """None: from the start."""
    lineage: tuple[StateId, ...]
    """The cuts back to the committed checkpoint, oldest first: of each group's copies, those up to this step."""
    checkpoint: Checkpoint | None
    """The committed one. None: an older run's may be adopted."""


class HandoffRequest(Record, frozen=True, kw_only=True):
    """The wish that all ranks of a group stop after one and the same step, save it, and wait for the next group.

    Which step that is the ranks settle among themselves. The verdict on it is the next group record.
    """

    group: Count
    after: Count
    """Number of the checkpoint that was committed when this was written, or of the last wish if that is higher."""
    in_memory: bool = False
    """A snapshot in the agents' memory is enough. Ranks that cannot take one save a checkpoint all the same."""
    reason: str

    @property
    def number(self) -> int:
        """Tells this wish from others in its group, and grows; what fulfils it names it."""
        return self.after + 1


class Quiesced(MemberRecord, frozen=True, kw_only=True):
    """A node's ranks stand still for a handoff, and what they have is held in memory."""

    group: Count
    number: Count
    """Of the handoff."""
    step: Count
    is_late: bool = False
    """They have trained on, since this could not be told in time, or since the neighbours do not have their parts."""


class Suspicion(MemberRecord, frozen=True, kw_only=True):
    """A member whose link is broken or silent, as another node sees it. Bound to that one's lease."""

    by_node_id: str
    by_incarnation: str
    is_lost: bool
    """The link was closed without a goodbye and could not be opened again. Else it is only silent."""
    has_heard: bool = False
    """A link of the one who says so has worked, if not this one: so its silence says something."""
    why: str
    for_s: Seconds = 0.0
    """How long it had not been heard when this was told."""

    @property
    def accuser(self) -> Identity:
        """The node that says so."""
        return Identity(self.by_node_id, self.by_incarnation)


class LinkState(Enum):
    """What is known of a neighbour from the link to it."""

    UP = "up"
    SILENT = "silent"
    """Open, or not yet opened, and without an answer."""
    LOST = "lost"
    """Closed without a goodbye, and not to be opened again."""


class CachedRecords(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The newest of each record that an agent has seen: what to restore from when etcd loses its data."""

    spec: Spec
    group: Group | None
    resume: RestorePoint | None = None
    checkpoint: Checkpoint | None = None

    @property
    def number(self) -> int:
        """Of the group; 0: none was seen."""
        return self.group.number if self.group is not None else 0


class Leader(MemberRecord, frozen=True, kw_only=True):
    """Who writes the next group, kept alive by its lease."""


class Failure(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """How one worker ended when it should not have."""

    rank: Count
    local_rank: Count
    exit_code: Count | None
    """None: killed by `signal`. 0: it ended before the other ranks were done."""
    signal: Count | None
    is_port_taken: bool = False
    """It could not open the group's master port."""
    is_peer_lost: bool
    """It died because the connection to another rank broke: a consequence, most likely."""
    unreadable: str = ""
    """It could not read the checkpoint that it must begin from: which, and why. Empty: it was something else."""
    tail: str
    """Last lines of its standard error; where no exception is known, of both streams."""
    at: WallClock
    """Wall clock of its node, seconds since 1970."""
    error: str = ""
    """The exception that ended it, on one line. Empty: none is known."""
    traceback: str = ""
    """Of that: as the script recorded it (torch's `@record`), or where `tail` does not hold all of it. Else empty."""
    why: str = ""
    """What the system knows of it: that memory ran out, or a GPU failed. Empty: nothing."""
    mistake: str = ""
    """What in the script itself ended each rank of the node, and where, before any process group existed. Empty: not
    all of them ended so, or it may be another cause."""
    hang: str = ""
    """It did not end: it stood still, and here. Empty: it ended."""

    @property
    def is_early_end(self) -> bool:
        """Whether it ended well, but before the other ranks, whose connections to it broke."""
        return self.exit_code == 0


class Clock(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """How the wall clock of another node compares to one's own."""

    who: Identity
    ahead_s: Seconds
    error_s: Seconds
    """By how much that may be wrong."""


class Inventory(MemberRecord, frozen=True, kw_only=True):
    """What a member could resume from as its workers of a group start."""

    group: Count
    copies: tuple[Replica, ...]


class ExitReport(MemberRecord, frozen=True, kw_only=True):
    """What became of one node's workers in one group. Not bound to a lease: it outlives its agent."""

    group: Count
    step: Count
    """Highest step committed by its ranks; 0 if the script commits none."""
    failure: Failure | None
    """None: all its workers ended with exit code 0."""
    after_s: Seconds = 0.0
    """Seconds from that end until this was told."""
    step_s: Seconds = 0.0
    """The usual time of a step; 0: not known."""
    clocks: tuple[Clock, ...] = ()
    """How its neighbours' clocks compare to its own."""


class Result(Record, frozen=True, kw_only=True):
    """How the job ended. Never rewritten: a finished job stays finished."""

    run: Run
    group: Count
    succeeded: bool
    exit_code: Count
    """The agents' exit code."""
    reason: str
    is_reset: bool = False
    """The next agent that starts begins the job anew."""
    summary: str = ""
    """What the job's incidents have cost, in a sentence."""
    at: WallClock = 0.0
    """When that was: wall clock of the leader, seconds since 1970. 0: not known."""

    @property
    def state(self) -> Literal["succeeded", "stopped", "failed"]:
        """In a word."""
        if self.succeeded:
            return "succeeded"
        return "failed" if self.exit_code else "stopped"


T = TypeVar("T")


@dataclass(frozen=True)
class Stored(Generic[T]):
    """A record with its place in etcd's history."""

    value: T
    create_revision: int
    mod_revision: int
    lease_id: int = 0
    """0: none."""


@dataclass(frozen=True)
class ClusterView:
    """All that a decision may rest on."""

    revision: int
    """All that was written up to this revision is in it; some of what came later may be."""
    is_whole: bool
    """False: seen by an agent that does not lead, without the `nodes` and `statuses` of others."""
    spec: Stored[Spec] | None = None
    leader: Stored[Leader] | None = None
    group: Stored[Group] | None = None
    result: Stored[Result] | None = None
    resume: Stored[RestorePoint] | None = None
    checkpoint: Stored[Checkpoint] | None = None
    handoff: Stored[HandoffRequest] | None = None
    suspects: tuple[Stored[Suspicion], ...] = ()
    """By suspect and accuser."""
    nodes: tuple[Stored[Node], ...] = ()
    """By age (create_revision)."""
    statuses: tuple[MemberStatus, ...] = ()
    """What members of the current group reported about it, by node id."""
    incident: Stored[Incident] | None = None
    """The one that made the current group."""

    @cached_property
    def inventories(self) -> tuple[Inventory, ...]:
        """Of the members that have reported theirs, by node id; likewise below."""
        return tuple(each.inventory for each in self.statuses if each.inventory is not None)

    @cached_property
    def quiesced(self) -> tuple[Quiesced, ...]:
        """Of members whose ranks stopped for a handoff."""
        return tuple(each.quiesced for each in self.statuses if each.quiesced is not None)

    @cached_property
    def transitions(self) -> tuple[TransitionReport, ...]:
        """How members moved into the group."""
        return tuple(each.transition for each in self.statuses if each.transition is not None)

    @cached_property
    def stalls(self) -> tuple[StallReport, ...]:
        """Of members whose ranks make no step, or made none for a while."""
        return tuple(each.stall for each in self.statuses if each.stall is not None)

    @cached_property
    def exits(self) -> tuple[ExitReport, ...]:
        """Of members whose workers have ended."""
        return tuple(each.exit for each in self.statuses if each.exit is not None)

    def with_exits(self, exits: Iterable[ExitReport]) -> ClusterView:
        """Return the view as if its members had reported these exits, and no others."""
        by_member = {each.identity: each for each in exits}
        statuses = (msgspec.structs.replace(each, exit=by_member.get(each.identity)) for each in self.statuses)
        return replace(self, statuses=tuple(statuses))


_SAME_WITHIN_S = 5.0


@dataclass(frozen=True)
class Policy:
    """How the planner and the life cycle weigh time and failures. Durations in seconds."""

    lease_ttl_s: float
    settle_s: float
    """How long to wait for more nodes after the last arrival, between min and max."""
    stop_grace_s: float
    """Between TERM and KILL when workers are stopped for a planned change."""
    kill_timeout_s: float
    """A node on which something lives on so long after KILL is unfit."""
    max_restarts: int
    """Worker failures without progress that are answered with a restart."""
    handoff_timeout_s: float
    """How long a member that was asked to leave waits for its group to stop and save."""
    handoff_wait_s: float
    """How long ranks that stopped and saved wait for the next group before they train on."""
    elastic_timeout_s: float | None
    """How long a job waits for nodes before it gives up. None: without end."""
    progress_window_s: float
    """So much new training makes the count of failures begin anew."""
    preempted_code: int = 0
    """Exit code of an agent that a signal has asked to leave."""
    ends_at_mistakes: bool = False
    """A mistake in the script that ends every rank twice in a row, before anything is trained, ends the job."""

    @property
    def same_within_s(self) -> float:
        """How long such a mistake waits for the other ranks of its node, and then of the others, to make the same.

        They import the same libraries, and not all equally fast.
        """
        return _SAME_WITHIN_S if self.ends_at_mistakes else 0.0
