"""All local ranks of one group as a unit: started together, watched by one thread, killed together.

The thread is a reactor's (`reactor.py`): for each rank it waits on its guardian's wire and end (`process_watcher.py`),
and on its channel (what the worker asks, see `channel.py`). Only ranks that stand still for a handoff while they are
asked to end are also looked at now and then: a page tells nobody that it changes. A rank whose standby is warm takes
that process over (`standbys.py`).

What it sees it posts, in this order: `RestorePointAsked`, the first time that a worker of the group does,
`RanksStarted` once all have made a step, `RanksQuiesced` when all do so for a handoff, with snapshots, and again when
the neighbours have their parts of these, and `PublishAsked` for what a worker asks, `WorkerExited` for each rank, and
once nothing of any is left `CopiesHeld`, if they may make snapshots, and `WorkersGone`. What ranks are seen to do, or
not to do, is posted by the lookout (`agent/diagnose/hang_monitor.py`).
"""

from __future__ import annotations

import threading
import time
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from agent.config import HangConfig
from agent.core.budget import is_peer_lost
from agent.core.events import PublishAsked, RanksQuiesced, RanksStarted, RestorePointAsked, WorkerExited, WorkersGone
from agent.diagnose.hang_monitor import HangMonitor
from agent.links.queries import LiveRank
from agent.observe.failed_rank import last_lines
from agent.observe.log import log
from agent.observe.stderr import standard_error
from agent.workers.channel import MessageError, resume_answer, verdict_answer
from agent.workers.launch_plan import StandbyPlan
from agent.workers.local_rank import LocalRank
from agent.workers.process import CANNOT_START, Exited, RankProcess, cannot_start
from agent.workers.process_watcher import ProcessWatcher
from agent.workers.reactor import Reactor
from agent.workers.reaper import become_subreaper
from agent.workers.snapshot_store import SnapshotStore
from agent.workers.standbys import Standbys
from trainer_runtime.contract import EXIT_RESTART

if TYPE_CHECKING:
    from collections.abc import Callable
    from collections.abc import Set as AbstractSet

    from agent.core.events import Event
    from agent.core.model import Checkpoint, Failure, RestorePoint, StateId
    from agent.links.snapshot_parts import SnapshotPart
    from agent.workers.channel import Channel, ReplicaMessage
    from agent.workers.launch_plan import Launch, RankCommand

_LOOK_EVERY_S = 0.05
_QUIET_S = 2.5
"""A script that has imported nothing for so long has most likely begun to train, if it is none that tells."""
_BEGUN_WITHIN_S = 60.0
"""Standbys for the next group are started then, though this one has not made its first step."""
_USUAL = HangConfig()


