"""What the ranks of a world do about a handoff, as `trainer_runtime/handoff.py`: stop after a common step, save, wait.

They see the request at different times. The first one that does settles on a step a little ahead; if one of them has
not seen it by then, or misses the others, they try again with a longer lead. At the step all take a snapshot, if that
is enough, and if not, or if they take none, rank 0 publishes. If no verdict comes in time, or no answer after it, they
train on: then that number is over for them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from agent.core import events as ev

if TYPE_CHECKING:
    from simulation.agent import Agent
    from simulation.training import Training, World

_LEAD = 2


class Standstill:
    """The ranks' own part in handoffs."""

    def __init__(self, world: World, training: Training) -> None:
        self._world = world
        self._training = training
        self._cluster = training.cluster
        self._seen: dict[int, int] = {}
        """The newest request that each agent's ranks have seen."""
        self._in_memory: set[int] = set()
        """Those for which a snapshot is enough."""
        self._settling = 0
        self._stop_at: int | None = None
        self._attempt = 0
        self._over = 0
        """Requests up to this number are over."""
        self.number = 0
        """Number of the handoff for which they are quiesced; 0: they train."""
        self.is_saved = False
        """All is saved: only the answer is waited for."""

    def on_request(self, agent: Agent, number: int, *, in_memory: bool) -> None:
        self._seen[agent.serial] = number
        if in_memory:
            self._in_memory.add(number)
        else:
            self._in_memory.discard(number)

    def is_met(self, agents: list[Agent]) -> bool:
        """After a step: whether all ranks stop here."""
        wanted = max((self._seen.get(agent.serial, 0) for agent in agents), default=0)
        if wanted <= self._over:
            return False
        if wanted != self._settling:
            self._settling, self._stop_at, self._attempt = wanted, None, 0
        step, is_alone = self._world.step, self._world.group.world_size == 1
        if self._stop_at is None:
            self._stop_at = step + (0 if is_alone else _LEAD << min(self._attempt, 3))
        if step < self._stop_at:
            return False
        has_missed = not is_alone and self._cluster.random.random() < self._training.misses
        if has_missed or any(self._seen.get(agent.serial, 0) != wanted for agent in agents):
            self._stop_at, self._attempt = None, self._attempt + 1
            return False
        self._stand(agents)
        return True

    def _stand(self, agents: list[Agent]) -> None:
        self.number, self.is_saved = self._settling, False
        self._cluster.transcript.note(f"stop {self._world.group.number} at step {self._world.step}")
        self._wait()
        if self.number in self._in_memory and self._training.copies_every:
            self._snap(agents)
        else:
            self._save(agents[0])

    def _snap(self, agents: list[Agent]) -> None:
        """All take a snapshot, and tell their agents; again, once the neighbours have their parts of it."""
        chance = self._cluster.random
        self._world.snapshot(agents, is_for_handoff=True)
        self.is_saved = True
        self._wait()
        for agent in agents:
            report_s = chance.uniform(0.0, 0.1)
            event = self._quiesced_event(is_shared=False)
            agent.ranks.later(report_s, lambda agent=agent, event=event: agent.post(event))
            if len(agents) == 1 or chance.random() >= self._training.lost_parts:
                agent.ranks.later(report_s + chance.uniform(0.0, 0.1), lambda agent=agent: self._hand_over(agent))

    def _quiesced_event(self, *, is_shared: bool) -> ev.RanksQuiesced:
        return ev.RanksQuiesced(
            self._world.group.number,
            self.number,
            self._world.step,
            is_shared=is_shared,
            is_with_next_only=self._training.has_large_parts,
        )

    def _hand_over(self, agent: Agent) -> None:
        network, keepers = self._cluster.network, self._world.keepers(agent)
        if self.number and all(network.is_open_both(agent.serial, each.link) for each in keepers):
            assert self._world.copy is not None
            self._world.hand_over(agent, self._world.copy)
            agent.post(self._quiesced_event(is_shared=True))

    def _save(self, first: Agent) -> None:
        """Rank 0 publishes, once what it published before is settled."""
        number, copy = self.number, self._world.copy
        assert copy is not None
        if self._world.publisher.is_busy:
            first.ranks.later(0.1, lambda: self._save(first) if self.number == number else None)
        elif number:
            self._world.publisher.publish(first, copy, handoff=number)

    def on_saved(self, number: int) -> None:
        if number and number == self.number:
            self.is_saved = True
            self._wait()

    def on_failed(self, number: int) -> None:
        if number and number == self.number:
            self._train_on()

    def _wait(self) -> None:
        """No longer than agreed."""
        waits_for = (self.number, self.is_saved)
        wait_s = self._cluster.policy.handoff_wait_s
        self._cluster.after(wait_s, lambda: self._train_on() if (self.number, self.is_saved) == waits_for else None)

    def _train_on(self) -> None:
        self._over, self.number, self.is_saved, self._stop_at = self.number, 0, False, None
        agents = [self._cluster.by_serial[member.link] for member in self._world.group.members]
        here = [agent for agent in agents if agent.ranks.world is self._world]
        gone = [agent for agent in agents if agent not in here]
        if here:
            self._training.trained_on.add(self._world.group.number)
            self._cluster.transcript.note(f"train on {self._world.group.number}")
        for agent in gone:
            self._world.tell_of(agent)
