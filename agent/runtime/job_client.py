"""An agent's client of its job in etcd: it follows the job's keys, keeps the agent's lease, and carries out effects."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from agent.config import AgentConfig
from agent.core import effects as fx
from agent.core import events as ev
from agent.core.model import Node
from agent.errors import RecordError
from agent.observe.log import log
from agent.runtime.loop import Heartbeat, Inbox, StoreThread
from agent.store.api import KeyRange, Snapshot, Store
from agent.store.job_writer import JobWriter
from agent.store.keys import JobKeys, Views
from agent.store.lease import LeaseKeeper
from agent.store.mirror import Mirror

BEATS_PER_LEASE = 8
"""A hung agent loses its place a lease after its loop's last turn, and later by at most a lease divided by this."""

_Run = Callable[[fx.StoreEffect], ev.WriteAnswered]


def first_watch(config: AgentConfig) -> fx.WatchKeys:
    """What an agent follows until it leads."""
    return fx.WatchKeys(config.node.node_id, is_whole=False)


class JobClient:
    """Mirror, lease keeper and store thread of one agent.

    Args:
        config: of the agent.
        store: where the job's keys are.
        inbox: gets the views, the answers to effects, renewals of the lease, and outages.
        heartbeat: of the agent's loop; without it the lease is not renewed.
        is_process_alive: whether the agent of a node record runs on this host; None: unknown.
        around: wraps the function that carries out an effect.
    """

    def __init__(
        self,
        config: AgentConfig,
        store: Store,
        inbox: Inbox,
        heartbeat: Heartbeat,
        is_process_alive: Callable[[Node], bool | None],
        around: Callable[[_Run], _Run] = lambda run: run,
    ) -> None:
        self._inbox = inbox
        self.outage = ""
        """Why etcd could not be reached last."""
        self._keys = JobKeys(config.job.job_id)
        self._mirror = Mirror(store, *self._target(first_watch(config)), self._on_outage)
        self.keeper = LeaseKeeper(
            store,
            heartbeat.is_alive,
            on_lost=lambda _lease_id: self._mirror.refresh(),
            on_renewed=lambda until: inbox.put(ev.LeaseRenewed(until)),
        )
        heartbeat.on_beat = self.keeper.loop_turned
        job_store = JobWriter(
            store,
            self._keys,
            self.keeper,
            lease_ttl_s=config.timing.lease_ttl_s,
            catch_up=self._mirror.catch_up,
            refresh_view=self._mirror.refresh,
            is_process_alive=is_process_alive,
        )
        self._store_thread = StoreThread(around(job_store.run), inbox)

    def start(self) -> None:
        """Begin to follow the job."""
        self._mirror.start()

    def follow(self, watch: fx.WatchKeys) -> None:
        """Follow this from now on."""
        self._mirror.retarget(*self._target(watch))

    def do(self, effect: fx.StoreEffect) -> None:
        """Carry out an effect on another thread, after those before it. The answer goes to the inbox."""
        self._store_thread.do(effect)

    def close(self) -> None:
        """End all threads once the effects given so far are done."""
        self._mirror.close()
        self.keeper.close()
        self._store_thread.close()

    def _target(self, watch: fx.WatchKeys) -> tuple[Sequence[KeyRange], Callable[[Snapshot], None]]:
        """What the mirror looks at, and who gets it."""
        ranges = self._keys.whole() if watch.is_whole else self._keys.followed(watch.node_id)
        views = Views(self._keys, is_whole=watch.is_whole)
        told: set[str] = set()

        def deliver(snapshot: Snapshot) -> None:
            try:
                view = views.of(snapshot)
            except RecordError as error:
                log.error(str(error))
            else:
                for why in {*views.unread.values()} - told:
                    log.error(f"{why}; what it says is left out")
                    told.add(why)
                self._inbox.put(ev.ViewChanged(view))

        return ranges, deliver

    def _on_outage(self, reason: str) -> None:
        self.outage = reason
        self._inbox.put(ev.StoreLost())
