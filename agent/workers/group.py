"""All local ranks of one group as a unit: started together, watched by one thread, killed together.

The thread waits on descriptors. For each rank: its channel (what the worker asks, see `channel.py`), its guardian's
wire (packets, see `guardian.py`), then the guardian's pidfd. That one is the last word: a process shows as ended only
after its children have been handed on, so what a killed guardian left can be found only then (`reaper.py`). Only ranks
that stand still for a handoff while they are asked to end are also looked at now and then: a page tells nobody that it
changes.

What it sees it posts, in this order: `ResumeAsked`, the first time that a worker of the group does, `Began` once all
have made a step, and `PublishAsked` for what a worker asks, `WorkerExited` for each rank, and once nothing of any is
left `CopiesHeld`, if they may make snapshots, and `WorkersGone`. What ranks are seen to do, or not to do, is posted by
the lookout (`lookout.py`).
"""

from __future__ import annotations

import os
import selectors
import signal
import socket
import threading
import time
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import structlog

from agent.config import HangConfig
from agent.core.events import Began, PublishAsked, ResumeAsked, WorkerExited, WorkersGone
from agent.workers.channel import GarbageError, resume_answer, verdict_answer
from agent.workers.lookout import Lookout
from agent.workers.process import CANNOT_START, Exited, RankProcess
from agent.workers.reaper import Orphans, become_subreaper
from agent.workers.snapshots import Snapshots

if TYPE_CHECKING:
    from collections.abc import Callable

    from agent.core.events import Event
    from agent.core.model import Checkpoint, Copy, Resume
    from agent.peers.parts import Part
    from agent.workers.channel import Channel
    from agent.workers.launch import Launch, RankCommand

_GUARDIAN_KILLED = "elastic-agent: the rank's guardian process was killed, and the rank with it"
_WAKE_BYTES = 64
_LAST_WORDS = 8
"""Messages. A worker that ends has at most one question open and one thing to say; a flood is not heard out."""
_LOOK_EVERY_S = 0.05
_USUAL = HangConfig()
_log = structlog.get_logger()


@dataclass
class _Rank:
    """One rank as the watching thread sees it."""

    command: RankCommand
    process: RankProcess | None
    """None: its guardian could not be spawned."""
    spawn_error: str = ""
    has_exited: bool = False
    is_gone: bool = False

    @property
    def step(self) -> int:
        """Highest step that it committed."""
        return self.process.page.step if self.process else 0

    @property
    def unreadable(self) -> str:
        """What it could not read of what it must begin from."""
        return self.process.channel.unreadable if self.process else ""


