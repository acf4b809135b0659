"""Agents of ours, as threads of this process: `meet_ours.py ENDPOINT JOB FIRST:END COUNT`.

Each is the real core in the real loop, on the real etcd layer, put together from the daemon's own parts. It has no
workers and no links. The program says "ready" and waits for a line. Then it prints when the last of its agents had the
group, on the wall clock, and the processor time of all its agents until then.
"""

from __future__ import annotations

import sys
import threading
import time
from pathlib import Path

from agent.config import AgentConfig, JobConfig, NodeConfig, TimingConfig, TimingOverrides, WorkerConfig
from agent.core import effects as fx
from agent.core import events as ev
from agent.core.lifecycle import step, wake_at
from agent.observe.log import configure
from agent.runtime.collective import initial_state, observer
from agent.runtime.loop import Core, Heartbeat, Inbox, run_loop
from agent.runtime.store_client import CollectiveClient
from agent.store.api import Store
from agent.store.etcd import EtcdStore
from agent.store.keys import JobKeys

_ADDRESS = "127.0.0.1"
_FIRST_PORT = 20000
"""What they say of themselves; nothing listens there."""
_WITHIN_S = 300.0
_STACK_BYTES = 1 << 20
_DETECT_WITHIN_S = 31.0
"""Hundreds of agents on a few cores are late with everything. With the usual leases of 4 s they would lose these."""


class MeetingAgent:
    """An agent without workers and links; `started_at` is set once it would start its workers.

    Args:
        config: of the agent.
        store: where the agents meet.
        number: makes the port that it names different from those of the others.
    """

    def __init__(self, config: AgentConfig, store: Store, number: int) -> None:
        self.has_group = threading.Event()
        self.started_at = 0.0
        self.group = 0
        """The number of the group whose workers it would start."""
        self._config = config
        self._port = _FIRST_PORT + number
        self._inbox = Inbox[ev.Event]()
        self._heartbeat = Heartbeat(config.timing.lease_ttl_s)
        self._client = CollectiveClient(config, store, self._inbox, self._heartbeat, lambda _node: None)
        self._thread = threading.Thread(target=self._run, name="loop", daemon=True)

    def start(self) -> None:
        """Begin."""
        self._inbox.put(ev.PortReserved(self._port))
        self._thread.start()
        self._client.start()

    def close(self) -> None:
        """End, without a word to the others. Its lease runs out."""
        self._inbox.put(fx.Exit(0, "measured"))
        self._thread.join()
        self._client.close()

    def _run(self) -> None:
        state = initial_state(self._config, self._port, page="")
        run_loop(Core(step, wake_at), state, self._inbox, self._heartbeat, self._act, observer(self._config))

    def _act(self, effect: fx.Effect) -> None:
        if isinstance(effect, fx.WatchKeys):
            self._client.follow(effect)
        elif isinstance(effect, fx.StartWorkers):
            self.group = effect.group.number
            self.started_at = time.time()
            self.has_group.set()
        elif isinstance(effect, fx.TerminateWorkers | fx.KillWorkers):
            self._inbox.put(ev.WorkersGone(effect.group))
        elif isinstance(effect, fx.StoreEffect):
            self._client.do(effect)


def config_of(endpoint: str, job_id: str, number: int, count: int) -> AgentConfig:
    """Of one of `count` agents that form one group, which can lose half of them."""
    nowhere = Path("/nonexistent")
    return AgentConfig(
        endpoints=(endpoint,),
        store_timeout_s=_WITHIN_S,
        job=JobConfig(job_id, max(1, count // 2), count),
        node=NodeConfig(f"node-{number}", is_node_id_chosen=True, address=_ADDRESS, ips=(_ADDRESS,), nproc=1),
        timing=TimingConfig(_DETECT_WITHIN_S, TimingOverrides(settle_s=_WITHIN_S)),
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
    sys.setswitchinterval(0.5)  # by default each thread that waits for the interpreter wakes 200 times a second
    tell("ready")
    sys.stdin.readline()
    used_before_s = time.process_time()
    agents = []
    for number in range(*map(int, mine.split(":"))):
        config = config_of(endpoint, job_id, number, int(count))
        agents.append(MeetingAgent(config, EtcdStore(config.endpoints, home=JobKeys(job_id).prefix), number))
        agents[-1].start()
    give_up_at = time.monotonic() + _WITHIN_S
    for agent in agents:
        if not agent.has_group.wait(max(0.0, give_up_at - time.monotonic())):
            sys.exit(f"not all agents had the group within {_WITHIN_S:g} s")
    tell(max(agent.started_at for agent in agents), time.process_time() - used_before_s)
    sys.stdin.readline()  # the others are not to lose a member


if __name__ == "__main__":
    main()
