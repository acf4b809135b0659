"""The records in etcd, from which decisions are made. `view.py` has the view of all of them.

Agents write records for each other. `agent/store/keys.py` defines their keys, and is their only codec. Everything here
is immutable, and every tuple has a defined order: nothing may depend on the order of a set.
"""

from __future__ import annotations

from enum import Enum
from functools import cached_property
from itertools import accumulate
from typing import TYPE_CHECKING, Literal

import msgspec

from agent.core.bounds import (
    Count,
    Fingerprint,
    Label,
    NodeId,
    Np,
    Nproc,
    Port,
    Run,
    Seconds,
    WallClock,
)
from agent.core.reasons import EndingReason, GroupReason, ResultReason, UnfitReason
from agent.core.records import Identity, MemberRecord, Record
from agent.core.ring import ring
from agent.core.saved_states import Checkpoint, RestorePoint
from agent.errors import EXIT_UNSAVED

if TYPE_CHECKING:
    from collections.abc import Mapping


class Spec(Record, frozen=True, kw_only=True):
    """The wanted state of the job. Written by the leader of a new job, then by commands such as `scale`."""

    run: Run
    """Random id, new at each fresh start of the job. It is part of the name of every checkpoint."""
    np_min: Np
    np_max: Np
    """Desired nodes. Equal to `np_min`: exactly that many."""
    revision: Count = 1
    """Grows with each change, so that a newer spec can be told from one that was restored from an old backup."""
    first_group: Count = 1
    """Number of the first group of the run."""
    fresh: bool = False
    """Do not resume from checkpoints of other runs."""
    paused_by: str = ""
    """Who paused the job, so that nothing changes by itself. Empty: it is not paused."""
    ending: EndingReason | None = None
    """Why the job is to end, once what its ranks or the agents' memory have is saved. None: it is not to end."""
    restart_after: Count = 0
    """Number of the group that an operator wants replaced by another one with the same members. 0: none."""
    excluded: tuple[str, ...] = ()
    """Ids of the nodes that an operator excluded from all later groups."""
    drained: tuple[Identity, ...] = ()
    """Agents that an operator asked to leave."""
    in_place: bool = False
    """Groups are entered in place (see the group's record): the ranks of a group have shown that they can."""
    secret: str
    """Secret by which the job's agents authenticate each other on their links. Never shown, never given to workers."""
    changed_by: str
    changed_at: WallClock
    """Wall clock, seconds since 1970. Only displayed, never compared."""

    @property
    def is_fixed(self) -> bool:
        """Whether exactly N nodes are wanted, so that a lost one must be replaced."""
        return self.np_min == self.np_max

    @property
    def np(self) -> str:
        """The number of nodes as a user writes it: `2` or `1:3`."""
        return str(self.np_max) if self.is_fixed else f"{self.np_min}:{self.np_max}"


class Timing(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, gc=False):
    """How fast a node detects failures, in seconds: the values in effect, whether derived or chosen."""

    detect_within_s: Seconds
    lease_ttl_s: Seconds
    link_heartbeat_s: Seconds
    settle_s: Seconds


