"""An agent's clients of etcd: they follow the job's keys, keep the agent's lease, and carry out effects on the store.

`StoreClient` is what both kinds of job share: a mirror, a lease keeper and a store thread. `CollectiveClient` and
`ParameterServerClient` add the keys and the writes of their kind of job.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from functools import partial
from queue import SimpleQueue
from typing import Any

from agent.config import AgentConfig
from agent.core import effects as fx
from agent.core import events as ev
from agent.core.incident import IncidentWrite
from agent.core.model import Node
from agent.errors import RecordError, StoreUnavailable
from agent.observe.log import InternalErrors, log
from agent.roles.events import RoleEvent, RoleStoreEffect, RoleViewChanged
from agent.roles.model import RoleNode, RoleSpec
from agent.roles.store import RoleKeys, RoleWriter
from agent.runtime.loop import Heartbeat, Inbox, SnapshotArrived
from agent.store.api import KeyRange, Snapshot, Store
from agent.store.job_writer import JobWriter
from agent.store.keys import JobKeys, Views
from agent.store.lease import LeaseKeeper
from agent.store.mirror import Mirror

_RETRY_S = 0.5
_Run = Callable[[fx.StoreEffect], ev.WriteAnswered]


class StoreThread:
    """Runs tasks that wait for the store, one at a time, in the order in which they were given.

    A task that raises `StoreUnavailable` or `RecordError` is run again until it succeeds, or until `close` was called.
    `do` and `close` may be called from any thread.
    """

    def __init__(self) -> None:
        self._queue: SimpleQueue[Callable[[], object] | None] = SimpleQueue()
        self._is_closed = threading.Event()
        self._last_error = ""
        self._thread = threading.Thread(target=self._work, name="store", daemon=True)
        self._thread.start()

    def do(self, task: Callable[[], object]) -> None:
        """Run a task later, in its turn."""
        self._queue.put(task)

    def close(self) -> None:
        """Run each of the tasks that are left once, and end the thread."""
        self._is_closed.set()
        self._queue.put(None)
        self._thread.join()

    def _work(self) -> None:
        while (task := self._queue.get()) is not None:
            while not self._has_run(task) and not self._is_closed.wait(_RETRY_S):
                pass

    def _has_run(self, task: Callable[[], object]) -> bool:
        try:
            task()
        except StoreUnavailable as error:
            log.debug("etcd did not take a record", reason=str(error))
            return False
        except RecordError as error:
            if str(error) != self._last_error:  # it comes back at each try
                self._last_error = str(error)
                log.error(str(error))
            return False
        return True


class StoreClient(ABC):
    """Mirror, lease keeper and store thread of one agent.

    Args:
        store: where the job's keys are.
        inbox: gets the events that snapshots become, and `StoreLost` at the beginning of each outage.
        heartbeat: of the agent's loop; without it the lease is not renewed.
    """

    def __init__(self, store: Store, inbox: Inbox[Any], heartbeat: Heartbeat) -> None:
        self.outage = ""
        """Why etcd could not be reached last."""
        self._inbox = inbox
        self._mirror = Mirror(store, (), lambda _snapshot: None, self._on_outage)
        self.keeper = LeaseKeeper(store, heartbeat.is_alive, self._on_lease_lost, self._on_lease_renewed)
        heartbeat.on_beat = self.keeper.loop_turned
        self._store_thread = StoreThread()

    def start(self) -> None:
        """Begin to follow the job."""
        self._mirror.start()

    def close(self) -> None:
        """End all threads once the tasks given so far are done."""
        self._mirror.close()
        self.keeper.close()
        self._before_end()
        self._store_thread.close()

    @abstractmethod
    def _on_lease_lost(self, lease_id: int) -> None:
        """Called on the keeper's thread when etcd has ended the lease."""

    @abstractmethod
    def _on_lease_renewed(self, until: float) -> None:
        """Called on the keeper's thread after each answered renewal; the lease surely lives until then."""

    @abstractmethod
    def _before_end(self) -> None:
        """Give the store thread its last tasks. Nothing renews the lease any more."""

    def _follow(self, ranges: Sequence[KeyRange], deliver: Callable[[Snapshot], None]) -> None:
        """Follow these keys from now on."""
        self._mirror.retarget(ranges, deliver)

    def _on_outage(self, reason: str) -> None:
        self.outage = reason
        self._inbox.put(ev.StoreLost())


def first_watch(config: AgentConfig) -> fx.WatchKeys:
    """Return what an agent follows until it leads."""
    return fx.WatchKeys(config.node.node_id, is_whole=False)


