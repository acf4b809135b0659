"""All local ranks of one group as a unit: started together, watched by one thread, killed together.

The watching thread is a reactor (`reactor.py`). For each rank it waits for packets from the guardian and for the
guardian's end (`process_watcher.py`), and for messages on the rank's channel (`channel.py`). Ranks that are quiesced
for a handoff while they are asked to end are polled as well, because a change of the shared control page wakes nobody.
A rank whose standby is warm takes over the standby's process (`standbys.py`).

Events are posted in this order:

1. `RestorePointAsked`, the first time that a rank of the group asks for its restore point.
2. `RanksStarted`, once all ranks have completed a step.
3. `RanksQuiesced`, when all ranks are quiesced for a handoff with snapshots, and again when the neighbours have their
   parts of these snapshots; `PublishAsked`, for each checkpoint that a rank asks to commit.
4. `WorkerExited`, for each rank.
   If the ranks enter another group instead: `InventoryChanged`, if they may take snapshots, and then `WorkersMoved`.
5. Once no process of any rank is left: `InventoryChanged`, if the ranks may take snapshots, and then `WorkersGone`.

Hangs and step times of the ranks are posted by the hang monitor (`agent/diagnose/hang_monitor.py`).
"""

from __future__ import annotations

import threading
import time
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from agent import clock
from agent.config import HangConfig
from agent.core.events import (
    PublishAsked,
    RanksQuiesced,
    RanksStarted,
    RestorePointAsked,
    WorkerExited,
    WorkersCannotMove,
    WorkersGone,
    WorkersMoved,
    WorkersReady,
)
from agent.diagnose.hang_monitor import HangMonitor
from agent.links.queries import LiveRank
from agent.observe.log import log
from agent.observe.notices import failure_output
from agent.observe.stderr import standard_error
from agent.workers.channel import MessageError, publish_answer, restore_point_answer
from agent.workers.launch_plan import StandbyPlan
from agent.workers.local_rank import LocalRank
from agent.workers.local_ranks import LocalRanks, is_cause
from agent.workers.process import CANNOT_START, Exited, RankProcess, cannot_start
from agent.workers.process_watcher import ProcessWatcher
from agent.workers.reactor import Reactor
from agent.workers.reaper import become_subreaper
from agent.workers.snapshot_saver import SnapshotSaver
from agent.workers.snapshot_store import SnapshotStore
from agent.workers.standbys import Standbys

if TYPE_CHECKING:
    from collections.abc import Callable

    from agent.core.events import Event
    from agent.core.failures import Failure
    from agent.core.saved_states import Checkpoint, RestorePoint, StateId
    from agent.links.part_sender import PartSender
    from agent.links.snapshot_parts import SnapshotPart
    from agent.workers.channel import Channel, ReplicaMessage
    from agent.workers.launch_plan import Launch, RankCommand
    from agent.workers.replica_space import ReplicaSpace

_ASK_EVERY_S = 0.05
_MOVE_WITHIN_S = 10.0
"""How long a rank may take to leave its old group."""
_SETTLED_S = 2.5
"""A script that has imported no module for this long has most likely begun to train. Used for scripts that do not
report their first step."""
_FIRST_STEP_WITHIN_S = 60.0
"""Standbys for the next group are started after this time even if the group has not completed its first step."""
_DEFAULT_HANG_CONFIG = HangConfig()


