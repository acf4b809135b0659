"""The process that writes a checkpoint from the snapshot in this agent's memory, before the agent leaves.

`trainer_runtime.save_snapshot` is its program. It has a channel like a rank's, over which it asks for the snapshot and
for the commit. It posts `PublishAsked`, and `SaveEnded` when it has ended in any way.

It ends with the agent, and by SIGKILL only: a signal that asks all processes of the node to end is what it saves for.
A disk that hangs may keep it for ever, so nothing waits for its end.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from contextlib import suppress
from typing import TYPE_CHECKING

from agent.children import at_parents_end
from agent.core.events import PublishAsked, SaveEnded
from agent.core.saved_states import RestorePoint
from agent.observe.log import log
from agent.observe.stderr import standard_error
from agent.workers.channel import Channel, MessageError, publish_answer, restore_point_answer
from trainer_runtime import contract

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from agent.core.effects import SaveSnapshot
    from agent.core.saved_states import Checkpoint, StateId
    from agent.workers.reactor import Reactor
    from agent.workers.snapshot_store import SnapshotStore

_PROGRAM = "trainer_runtime.save_snapshot"
_OUTPUT_BYTES = 1 << 16
_IGNORED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


class SnapshotSaver:
    """Starts the process, at most once, and answers it. Methods without a remark may be called from any thread.

    Args:
        snapshots: has the snapshot.
        reactor: waits for the process.
        post: receives the events.
    """

    def __init__(
        self, snapshots: SnapshotStore, reactor: Reactor, post: Callable[[PublishAsked | SaveEnded], None]
    ) -> None:
        self._snapshots = snapshots
        self._reactor = reactor
        self._post = post
        self._lock = threading.Lock()
        self._running: _Running | None = None

    def begin(self, order: SaveSnapshot, env: Mapping[str, str]) -> None:
        """Start the process. Called by the agent's main thread, with which the process ends.

        Args:
            order: the snapshot to save.
            env: environment of the process, with the id of this node.
        """
        try:
            running = self._running = _Running(env)
        except OSError as error:
            log.warning(f"no process could be started to save step {order.copy.step}: {error}")
            self._post(SaveEnded())
            return
        restore_point = RestorePoint(group=order.group, copy=order.copy, lineage=(), checkpoint=order.committed)
        self._reactor.call_soon(lambda: self._watch(running, restore_point))

    def answer(self, copy: StateId, checkpoint: Checkpoint | None, reason: str, *, is_saved: bool) -> None:
        """Answer the process, if it has asked for the commit of this copy. See `publish_answer`."""
        with self._lock:
            channel = self._running.channel if self._running is not None else None
            if channel is not None and channel.pending_publish is not None and channel.pending_publish.copy == copy:
                channel.pending_publish = None
                channel.send(publish_answer(copy, checkpoint, reason, is_saved=is_saved))
                if checkpoint is not None:
                    log.info(f"step {copy.step} is saved: the next start continues there")

    def close(self) -> None:
        """Kill the process if it still runs. Does not wait for its end."""
        running = self._running
        if running is not None:
            running.process.kill()
            self._reactor.call_soon(lambda: self._forget(running))

    # On the reactor's thread

    def _watch(self, running: _Running, restore_point: RestorePoint) -> None:
        self._reactor.add_reader(running.channel, lambda: self._read_message(running, restore_point))
        self._reactor.add_reader(running.output, lambda: self._read_output(running))
        self._reactor.add_reader(running.pidfd, lambda: self._on_end(running))

    def _read_message(self, running: _Running, restore_point: RestorePoint) -> None:
        channel = running.channel
        with self._lock:
            before = channel.pending_publish
            try:
                is_open = channel.receive()
            except MessageError as error:
                log.warning(f"the process that saves a snapshot sent an invalid message to the agent: {error}")
                return
            asked = channel.pending_publish
            if channel.awaits_restore_point:
                channel.awaits_restore_point = False
                with self._snapshots.pieces(restore_point.copy) as (pieces, memories):
                    channel.send(restore_point_answer(restore_point, pieces), memories)
        if not is_open:
            self._reactor.remove_reader(channel)
        elif asked is not None and asked is not before:
            self._post(PublishAsked(group=restore_point.group, checkpoint=asked))

    def _read_output(self, running: _Running) -> None:
        text = running.read_output()
        if text:
            standard_error().write(text.rstrip("\n"))
        else:
            self._reactor.remove_reader(running.output)

    def _on_end(self, running: _Running) -> None:
        while self._reactor.has_reader(running.output):
            self._read_output(running)
        running.process.wait()
        self._forget(running)
        self._post(SaveEnded())

    def _forget(self, running: _Running) -> None:
        for source in (running.channel, running.output, running.pidfd):
            if self._reactor.has_reader(source):
                self._reactor.remove_reader(source)
        with self._lock:
            running.close()


class _Running:
    """The process, and what it is connected by.

    Raises:
        OSError: it could not be started.
    """

    def __init__(self, env: Mapping[str, str]) -> None:
        self.channel = Channel()
        self.output, write_end = os.pipe2(os.O_CLOEXEC)
        try:
            self.process = subprocess.Popen(
                [sys.executable, "-P", "-m", _PROGRAM],  # -P: a file of the user's would stand in for a library's
                env={**env, contract.CHANNEL_FD: str(self.channel.theirs.fileno())},
                pass_fds=[self.channel.theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=write_end,
                preexec_fn=_ignoring(at_parents_end(signal.SIGKILL)),  # noqa: PLW1509 - before the program starts
            )
        except OSError:
            self.channel.close()
            os.close(self.output)
            raise
        finally:
            self.channel.theirs.close()
            os.close(write_end)
        self.pidfd = os.pidfd_open(self.process.pid)
        self._is_closed = False

    def read_output(self) -> str:
        """Return what it has written; empty: it writes nothing more."""
        return os.read(self.output, _OUTPUT_BYTES).decode(errors="replace")

    def close(self) -> None:
        """Close all descriptors. May be called again."""
        if not self._is_closed:
            self._is_closed = True
            self.channel.close()
            for descriptor in (self.output, self.pidfd):
                with suppress(OSError):
                    os.close(descriptor)


def _ignoring(then: Callable[[], None]) -> Callable[[], None]:
    def before_exec() -> None:
        for number in _IGNORED:
            signal.signal(number, signal.SIG_IGN)
        then()

    return before_exec