class CollectiveClient(StoreClient):
    """The client of a collective job. Each effect is answered in the inbox; the core decides whether to try again.

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
        inbox: Inbox[ev.Event],
        heartbeat: Heartbeat,
        is_process_alive: Callable[[Node], bool | None],
        around: Callable[[_Run], _Run] = lambda run: run,
    ) -> None:
        super().__init__(store, inbox, heartbeat)
        self._keys = JobKeys(config.job.job_id)
        self._writer = JobWriter(
            store,
            self._keys,
            self.keeper,
            lease_ttl_s=config.timing.lease_ttl_s,
            followed=self._mirror,
            is_process_alive=is_process_alive,
        )
        self._run = around(self._writer.run)
        self.follow(first_watch(config))

    def follow(self, watch: fx.WatchKeys) -> None:
        """Follow these keys from now on."""
        views = Views(self._keys, is_whole=watch.is_whole)
        reported: set[str] = set()
        mishaps = InternalErrors("reading the job's records")

        def decode(snapshot: Snapshot) -> ev.ViewChanged | None:
            try:
                view = views.of(snapshot)
            except RecordError as error:
                log.error(str(error))
                return None
            except Exception as error:  # noqa: BLE001 - as in the mirror: an agent that sees nothing must not end either
                mishaps.report(error)
                return None
            for why in {*views.unread.values()} - reported:
                log.error(f"{why}; what it says is left out")
                reported.add(why)
            return ev.ViewChanged(view)

        def deliver(snapshot: Snapshot) -> None:
            self._inbox.put(SnapshotArrived(snapshot.revision, partial(decode, snapshot)))

        self._follow(self._keys.whole() if watch.is_whole else self._keys.followed(watch.node_id), deliver)

    def do(self, effect: fx.StoreEffect) -> None:
        """Carry out an effect on the store thread, after those before it. The answer goes to the inbox."""
        self._store_thread.do(partial(self._carry_out, effect))

    def record(self, write: IncidentWrite, on_answer: Callable[[ev.Outcome, int], None]) -> None:
        """Write incidents on the store thread, after what it has to do before. `on_answer` is called there."""
        self._store_thread.do(lambda: on_answer(*self._writer.write_incidents(write)))

    def _on_lease_lost(self, lease_id: int) -> None:
        self._mirror.note_lease_end(lease_id)  # the core registers again once it misses the agent's record

    def _on_lease_renewed(self, until: float) -> None:
        self._inbox.put(ev.LeaseRenewed(until))

    def _before_end(self) -> None:
        pass  # the core leaves by an effect

    def _carry_out(self, effect: fx.StoreEffect) -> None:
        try:
            answer = self._run(effect)
        except RecordError as error:
            log.error(str(error))
            answer = ev.WriteAnswered(effect, ev.Outcome.UNKNOWN)
        self._inbox.put(answer)


class ParameterServerClient(StoreClient):
    """The client of a parameter-server job. Each effect is tried until etcd has it; there are no answers.

    Args:
        config: of the agent.
        store: where the job's keys are.
        inbox: gets the views and outages.
        heartbeat: of the agent's loop; without it the lease is not renewed.
        spec: of the run.
        node: this agent's record.
    """

    def __init__(
        self,
        config: AgentConfig,
        store: Store,
        inbox: Inbox[RoleEvent],
        heartbeat: Heartbeat,
        spec: RoleSpec,
        node: RoleNode,
    ) -> None:
        super().__init__(store, inbox, heartbeat)
        keys = RoleKeys(config.job.job_id)
        self._writer = RoleWriter(
            store, keys, spec, config.node.node_id, node, config.timing.lease_ttl_s, self.keeper.hold
        )

        def deliver(snapshot: Snapshot) -> None:
            try:
                inbox.put(RoleViewChanged(keys.view(snapshot)))
            except RecordError as error:
                log.error(str(error))

        self._follow(keys.everything(), deliver)

    def start(self) -> None:
        """Register this agent, and begin to follow the job."""
        self._store_thread.do(self._writer.register)
        super().start()

    def do(self, effect: RoleStoreEffect) -> None:
        """Carry out an effect on the store thread, after those before it."""
        self._store_thread.do(partial(self._writer.write, effect))

    def _on_lease_lost(self, lease_id: int) -> None:  # noqa: ARG002 - it has only one
        self._store_thread.do(self._writer.register)

    def _on_lease_renewed(self, until: float) -> None:
        pass  # the core does not count on the lease

    def _before_end(self) -> None:
        self._store_thread.do(self._writer.leave)
