"""One local rank of a group: what runs there, and what has become of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from agent.links.queries import RankState
    from agent.workers.launch_plan import RankCommand
    from agent.workers.process import Exited, Message, RankProcess
    from agent.workers.process_watcher import ProcessWatcher
    from agent.workers.worker_group import WorkerGroup


@dataclass
class LocalRank:
    """One rank as the watching thread sees it."""

    workers: WorkerGroup
    group: int
    command: RankCommand
    ward: ProcessWatcher | None = None
    """None: its guardian could not be spawned."""
    is_adopted: bool = False
    """It was a standby."""
    spawn_error: str = ""
    has_exited: bool = False
    cause: Exited | None = None
    """How it ended, if that is its own failure and not another's consequence."""
    is_gone: bool = False

    @property
    def process(self) -> RankProcess | None:
        """None: as above."""
        return self.ward.process if self.ward else None

    @property
    def step(self) -> int:
        """Highest step that it committed."""
        return self.process.page.step if self.process else 0

    @property
    def unreadable(self) -> str:
        """What it could not read of what it must begin from."""
        return self.process.channel.unreadable if self.process else ""

    @property
    def state(self) -> RankState:
        """What it does, for who watches."""
        page = self.process.page if self.process else None
        if page is None or self.has_exited:
            return "ended"
        if page.stopped:
            return "standing"
        if page.phase:
            return "phase"
        return "training" if page.restored or not self.workers.commits else "starting"

    def start(self) -> None:
        """Let it run."""
        if self.process and self.is_adopted:
            self.process.adopt(self.command)
        elif self.process:
            self.process.start()

    def hear(self, message: Message) -> None:
        """What its guardian tells."""
        if message.exited:
            self.workers.on_exit(self, message.exited)
        if message.gone:
            self.workers.on_gone(self)

    def hear_question(self) -> bool:
        """What it says itself; False: there will be no more."""
        return self.workers.on_question(self)
