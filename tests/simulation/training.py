"""The simulated training: worlds of ranks that step together, the true history of their steps, and checkpoint files.

A world begins once all ranks of its group live and were told where. Its steps, and those of a group that was cut off,
make one tree: each step knows the one before it. Every step may leave a copy in the members' memory, whole or in
parts; now and then rank 0 publishes a checkpoint as `trainer_runtime/writer.py` does.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import msgspec
from simulation.files import Files, Publisher
from simulation.standstill import Standstill
from simulation.transcript import named

from agent.core import events as ev
from agent.core.model import Group, Member
from agent.core.neighbours import neighbours, next_member
from agent.core.records import Identity
from agent.core.saved_states import Replica, RestorePoint, StateId

if TYPE_CHECKING:
    from simulation.agent import Agent
    from simulation.cluster import Cluster

_PACED_STEPS = 3
_TOLD_BY_ONE = 16
"""So many ranks see at most that one is gone."""


class History:
    """All steps that were ever taken, each with the one before."""

    def __init__(self) -> None:
        self._before: dict[StateId, StateId | None] = {}
        self._depth: dict[StateId | None, int] = {None: 0}

    def add(self, copy: StateId, before: StateId | None) -> None:
        assert copy not in self._before, f"{copy} was trained twice"
        self._before[copy] = before
        self._depth[copy] = self._depth[before] + 1

    def __contains__(self, copy: StateId) -> bool:
        return copy in self._before

    def __len__(self) -> int:
        return len(self._before)

    def depth(self, copy: StateId | None) -> int:
        """How many steps lie before it."""
        return self._depth[copy]

    def is_after(self, copy: StateId | None, other: StateId | None) -> bool:
        """Whether the other is this copy or one that it came from."""
        depth = self._depth[other]
        while self._depth[copy] > depth and copy is not None:
            copy = self._before[copy]
        return copy == other


def is_complete(found: Sequence[Replica]) -> bool:
    """Whether somebody has the common part, and somebody each rank's own."""
    ranks = {rank for held in found for rank in held.parts}
    return any(held.has_common for held in found) and ranks == set(range(found[0].world_size))


def complete_copies(held: Iterable[Replica]) -> list[StateId]:
    """Return the copies of which all is there."""
    pieces: dict[StateId, list[Replica]] = {}
    for each in held:
        pieces.setdefault(each.copy, []).append(each)
    return [copy for copy, found in pieces.items() if is_complete(found)]