class WorkerGroup:
    """The rank processes of this node. Methods may be called from one thread; `post` is called from another."""

    def __init__(
        self,
        post: Callable[[Event], None],
        hang: HangConfig = _DEFAULT_HANG_CONFIG,
        standbys: StandbyPlan | None = None,
        replicate: Callable[[SnapshotPart, Callable[[], None]], None] = lambda _part, on_end: on_end(),
        part_sender: PartSender | None = None,
        after_replication: Callable[[Callable[[], None]], None] = lambda then: then(),
        on_replica_message: Callable[[ReplicaMessage], None] = lambda _: None,
        replica_space: ReplicaSpace | None = None,
    ) -> None:
        """Create a group without ranks, and start the standbys.

        Args:
            post: receives the events.
            hang: limits of the hang monitor.
            standbys: plan of the standbys. None: there are none.
            replicate: see `SnapshotStore`.
            part_sender: sends each such part that is large. None: these are not sent.
            after_replication: receives a function to call once the neighbours have stored these parts; may not block.
            on_replica_message: receives what a parameter server reports of the replica of a shard.
            replica_space: provides space for the large parts of snapshots that neighbours send.
        """
        become_subreaper()
        self._post = post
        self.snapshots = SnapshotStore(post, replicate, part_sender, replica_space)
        """The snapshots that this node holds in memory."""
        self._after_replication = after_replication
        self._on_replica_message = on_replica_message
        self._hang_monitor = HangMonitor(post, hang)
        self._lock = threading.Lock()
        self._local = LocalRanks()
        self._restore_point: RestorePoint | None = None
        """Restore point of the newest group for which it is settled."""
        self._reactor = Reactor("workers")
        self.saver = SnapshotSaver(self.snapshots, self._reactor, post)
        """Saves the snapshot in this node's memory before the agent leaves."""
        self._standbys = Standbys(standbys or StandbyPlan(), self._reactor, self._lock, post)
        if standbys:
            self._standbys.begin()

    def start(self, launch: Launch, *, is_waiting: bool = False) -> None:
        """Start all ranks.

        Args:
            launch: what to start.
            is_waiting: they set up the script, and wait until `move` sends them into a group. `WorkersReady` is posted
                once they have set up.

        Raises:
            RuntimeError: ranks of an older group are still alive. A node runs one group at a time.
        """
        with self._lock:
            if not self._local.are_gone:
                raise RuntimeError(
                    f"group {launch.group} may not start: workers of group {self._local.group} are alive"
                )
            # Spawn all guardians first, so that they start in parallel.
            ranks = tuple(
                self._create_rank(command, launch.group, takes_set_up=launch.takes_set_up)
                for command in launch.commands
            )
            local = self._local = LocalRanks(launch.group, ranks, is_waiting=is_waiting, ahead=launch.ahead)
            # Keep the lock: the watching thread may close a standby that dies while it is adopted.
            if launch.source is not None and not is_waiting:
                self.snapshots.begin(launch.source, launch.group, local.memories, launch.next_node)
            for rank in ranks:
                rank.start(is_waiting=is_waiting)
        self._reactor.call_soon(partial(self._watch_ranks, ranks))
        if not is_waiting:
            self._hang_monitor.begin(launch.group, [rank.process for rank in ranks if rank.process])
        self._reactor.call_later(_SETTLED_S, partial(self._refill_standbys_later, launch.group, _SETTLED_S, -1))

    def move(self, group: int, launch: Launch, *, is_planned: bool) -> None:
        """Send the ranks of this group into another group.

        Posts `WorkersMoved` once all have asked what becomes of them, or `WorkersCannotMove`.

        Args:
            group: number of their group.
            launch: their place in the other one.
            is_planned: the ranks are quiesced for a handoff. If False, each is signalled to break its connections.
        """
        with self._lock:
            local = self._local
            if group != local.group or local.is_ending:
                return  # the core learns of their end in any case
            local.move, local.is_planned = launch, is_planned
            if not (is_planned or local.is_waiting):
                for process in local.processes:
                    process.break_group(group)
        self._reactor.call_soon(self._keep_trying_to_move)

    def terminate(self, group: int) -> None:
        """Ask each rank of this group to end, if the group is the running one. See `RankProcess.ask_to_end`."""
        with self._lock:
            is_new = group == self._local.group and not self._local.is_ending
            if is_new:
                self._local.is_ending, self._local.move = True, None
        if is_new:
            self._hang_monitor.end()
            self._reactor.call_soon(self._keep_asking_to_end)

    def kill(self, group: int) -> None:
        """Send SIGKILL to all processes of this group, if the group is the running one."""
        with self._lock:
            if group != self._local.group:
                return
            self._local.move = None
            self._hang_monitor.end()
            if not self._local.is_ending:
                self._show_cause()
            # Include ranks that have ended: their guardian may delay console output until the group ends.
            for rank in self._local.ranks:
                if rank.process:
                    rank.process.kill()

    def _show_cause(self) -> None:
        """Print the failure that ended this group, unless the console shows it already. The caller holds the lock.

        It is printed before the ranks are killed, and so before the failures that follow from it.
        """
        found = self._local.note_shown_cause()
        if found is not None:
            rank, cause = found
            how = cause.error or f"code {cause.exit_code}"
            standard_error().write(failure_output(f"rank {rank} ended with {how}", cause))

    def send_restore_point(self, restore_point: RestorePoint) -> None:
        """Send the restore point to each rank of its group that asks for it. The group may start later."""
        with self._lock:
            if restore_point.group >= self._local.group:
                self._restore_point = restore_point
                self.snapshots.on_restore_point(restore_point)
                self._answer_restore_point()

    def send_publish_answer(self, group: int, copy: StateId, checkpoint: Checkpoint | None, reason: str) -> None:
        """Answer the rank that asked to publish a checkpoint: the checkpoint as committed, or None and the reason."""
        with self._lock:
            for channel in self._local.channels if group == self._local.group else ():
                if channel.pending_publish is not None and channel.pending_publish.copy == copy:
                    channel.pending_publish = None
                    channel.send(publish_answer(copy, checkpoint, reason))

    def request_handoff(self, group: int, number: int, *, in_memory: bool = False) -> None:
        """Write a handoff request to the control page of each rank of this group, if the group is the running one.

        Args:
            group: number of the group.
            number: number of the handoff.
            in_memory: whether snapshots in memory suffice, so that no checkpoint is needed.
        """
        with self._lock:
            for process in self._local.processes if group == self._local.group else ():
                process.page.in_memory = int(in_memory)
                process.page.handoff = number

    def send_message(self, message: dict[str, object]) -> None:
        """Send a message to the processes of a parameter-server job. See `trainer_runtime.ps.control_messages`."""
        with self._lock:
            for channel in self._local.channels:
                channel.send(message)

    def set_hang_threshold(self, after_s: float | None) -> None:
        """Report ranks that complete no step for `after_s` seconds. None: only the usual hang limit applies."""
        self._hang_monitor.set_threshold(after_s)

    @property
    def ranks(self) -> tuple[LocalRank, ...]:
        """The ranks of the group started last. Thread-safe."""
        return self._local.ranks

    @property
    def has_asked_restore_point(self) -> bool:
        """Whether a rank of this group has asked for its restore point. Without that, its progress is unknown."""
        return self._local.has_asked_restore_point

    def has_shown_errors(self, failure: Failure) -> bool:
        """Whether the console shows the error that ended this rank of the group started last.

        A script error ends all ranks alike, so it is enough if one of them is shown.
        """
        return self._local.has_shown_errors(failure)

    def live_ranks(self) -> tuple[int, tuple[LiveRank, ...]]:
        """Return the number of the group started last, and the state of its ranks. Thread-safe; never blocks."""
        return self._local.live()

    def close(self) -> None:
        """Kill all processes, and return when none is left."""
        self.kill(self._local.group)
        self._hang_monitor.close()
        self._standbys.close()
        self.saver.close()
        self._reactor.close()
        for rank in self._local.ranks:  # some are alive only if an error has ended the thread
            if rank.process:
                rank.process.wait()
        self.snapshots.close()

    def _answer_restore_point(self) -> None:
        """Send the restore point to the ranks that wait for it. The caller holds the lock."""
        restore_point = self._restore_point
        if restore_point is None or restore_point.group != self._local.group:
            return
        is_committed = restore_point.checkpoint is not None and restore_point.checkpoint.copy == restore_point.copy
        for channel in self._local.channels:
            if channel.awaits_restore_point:
                channel.awaits_restore_point = False
                with self.snapshots.pieces(None if is_committed else restore_point.copy) as (pieces, memories):
                    channel.send(restore_point_answer(restore_point, pieces), memories)

    def _create_rank(self, command: RankCommand, group: int, *, takes_set_up: bool) -> LocalRank:
        """Create a rank whose process waits to be started. The caller holds the lock."""
        rank = LocalRank(self, group, command)
        rank.watcher = self._standbys.take(command, rank, takes_set_up=takes_set_up)
        if rank.watcher:
            rank.is_adopted = True
            return rank
        try:
            rank.watcher = ProcessWatcher(RankProcess(command), rank, self._reactor, self._lock)
        except OSError as error:
            rank.spawn_error = cannot_start(error)
        return rank

    # The methods below run on the watching thread.

    def _watch_ranks(self, ranks: tuple[LocalRank, ...]) -> None:
        for rank in ranks:
            if rank.watcher is None:
                ended = Exited(exit_code=CANNOT_START, signal=None, tail="", at=time.time(), error=rank.spawn_error)
                self.on_exit(rank, ended)
                self.on_gone(rank)
                continue
            if not rank.is_adopted:
                rank.watcher.start()
            rank.watcher.watch_channel()
        self._report_set_up()

    def _keep_asking_to_end(self) -> None:
        if self._ask_to_end():
            self._reactor.call_later(_ASK_EVERY_S, self._keep_asking_to_end)

    def _ask_to_end(self) -> bool:
        """Ask the ranks of an ending group to end. Return whether some must be asked again."""
        with self._lock:
            processes = self._local.processes if self._local.is_ending else []
            still = [process for process in processes if process.ask_to_end()]
        return bool(still)

    def _keep_trying_to_move(self) -> None:
        local = self._local
        if self._try_to_move() and local.is_planned and not local.is_waiting:  # others send a message
            self._reactor.call_later(_ASK_EVERY_S, self._keep_trying_to_move)

    def _try_to_move(self) -> bool:
        """Send the ranks into the other group if all have asked. Return whether to try again soon."""
        with self._lock:
            local = self._local
            if local.move is None:
                return False
            if local.may_move:
                has_asked = local.have_asked
                if has_asked:
                    self._send_into(local.move)
                return not has_asked
            local.move = None
        self._post(WorkersCannotMove(local.group))
        return False

    def _send_into(self, launch: Launch) -> None:
        """Send the ranks, all of which wait, into the other group. The caller holds the lock."""
        last, step, at = self._local.group, max(rank.step for rank in self._local.ranks), clock.now()
        self.snapshots.end()  # they write none until they have their place
        local = self._local = self._local.sent_into(launch)
        for process in local.processes:
            process.renew_memory()
        if launch.source is not None:
            self.snapshots.begin(launch.source, launch.group, local.memories, launch.next_node)
        self._post(WorkersMoved(last, step, at))
        for rank in local.ranks:
            if rank.process:
                rank.process.move(rank.command)
        self._hang_monitor.begin(launch.group, local.processes)
        self._reactor.call_later(_MOVE_WITHIN_S, partial(self._kill_unmoved, launch.group))

    def _kill_unmoved(self, group: int) -> None:
        """Kill the ranks that have not left their old group: they stopped waiting at the same moment, or are stuck."""
        with self._lock:
            unmoved = [process for process in self._local.processes if process.channel.is_moving]
            if group != self._local.group or not unmoved:
                return
            log.warning(f"rank {unmoved[0].rank} did not leave its old group within {_MOVE_WITHIN_S:g} s: killed")
            for process in unmoved:
                process.kill()

    def _refill_standbys_later(self, group: int, after_s: float, known: int) -> None:
        """Start standbys although the group has not reported its first step.

        A script that does not commit never reports one; others may take long until their first step.
        """
        local, process = self._local, self._local.running_process
        if process is None or group != local.group or local.has_started or any(rank.has_exited for rank in local.ranks):
            return
        count = len(process.imports().modules)
        is_plain = not local.has_asked_restore_point and after_s > _SETTLED_S
        if (is_plain and count == known) or after_s >= _FIRST_STEP_WITHIN_S:
            self._refill_standbys()
        else:
            self._reactor.call_later(
                _SETTLED_S, partial(self._refill_standbys_later, group, after_s + _SETTLED_S, count)
            )

    def _refill_standbys(self) -> None:
        process = self._local.running_process
        self._standbys.refill(process.imports() if process else None)

    def on_message(self, rank: LocalRank) -> bool:
        """Handle one message of a rank. Return False if there will be no more."""
        process = rank.process
        assert process is not None  # noqa: S101 - only a process has a channel
        channel = process.channel
        try:
            with self._lock:
                old_publish, old_damaged = channel.pending_publish, channel.damaged
                old_snapshot = channel.snapshot
                is_open = channel.receive() and not rank.is_gone
                replica_messages, channel.replica_messages = channel.replica_messages, []
                asked = channel.pending_publish
                is_first = self._local.note_question(channel)
                started, quiesced = self._local.note_started(), self._local.note_quiesced()
                self._answer_restore_point()
        except MessageError as error:
            log.warning(f"rank {rank.command.rank} sent an invalid message to the agent: {error}")
            return True
        for message in replica_messages:
            self._on_replica_message(message)
        if channel.snapshot is not None and channel.snapshot is not old_snapshot:
            self.snapshots.on_snapshot(rank.command.rank, channel.snapshot.step, channel.snapshot.at_s)
        if channel.damaged is not None and channel.damaged is not old_damaged:
            self.snapshots.mark_damaged(channel.damaged)
        if quiesced is not None:
            self._post_quiesced(quiesced)
        if not is_open:
            return False
        if asked is not None and asked is not old_publish:
            self._post(PublishAsked(group=self._local.group, checkpoint=asked))
        elif is_first:
            self._post(RestorePointAsked(self._local.group))
        elif started is not None:
            self._on_started(started)
        self._go_on(rank, channel)
        return True

    def _on_started(self, started: RanksStarted) -> None:
        self._refill_standbys()  # before the post: an observer of the first step can rely on the refill
        if started.can_move and self._local.ahead:
            self._standbys.set_up_ahead(self._local.ahead, [each.worker_pid for each in self._local.processes])
        self._post(started)

    def _go_on(self, rank: LocalRank, channel: Channel) -> None:
        """Do what a rank may have waited for with its message."""
        if self._local.is_ending:  # the message may be the question whether the group is over
            self._ask_to_end()
        elif self._local.move is not None:
            self._try_to_move()
        elif not self._local.is_waiting:
            with self._lock:
                rank.enter()
        elif channel.awaits_place:
            self._report_set_up()

    def _report_set_up(self) -> None:
        """Post that all ranks have set up and wait, if so."""
        if self._local.have_set_up:
            self._post(WorkersReady(self._local.group))

    def _post_quiesced(self, quiesced: RanksQuiesced) -> None:
        self._post(quiesced)
        self.snapshots.when_sent(quiesced.step, partial(self._on_sent, quiesced))

    def _on_sent(self, quiesced: RanksQuiesced, *, is_with_next_only: bool) -> None:
        shared = replace(quiesced, is_shared=True, is_with_next_only=is_with_next_only)
        self._after_replication(partial(self._post, shared))

    def on_exit(self, rank: LocalRank, exited: Exited) -> None:
        """Record and post that the main process of a rank has ended."""
        rank.has_exited = True
        if is_cause(exited) and not rank.unreadable:
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
                script_error=exited.script_error,
            )
        )

    def on_gone(self, rank: LocalRank) -> None:
        """Record that no process of a rank is left. Post that the group is gone if it was the last."""
        with self._lock:
            rank.is_gone = True
            is_last = self._local.are_gone
        if is_last:
            self.snapshots.end()
            self._post(WorkersGone(group=self._local.group))
