"""The process that writes a checkpoint from the snapshot in this agent's memory, before the agent leaves.

`trainer_runtime.save_snapshot` is its program. It has a channel like a rank's, over which it asks for the snapshot and
for the commit. It posts `PublishAsked`, and `SaveEnded` when it has ended in any way.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from typing import TYPE_CHECKING

from agent.core.events import PublishAsked, SaveEnded
from agent.core.model import RestorePoint
from agent.observe.log import log
from agent.workers.channel import Channel, MessageError, publish_answer, restore_point_answer
from trainer_runtime import contract

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from agent.core.effects import SaveSnapshot
    from agent.core.model import Checkpoint, StateId
    from agent.workers.reactor import Reactor
    from agent.workers.snapshot_store import SnapshotStore

_PROGRAM = "trainer_runtime.save_snapshot"


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
        self._channel: Channel | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._pidfd = -1

    def begin(self, order: SaveSnapshot, env: Mapping[str, str]) -> None:
        """Start the process.

        Args:
            order: the snapshot to save.
            env: environment of the process, with the id of this node.
        """
        channel = Channel()
        try:
            process = subprocess.Popen(
                [sys.executable, "-m", _PROGRAM],
                env={**env, contract.CHANNEL_FD: str(channel.theirs.fileno())},
                pass_fds=[channel.theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
            )
        except OSError as error:
            log.warning(f"no process could be started to save step {order.copy.step}: {error}")
            channel.close()
            self._post(SaveEnded())
            return
        finally:
            channel.theirs.close()
        self._channel, self._process, self._pidfd = channel, process, os.pidfd_open(process.pid)
        restore_point = RestorePoint(group=order.group, copy=order.copy, lineage=(), checkpoint=order.committed)
        self._reactor.call_soon(lambda: self._watch(restore_point))

    def answer(self, copy: StateId, checkpoint: Checkpoint | None, reason: str) -> None:
        """Answer the process, if it has asked for the commit of this copy. None: it is not committed."""
        with self._lock:
            channel = self._channel
            if channel is not None and channel.pending_publish is not None and channel.pending_publish.copy == copy:
                channel.pending_publish = None
                channel.send(publish_answer(copy, checkpoint, reason))

    def close(self) -> None:
        """Kill the process if it still runs."""
        if self._process is not None:
            self._process.kill()

    # On the reactor's thread

    def _watch(self, restore_point: RestorePoint) -> None:
        assert self._channel is not None  # noqa: S101 - set by `begin`
        self._reactor.add_reader(self._channel, lambda: self._read_message(restore_point))
        self._reactor.add_reader(self._pidfd, self._on_end)

    def _read_message(self, restore_point: RestorePoint) -> None:
        channel = self._channel
        assert channel is not None  # noqa: S101 - as above
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

    def _on_end(self) -> None:
        assert self._process is not None  # noqa: S101 - as above
        assert self._channel is not None  # noqa: S101 - as above
        if self._reactor.has_reader(self._channel):
            self._reactor.remove_reader(self._channel)
        self._reactor.remove_reader(self._pidfd)
        os.close(self._pidfd)
        with self._lock:
            self._channel.close()
            self._process.wait()
        self._post(SaveEnded())