class WorkerGroup:
    """This node's rank processes. Methods may be called from one thread; `post` is called from another."""

    def __init__(
        self,
        post: Callable[[Event], None],
        hang: HangConfig = _USUAL,
        standbys: StandbyPlan | None = None,
        hand_over: Callable[[SnapshotPart], None] = lambda _: None,
        when_handed_over: Callable[[Callable[[], None]], None] = lambda then: then(),
        on_copy: Callable[[ReplicaMessage], None] = lambda _: None,
    ) -> None:
        """Make ready.

        Args:
            post: given what happens.
            hang: when ranks hang.
            standbys: how to keep them; None: there are none.
            hand_over: given what neighbours are to keep of new snapshots; may not block.
            when_handed_over: given what to call once they have it; may not block.
            on_copy: given what a parameter server says of the copy of a shard.
        """
        become_subreaper()
        self._post = post
        self.snapshots = SnapshotStore(post, hand_over)
        """What is held of the training in memory."""
        self._when_handed_over = when_handed_over
        self._on_copy = on_copy
        self._lookout = HangMonitor(post, hang)
        self._lock = threading.Lock()
        self._group = 0
        self._ranks: tuple[LocalRank, ...] = ()
        self._resume: RestorePoint | None = None
        """Of the newest group of which it is known where it begins."""
        self._has_asked_resume = False
        self._has_begun = False
        self._stood = 0
        """Number of the newest handoff for which all ranks stood still with snapshots."""
        self._is_ending = False
        self._told_rank: int | None = None
        """The rank of this group whose last lines were shown, since the console has nothing of it."""
        self._reactor = Reactor("workers")
        self._standbys = Standbys(standbys or StandbyPlan(), self._reactor, self._lock, post)
        if standbys:
            self._standbys.begin()

    def start(self, launch: Launch) -> None:
        """Start all ranks. RuntimeError: workers of an older group live (one group at a time on a node)."""
        with self._lock:
            if not all(rank.is_gone for rank in self._ranks):
                raise RuntimeError(f"group {launch.group} may not start: workers of group {self._group} live")
            # All guardians first: they come up side by side.
            ranks = tuple(self._seat(command, launch.group) for command in launch.commands)
            self._group, self._ranks = launch.group, ranks
            self._has_asked_resume = self._has_begun = self._is_ending = False
            self._told_rank = None
            self._stood = 0
            # Still with the lock: a standby that dies as it is taken is let go of by the watching thread.
            if launch.source is not None:
                self.snapshots.begin(launch.source, launch.group, _memories(ranks))
            for rank in ranks:
                rank.start()
        self._reactor.soon(partial(self._tend, ranks))
        self._lookout.begin(launch.group, [rank.process for rank in ranks if rank.process])
        self._reactor.later(_QUIET_S, partial(self._refill_in_time, launch.group, _QUIET_S, -1))

    def terminate(self, group: int) -> None:
        """Ask each rank of this group to end, if it is the one that runs; see `RankProcess.ask_to_end`."""
        with self._lock:
            is_new = group == self._group and not self._is_ending
            self._is_ending |= is_new
        if is_new:
            self._lookout.end()
            self._reactor.soon(self._keep_asking_to_end)

    def kill(self, group: int) -> None:
        """SIGKILL to all processes of this group, if it is the one that runs."""
        with self._lock:
            if group == self._group:
                self._lookout.end()
            if group == self._group and not self._is_ending:
                self._tell_cause()
            # Those that have ended, too: the guardian may wait with what it shows for the end of the group.
            for rank in self._ranks if group == self._group else ():
                if rank.process:
                    rank.process.kill()

    def _tell_cause(self) -> None:
        """With the lock held: show what ended this group, if the console has nothing of it, before its consequences."""
        causes = sorted((rank.cause.at, rank.command.rank, rank) for rank in self._ranks if rank.cause)
        shown = [rank for rank in self._ranks if _is_shown(rank)]
        if self._told_rank is not None or not causes or not shown or any(rank.cause for rank in shown):
            return
        _, self._told_rank, first = causes[0]
        assert first.cause is not None  # noqa: S101 - looked for above
        how = first.cause.error or f"code {first.cause.exit_code}"
        standard_error().write(last_lines(f"rank {self._told_rank} ended with {how}", first.cause))

    def tell_resume(self, resume: RestorePoint) -> None:
        """Tell each rank of its group that asks, or has asked, where to begin. The group may start later."""
        with self._lock:
            if resume.group >= self._group:
                self._resume = resume
                self.snapshots.note_resume(resume)
                self._answer_resume()

    def tell_verdict(self, group: int, copy: StateId, checkpoint: Checkpoint | None, reason: str) -> None:
        """Tell the rank that asked whether its checkpoint counts: as committed, or None and why not."""
        with self._lock:
            for channel in self._channels() if group == self._group else ():
                if channel.asked is not None and channel.asked.copy == copy:
                    channel.asked = None
                    channel.send(verdict_answer(copy, checkpoint, reason))

    def tell_handoff(self, group: int, number: int, *, in_memory: bool = False) -> None:
        """Put the wish for a handoff on the page of each rank of this group, if it is the one that runs.

        Args:
            group: whose ranks are meant.
            number: of the handoff.
            in_memory: snapshots are enough.
        """
        with self._lock:
            for process in self._living() if group == self._group else ():
                process.page.in_memory = int(in_memory)
                process.page.handoff = number

    def tell(self, said: dict[str, object]) -> None:
        """Send processes of a parameter-server job a message; see `trainer_runtime.ps.control_messages`."""
        with self._lock:
            for channel in self._channels():
                channel.send(said)

    def look_out(self, after_s: float | None) -> None:
        """Tell of ranks that make no step after so long already, in seconds; None: after the usual limit."""
        self._lookout.suspect_after(after_s)

    @property
    def commits(self) -> bool:
        """Whether a rank of this group has asked where to begin: else nobody can tell what they do."""
        return self._has_asked_resume

    def has_shown_errors(self, failure: Failure) -> bool:
        """Whether what ended this rank of the group started last is on the console; what ended all is, if one is."""
        # Without an exception its last lines are of both streams.
        streams = {2} if failure.error else {1, 2}
        shown = {each.command.rank for each in self._ranks if _is_shown(each, streams)}
        return failure.rank in {*shown, self._told_rank} or bool(shown and failure.mistake)

    def steps(self) -> int:
        """Highest step committed by any rank of the group started last; 0 before the first."""
        with self._lock:
            return max((rank.step for rank in self._ranks), default=0)

    def pulse(self) -> tuple[int, tuple[LiveRank, ...]]:
        """The group started last, and how its ranks are. From any thread; waits for nothing."""
        ranks = self._ranks
        return self._group, tuple(LiveRank(rank=rank.command.rank, step=rank.step, state=rank.state) for rank in ranks)

    def close(self) -> None:
        """Kill everything, and return when nothing is left."""
        self.kill(self._group)
        self._lookout.close()
        self._standbys.close()
        self._reactor.close()
        for rank in self._ranks:  # of which some live only if the thread was ended by an error
            if rank.process:
                rank.process.wait()
        self.snapshots.close()

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

    def _seat(self, command: RankCommand, group: int) -> LocalRank:
        """With the lock held: a rank, whose process waits to be started."""
        rank = LocalRank(self, group, command)
        rank.ward = self._standbys.take(command, rank)
        if rank.ward:
            rank.is_adopted = True
            return rank
        try:
            rank.ward = ProcessWatcher(RankProcess(command), rank, self._reactor, self._lock)
        except OSError as error:
            rank.spawn_error = cannot_start(error)
        return rank

    # Below: the watching thread.

    def _tend(self, ranks: tuple[LocalRank, ...]) -> None:
        for rank in ranks:
            if rank.ward is None:
                ended = Exited(exit_code=CANNOT_START, signal=None, tail="", at=time.time(), error=rank.spawn_error)
                self.on_exit(rank, ended)
                self.on_gone(rank)
                continue
            if not rank.is_adopted:
                rank.ward.look_after()
            rank.ward.listen()

    def _keep_asking_to_end(self) -> None:
        if self._ask_to_end():
            self._reactor.later(_LOOK_EVERY_S, self._keep_asking_to_end)

    def _ask_to_end(self) -> bool:
        """Ask those to end that should; True: some must be asked again."""
        with self._lock:
            still = [process for process in self._living() if process.ask_to_end()] if self._is_ending else []
        return bool(still)

    def _refill_in_time(self, group: int, after_s: float, known: int) -> None:
        """A script that does not commit tells of no first step, and one that does may be long in coming to it."""
        process = self._running()
        if process is None or group != self._group or self._has_begun or any(rank.has_exited for rank in self._ranks):
            return
        count = len(process.imports().modules)
        is_plain = not self._has_asked_resume and after_s > _QUIET_S
        if (is_plain and count == known) or after_s >= _BEGUN_WITHIN_S:
            self._refill()
        else:
            self._reactor.later(_QUIET_S, partial(self._refill_in_time, group, after_s + _QUIET_S, count))

    def _running(self) -> RankProcess | None:
        """The first that has not ended: what it has imported can be read."""
        return next((rank.process for rank in self._ranks if rank.process and not rank.has_exited), None)

    def _refill(self) -> None:
        process = self._running()
        self._standbys.refill(process.imports() if process else None)

    def on_question(self, rank: LocalRank) -> bool:  # noqa: C901 - all that a worker may say
        """A worker says something. False: there will be no more."""
        process = rank.process
        assert process is not None  # noqa: S101 - only a process has a channel
        channel = process.channel
        try:
            with self._lock:
                had_asked, had_snapped, had_damaged = channel.asked, channel.snapped, channel.damaged
                is_open = channel.receive() and not rank.is_gone
                copies, channel.copies = channel.copies, []
                asked = channel.asked
                is_first = channel.has_asked_resume and not self._has_asked_resume
                self._has_asked_resume |= is_first
                began, stood = self._began(), self._stands_still()
                self._answer_resume()
        except MessageError as error:
            log.warning(f"rank {rank.command.rank} sent what is no message to the agent: {error}")
            return True
        for said in copies:
            self._on_copy(said)
        if channel.snapped != had_snapped:
            self.snapshots.take(rank.command.rank, channel.snapped)
        if channel.damaged is not None and channel.damaged is not had_damaged:
            self.snapshots.disown(channel.damaged)
        if stood is not None:
            self._tell_stood(stood)
        if not is_open:
            return False
        if asked is not None and asked is not had_asked:
            self._post(PublishAsked(group=self._group, checkpoint=asked))
        elif is_first:
            self._post(RestorePointAsked(self._group))
        elif began is not None:
            self._refill()  # first: once the first step is known of, so is that the standbys were taken
            self._post(began)
        if self._is_ending:  # it may have asked whether it should
            self._ask_to_end()
        return True

    def _began(self) -> RanksStarted | None:
        """With the lock held: what is to be told once all ranks have made their first step."""
        told = [channel.began for channel in self._channels()]
        if self._has_begun or None in told:
            return None
        self._has_begun = True
        latest = {
            name: max(getattr(began, name) for began in told)
            for name in ("entered", "joined", "loaded", "stepped", "step")
        }
        return RanksStarted(group=self._group, **latest)

    def _stands_still(self) -> RanksQuiesced | None:
        """With the lock held: what is to be told once all ranks stand still for another handoff, with snapshots."""
        told = {channel.stood for channel in self._channels()}
        stood = told.pop()
        if told or stood is None or stood.handoff <= self._stood:
            return None
        self._stood = stood.handoff
        return RanksQuiesced(self._group, stood.handoff, stood.step, is_shared=False)

    def _tell_stood(self, stood: RanksQuiesced) -> None:
        self._post(stood)
        if self.snapshots.has_handed_over(stood.step):
            self._when_handed_over(partial(self._post, replace(stood, is_shared=True)))

    def on_exit(self, rank: LocalRank, exited: Exited) -> None:
        """A rank has ended."""
        rank.has_exited = True
        if _is_cause(exited) and not rank.unreadable:
            rank.cause = exited
        self._post(
            WorkerExited(
                group=rank.group,
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
                mistake=exited.mistake,
            )
        )

    def on_gone(self, rank: LocalRank) -> None:
        """Nothing of it is left."""
        with self._lock:
            rank.is_gone = True
            is_last = all(other.is_gone for other in self._ranks)
        if is_last:
            self.snapshots.end()
            self._post(WorkersGone(group=self._group))


def _is_shown(rank: LocalRank, streams: AbstractSet[int] = frozenset({2})) -> bool:
    return rank.command.console_prefix is not None and streams <= {*rank.command.console_streams}


def _is_cause(exited: Exited) -> bool:
    """Whether it ended of itself, by a failure that is not another's consequence, and said something of it."""
    if is_peer_lost(f"{exited.error}\n{exited.tail}"):
        return False
    return bool(exited.error) or (bool(exited.tail.strip()) and exited.exit_code not in {None, 0, EXIT_RESTART})


def _memories(ranks: tuple[LocalRank, ...]) -> dict[int, int]:
    """Where they put their snapshots."""
    placed = ((rank.command.rank, rank.process.memory) for rank in ranks if rank.process)
    return {rank: memory for rank, memory in placed if memory is not None}