class World:
    """The ranks of one group."""

    def __init__(self, training: Training, group: Group, run: str) -> None:
        self.group = group
        self.run = run
        self.step = self.began_after = 0
        self.copy: StateId | None = None
        self.is_begun = False
        self.made = 0
        """Steps taken by these ranks."""
        self.reached_before = (0, 0)
        """The last group before that had made a step, and its highest one."""
        self.started_at = training.cluster.now
        self.loaded_at = self.stepped_at = 0.0
        """When they had what they begin from, and had made their first step."""
        self.publisher = Publisher(self, training)
        self.standstill = Standstill(self, training)
        self._training = training
        self._cluster = training.cluster
        self._told: dict[Identity, RestorePoint] = {}
        self._unsent: tuple[StateId, list[Agent]] | None = None
        """The last copy, and the agents that have not sent their ranks' parts of it, since they are stopped."""
        self._is_broken = False

    def agents(self) -> list[Agent] | None:
        """All members' agents, in rank order, if all their workers are at work; else None."""
        found = []
        for member in self.group.members:
            agent = self._cluster.by_serial[member.link]
            if not agent.ranks.is_at_work(self.group.number) or agent.ranks.world is not self:
                return None
            found.append(agent)
        return found

    def on_restore_point(self, agent: Agent, restore_point: RestorePoint) -> None:
        """One member's ranks know where to begin."""
        assert restore_point.group == self.group.number, "workers are told of another group's beginning"
        assert agent.state.identity not in self._told, "workers are told twice"
        self._told[agent.state.identity] = restore_point
        if not self.is_begun and all(member.identity in self._told for member in self.group.members):
            agent.ranks.later(self._cluster.random.uniform(0.0, 0.1), self._begin)

    def _begin(self) -> None:
        agents = self.agents()
        if agents is None or self.is_begun:
            return
        told = {restore_point.copy for restore_point in self._told.values()}
        assert len(told) == 1, f"ranks of group {self.group.number} begin at {told}"
        restore_point = next(iter(self._told.values()))
        if not self._training.is_held_by(agents, restore_point.copy) and agents[0].name in self._training.files.away:
            agents[0].ranks.cannot_read()
            return
        self.copy = self._training.load(agents, restore_point)
        self.is_begun = True
        self.loaded_at = self._cluster.now
        self.step = self.began_after = self.copy.step if self.copy is not None else 0
        self._cluster.invariants.on_begin(self.group, restore_point, self.copy)
        where = f" at {named(self.copy)}" if self.copy is not None and self.copy != restore_point.copy else ""
        self._cluster.transcript.note(f"train {self.group.number}{where}")
        self.publisher.inherit(restore_point)
        if restore_point.copy != self.copy and self.copy is not None:
            self.publisher.roll_back(agents[0], self.copy)
        self._cluster.after(self._training.step_s(), self._turn)

    def _turn(self) -> None:
        """All ranks take a step, if all can."""
        if self._is_broken:
            return
        agents = self.agents()
        if agents is None:
            return
        is_waiting = self.publisher.is_blocking or self.standstill.number or self._training.is_held
        if not is_waiting and self._can_meet(agents) and self._are_parts_sent():
            self._step(agents)
        if not self._is_broken:
            self._cluster.after(self._training.step_s(), self._turn)

    def _can_meet(self, agents: list[Agent]) -> bool:
        """Whether a collective gets through."""
        network = self._cluster.network
        serials = [agent.serial for agent in agents]
        return not any(agent.is_host_paused or agent.ranks.idle for agent in agents) and all(
            network.is_open_both(one, other) for one in serials for other in serials if one < other
        )

    def _are_parts_sent(self) -> bool:
        """Whether all agents have sent the parts of the last copy. Until then no rank may replace an older one."""
        if self._unsent is not None:
            copy, stopped = self._unsent
            for agent in [each for each in stopped if not each.is_paused]:
                stopped.remove(agent)
                self.hand_over(agent, copy)
            self._unsent = (copy, stopped) if stopped else None
        return self._unsent is None

    def _step(self, agents: list[Agent]) -> None:
        before = self.copy
        self.step += 1
        self.made += 1
        if self.made == 1:
            self.reached_before = self._training.reached.get(self.run, (0, 0))
        self.copy = StateId(run=self.run, group=self.group.number, step=self.step)
        self._training.history.add(self.copy, before)
        reached = self._training.reached
        reached[self.run] = max((self.group.number, self.step), reached.get(self.run, (0, 0)))
        self._tell(agents)
        if self._training.copies_every and self.step % self._training.copies_every == 0:
            self.snapshot(agents)
        is_last = self._training.goal is not None and self.step >= self._training.goal
        if not is_last and self.standstill.is_met(agents):
            return
        if self._training.saves_every and self.step % self._training.saves_every == 0:
            self.publisher.publish(agents[0], self.copy)
        if self._training.closes_every and self.step % self._training.closes_every == 0:
            agents[0].ranks.later(self._training.step_s() / 2, lambda: self._close(agents))
        if is_last:
            self._is_broken = True
            for agent in agents:
                agent.ranks.later(self._cluster.random.uniform(0.0, 0.2), agent.ranks.finish)

    def _close(self, agents: list[Agent]) -> None:
        """The epoch is over, and saved with what the script did after its last commit."""
        if self._is_broken or self.publisher.is_blocking or self.standstill.number:
            return
        before = self.copy
        assert before is not None
        self.copy = msgspec.structs.replace(before, save=before.save + 1)
        self._training.history.add(self.copy, before)
        self.publisher.publish(agents[0], self.copy)

    def _tell(self, agents: list[Agent]) -> None:
        """The first step, and what steps take, are told to the agents."""
        for agent in agents:
            agent.ranks.reached = self.step
        if self.made == 1:
            self.stepped_at = self._cluster.now
            for agent in agents:
                agent.ranks.tell_began()
        elif self.made == _PACED_STEPS and self._training.tells_pace:
            step_s = self._training.pace_s
            for agent in agents:
                own_s = self._training.slow.get(agent.name, 0.5 * step_s)
                agent.post(ev.StepTimeChanged(self.group.number, step_s, (own_s,) * agent.state.me.nproc))

    @property
    def hang_limit_s(self) -> float:
        """So long without a step is suspicious; 0: nobody looks."""
        return self._training.hang_limit_s

    @property
    def reached(self) -> int:
        """The highest step that these ranks committed; 0 before their first."""
        return self.step if self.made else 0

    def snapshot(self, agents: list[Agent], *, is_for_handoff: bool = False) -> None:
        """Every node keeps the common part, its ranks' own, and those of the nodes beside it; or not all of that.

        In a handoff the parts are handed over with some time, see `hand_over`.
        """
        assert self.copy is not None
        size = len(agents)
        own = [range(first := self.group.first_rank(i), first + self.group.members[i].nproc) for i in range(size)]
        lazy = not is_for_handoff and self._cluster.random.random() < self._training.lost_parts
        is_kept = not (lazy or is_for_handoff)
        stopped = [agent for agent in agents if agent.is_paused] if is_kept and size > 1 else []
        self._unsent = (self.copy, stopped) if stopped else None
        keepers = [
            {member.identity for member in self.keepers(agent)} if is_kept and agent not in stopped else set()
            for agent in agents
        ]
        for index, agent in enumerate(agents):
            me = agent.state.identity
            parts = {rank for of, kept in enumerate(keepers) if of == index or me in kept for rank in own[of]}
            held = Replica(
                copy=self.copy,
                world_size=self.group.world_size,
                has_common=not lazy or index > 0,
                parts=tuple(sorted(parts)),
            )
            agent.hold_copy(held)

    def hand_over(self, agent: Agent, copy: StateId) -> None:
        """The nodes beside this one, or the next one, keep its ranks' parts of a copy too."""
        rank = self.group.node_rank(agent.state.identity)
        assert rank is not None
        first = self.group.first_rank(rank)
        for peer in self.keepers(agent):
            self._cluster.by_serial[peer.link].add_parts(copy, range(first, first + self.group.members[rank].nproc))

    def keepers(self, agent: Agent) -> tuple[Member, ...]:
        """The other members that keep the parts of this one's ranks."""
        me = agent.state.identity
        if not self._training.has_large_parts:
            return neighbours(self.group, me)
        after = next_member(self.group, me)
        return (after,) if after is not None else ()

    def on_gone(self, agent: Agent) -> None:
        """A member's ranks are gone: the others' collectives fail, unless nobody tells them."""
        self._is_broken = True
        if not self.standstill.number:  # those that stand still notice once they train on
            self.tell_of(agent)

    def tell_of(self, agent: Agent) -> None:
        """The others may see that they lost this one."""
        if agent.is_host_dead:
            return
        chance, members = self._cluster.random, self.group.members
        if len(members) > _TOLD_BY_ONE:  # these tell others: all of them telling all would be N squared events
            members = tuple(chance.sample(members, _TOLD_BY_ONE))
        for member in members:
            other = self._cluster.by_serial[member.link]
            is_told = self._cluster.network.is_open_both(agent.serial, other.serial) and chance.random() < 0.8
            if other is not agent and is_told and other.ranks.world is self:
                other.ranks.later(chance.uniform(0.01, 1.0), other.ranks.lose_peers)


