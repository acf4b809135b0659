"""How a simulated agent notices that its ranks make no step, as `step_watch.py` and `hang_monitor.py` do.

It looks once a second. A limit without a step is suspicious; half as much again, with stacks that stand still, is
"still"; twice the limit is certain; and a step that comes after all is told too. Before the first step of a group all
takes three times as long. Time in which the agent itself was stopped hardly counts. While a neighbour is silent it
may be suspicious sooner.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from agent.core import events as ev
from agent.core.incident import RankStall

if TYPE_CHECKING:
    from simulation.agent import Agent
    from simulation.training import World

_LOOK_S = 1.0
_UNSEEN_S = 5.0
_FIRST = 3.0

Stage = Literal["over", "suspicious", "still", "certain"]


class Watcher:
    """Looks after one agent's ranks of one group."""

    def __init__(self, agent: Agent, world: World) -> None:
        self._agent = agent
        self._world = world
        self._stage: Stage = "over"
        self._made = 0
        self._quiet_s = 0.0
        self._looked_at = agent.clock()
        self._look_again()

    def _look_again(self) -> None:
        self._agent.later(_LOOK_S, self._look)

    def _look(self) -> None:
        ranks, world, now = self._agent.ranks, self._world, self._agent.clock()
        if ranks.world is not world or not ranks.living:
            return
        passed_s, self._looked_at = min(now - self._looked_at, _UNSEEN_S), now
        is_due = world.is_begun and not world.publisher.is_blocking
        has_moved, self._made = world.made != self._made, world.made
        self._quiet_s = 0.0 if has_moved or not is_due else self._quiet_s + passed_s
        limit_s = self._world.hang_limit_s * (1.0 if world.made else _FIRST)
        soon_s = self._agent.state.hang_threshold.after_s
        soon_s = limit_s if soon_s is None or not world.made else min(soon_s, limit_s)
        stage = self._stage_of(self._quiet_s / limit_s, is_suspicious=self._quiet_s >= soon_s)
        if stage != self._stage:
            self._tell(stage, limit_s)
        self._look_again()

    def _stage_of(self, share: float, *, is_suspicious: bool) -> Stage:
        if share >= 2.0:
            return "certain"
        if share >= 1.5 and "runs" not in self._agent.ranks.idle.values():
            return "still"
        return "suspicious" if is_suspicious else "over"

    def _tell(self, stage: Stage, limit_s: float) -> None:
        self._stage = stage
        ranks, number = self._agent.ranks, self._world.group.number
        first = self._world.group.first_rank(ranks.node_rank)
        stalls = tuple(self._stall(first, local_rank) for local_rank in range(self._agent.state.me.nproc))
        if stage in {"still", "certain"}:
            self._agent.cluster.invariants.on_hang(number)
        self._agent.post(ev.RanksStalled(number, stage, self._quiet_s, limit_s, stalls))

    def _stall(self, first: int, local_rank: int) -> RankStall:
        ranks = self._agent.ranks
        doing = "exited" if local_rank not in ranks.living else ranks.idle.get(local_rank, "waits")
        where = {"exited": "", "waits": "train.py:40 in step"}.get(doing, "train.py:33 in load")
        step = self._world.step if self._world.made else 0
        return RankStall(rank=first + local_rank, step=step, doing=doing, where=where, stack=where)
