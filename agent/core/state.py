"""All that one agent knows and has under way: the state that `lifecycle.step` changes."""

from __future__ import annotations

from dataclasses import dataclass, field

from agent.core import effects as fx
from agent.core import events as ev
from agent.core.incident import Incident
from agent.core.local_workers import LocalWorkers
from agent.core.member_status import WrittenStatus
from agent.core.model import (
    UNTOLD,
    CachedRecords,
    ClusterView,
    Group,
    Identity,
    Node,
    NodeInfo,
    Policy,
    Replica,
    Stored,
    Timing,
)
from agent.core.neighbours import Links
from agent.core.observations import Observations
from agent.core.proposals import Plan
from agent.core.transitions import WorkerObservations


@dataclass(frozen=True)
class AgentFacts:
    """What an agent knows of itself before it has met anyone."""

    job_id: str
    node_id: str
    is_node_id_chosen: bool
    """The operator named it; else it is the host's name, and `-2`, `-3` may be added on a shared host."""
    incarnation: str
    address: str
    nproc: int
    link: int
    """Port on which its neighbours reach it."""
    host: str
    pid: int
    pid_started: int
    run: str
    """Id for the job's run, should this agent be the one to begin it."""
    secret: str
    """Likewise: by which the job's agents know each other."""
    np_min: int
    np_max: int
    fresh: bool
    started_at: float
    """Wall clock, seconds since 1970."""
    started_now: float
    """The same moment on the clock of `now`."""
    timing: Timing
    """For people to see."""
    link_cert: str = ""
    """Fingerprint of the certificate that it shows at `link`; empty: it has none."""
    position: int = 0
    """In the operator's list of machines; 0: there is none."""
    about: NodeInfo = UNTOLD
    """As timing."""


@dataclass(frozen=True)
class Leaving:
    """The agent is to end with this code, once its workers are gone."""

    code: int
    sentence: str
    is_hurried: bool = False
    """Asked twice: workers get no grace."""


@dataclass(frozen=True)
class AgentState:
    """All that an agent knows and has under way."""

    me: AgentFacts
    policy: Policy
    view: ClusterView | None = None
    workers: LocalWorkers = field(default_factory=LocalWorkers)
    seen: Observations = field(default_factory=Observations)
    port: int = 0
    """Held for the next group's master; 0: none yet."""
    suffix: int = 1
    life: int = 1
    """Counts our incarnations: workers that we stopped on our own make the next one."""
    known: CachedRecords | None = None
    """The newest spec and group that were seen. The workers follow these, whatever etcd may have lost."""
    has_lost_data: bool = False
    """etcd shows less than is known."""
    is_store_lost: bool = False
    lease_until: float | None = None
    """Our lease surely lives until then."""
    links: Links = ()
    linked: fx.HoldLinks | None = None
    has_heard: bool = False
    """A link to somebody has worked."""
    heard: int = 0
    """The last group, not ours, that all our links of were up."""
    looking: fx.SetHangThreshold = field(default_factory=lambda: fx.SetHangThreshold(None))
    copies: tuple[Replica, ...] = ()
    told_resume: int = 0
    """The group whose workers know where it begins."""
    observed: WorkerObservations = field(default_factory=WorkerObservations)
    """How the workers do."""
    status: WrittenStatus = field(default_factory=WrittenStatus)
    """What etcd has of this node's reports about its group."""
    health: str = ""
    """What is wrong with this node; empty: it can train."""
    standby: ev.StandbyChanged = field(default_factory=lambda: ev.StandbyChanged("", is_warming=False))
    resumed: int = 0
    """The last group in which a local rank asked where to begin."""
    asked: ev.PublishAsked | None = None
    """A local worker waits for the verdict on its checkpoint."""
    asked_at: float = 0.0
    outage_ended_at: float | None = None
    pending: fx.StoreEffect | None = None
    pending_since: float = 0.0
    must_refresh: bool = False
    is_answer_void: bool = False
    """What is under way was sent before etcd lost its history: its answer, and its revision, speak of the lost one."""
    settled_revision: int = 0
    """Nothing is decided from a view older than our own last write."""
    retry_at: float = 0.0
    holder: fx.NodeIdHolder | None = None
    """Another agent that has our node id, as we last asked."""
    held_since: float = 0.0
    leaderless_since: float | None = None
    watched: fx.WatchKeys | None = None
    drain_until: float | None = None
    """Asked to leave: until then the group has time to go on without us."""
    leaving: Leaving | None = None
    has_left: bool = False
    planned: Plan | None = None
    """The leader's plan for the current view."""
    said_joined: bool = False
    said_group: int = 0
    trouble: str = ""
    """Why the last write had no answer; empty once one has."""
    said_trouble: str = ""
    said_reason: str = ""
    said_np: str = ""
    written: Incident | None = None
    """The incident that we have last added something to."""
    said_incident: int = 0
    """The group whose incident was told whole."""
    said_slow: tuple[int, tuple[int, ...]] = (0, ())
    """A group, and its ranks that were told to be slow."""

    @property
    def node_id(self) -> str:
        """Our node id, with the number added that a shared host needs."""
        return self.me.node_id if self.suffix == 1 else f"{self.me.node_id}-{self.suffix}"

    @property
    def identity(self) -> Identity:
        """Who we are to others."""
        return Identity(self.node_id, self.incarnation)

    @property
    def incarnation(self) -> str:
        """Of this life of ours."""
        return self.me.incarnation if self.life == 1 else f"{self.me.incarnation}.{self.life}"

    @property
    def node(self) -> Node:
        """Our record among the nodes, as it should be."""
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
            known=self.known if self.has_lost_data else None,
            resumed=self.resumed,
            own_s=self.observed.paced.own_s if self.observed.paced is not None else (),
            is_warming=self.standby.is_warming,
            standby=self.standby.told,
            heard=self.heard,
            position=self.me.position,
            about=self.me.about,
        )

    @property
    def _unfit(self) -> str:
        if self.workers.is_stuck:
            return f"processes of group {self.workers.group} survive SIGKILL"
        return f"its health check failed: {self.health}" if self.health else ""

    def wall(self, now: float) -> float:
        """The wall clock, seconds since 1970, as it was set when the agent started."""
        return self.me.started_at + now - self.me.started_now

    @property
    def group(self) -> Group | None:
        """The current group: the one with the highest number that was ever seen."""
        return self.known.group if self.known is not None else None

    @property
    def is_member(self) -> bool:
        """Whether we are one of the current group."""
        return self.group is not None and self.group.node_rank(self.identity) is not None

    @property
    def registered(self) -> Stored[Node] | None:
        """Our record among the nodes, as etcd has it."""
        nodes = self.view.nodes if self.view is not None else ()
        me = self.identity
        return next((n for n in nodes if n.value.node_id == me.node_id and n.value.incarnation == me.incarnation), None)

    @property
    def is_leader(self) -> bool:
        """Whether the leader key is ours."""
        leader = self.view.leader if self.view is not None else None
        return leader is not None and self.identity == leader.value.identity
