"""A rank process as the watching thread sees it: from when it is looked after until nothing of it is left.

It waits on the guardian's wire (packets, see `guardian.py`), then on the guardian's pidfd. That one is the last word: a
process shows as ended only after its children have been handed on, so what a killed guardian left can be found only
then (`reaper.py`). Whatever happens, its owner hears that the worker has exited, and then, once, that it is gone. A
standby changes its owner when it becomes a rank.
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
_LAST_WORDS = 8
"""Messages. A worker that ends has at most one question open and one thing to say; a flood is not heard out."""


class ProcessOwner(Protocol):
    """Who wants to know what becomes of it."""

    def hear(self, message: Message) -> None:
        """What its guardian tells."""
        ...

    def hear_question(self) -> bool:
        """Its channel is readable: take one message. False: there will be no more."""
        ...


class _NoOwner:
    """Wants to know nothing more. An owner has its ward: what is over must not hold on to it in turn."""

    def hear(self, message: Message) -> None:
        """Nothing comes."""

    def hear_question(self) -> bool:
        """Nothing comes."""
        return False


class ProcessWatcher:
    """One process. All but `adopt` is called on the reactor's thread."""

    def __init__(self, process: RankProcess, owner: ProcessOwner, reactor: Reactor, lock: Lock) -> None:
        """`lock`: held whenever the process, or its owner, is changed."""
        self.process = process
        self._owner = owner
        self._reactor = reactor
        self._lock = lock
        self._has_exited = False
        self._is_gone = False
        self._is_listening: bool | None = None
        """None: not yet."""

    def look_after(self) -> None:
        """Begin."""
        self._reactor.on(self.process, self._take_packets)
        self._reactor.on(self.process.pidfd, self._on_guardian_end)

    def listen(self) -> None:
        """Hear what the worker asks, too."""
        if self._is_listening is None:
            self._is_listening = True
            self._reactor.on(self.process.channel, self._take_question)

    def _listen_no_more(self) -> None:
        if self._is_listening:
            self._reactor.off(self.process.channel)
        self._is_listening = False

    def adopt(self, owner: ProcessOwner) -> bool:
        """Give it to another, with the lock held; False: the worker has ended."""
        if self.process.exited is not None or self._is_gone:
            return False
        self._owner = owner
        return True

    def _take_packets(self) -> None:
        with self._lock:
            messages, is_over = self.process.receive()
            owner = self._owner  # within the lock: who adopts it meanwhile sees that it has exited
        if is_over:
            self._reactor.off(self.process)
        for message in messages:
            self._pass_on(message, owner)

    def _pass_on(self, message: Message, owner: ProcessOwner) -> None:
        if message.warning:
            log.warning(message.warning)
        if message.exited:
            self._has_exited = True
            self._hear_out()
        self._is_gone |= message.gone
        owner.hear(message)

    def _take_question(self) -> None:
        """One at a time: a worker that asks without end must not keep the thread from the others."""
        if not self._owner.hear_question():
            self._listen_no_more()

    def _hear_out(self) -> None:
        """Take what a worker said before it ended, although its end was seen first."""
        self.listen()
        for _ in range(_LAST_WORDS):
            if self._is_listening:
                self._take_question()

    def _on_guardian_end(self) -> None:
        process = self.process
        if self._reactor.is_on(process):
            self._take_packets()  # what it said before it ended
        self._hear_out()
        self._listen_no_more()
        self._reactor.off(process.pidfd)
        with self._lock:
            owner = self._owner
            process.close()
            if not self._has_exited:
                process.exited = Exited(exit_code=None, signal=signal.SIGKILL, tail=_GUARDIAN_KILLED, at=time.time())
            self._owner = _NoOwner()
        if self._is_gone:
            return
        if not self._has_exited:
            self._pass_on(Message(exited=process.exited), owner)
        self._hunt(owner, Orphans(process.mark, process.worker_pid))

    def _hunt(self, owner: ProcessOwner, orphans: Orphans) -> None:
        """Kill what a killed guardian left; come back at each death, since that may leave more."""
        pid = orphans.kill()
        if pid is None:
            self._pass_on(Message(gone=True), owner)
            return
        pidfd = os.pidfd_open(pid)
        self._reactor.on(pidfd, partial(self._on_orphan_end, owner, orphans, pidfd))

    def _on_orphan_end(self, owner: ProcessOwner, orphans: Orphans, pidfd: int) -> None:
        self._reactor.off(pidfd)
        os.close(pidfd)
        self._hunt(owner, orphans)
