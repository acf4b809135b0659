"""One local rank of a group: its process, and how it ended."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec

from agent.links.queries import LiveRank

if TYPE_CHECKING:
    from agent.links.queries import RankState
    from agent.workers.launch_plan import RankCommand
    from agent.workers.process import Exited, Message, RankProcess
    from agent.workers.process_watcher import ProcessWatcher
    from agent.workers.worker_group import WorkerGroup


@dataclass
class LocalRank:
    """One rank, as the watching thread sees it."""

    workers: WorkerGroup
    group: int
    command: RankCommand
    watcher: ProcessWatcher | None = None
    """None: the guardian could not be spawned."""
    is_adopted: bool = False
    """Whether its process was a standby."""
    spawn_error: str = ""
    has_exited: bool = False
    cause: Exited | None = None
    """How it ended, if it failed by itself and not as a consequence of another failure."""
    is_gone: bool = False

    @property
    def process(self) -> RankProcess | None:
        """The rank's process. None: the guardian could not be spawned."""
        return self.watcher.process if self.watcher else None

    @property
    def step(self) -> int:
        """Highest step that it committed."""
        return self.process.page.step if self.process else 0

    @property
    def unreadable(self) -> str:
        """Why it could not read the state that it must start from; empty: it could."""
        return self.process.channel.unreadable if self.process else ""

    @property
    def state(self) -> RankState:
        """What the rank is doing, for status displays."""
        page = self.process.page if self.process else None
        if page is None or self.has_exited:
            return "ended"
        if page.quiesced:
            return "quiesced"
        if page.phase:
            return "phase"
        return "training" if page.restored or not self.workers.has_asked_restore_point else "starting"

    def live(self) -> LiveRank:
        """Return what a status display shows of this rank. Rank 0 is asked for its metrics, for the next call."""
        live = LiveRank(rank=self.command.rank, step=self.step, state=self.state)
        if self.command.rank != 0 or self.process is None:
            return live
        page = self.process.page
        step, metrics = page.metrics_step, page.metrics
        page.metrics_asked += 1
        if not step:
            return live
        finite = {name: value if math.isfinite(value) else None for name, value in metrics.items()}
        return msgspec.structs.replace(live, metrics_step=step, metrics=finite)

    def start(self, *, is_waiting: bool = False) -> None:
        """Start the worker, or turn the standby into this rank. `is_waiting`: it is to set up, and to wait then."""
        if self.process is None or (is_waiting and self.process.is_ahead):
            return
        if self.process.is_ahead:
            self.enter()
        elif self.is_adopted:
            self.process.adopt(self.command)
        else:
            self.process.start()

    def enter(self) -> None:
        """Send the process, which has set up ahead, into the group; if it still sets up, do nothing: call again."""
        if self.process and self.process.is_ahead and self.process.channel.awaits_place:
            self.process.move(self.command)

    def on_guardian_message(self, message: Message) -> None:
        """Handle a packet from the guardian."""
        if message.exited:
            self.workers.on_exit(self, message.exited)
        if message.gone:
            self.workers.on_gone(self)

    def on_worker_message(self) -> bool:
        """Handle one message from the worker. Return False if there will be no more."""
        return self.workers.on_message(self)
