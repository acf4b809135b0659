"""Watches a rank process from its start until none of its processes is left.

It waits for packets on the guardian's socket (see `guardian.py`) and for the end of the guardian's pidfd. The latter
decides: a process shows as ended only after its children have got a new parent, so only then can the orphans of a
killed guardian be found (`reaper.py`). In every case the owner is told that the worker has exited, and then, once, that
it is gone. A standby gets another owner when it becomes a rank.
"""

from __future__ import annotations

import os
import signal
import time
from functools import partial
from typing import TYPE_CHECKING, Protocol

from agent.observe.log import log
from agent.workers.process import Exited, Message, RankProcess
from agent.workers.reaper import Orphans

if TYPE_CHECKING:
    from threading import Lock

    from agent.workers.reactor import Reactor

_GUARDIAN_KILLED = "elastic-agent: the rank's guardian process was killed, and the rank with it"
_MAX_LAST_MESSAGES = 8
"""Limit of messages read after the end. A worker has at most one open question and one report then."""


class ProcessOwner(Protocol):
    """Receives what happens to a process."""

    def on_guardian_message(self, message: Message) -> None:
        """Handle a packet from the guardian."""
        ...

    def on_worker_message(self) -> bool:
        """Read one message from the channel. Return False if there will be no more."""
        ...


class _NoOwner:
    """The owner of a process that is gone. It breaks the reference cycle between an owner and its watcher."""

    def on_guardian_message(self, message: Message) -> None:
        """Ignore it."""

    def on_worker_message(self) -> bool:
        """Return False."""
        return False


class ProcessWatcher:
    """One process. All methods but `adopt` run on the reactor's thread."""

    def __init__(self, process: RankProcess, owner: ProcessOwner, reactor: Reactor, lock: Lock) -> None:
        """Prepare to watch. `lock` is held whenever the process or its owner changes."""
        self.process = process
        self._owner = owner
        self._reactor = reactor
        self._lock = lock
        self._has_exited = False
        self._is_gone = False
        self._is_watching_channel: bool | None = None
        """None: not yet started."""

    def start(self) -> None:
        """Start to watch the guardian."""
        self._reactor.add_reader(self.process, self._read_packets)
        self._reactor.add_reader(self.process.pidfd, self._on_guardian_end)

    def watch_channel(self) -> None:
        """Start to watch the worker's channel."""
        if self._is_watching_channel is None:
            self._is_watching_channel = True
            self._reactor.add_reader(self.process.channel, self._read_message)

    def _stop_watching_channel(self) -> None:
        if self._is_watching_channel:
            self._reactor.remove_reader(self.process.channel)
        self._is_watching_channel = False

    def adopt(self, owner: ProcessOwner) -> bool:
        """Change the owner. Return False if the worker has ended. The caller holds the lock."""
        if self.process.exited is not None or self._is_gone:
            return False
        self._owner = owner
        return True

    def _read_packets(self) -> None:
        with self._lock:
            messages, is_over = self.process.receive()
            owner = self._owner  # with the lock: whoever adopts the process later sees that it has exited
        if is_over:
            self._reactor.remove_reader(self.process)
        for message in messages:
            self._deliver(message, owner)

    def _deliver(self, message: Message, owner: ProcessOwner) -> None:
        if message.warning:
            log.warning(message.warning)
        if message.exited:
            self._has_exited = True
            self._read_last_messages()
        self._is_gone |= message.gone
        owner.on_guardian_message(message)

    def _read_message(self) -> None:
        """Read one message at a time, so that a worker that floods its channel does not starve the others."""
        if not self._owner.on_worker_message():
            self._stop_watching_channel()

    def _read_last_messages(self) -> None:
        """Read what a worker sent before it ended, although its end was seen first."""
        self.watch_channel()
        for _ in range(_MAX_LAST_MESSAGES):
            if self._is_watching_channel:
                self._read_message()

    def _on_guardian_end(self) -> None:
        process = self.process
        if self._reactor.has_reader(process):
            self._read_packets()  # packets from before its end
        self._read_last_messages()
        self._stop_watching_channel()
        self._reactor.remove_reader(process.pidfd)
        with self._lock:
            owner = self._owner
            process.close()
            if not self._has_exited:
                process.exited = Exited(exit_code=None, signal=signal.SIGKILL, tail=_GUARDIAN_KILLED, at=time.time())
            self._owner = _NoOwner()
        if self._is_gone:
            return
        if not self._has_exited:
            self._deliver(Message(exited=process.exited), owner)
        self._kill_orphans(owner, Orphans(process.mark, process.worker_pid))

    def _kill_orphans(self, owner: ProcessOwner, orphans: Orphans) -> None:
        """Kill the orphans of a killed guardian. Repeat at each death, because it may leave more orphans."""
        pid = orphans.kill()
        if pid is None:
            self._deliver(Message(gone=True), owner)
            return
        pidfd = os.pidfd_open(pid)
        self._reactor.add_reader(pidfd, partial(self._on_orphan_end, owner, orphans, pidfd))

    def _on_orphan_end(self, owner: ProcessOwner, orphans: Orphans, pidfd: int) -> None:
        self._reactor.remove_reader(pidfd)
        os.close(pidfd)
        self._kill_orphans(owner, orphans)