class NodeInfo(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What a node publishes about itself for people. No decision uses it."""

    page: str = ""
    """Address of the web page that it serves. Empty: it serves none."""
    page_has_own_token: bool = False
    """The page has a token of its own instead of the one that is derived from the job's secret."""
    facts: tuple[tuple[str, str], ...] = ()
    """Versions of its software, and a digest of the script and the files beside it. All nodes should have the same."""


NO_INFO = NodeInfo()


class Node(MemberRecord, frozen=True, kw_only=True, dict=True):
    """An agent's registration in the job, bound to its lease."""

    address: str
    """Address at which other nodes reach the workers of this node."""
    nproc: Nproc
    """Number of rank processes on this node."""
    port: Port
    """Port that is reserved for the master of the process group, in case rank 0 runs here."""
    link: Port
    """Port on which the agent accepts links of its neighbours."""
    link_cert: Fingerprint = ""
    """Fingerprint of the certificate that it presents there. Empty: links are not encrypted."""
    host: str
    """Boot id and pid namespace. Pids can be compared only between nodes with the same value."""
    pid: Count
    pid_started: Count
    """Start of that process in clock ticks since boot, which tells it from a later process with the same pid."""
    timing: Timing
    is_draining: bool = False
    """The node was asked to leave. It leaves once the group goes on without it."""
    unfit: UnfitReason | None = None
    """Why the node cannot train although its agent is alive. None: it can."""
    cached: CachedRecords | None = None
    """The records that the agent has cached, published while etcd has lost some of them."""
    restoring_group: Count = 0
    """The last group in which a local rank asked where to begin, so that its script commits and can be handed off."""
    own_s: tuple[Seconds, ...] = ()
    """Seconds of a step that each local rank spends on its own work, without waiting for others. Empty: not known."""
    step_s: Seconds = 0.0
    """Seconds of a whole step when `own_s` was measured. 0: not known."""
    is_warming: bool = False
    """Its standby processes are being prepared. Once they are ready, its ranks start much faster."""
    is_set_up: bool = False
    """It is no member, and its processes have set up the script: they can enter a group at once."""
    standby: str = ""
    """Which standby processes it has, or why it has none. Empty: not known."""
    reachable_group: Count = 0
    """The last group, not its own, of which it has reached all members that it would be a neighbour of."""
    position: Count = 0
    """Position in the operator's list of machines, by which nodes that join together get their ranks. 0: no list."""
    domain: Label = ""
    """What it shares with nodes that fail together, such as a rack. Empty: not known."""
    about: NodeInfo = NO_INFO

    @property
    def is_eligible(self) -> bool:
        """Whether the node can be a member of the next group."""
        return not self.is_draining and self.unfit is None

    @cached_property
    def member(self) -> Member:
        """The node as it is recorded in a group."""
        return Member(
            node_id=self.node_id,
            incarnation=self.incarnation,
            address=self.address,
            nproc=self.nproc,
            port=self.port,
            link=self.link,
            link_cert=self.link_cert,
            domain=self.domain,
        )


class Member(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, dict=True):
    """A node's place in a group. The pair (node_id, incarnation) is its identity."""

    node_id: NodeId
    incarnation: str
    address: str
    nproc: Nproc
    port: Port
    link: Port
    link_cert: Fingerprint = ""
    domain: Label = ""

    @cached_property
    def identity(self) -> Identity:
        """The member's identity: the same node id with another incarnation is another member."""
        return Identity(self.node_id, self.incarnation)


Cause = Literal["start", "lost", "failed", "join", "scale", "drain", "restart", "port", "wait"]


class Group(Record, frozen=True, kw_only=True, dict=True):
    """The nodes that train together. Numbers only grow, and a group is never rewritten under its number."""

    run: Run
    """The run that the group belongs to."""
    number: Count
    members: tuple[Member, ...]
    """In rank order. Empty: the job waits for nodes, and no older group can come back."""
    cause: Cause
    reason: GroupReason
    restarts: Count
    """Worker failures since the last progress, which count against the restart budget."""
    step: Count
    """Highest step that any rank had committed when this record was written."""
    counted_from: Count = 0
    """Highest committed step when `restarts` was last set to 0. Progress is counted from there."""
    reached: Count
    """Size of the largest group since np was last changed. After a loss the job needs no more nodes than this."""
    grown_by: tuple[str, ...] = ()
    """Ids of the nodes that joined with this group."""
    flaps: Count = 0
    """How often in a row one of these nodes was soon lost again. Each time doubles the wait before the next growth."""
    placed_last: tuple[str, ...] = ()
    """Nodes that come last in rank order, the worst last, because recent failures were always of their workers."""
    failed_alone: str = ""
    """The only node whose workers failed before this group, if there was no progress since. Empty: none."""
    failed_early: str = ""
    """The only node whose ranks failed before this group, if they failed before a first step. Empty: none."""
    left_out: tuple[Identity, ...] = ()
    """Nodes that did so twice in a row, if the others were enough. Left out of groups until their agents restart."""
    failed_reads: Count = 0
    """How often in a row the checkpoint could not be read. Each time doubles the wait before the next try."""
    script_error: str = ""
    """The error in the script that ended every rank of the previous group. Empty: not all ended by one."""
    in_place: bool = False
    """Ranks of the previous group that stay keep their processes. A process that starts for this group sets up alone,
    and enters the group at `State.run`."""

    @property
    def world_size(self) -> int:
        """Number of rank processes on all nodes."""
        return sum(member.nproc for member in self.members)

    @cached_property
    def node_ranks(self) -> Mapping[Identity, int]:
        """The node rank of each member, in rank order."""
        return {member.identity: rank for rank, member in enumerate(self.members)}

    @cached_property
    def _first_ranks(self) -> tuple[int, ...]:
        return tuple(accumulate((member.nproc for member in self.members), initial=0))

    @cached_property
    def ring(self) -> tuple[Member, ...]:
        """The members in the order in which each has links to the two beside it."""
        return ring(self.members)

    @cached_property
    def _ranks_by_id(self) -> Mapping[str, int]:
        return {member.node_id: rank for rank, member in enumerate(self.members)}

    @cached_property
    def _places_by_id(self) -> Mapping[str, int]:
        return {member.node_id: place for place, member in enumerate(self.ring)}

    def node_rank(self, who: Identity) -> int | None:
        """The node rank of a member. None: it is no member.

        Most agents ask for a few members only, so it costs less than one look at `node_ranks` of a large group.
        """
        return _place_of(who, self._ranks_by_id, self.members)

    def ring_place(self, who: Identity) -> int | None:
        """The place of a member in the ring. None: it is no member."""
        return _place_of(who, self._places_by_id, self.ring)

    def first_rank(self, node_rank: int) -> int:
        """The global rank of the first rank process on that node."""
        return self._first_ranks[node_rank]


def _place_of(who: Identity, by_id: Mapping[str, int], members: tuple[Member, ...]) -> int | None:
    place = by_id.get(who.node_id)
    return place if place is not None and members[place].incarnation == who.incarnation else None


class HandoffRequest(Record, frozen=True, kw_only=True):
    """A request that all ranks of a group stop after the same step, save it, and wait for the next group.

    The ranks agree among themselves on the step. The answer to them is the next group record.
    """

    group: Count
    after: Count
    """Number of the checkpoint that was committed when this was written, or of the last request if that is higher."""
    in_memory: bool = False
    """A snapshot in the agents' memory is enough. Ranks that cannot take one save a checkpoint instead."""
    reason: GroupReason

    @property
    def number(self) -> int:
        """Identifies this request within its group, and grows. What fulfils the request carries this number."""
        return self.after + 1


class Quiesced(MemberRecord, frozen=True, kw_only=True):
    """The ranks of a node have stopped for a handoff, and their snapshot is held in memory."""

    group: Count
    number: Count
    """Number of the handoff request."""
    step: Count
    is_late: bool = False
    """The ranks have trained on: this could not be reported in time, or the neighbours do not have their parts."""
    is_with_next_only: bool = False
    """Of the other members, only the next one holds the parts of these ranks, because they are large."""


class Suspicion(MemberRecord, frozen=True, kw_only=True):
    """A member whose link is broken or silent, as another node sees it. Bound to the lease of that other node."""

    by_node_id: str
    by_incarnation: str
    is_lost: bool
    """The link was closed without a goodbye and could not be opened again. Otherwise it is only silent."""
    has_had_link: bool = False
    """Some link of the reporting node has worked, if not this one, so its report of silence is meaningful."""
    why: str
    for_s: Seconds = 0.0
    """How long there had been no answer when this was reported."""

    @property
    def accuser(self) -> Identity:
        """The node that reports it."""
        return Identity(self.by_node_id, self.by_incarnation)


class LinkState(Enum):
    """The state of the link to a neighbour."""

    UP = "up"
    SILENT = "silent"
    """Open or being opened, and without an answer."""
    LOST = "lost"
    """Closed without a goodbye, and could not be opened again."""


class CachedRecords(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The newest version of each record that an agent has seen, to restore them when etcd loses its data."""

    spec: Spec
    group: Group | None
    restore_point: RestorePoint | None = None
    checkpoint: Checkpoint | None = None

    @property
    def number(self) -> int:
        """Number of the group. 0: none was seen."""
        return self.group.number if self.group is not None else 0


class Leader(MemberRecord, frozen=True, kw_only=True):
    """The agent that writes the next group. Bound to its lease."""


class Result(Record, frozen=True, kw_only=True):
    """How the job ended. It is never rewritten: a finished job stays finished."""

    run: Run
    group: Count
    succeeded: bool
    exit_code: Count
    """The agents' exit code."""
    reason: ResultReason
    is_reset: bool = False
    """The next agent that starts restarts the job."""
    summary: str = ""
    """What the incidents of the job cost, in one sentence."""
    at: WallClock = 0.0
    """When the job ended: wall clock of the leader, seconds since 1970. 0: not known."""

    @property
    def state(self) -> Literal["succeeded", "stopped", "failed"]:
        """The result in one word."""
        if self.succeeded:
            return "succeeded"
        return "stopped" if self.exit_code in {0, EXIT_UNSAVED} else "failed"
