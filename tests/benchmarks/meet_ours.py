"""Agents of ours, as threads of this process: `meet_ours.py ENDPOINT JOB FIRST:END COUNT`.

Each is the real core in the real loop, on the real etcd layer, wired as in `agent/daemon.py`; it has no workers and
no links. Says "ready", waits for a line, and prints when the last of its own agents had the group, on the wall clock,
and the processor time that this took in all of them.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from agent.config import AgentConfig, JobConfig, NodeConfig, TimingConfig, WorkerConfig
from agent.core import effects as fx
from agent.core import events as ev
from agent.core.state import AgentState
from agent.daemon import _BEATS_PER_LEASE, _me
from agent.loop import Heartbeat, Inbox, StoreThread, run_loop
from agent.observe.log import configure
from agent.store.api import KeyRange, Snapshot
from agent.store.etcd import EtcdStore
from agent.store.job import JobStore
from agent.store.keys import JobKeys, Views
from agent.store.lease import LeaseKeeper
from agent.store.mirror import Mirror

_ADDRESS = "127.0.0.1"
_FIRST_PORT = 20000
"""What they say of themselves; nothing listens there."""
_WITHIN_S = 300.0
_STACK_BYTES = 1 << 20


class MeetingAgent:
    """An agent without workers and links; `started_at` is set once it would start its workers."""

    def __init__(self, endpoint: str, job_id: str, number: int, count: int) -> None:
        self._config = _config(endpoint, job_id, number, count)
        self._number = number
        self.has_group = threading.Event()
        self.started_at = 0.0
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        config, inbox = self._config, Inbox()
        self._keys = JobKeys(config.job.job_id)
        store = EtcdStore(config.endpoints, home=self._keys.prefix)
        heartbeat = Heartbeat(config.timing.lease_ttl_s / _BEATS_PER_LEASE)
        self._inbox, followed = inbox, fx.Watch(config.node.node_id, is_whole=False)
        self._mirror = Mirror(
            store, self._ranges(followed), self._deliver(followed), lambda _: inbox.put(ev.StoreLost())
        )
        keeper = LeaseKeeper(
            store,
            heartbeat.is_alive,
            on_lost=lambda _lease_id: self._mirror.refresh(),
            on_renewed=lambda until: inbox.put(ev.LeaseRenewed(until)),
        )
        heartbeat.on_beat = keeper.loop_turned
        job_store = JobStore(
            store,
            self._keys,
            keeper,
            lease_ttl_s=config.timing.lease_ttl_s,
            refresh_view=self._mirror.catch_up,
            is_process_alive=lambda _node: None,
        )
        self._store_thread = StoreThread(job_store.run, inbox)
        inbox.put(ev.PortReserved(_FIRST_PORT + self._number))
        self._mirror.start()
        state = AgentState(_me(config, _FIRST_PORT + self._number), config.policy, watched=followed)
        run_loop(state, inbox, heartbeat, self._act)

    def _ranges(self, watch: fx.Watch) -> Sequence[KeyRange]:
        return self._keys.whole() if watch.is_whole else self._keys.followed(watch.node_id)

    def _deliver(self, watch: fx.Watch) -> Callable[[Snapshot], None]:
        views = Views(self._keys, is_whole=watch.is_whole)

        def deliver(snapshot: Snapshot) -> None:
            self._inbox.put(ev.Viewed(views.of(snapshot)))

        return deliver

    def _act(self, effect: fx.Effect) -> None:
        if isinstance(effect, fx.Watch):
            self._mirror.retarget(self._ranges(effect), self._deliver(effect))
        elif isinstance(effect, fx.StartWorkers):
            self.started_at = time.time()
            self.has_group.set()
        elif isinstance(effect, fx.StoreEffect):
            self._store_thread.do(effect)


def _config(endpoint: str, job_id: str, number: int, count: int) -> AgentConfig:
    nowhere = Path("/nonexistent")
    return AgentConfig(
        endpoints=(endpoint,),
        store_timeout_s=_WITHIN_S,
        job=JobConfig(job_id, count, count),
        node=NodeConfig(f"node-{number}", is_node_id_chosen=True, address=_ADDRESS, ips=(_ADDRESS,), nproc=1),
        timing=TimingConfig(),
        workers=WorkerConfig(("none",), nowhere, nowhere, max_restarts=0),
    )


def tell(*words: object) -> None:
    """To who started this process."""
    sys.stdout.write(f"{' '.join(map(str, words))}\n")
    sys.stdout.flush()


def main() -> None:
    """Take part with some agents."""
    endpoint, job_id, mine, count = sys.argv[1:]
    configure("meeting")
    threading.stack_size(_STACK_BYTES)
    tell("ready")
    sys.stdin.readline()
    used_before_s = time.process_time()
    agents = [MeetingAgent(endpoint, job_id, number, int(count)) for number in range(*map(int, mine.split(":")))]
    give_up_at = time.monotonic() + _WITHIN_S
    for agent in agents:
        if not agent.has_group.wait(max(0.0, give_up_at - time.monotonic())):
            sys.exit(f"not all agents had the group within {_WITHIN_S:g} s")
    tell(max(agent.started_at for agent in agents), time.process_time() - used_before_s)
    sys.stdin.readline()  # the others are not to lose a member


if __name__ == "__main__":
    main()
