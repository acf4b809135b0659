"""The same cluster under hypothesis: what fails is shrunk to the shortest scenario that still fails."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule, run_state_machine_as_test
from simulation.agent import Agent
from simulation.cluster import Cluster
from simulation.etcd import ETCD, FATES

_NAMES = ("a", "b", "c", "d")
_EFFECTS = (
    "WriteGroup",
    "WriteIncident",
    "WriteHandoff",
    "WriteRestorePoint",
    "WriteCheckpoint",
    "WriteStatus.inventory",
    "WriteStatus.exit",
    "Register",
    "Campaign",
)

names = st.sampled_from(_NAMES)


class Job(RuleBasedStateMachine):
    """A job of up to four agents, and what can befall it."""

    @initialize(
        np=st.sampled_from(((1, 3), (2, 2))),
        saves=st.sampled_from((0, 3)),
        keep=st.sampled_from((1, 2)),
        hands_off=st.booleans(),
    )
    def begin(self, np: tuple[int, int], saves: int, keep: int, *, hands_off: bool) -> None:
        self.cluster = Cluster(0, np=np)
        self.cluster.training.saves_every, self.cluster.training.keep = saves, keep
        self.cluster.training.hands_off = hands_off
        for name in _NAMES[:2]:
            self.cluster.start(name)
        self.cluster.run(2.0)

    def _agent(self, name: str) -> Agent | None:
        named = (agent for agent in self.cluster.agents if agent.state.me.node_id == name and not agent.is_gone)
        return next(named, None)

    def _has_nobody_to_leave(self) -> bool:
        return not any(agent.is_asked_to_stop and not agent.is_gone for agent in self.cluster.agents)

    @rule(seconds=st.sampled_from((0.02, 0.3, 1.5, 5.0)))
    def run(self, seconds: float) -> None:
        self.cluster.run(seconds)

    @rule(name=names)
    def start(self, name: str) -> None:
        if self._agent(name) is None:
            self.cluster.start(name)

    @rule(name=names, host=st.booleans())
    def kill(self, name: str, *, host: bool) -> None:
        agent = self._agent(name)
        if agent is not None:
            self.cluster.kill(agent, host=host)

    @rule(name=names)
    def fail(self, name: str) -> None:
        agent = self._agent(name)
        if agent is not None:
            self.cluster.fail_worker(agent)

    @rule(name=names, host=st.booleans())
    def pause(self, name: str, *, host: bool) -> None:
        agent = self._agent(name)
        if agent is not None:
            agent.pause(host=host)

    @rule(name=names)
    def wake(self, name: str) -> None:
        agent = self._agent(name)
        if agent is not None:
            agent.wake()

    @rule(name=names)
    def stop(self, name: str) -> None:
        agent = self._agent(name)
        if agent is not None:
            self.cluster.ask_to_stop(agent)

    @rule(one=names, other=st.sampled_from((*_NAMES, "etcd")), both=st.booleans())
    def cut(self, one: str, other: str, *, both: bool) -> None:
        agent, peer = self._agent(one), self._agent(other)
        serial = ETCD if other == "etcd" else peer.serial if peer is not None else None
        if agent is not None and serial is not None:
            self.cluster.network.cut(agent.serial, serial)
            if both:
                self.cluster.network.cut(serial, agent.serial)

    @rule()
    def heal(self) -> None:
        self.cluster.network.heal()

    @rule(name=names, effect=st.sampled_from(_EFFECTS), fate=st.sampled_from(FATES))
    def lose(self, name: str, effect: str, fate: str) -> None:
        agent = self._agent(name)
        if agent is not None:
            agent.lose(effect, fate)

    @precondition(lambda self: not self.cluster.etcd.is_frozen)
    @rule()
    def freeze(self) -> None:
        self.cluster.etcd.freeze()

    @precondition(lambda self: self.cluster.etcd.is_frozen)
    @rule(new_leader=st.booleans())
    def thaw(self, *, new_leader: bool) -> None:
        self.cluster.etcd.thaw(is_new_leader=new_leader)

    @rule(np=st.sampled_from(((1, 3), (2, 2), (1, 1))))
    def scale(self, np: tuple[int, int]) -> None:
        self.cluster.scale(np)

    def teardown(self) -> None:
        """Everybody is well again: the job trains, or has nobody to train on."""
        if not hasattr(self, "cluster"):
            return
        self.cluster.network.heal()
        if self.cluster.etcd.is_frozen:
            self.cluster.etcd.thaw(is_new_leader=True)
        for name in _NAMES:
            self.wake(name)
        self.cluster.run_until(self._has_nobody_to_leave)  # who does would not be there afterwards
        for name in _NAMES[:3]:
            self.start(name)
        self.cluster.run(10.0)
        self.cluster.scale((2, 2))
        self.cluster.run_until(lambda: len(self.cluster.training_nodes) == 2 and self.cluster.is_begun, within_s=180.0)


@pytest.mark.timeout(600)
def test_any_scenario_ends_well() -> None:
    """Scenarios of up to 30 events; the same ones in every run."""
    run_state_machine_as_test(
        Job,
        settings=settings(
            max_examples=40,
            stateful_step_count=30,
            derandomize=True,
            deadline=None,
            database=None,
            phases=(Phase.generate, Phase.shrink),
            suppress_health_check=list(HealthCheck),
        ),
    )
