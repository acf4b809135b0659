"""The local workers of a simulated agent, as objects: what lives, what is told to end, what it leaves behind."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from simulation.watcher import Watcher

from agent.core import effects as fx
from agent.core import events as ev
from agent.core.model import Group
from agent.core.reasons import Doing
from agent.core.saved_states import RestorePoint

if TYPE_CHECKING:
    from simulation.agent import Agent
    from simulation.training import World

PEER_LOST = "Connection closed by peer"
EXIT_TOLD = 101
_VERDICT_S = 6.0
"""How long ranks that have lost others wait for their agent to know why."""
FINISHED = 0
"""In place of a signal: they ended by themselves."""


class Ranks:
    """All rank processes of one agent."""

    def __init__(self, agent: Agent) -> None:
        self._agent = agent
        self._cluster = agent.cluster
        self.group: Group | None = None
        """Whose workers live; None: nobody's."""
        self.world: World | None = None
        self.living: set[int] = set()
        """Local ranks."""
        self.is_stopping = False
        self.is_stuck = False
        """Nothing can kill them."""
        self.bad_code = 0
        """Each start ends with this code, before a step. 0: it does not."""
        self.idle: dict[int, Doing] = {}
        """Local ranks that make no step, and what they do instead."""
        self.node_rank = 0
        self.started_at = 0.0
        """On the agent's clock."""
        self.reached = self.before = 0
        """The step that they have made last, and that those of the group before had."""
        self.restore_point: RestorePoint | None = None
        self.page = 0
        """Number of the handoff that is wanted."""
        self.in_memory = False
        """A snapshot is enough for it."""
        self.starts = 0
        self.can_move = self.has_lost_peers = False
        """They have made a step in this group, of a script that can go on in another; they have lost others."""
        self.is_waiting = self.is_ready = False
        """They set up the script, or have done so, and are in no group."""
        self._sent_to: tuple[Group, int, str] | None = None
        """Where they go once they have set up."""
        self._waiting: list[Callable[[], None]] = []

    @property
    def number(self) -> int:
        return self.group.number if self.group is not None else 0

    def is_at_work(self, number: int) -> bool:
        """Whether all of them live, for this group."""
        return self.number == number and not self.is_stopping and len(self.living) == self._agent.state.me.nproc

    def act(self, effect: fx.LocalEffect) -> None:  # noqa: C901 - one a kind of effect
        match effect:
            case fx.StartWorkers(group, node_rank, spec):
                self.node_rank = node_rank
                self._start(group, spec.run)
            case fx.SetUpWorkers(group, node_rank, spec):
                self.node_rank = node_rank
                self._set_up(group, spec.run)
            case fx.MoveWorkers(from_group, group, node_rank, spec, is_planned) if self.number == from_group:
                self._sent_to = group, node_rank, spec.run
                if not is_planned:  # they break their connections
                    self.later(self._cluster.random.uniform(0.0, 0.5), self.lose_peers)
                self.later(self._cluster.random.uniform(0.0, 0.2), lambda: self._move(is_planned=is_planned))
            case fx.SendRestorePoint(restore_point):
                self.restore_point = restore_point
                if self.world is not None:
                    self.world.on_restore_point(self._agent, restore_point)
            case fx.RequestHandoff(group, number, in_memory):
                self._set_handoff(group, number, in_memory=in_memory)
            case fx.AnswerPublish():
                if self.world is not None:
                    self.world.publisher.on_verdict(effect)
            case fx.TerminateWorkers(group) if self.number == group and self._is_quiesced():
                self._leave()
            case fx.TerminateWorkers(group):
                self._end(group, self._cluster.random.uniform(0.01, 3.0))  # some do not listen
            case fx.KillWorkers(group):
                self._end(group, self._cluster.random.uniform(0.0, 0.05))

    def _start(self, group: Group, run: str) -> None:
        self._cluster.invariants.on_start(self._agent, group, run)
        self.living = set(range(self._agent.state.me.nproc))
        self.is_stopping = False
        self.starts += 1
        self._enter(group, run)
        if self.bad_code:
            self.later(0.02, lambda code=self.bad_code: self._fail_early(code))  # also if the node is mended until then

    def _set_up(self, joined: Group, run: str) -> None:
        """They set up the script, and wait; in no world yet."""
        self._cluster.invariants.on_set_up(self._agent, joined, run)
        self.living = set(range(self._agent.state.me.nproc))
        self.is_stopping, self.is_waiting, self.is_ready = False, True, False
        self.starts += 1
        self.group, self.world, self.restore_point, self.page = joined, None, None, 0
        self._sent_to = None
        if self.bad_code:
            self.later(0.02, lambda code=self.bad_code: self._fail_early(code))
        self.later(self._cluster.random.uniform(0.0, 3.0), self._get_ready)

    def _get_ready(self) -> None:
        self.is_ready = True
        self._agent.post(ev.WorkersReady(self.number))
        self._move(is_planned=True)

    def lose_peers(self) -> None:
        """Their collectives fail: they end, or ask for their place and wait, for as long as their agent may need."""
        if self.idle or self.is_waiting:
            return
        if not self.can_move:
            self.fail(peer_lost=True)
        elif not self.has_lost_peers:
            self.has_lost_peers = True
            self.later(_VERDICT_S, lambda: self.fail(peer_lost=True))
            self._move(is_planned=False)

    def _move(self, *, is_planned: bool) -> None:
        """They keep their processes, and act for another group from now on; if they are quiesced, or wait."""
        agent, last = self._agent, self.group
        if self._sent_to is None or last is None:
            return
        is_ready = self.is_ready if self.is_waiting else is_planned or self.has_lost_peers
        if not is_ready and not self.is_stopping:
            return
        (group, node_rank, run), self._sent_to = self._sent_to, None
        is_free = self.is_waiting or self.has_lost_peers or self._is_quiesced()
        if not is_free or self.is_stopping or len(self.living) < agent.state.me.nproc:
            agent.post(ev.WorkersCannotMove(last.number))
            return
        self._cluster.invariants.on_move(agent, group, run)
        world, step = self.world, self.reached
        self.node_rank = node_rank
        agent.post(ev.InventoryChanged(tuple(agent.memory.values())))
        self._enter(group, run)
        agent.post(ev.WorkersMoved(last.number, step, self.started_at))
        if world is not None:
            world.on_gone(agent)

    def _enter(self, group: Group, run: str) -> None:
        self.group, self.restore_point, self.page = group, None, 0
        self.is_waiting = self.can_move = self.has_lost_peers = False
        self._sent_to = None
        self.idle.clear()
        self.before = self.reached
        self.started_at = self._agent.clock()
        self.world = self._cluster.training.join(group, run)
        self.watch()
        if self._cluster.training.hands_off:
            self.later(
                self._cluster.random.uniform(0.0, 0.5), lambda: self._agent.post(ev.RestorePointAsked(group.number))
            )

    def watch(self) -> None:
        """From now on the agent looks after them, if hangs are looked for."""
        if self.world is not None and self.world.hang_limit_s:
            Watcher(self._agent, self.world)

    def tell_began(self) -> None:
        """All of them have made their first step."""
        assert self.world is not None
        now = self._agent.clock()
        loaded = max(self.started_at, now - (self._cluster.now - self.world.loaded_at))
        set_up = (self.started_at + loaded) / 2
        joined = (self.started_at + set_up) / 2
        entered = (self.started_at + joined) / 2
        can_move = self.can_move = self._cluster.training.moves
        self._agent.post(ev.RanksStarted(self.number, entered, joined, set_up, loaded, now, self.world.step, can_move))

    def _set_handoff(self, group: int, number: int, *, in_memory: bool) -> None:
        """It stands on their page, and they see it when they look."""
        if not self.number:
            return  # they are gone, and their agent does not know it yet
        assert group == self.number, "workers are told of another group's handoff"
        assert number > self.page, "workers are told twice"
        self.page, self.in_memory = number, in_memory
        self.later(self._cluster.random.uniform(0.0, 1.0), self._look_at_page)

    def _look_at_page(self) -> None:
        if self.world is not None:
            self.world.standstill.on_request(self._agent, self.page, in_memory=self.in_memory)

    def _is_quiesced(self) -> bool:
        return self.world is not None and self.world.standstill.is_saved and not self.is_stopping

    def _leave(self) -> None:
        """They are told that their group is over, and end by themselves."""
        self._cluster.invariants.on_leave(self._agent)
        self.is_stopping = True
        group = self.group
        self._agent.later(self._cluster.random.uniform(0.01, 0.3), lambda: self._be_gone(group, None))

    def later(self, delay_s: float, action: Callable[[], None]) -> None:
        """Something in these workers happens later, unless they are gone by then."""
        group = self.group
        self._cluster.after(delay_s, lambda: self._happen(group, action))

    def _happen(self, group: Group | None, action: Callable[[], None]) -> None:
        if group is not self.group or not self.living:
            return
        if self._agent.is_host_paused:
            self._waiting.append(lambda: self._happen(group, action))
        else:
            action()

    def wake(self) -> None:
        waiting, self._waiting = self._waiting, []
        for action in waiting:
            action()

    def _end(self, number: int, delay_s: float) -> None:
        if self.number == number:
            self.is_stopping = True
            group = self.group
            self._agent.later(delay_s, lambda: self._be_gone(group, 15))

    def vanish(self) -> None:
        """The agent is dead, and with it all that was its own."""
        world, self.group, self.living, self.world = self.world, None, set(), None
        if world is not None:
            world.on_gone(self._agent)

    def cannot_read(self) -> None:
        """Rank 0 cannot read the checkpoint that it must begin from."""
        self.exit(0, 1, "", unreadable="/ckpt: Stale file handle")

    def fail_with_script_error(self) -> None:
        """The script has one, which ends each of them."""
        for local_rank in sorted(self.living):
            self.exit(local_rank, 1, "boom", script_error="NameError: name 'x' is not defined (train.py, line 3)")

    def exit(self, local_rank: int, code: int, tail: str, *, unreadable: str = "", script_error: str = "") -> None:
        """One of them ends by itself; with a code below zero by that signal."""
        if local_rank not in self.living or self.group is None:
            return
        self.living.remove(local_rank)
        if code and tail != PEER_LOST and not unreadable:
            self._cluster.invariants.on_own_failure(self.number)
        step = self.world.reached if self.world is not None else 0
        ended = (None, -code) if code < 0 else (code, None)
        at = self._agent.wall()
        self._cluster.invariants.incidents.on_end(self._agent, self.group, local_rank)
        self._agent.post(
            ev.WorkerExited(self.number, local_rank, *ended, tail, step, at, unreadable, script_error=script_error)
        )
        if code and self.world is not None:
            self.world.on_gone(self._agent)
        if not self.living:
            group = self.group
            self._agent.later(self._cluster.random.uniform(0.0, 0.05), lambda: self._be_gone(group, FINISHED))

    def _fail_early(self, code: int) -> None:
        if self.living and not self._agent.is_dead:
            self.exit(min(self.living), code, "boom")

    def fail(self, *, peer_lost: bool) -> None:
        """One of them dies."""
        if self.living and not self._agent.is_dead:
            self.exit(min(self.living), 1, PEER_LOST if peer_lost else "boom")

    def finish(self) -> None:
        """All that live end well."""
        for local_rank in sorted(self.living):
            self.exit(local_rank, 0, "")

    def _be_gone(self, group: Group | None, signal: int | None) -> None:
        """Nothing of them is left; None: they left for a handoff."""
        if group is None or group is not self.group or self.is_stuck:
            return
        number, living, world = self.number, sorted(self.living), self.world
        self.group, self.living, self.world = None, set(), None
        agent = self._agent
        step = world.reached if world is not None else 0
        for local_rank in living:
            code = EXIT_TOLD if signal is None else None
            agent.post(ev.WorkerExited(number, local_rank, code, signal, "", step, agent.wall()))
            self._cluster.invariants.incidents.on_end(agent, group, local_rank)
        agent.post(ev.InventoryChanged(tuple(agent.memory.values())))
        agent.post(ev.WorkersGone(number))
        if world is not None and signal != FINISHED:
            world.on_gone(agent)
