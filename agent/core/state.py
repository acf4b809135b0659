"""The state of one agent, which `lifecycle.step` changes."""

from __future__ import annotations

from dataclasses import dataclass, field

from agent.core import effects as fx
from agent.core import events as ev
from agent.core.local_workers import LocalWorkers
from agent.core.member_status import WrittenStatus
from agent.core.model import NO_INFO, CachedRecords, Group, Node, NodeInfo, Timing
from agent.core.neighbours import Links
from agent.core.observations import Observations, Outage
from agent.core.policy import Policy
from agent.core.proposals import Plan
from agent.core.reasons import HealthCheckFailed, LeaveReason, ProcessesLeft, UnfitReason, UnsavedSteps
from agent.core.records import Identity, Stored
from agent.core.saved_states import Replica, StateId
from agent.core.transitions import WorkerObservations
from agent.core.view import ClusterView


@dataclass(frozen=True)
class AgentFacts:
    """What an agent knows about itself when it starts."""

    job_id: str
    node_id: str
    is_node_id_chosen: bool
    """The operator chose it. Otherwise it is the name of the host, and `-2`, `-3` may be added on a shared host."""
    incarnation: str
    address: str
    nproc: int
    link: int
    """Port on which it accepts links of its neighbours."""
    host: str
    pid: int
    pid_started: int
    run: str
    """Id for the run, used if this agent creates the job."""
    secret: str
    """Secret by which the job's agents authenticate each other, used likewise."""
    np_min: int
    np_max: int
    fresh: bool
    started_at: float
    """When the agent started: wall clock, seconds since 1970."""
    started_now: float
    """The same moment on the clock of `now`."""
    timing: Timing
    """Only displayed."""
    link_cert: str = ""
    """Fingerprint of the certificate that it presents at `link`. Empty: it has none."""
    position: int = 0
    """Position in the operator's list of machines. 0: there is no list."""
    domain: str = ""
    """What it shares with nodes that fail together, such as a rack. Empty: not known."""
    about: NodeInfo = NO_INFO
    """Only displayed."""


@dataclass(frozen=True)
class Leaving:
    """The agent ends with this exit code once its workers are gone."""

    code: int
    reason: LeaveReason
    is_hurried: bool = False
    """Workers are ended without a grace period."""