class Training:
    """All worlds, their history and their files."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self.history = History()
        self.files = Files()
        self.copies_every = 1
        """Steps between copies in memory; 0: none."""
        self.saves_every = 0
        self.closes_every = 0
        """Epochs are so many steps long, and each is closed by a save; 0: they are not."""
        """Steps between checkpoints; 0: none."""
        self.keep = 2
        self.hands_off = False
        """Ranks ask where to begin, and stop together when asked to."""
        self.moves = False
        """Ranks that are quiesced can enter the next group without a new process."""
        self.misses = 0.0
        """Share of handoffs in which the ranks miss each other at the step that they had settled on."""
        self.is_local = False
        """Checkpoints are on rank 0's own disk."""
        self.has_large_parts = False
        """A node's parts of copies are kept by the next member only, not by both neighbours."""
        self.lost_parts = 0.0
        """Share of copies of which each node holds only its own ranks' parts, and rank 0 not the common one."""
        self.goal: int | None = None
        """The step after which workers end; None: not yet."""
        self.is_held = False
        """Nobody takes a step."""
        self.speed_s = 0.5
        self.tells_pace = False
        """What steps take is told."""
        self.slow: dict[str, float] = {}
        """Nodes whose ranks take so many seconds of each step for themselves."""
        self.hang_limit_s = 0.0
        """So long without a step is suspicious; 0: nobody looks."""
        self.reached: dict[str, tuple[int, int]] = {}
        """By run: the last group that made a step, and its highest step."""
        self.trained_on: set[int] = set()
        """Groups whose ranks had stopped for a handoff, and then trained on: some steps are in no record."""
        self._worlds: dict[int, list[World]] = {}

    def step_s(self) -> float:
        return self.cluster.random.uniform(0.2, 1.0) * self.speed_s

    @property
    def pace_s(self) -> float:
        """What is told of that."""
        return 0.6 * self.speed_s

    def join(self, group: Group, run: str) -> World:
        """The world of this group's ranks."""
        worlds = self._worlds.setdefault(group.number, [])
        for world in worlds:
            if world.group == group and world.run == run:
                return world
        worlds.append(World(self, group, run))
        return worlds[-1]

    def is_begun(self, group: Group) -> bool:
        """Whether this group's ranks have begun."""
        world = self.world_of(group)
        return world is not None and world.is_begun

    def world_of(self, group: Group) -> World | None:
        """The ranks of exactly this group; None: they were never started."""
        return next((world for world in self._worlds.get(group.number, []) if world.group == group), None)

    def publish(self, agent: Agent, copy: StateId) -> None:
        """This agent's rank 0 publishes a copy that it has, whatever it is."""
        world = agent.ranks.world
        assert world is not None
        world.publisher.publish(agent, copy)

    @property
    def newest_step(self) -> int:
        """Of the group with the highest number."""
        return self._worlds[max(self._worlds)][-1].step if self._worlds else 0

    def is_held_by(self, agents: list[Agent], copy: StateId | None) -> bool:
        """Whether all of it is in these members' memory."""
        held = (each for agent in agents for each in agent.memory.values())
        return copy is None or copy in complete_copies(held)

    def load(self, agents: list[Agent], restore_point: RestorePoint) -> StateId | None:
        """Read the copy that was named, from the members' memory or from its files."""
        copy, committed = restore_point.copy, restore_point.checkpoint
        if copy is None:
            return None
        if self.is_held_by(agents, copy):
            return copy
        assert committed is not None, f"nobody holds {copy}"
        assert committed.copy == copy, f"nobody holds {copy}"
        assert committed.node in {"", agents[0].name}, f"rank 0 is on {agents[0].name}, {committed.name} is not"
        return self.files.read(committed)
