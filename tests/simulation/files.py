"""Checkpoint files as objects, and the publisher that writes, commits, renames and deletes them.

The order is that of `trainer_runtime/writer.py` and `resume.py`: a private name; the question to the agent; after a
yes the rename, then the deletion of what the committed record lists as superseded, private name first. A reader
that finds only the private name completes the rename. The publisher may be stopped, or die, between any two of these.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from agent.core import effects as fx
from agent.core import events as ev
from agent.core.saved_states import Checkpoint, RestorePoint, StateId
from agent.observe.messages import describe
from trainer_runtime.contract import EXIT_RESTART

if TYPE_CHECKING:
    from simulation.agent import Agent
    from simulation.training import Training, World


def final_name(private: str) -> str:
    """The name that a directory gets once it is committed."""
    return private[1:].partition("~")[0]


class Files:
    """A directory that all nodes share, or, as it is told in each record, one on each node's own disk."""

    def __init__(self) -> None:
        self.names: dict[str, StateId] = {}
        self.damaged: set[StateId] = set()
        self.away: set[str] = set()
        """Nodes that cannot read the directory for now."""
        self.deletions = 0

    def is_readable(self, committed: Checkpoint) -> bool:
        return any(self.names.get(name) == committed.copy for name in (committed.private, committed.name))

    def read(self, committed: Checkpoint) -> StateId:
        """Read what was committed, or, if it is damaged, the newest of those kept that is not."""
        for private in (committed.private, *reversed(committed.kept)):
            self.rename(private)
            copy = self.names.get(final_name(private))
            if copy is not None and copy not in self.damaged:
                return copy
        raise AssertionError(f"nothing of {committed} can be read: {sorted(self.names)}")

    def copy_of(self, private: str) -> StateId | None:
        """What lies under a name, whether in place or not."""
        return self.names.get(private) or self.names.get(final_name(private))

    def rename(self, private: str) -> None:
        """Put it in place, unless something is there already."""
        copy = self.names.get(private)
        if copy is not None and final_name(private) not in self.names:
            self.names[final_name(private)] = self.names.pop(private)

    def discard(self, private: str) -> None:
        """Delete what was not committed. Under the final name may be the same step, saved by another agent."""
        self.deletions += 1
        self.names.pop(private, None)

    def delete(self, private: str) -> None:
        self.deletions += 1
        self.names.pop(private, None)
        self.names.pop(final_name(private), None)