@dataclass(frozen=True)
class AgentState:
    """What an agent knows, and what it has in progress."""

    me: AgentFacts
    policy: Policy
    view: ClusterView | None = None
    workers: LocalWorkers = field(default_factory=LocalWorkers)
    seen: Observations = field(default_factory=Observations)
    port: int = 0
    """Port that is reserved for the master of the next group. 0: none yet."""
    suffix: int = 1
    """Number that is added to the node id on a shared host. 1: none is added."""
    life: int = 1
    """Counts the incarnations of this agent. A new one begins when it stops its workers because it is cut off."""
    cached: CachedRecords | None = None
    """The newest spec and other records that were seen. The workers follow these, even if etcd has lost them."""
    last_group: Group | None = None
    """The newest group with members that was seen. None: there was none yet."""
    has_lost_data: bool = False
    """etcd shows less than is cached."""
    is_store_lost: bool = False
    """etcd cannot be reached."""
    lease_until: float | None = None
    """Until when the lease of this agent is certainly valid."""
    links: Links = ()
    held_links: fx.HoldLinks | None = None
    """The last `HoldLinks` effect."""
    has_had_link: bool = False
    """Some link of this agent has worked."""
    reachable_group: int = 0
    """Number of the last group, not its own, of which it has reached all members that it would be a neighbour of."""
    hang_threshold: fx.SetHangThreshold = field(default_factory=lambda: fx.SetHangThreshold(None))
    """The last `SetHangThreshold` effect."""
    copies: tuple[Replica, ...] = ()
    """The snapshots that this node holds in memory."""
    sent_restore_point: int = 0
    """Number of the last group whose restore point was sent to the workers."""
    observed: WorkerObservations = field(default_factory=WorkerObservations)
    """What was observed of the workers."""
    status: WrittenStatus = field(default_factory=WrittenStatus)
    """The status record of this node in etcd."""
    health: str = ""
    """What is wrong with this node. Empty: it can train."""
    standby: ev.StandbyChanged = field(default_factory=lambda: ev.StandbyChanged("", is_warming=False))
    restoring_group: int = 0
    """Number of the last group in which a local rank asked for the restore point."""
    asked: ev.PublishAsked | None = None
    """The request of a local worker that waits for its checkpoint to be committed. None: no worker waits."""
    asked_at: float = 0.0
    saving: StateId | None = None
    """The snapshot from which a last checkpoint is written before this agent leaves. None: there is none."""
    saving_since: float = 0.0
    """When that began."""
    is_save_over: bool = False
    """The process that wrote it has ended."""
    outage: Outage | None = None
    """The last outage of etcd, or what may have been one. None: there was none."""
    pending: fx.StoreEffect | None = None
    """The effect on the store that has not been answered yet."""
    pending_since: float = 0.0
    pending_after: int = 0
    """Revision of the view when that effect was decided."""
    must_refresh: bool = False
    is_answer_void: bool = False
    """`pending` was sent before etcd lost its history, so its answer and revision are about the lost history."""
    settled_revision: int = 0
    """Revision of the last write or complete read of this agent. Nothing is decided from an older view."""
    retry_at: float = 0.0
    places_lost: int = 0
    """How often in a row this agent has lost its place in etcd, each time soon after the last."""
    place_lost_at: float | None = None
    """When it lost it last. None: it never has."""
    register_at: float = 0.0
    """Not before does it register again."""
    holder: fx.NodeIdHolder | None = None
    """Another agent that held our node id at the last attempt to register."""
    held_since: float = 0.0
    leaderless_since: float | None = None
    watched: fx.WatchKeys | None = None
    drain_until: float | None = None
    """The agent was asked to leave. Until then the group has time to continue without this node."""
    leaving: Leaving | None = None
    unsaved: UnsavedSteps | None = None
    """The steps that are given up as this agent leaves. None: none that it knows."""
    has_left: bool = False
    """Its lease was revoked, or nothing more can be done about it."""
    planned: Plan | None = None
    """The plan for the current view. None: this agent does not lead."""
    planned_for: tuple[ClusterView, Observations] | None = None
    """What that plan was made from."""
    trouble: str = ""
    """Why the last write had no answer. Empty: it had one."""

    @property
    def node_id(self) -> str:
        """The node id, with the number that is added on a shared host."""
        return self.me.node_id if self.suffix == 1 else f"{self.me.node_id}-{self.suffix}"

    @property
    def identity(self) -> Identity:
        """The identity by which other nodes know this agent."""
        return Identity(self.node_id, self.incarnation)

    @property
    def incarnation(self) -> str:
        """The present incarnation."""
        return self.me.incarnation if self.life == 1 else f"{self.me.incarnation}.{self.life}"

    @property
    def node(self) -> Node:
        """The node record of this agent, as it should be in etcd."""
        return Node(
            node_id=self.node_id,
            incarnation=self.incarnation,
            address=self.me.address,
            nproc=self.me.nproc,
            port=self.port,
            link=self.me.link,
            link_cert=self.me.link_cert,
            host=self.me.host,
            pid=self.me.pid,
            pid_started=self.me.pid_started,
            timing=self.me.timing,
            is_draining=self.drain_until is not None,
            unfit=self._unfit,
            cached=self.cached if self.has_lost_data else None,
            restoring_group=self.restoring_group,
            own_s=(own_s := self.observed.paced.own_s if self.observed.paced is not None else ()),
            step_s=self.observed.step_s if own_s else 0.0,
            is_warming=self.standby.is_warming,
            is_set_up=self.workers.has_set_up,
            standby=self.standby.summary,
            reachable_group=self.reachable_group,
            position=self.me.position,
            domain=self.me.domain,
            about=self.me.about,
        )

    @property
    def _unfit(self) -> UnfitReason | None:
        if self.workers.is_stuck:
            return ProcessesLeft(group=self.workers.group)
        if self.health:
            return HealthCheckFailed(trouble=self.health)
        return self.workers.set_up_failure if self.workers.group == (self.group.number if self.group else 0) else None

    def wall(self, now: float) -> float:
        """The wall clock in seconds since 1970, computed from its value at the start of the agent."""
        return self.me.started_at + now - self.me.started_now

    @property
    def group(self) -> Group | None:
        """The current group: the one with the highest number that was seen."""
        return self.cached.group if self.cached is not None else None

    @property
    def is_member(self) -> bool:
        """Whether this node is a member of the current group."""
        return self.group is not None and self.group.node_rank(self.identity) is not None

    @property
    def registered(self) -> Stored[Node] | None:
        """The node record of this agent that is in etcd. None: there is none."""
        return self.view.present.get(self.identity) if self.view is not None else None

    @property
    def is_leader(self) -> bool:
        """Whether this agent is the leader."""
        leader = self.view.leader if self.view is not None else None
        return leader is not None and self.identity == leader.value.identity
