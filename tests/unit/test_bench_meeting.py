"""The benchmark of meeting: its agents, made of the daemon's own parts, form one group on a store in memory."""

from __future__ import annotations

from benchmarks.meet_ours import MeetingAgent, config_of

from agent.store.memory import MemoryStore

BOUND_S = 60.0


def test_agents_of_the_benchmark_form_one_group() -> None:
    store = MemoryStore()
    agents = [MeetingAgent(config_of("127.0.0.1:1", "job", number, 3), store, number) for number in range(3)]
    for agent in agents:
        agent.start()
    try:
        assert [agent.has_group.wait(BOUND_S) for agent in agents] == [True] * 3
        assert [agent.group for agent in agents] == [1] * 3
    finally:
        for agent in agents:
            agent.close()