class Publisher:
    """Rank 0's writer in one world."""

    def __init__(self, world: World, training: Training) -> None:
        self._world = world
        self._training = training
        self._cluster = training.cluster
        self._files = training.files
        self._kept: tuple[str, ...] = ()
        self._asked: tuple[Agent, Checkpoint] | None = None
        self.is_blocking = False
        """Nobody steps until a rollback is committed."""
        self.verdicts: list[bool] = []

    def inherit(self, restore_point: RestorePoint) -> None:
        committed = restore_point.checkpoint
        if committed is not None:
            self._kept = (*committed.kept, committed.private)

    @property
    def is_busy(self) -> bool:
        """The last one is not settled yet."""
        return self._asked is not None

    def publish(self, agent: Agent, copy: StateId, *, handoff: int = 0) -> None:
        """Write a checkpoint; then ask."""
        if self.is_busy:
            return
        name = _stem(copy)
        private = f".{name}~{len(self._files.names)}"
        self._files.names[private] = copy
        cut = max(0, len(self._kept) - (self._training.keep - 1))
        self._ask(agent, copy, private, kept=self._kept[cut:], superseded=self._kept[:cut], handoff=handoff)

    def roll_back(self, agent: Agent, copy: StateId) -> None:
        """What was committed is damaged: commit the older one that was read."""
        self.is_blocking = True
        place = [final_name(private) for private in self._kept].index(_stem(copy))
        self._ask(agent, copy, self._kept[place], kept=self._kept[:place], superseded=(), is_rollback=True)

    def _ask(
        self,
        agent: Agent,
        copy: StateId,
        private: str,
        *,
        kept: tuple[str, ...],
        superseded: tuple[str, ...],
        is_rollback: bool = False,
        handoff: int = 0,
    ) -> None:
        asked = Checkpoint(
            copy=copy,
            name=final_name(private),
            private=private,
            manifest_sha256="",
            kept=kept,
            superseded=superseded,
            is_rollback=is_rollback,
            handoff=handoff,
            node=agent.name if self._training.is_local else "",
        )
        self._asked = (agent, asked)
        agent.ranks.later(self._training.step_s(), lambda: agent.post(ev.PublishAsked(self._world.group.number, asked)))

    def on_verdict(self, verdict: fx.AnswerPublish) -> None:
        if self._asked is None or verdict.copy != self._asked[1].copy:
            return
        (agent, asked), self._asked = self._asked, None
        committed, files = verdict.checkpoint, self._files
        self.verdicts.append(committed is not None)
        self.is_blocking = self.is_blocking and committed is None
        if committed is None:
            why = describe(verdict.reason) if verdict.reason is not None else ""
            self._cluster.tell(f"{agent.name} may not commit: {why}")
            self._world.standstill.on_failed(asked.handoff)
            if asked.is_rollback:  # what was kept stays, and rank 0 ends
                agent.ranks.later(self._training.step_s(), lambda: agent.ranks.exit(0, EXIT_RESTART, ""))
            else:
                agent.ranks.later(self._training.step_s(), lambda: files.discard(asked.private))
            return
        self._kept = (*committed.kept, committed.private)
        if committed.is_late:
            self._world.standstill.on_failed(committed.handoff)
        else:
            self._world.standstill.on_saved(committed.handoff)
        agent.ranks.later(self._training.step_s(), lambda: self._place(agent, committed))

    def _place(self, agent: Agent, committed: Checkpoint) -> None:
        self._files.rename(committed.private)
        for private in committed.superseded:
            agent.ranks.later(self._training.step_s(), lambda private=private: self._files.delete(private))


class LastSaver:
    """The process that writes a checkpoint from an agent's memory before the agent leaves."""

    def __init__(self, agent: Agent) -> None:
        self._agent = agent
        self._asked: Checkpoint | None = None
        self.is_failing = False
        """It ends before it has written anything."""

    def act(self, effect: fx.SaveSnapshot) -> None:
        agent, training = self._agent, self._agent.cluster.training
        assert agent.memory[effect.copy].has_common, "a snapshot that is not whole is to be saved"
        if self.is_failing:
            agent.later(training.step_s(), lambda: agent.post(ev.SaveEnded()))
            return
        name = _stem(effect.copy)
        private = f".{name}~{len(training.files.names)}"
        training.files.names[private] = effect.copy
        committed = effect.committed
        kept = (*committed.kept, committed.private) if committed is not None else ()
        cut = max(0, len(kept) - (training.keep - 1))
        self._asked = Checkpoint(
            copy=effect.copy,
            name=final_name(private),
            private=private,
            manifest_sha256="",
            kept=kept[cut:],
            superseded=kept[:cut],
            node=agent.name if training.is_local else "",
        )
        asked = ev.PublishAsked(effect.group, self._asked)
        agent.later(training.step_s(), lambda: agent.post(asked))

    def on_verdict(self, verdict: fx.AnswerPublish) -> None:
        """The process puts its files in place, or deletes them, and ends."""
        asked, files = self._asked, self._agent.cluster.training.files
        if asked is None or verdict.copy != asked.copy:
            return
        self._asked = None
        if verdict.checkpoint is None:
            files.names.pop(asked.private, None)  # the final name may be that of another agent's checkpoint
        else:
            files.rename(asked.private)
            for private in asked.superseded:
                files.delete(private)
        self._agent.post(ev.SaveEnded())


def _stem(copy: StateId) -> str:
    return f"{copy.run}-{copy.group}-{copy.step}-{copy.save}"