class LocalWorkers:
    """This node's rank processes. Methods may be called from one thread; `post` is called from another."""

    def __init__(
        self,
        post: Callable[[Event], None],
        hang: HangConfig = _USUAL,
        hand_over: Callable[[Part], None] = lambda _: None,
    ) -> None:
        """`hand_over` is given what neighbours are to keep of new snapshots; it may not block."""
        become_subreaper()
        self._post = post
        self.snapshots = Snapshots(post, hand_over)
        """What is held of the training in memory."""
        self._lookout = Lookout(post, hang)
        self._selector = selectors.DefaultSelector()
        self._lock = threading.Lock()
        self._group = 0
        self._ranks: tuple[_Rank, ...] = ()
        self._resume: Resume | None = None
        """Of the newest group of which it is known where it begins."""
        self._has_asked_resume = False
        self._has_begun = False
        self._is_ending = False
        self._is_new = False
        self._is_closing = False
        self._wake_r, self._wake_w = socket.socketpair()
        self._wake_r.setblocking(False)
        self._selector.register(self._wake_r, selectors.EVENT_READ, self._on_wake)
        self._thread = threading.Thread(target=self._watch, name="workers", daemon=True)
        self._thread.start()

    def start(self, launch: Launch) -> None:
        """Start all ranks. RuntimeError: workers of an older group live (one group at a time on a node)."""
        with self._lock:
            if not all(rank.is_gone for rank in self._ranks):
                raise RuntimeError(f"group {launch.group} may not start: workers of group {self._group} live")
        # All guardians first: they come up side by side.
        ranks = tuple(_spawn(command) for command in launch.commands)
        if launch.source is not None:
            self.snapshots.begin(launch.source, launch.group, _memories(ranks))
        for rank in ranks:
            if rank.process:
                rank.process.start()
        with self._lock:
            self._group, self._ranks, self._is_new = launch.group, ranks, True
            self._has_asked_resume = self._has_begun = self._is_ending = False
        self._wake()
        self._lookout.begin(launch.group, [rank.process for rank in ranks if rank.process])

    def terminate(self, group: int) -> None:
        """Ask each rank of this group to end, if it is the one that runs; see `RankProcess.ask_to_end`."""
        with self._lock:
            self._is_ending |= group == self._group
            if self._is_ending:
                self._lookout.end()
        self._wake()

    def kill(self, group: int) -> None:
        """SIGKILL to all processes of this group, if it is the one that runs."""
        with self._lock:
            if group == self._group:
                self._lookout.end()
            for process in self._living() if group == self._group else ():
                process.kill()

    def tell_resume(self, resume: Resume) -> None:
        """Tell each rank of its group that asks, or has asked, where to begin. The group may start later."""
        with self._lock:
            if resume.group >= self._group:
                self._resume = resume
                self.snapshots.note_resume(resume)
                self._answer_resume()

    def tell_verdict(self, group: int, copy: Copy, checkpoint: Checkpoint | None, reason: str) -> None:
        """Tell the rank that asked whether its checkpoint counts: as committed, or None and why not."""
        with self._lock:
            for channel in self._channels() if group == self._group else ():
                if channel.asked is not None and channel.asked.copy == copy:
                    channel.asked = None
                    channel.send(verdict_answer(copy, checkpoint, reason))

    def tell_handoff(self, group: int, number: int) -> None:
        """Put the wish for a handoff on the page of each rank of this group, if it is the one that runs."""
        with self._lock:
            for process in self._living() if group == self._group else ():
                process.page.handoff = number

    def steps(self) -> int:
        """Highest step committed by any rank of the group started last; 0 before the first."""
        with self._lock:
            return max((rank.step for rank in self._ranks), default=0)

    def close(self) -> None:
        """Kill everything, and return when nothing is left."""
        self.kill(self._group)
        self._lookout.close()
        self._is_closing = True
        self._wake()
        self._thread.join()
        for rank in self._ranks:  # of which some live only if the thread was ended by an error
            if rank.process:
                rank.process.wait()
        self.snapshots.close()
        self._selector.close()
        self._wake_r.close()
        self._wake_w.close()

    def _living(self) -> list[RankProcess]:
        return [rank.process for rank in self._ranks if rank.process and not rank.is_gone]

    def _channels(self) -> list[Channel]:
        return [rank.process.channel for rank in self._ranks if rank.process]

    def _answer_resume(self) -> None:
        """With the lock held: tell the ranks that wait for it where to begin."""
        resume = self._resume
        if resume is None or resume.group != self._group:
            return
        is_committed = resume.checkpoint is not None and resume.checkpoint.copy == resume.copy
        for channel in self._channels():
            if channel.asks_resume:
                channel.asks_resume = False
                with self.snapshots.pieces(None if is_committed else resume.copy) as (pieces, memories):
                    channel.send(resume_answer(resume, pieces), memories)

    def _wake(self) -> None:
        self._wake_w.send(b".")

    # Below: the watching thread.

    def _watch(self) -> None:
        while not self._is_closing or self._is_new or len(self._selector.get_map()) > 1:
            for key, _ in self._selector.select(_LOOK_EVERY_S if self._ask_to_end() else None):
                if self._selector.get_map().get(key.fd) is key:  # else another's handler has ended it just now
                    key.data()

    def _on(self, source: RankProcess | Channel | int, handler: Callable[[], None]) -> None:
        self._selector.register(source, selectors.EVENT_READ, handler)

    def _is_watched(self, source: RankProcess | Channel) -> bool:
        return any(key.fileobj is source for key in self._selector.get_map().values())

    def _on_wake(self) -> None:
        self._wake_r.recv(_WAKE_BYTES)
        with self._lock:
            ranks, self._is_new = self._ranks if self._is_new else (), False
        for rank in ranks:
            if rank.process:
                self._on(rank.process, partial(self._on_packets, rank, rank.process))
                self._on(rank.process.channel, partial(self._on_question, rank, rank.process.channel))
                self._on(rank.process.pidfd, partial(self._on_guardian_end, rank, rank.process))
            else:
                self._post_exit(
                    rank, Exited(exit_code=CANNOT_START, signal=None, tail=rank.spawn_error, at=time.time())
                )
                self._post_gone(rank)

    def _ask_to_end(self) -> bool:
        """Ask those to end that should; True: some must be asked again."""
        with self._lock:
            still = [process for process in self._living() if process.ask_to_end()] if self._is_ending else []
        return bool(still)

    def _on_packets(self, rank: _Rank, process: RankProcess) -> None:
        messages, is_over = process.receive()
        if is_over:
            self._selector.unregister(process)
        for message in messages:
            if message.warning:
                _log.warning(message.warning)
            if message.exited:
                self._hear_out(rank, process.channel)
                self._post_exit(rank, message.exited)
            if message.gone:
                self._post_gone(rank)

    def _on_question(self, rank: _Rank, channel: Channel) -> None:
        """One at a time: a worker that asks without end must not keep the thread from the others."""
        try:
            with self._lock:
                had_asked, had_snapped = channel.asked, channel.snapped
                is_open = channel.receive() and not rank.is_gone
                asked = channel.asked
                is_first = channel.has_asked_resume and not self._has_asked_resume
                self._has_asked_resume |= is_first
                began = self._began()
                self._answer_resume()
        except GarbageError as error:
            _log.warning(f"rank {rank.command.rank} sent what is no message to the agent: {error}")
            return
        if channel.snapped != had_snapped:
            self.snapshots.take(rank.command.rank, channel.snapped)
        if not is_open:
            self._selector.unregister(channel)
        elif asked is not None and asked is not had_asked:
            self._post(PublishAsked(group=self._group, checkpoint=asked))
        elif is_first:
            self._post(ResumeAsked(self._group))
        elif began is not None:
            self._post(began)

    def _began(self) -> Began | None:
        """With the lock held: what is to be told once all ranks have made their first step."""
        told = [channel.began for channel in self._channels()]
        if self._has_begun or None in told:
            return None
        self._has_begun = True
        latest = {
            name: max(getattr(began, name) for began in told)
            for name in ("entered", "joined", "loaded", "stepped", "step")
        }
        return Began(group=self._group, **latest)

    def _hear_out(self, rank: _Rank, channel: Channel) -> None:
        """Take what a worker said before it ended, although its end was seen first."""
        for _ in range(_LAST_WORDS):
            if self._is_watched(channel):
                self._on_question(rank, channel)

    def _on_guardian_end(self, rank: _Rank, process: RankProcess) -> None:
        if self._is_watched(process):
            self._on_packets(rank, process)  # what it said before it ended
        self._hear_out(rank, process.channel)
        self._selector.unregister(process.pidfd)
        if self._is_watched(process.channel):
            self._selector.unregister(process.channel)
        with self._lock:
            process.close()
        if rank.is_gone:
            return
        if not rank.has_exited:
            self._post_exit(rank, Exited(exit_code=None, signal=signal.SIGKILL, tail=_GUARDIAN_KILLED, at=time.time()))
        self._hunt(rank, Orphans(process.mark, process.worker_pid))

    def _hunt(self, rank: _Rank, orphans: Orphans) -> None:
        """Kill what a killed guardian left; come back at each death, since that may leave more."""
        pid = orphans.kill()
        if pid is None:
            self._post_gone(rank)
            return
        pidfd = os.pidfd_open(pid)
        self._on(pidfd, partial(self._on_orphan_end, rank, orphans, pidfd))

    def _on_orphan_end(self, rank: _Rank, orphans: Orphans, pidfd: int) -> None:
        self._selector.unregister(pidfd)
        os.close(pidfd)
        self._hunt(rank, orphans)

    def _post_exit(self, rank: _Rank, exited: Exited) -> None:
        rank.has_exited = True
        self._post(
            WorkerExited(
                group=self._group,
                local_rank=rank.command.local_rank,
                exit_code=exited.exit_code,
                signal=exited.signal,
                stderr_tail=exited.tail,
                step=rank.step,
                unreadable=rank.unreadable,
                at=exited.at,
                error=exited.error,
                traceback=exited.traceback,
                why=exited.why,
            )
        )

    def _post_gone(self, rank: _Rank) -> None:
        with self._lock:
            rank.is_gone = True
            is_last = all(other.is_gone for other in self._ranks)
        if is_last:
            self.snapshots.end()
            self._post(WorkersGone(group=self._group))


def _memories(ranks: tuple[_Rank, ...]) -> dict[int, int]:
    """Where they put their snapshots."""
    processes = (rank.process for rank in ranks if rank.process)
    return {process.command.rank: process.memory for process in processes if process.memory is not None}


def _spawn(command: RankCommand) -> _Rank:
    try:
        return _Rank(command, RankProcess(command))
    except OSError as error:
        return _Rank(command, None, f"elastic-agent: cannot start the guardian of rank {command.rank}: {error}")
