"""The worker's end of the channel to its agent; `contract` describes the messages.

Rank 0 asks and waits; the agent answers each question once, in order. A wait has no time-out: the agent may have lost
its store for an hour. It ends with the agent, for then the channel ends, and by any signal.
"""

from __future__ import annotations

import array
import functools
import json
import os
import select
import socket
import threading
import time
from contextlib import suppress
from dataclasses import asdict, replace

from trainer_runtime import contract
from trainer_runtime.milestones import boot_time, reached
from trainer_runtime.record import (
    CommittedCheckpoint,
    ReplicaPiece,
    RestorePoint,
    Verdict,
    publication,
    resume_of,
    verdict_of,
)

_SENTENCE_CHARACTERS = 1000
_DESCRIPTOR_BYTES = array.array("i").itemsize


class AgentGoneError(RuntimeError):
    """The agent has ended, so nobody can say what counts. This process is about to be killed."""


class ChannelError(RuntimeError):
    """The agent answered something else than was asked."""

    def __init__(self, wanted: str, got: object) -> None:
        super().__init__(
            f"wanted {wanted} from the agent, got {str(got)[:200]}; "
            "install the same elastic-agent for the agent and the training script"
        )


class AgentChannel:
    """Asks the agent, and waits for its answer. Methods may be called from any thread."""

    def __init__(self, descriptor: int) -> None:
        os.set_inheritable(descriptor, False)  # the programs that the script starts have no part in this
        self._sock = socket.socket(fileno=descriptor)
        self._lock = threading.Lock()
        self._unanswered = 0
        self._resume: RestorePoint | None = None
        self._descriptors: list[int] = []
        """That came with answers, and nobody has taken."""
        self._began: dict[str, object] | None = None
        """What is to be said of the first step; None: there was none."""
        self._has_begun = False
        """It was said."""

    def ask_resume(self) -> RestorePoint:
        """Return where to begin: what the group's record says, or what this process has itself committed since.

        Raises:
            AgentGoneError: the agent has ended.
            ChannelError: it is of another version.
        """
        with self._lock:
            if self._resume is None:
                answer = self._ask({"ask": "resume"})
                descriptors, self._descriptors = self._descriptors, []
                try:
                    self._resume = resume_of(answer, descriptors)
                except ValueError as error:
                    raise ChannelError("where to resume", error) from error
            return self._resume

    def publish(self, asked: CommittedCheckpoint) -> Verdict:
        """Return whether a checkpoint counts, whose files are on disk under their private name.

        Raises:
            AgentGoneError: the agent has ended; the answer may have been yes or no.
            ChannelError: it is of another version.
        """
        with self._lock:
            verdict = _verdict_on(asked, self._ask(publication(asked)))
            committed = verdict.checkpoint
            if committed is not None and self._resume is not None:
                self._resume = replace(self._resume, copy=committed.copy, checkpoint=committed)
            return verdict

    def held_bytes(self) -> int:
        """Return how much of a copy this node holds, as far as it was told with where to begin, until it is let go of.

        All ranks of the node are told the same.
        """
        return sum(piece.bytes for piece in self._resume.memory) if self._resume is not None else 0

    def let_go_of_memory(self) -> None:
        """Close what came with the word where to begin: it is not needed any more, and is as large as the model.

        Nothing is waited for: if a checkpoint waits for its verdict, it stays until a later call.
        """
        if self._resume is None or not self._resume.memory or not self._lock.acquire(blocking=False):
            return
        try:
            for piece in self._resume.memory:
                os.close(piece.descriptor)
            self._resume = replace(self._resume, memory=())
        finally:
            self._lock.release()

    def tell_snapped(self, step: int) -> None:
        """Say that this rank's snapshot of the step is whole. Nothing is waited for, a question that is open neither.

        It is not said if the agent has ended, or has not heard for long.
        """
        with suppress(OSError):
            self._sock.send(json.dumps({"snapped": {"step": step}}).encode(), socket.MSG_DONTWAIT)

    def tell_stood(self, handoff: int, step: int) -> None:
        """Say that all ranks stand still for this handoff, each with a snapshot of this step. As `tell_snapped`."""
        with suppress(OSError):
            message = {"stood": {"handoff": handoff, "step": step}}
            self._sock.send(json.dumps(message).encode(), socket.MSG_DONTWAIT)

    def tell_damaged(self, piece: ReplicaPiece) -> None:
        """Say that this piece of the copy to begin from is not what it should be.

        Raises:
            AgentGoneError: the agent has ended.
        """
        with self._lock:
            self._send({"damaged": {"kind": "common" if piece.is_common else "part", "rank": piece.rank}})

    def ask_leave(self, within_s: float) -> bool:
        """Ask whether the group is over for a rank that stands still; False: nobody said so in time.

        Raises:
            AgentGoneError: the agent has ended.
        """
        give_up_at = time.monotonic() + within_s
        if not self._lock.acquire(timeout=within_s):  # a checkpoint still waits for its verdict
            return False
        try:
            self._send({"ask": "leave"})
            poll = select.poll()  # not `select`: beside many ranks the channel has a number above 1023
            poll.register(self._sock, select.POLLIN)
            while poll.poll(1000 * max(0.0, give_up_at - time.monotonic())):
                if _is_leave(self._receive()):
                    return True
                self._unanswered -= 1
            return False
        finally:
            self._lock.release()

    def tell_unreadable(self, sentence: str) -> None:
        """Say, before leaving, that this rank cannot read what it must begin from, and why.

        Raises:
            AgentGoneError: the agent has ended.
        """
        with self._lock:
            self._send({"unreadable": sentence[:_SENTENCE_CHARACTERS]})

    def tell_began(self, step: int) -> None:
        """Say that the first step of this process was committed, and when it had got how far before; once.

        Nothing is waited for: if a checkpoint waits for its verdict, a later call says what this one would have. If the
        agent has ended, it is not said.
        """
        if self._has_begun:
            return
        if self._began is None:
            self._began = {**asdict(reached), "stepped": boot_time(), "step": step}
        if not self._lock.acquire(blocking=False):
            return
        self._has_begun = True
        try:
            with suppress(AgentGoneError):
                self._send({"began": self._began})
        finally:
            self._lock.release()

    def _ask(self, question: dict[str, object]) -> object:
        while self._unanswered:  # a signal handler raised an exception while we waited, and the script went on
            self._receive_answer()
        self._send(question)
        self._unanswered += 1
        packet = self._receive_answer()
        try:
            return json.loads(packet)
        except ValueError:
            raise ChannelError("an answer in JSON", packet) from None

    def _send(self, message: dict[str, object]) -> None:
        packet = json.dumps(message).encode()
        if len(packet) > contract.MESSAGE_BYTES:
            raise ValueError(f"a message to the agent has {len(packet)} bytes, at most {contract.MESSAGE_BYTES} fit")
        try:
            self._sock.send(packet)
        except OSError as error:
            raise AgentGoneError(f"the agent has ended ({error.strerror})") from error

    def _receive_answer(self) -> bytes:
        while _is_leave(packet := self._receive()):
            continue  # to a question that was given up
        self._unanswered -= 1
        return packet

    def _receive(self) -> bytes:
        room = socket.CMSG_SPACE(contract.MAX_DESCRIPTORS * _DESCRIPTOR_BYTES)
        try:
            packet, attached, _, _ = self._sock.recvmsg(contract.MESSAGE_BYTES, room, socket.MSG_CMSG_CLOEXEC)
        except ConnectionResetError:  # it ended before it had read all questions
            packet, attached = b"", []
        for _, _, data in attached:
            self._descriptors += array.array("i", data[: len(data) - len(data) % _DESCRIPTOR_BYTES])
        if not packet:
            raise AgentGoneError("the agent has ended, and with it the wait for its answer")
        return packet


def _is_leave(packet: bytes) -> bool:
    return packet.startswith(b'{"leave"')


def _verdict_on(asked: CommittedCheckpoint, answer: object) -> Verdict:
    try:
        verdict = verdict_of(answer)
    except ValueError as error:
        raise ChannelError(f"a verdict on {asked.name}", error) from error
    committed = verdict.checkpoint
    if verdict.copy != asked.copy or (committed is not None and committed.private != asked.private):
        raise ChannelError(f"a verdict on {asked.private or asked.name}", verdict)
    return verdict


def open_channel() -> AgentChannel | None:
    """Take up the channel that the agent handed down, once for this process; None without an agent.

    Raises:
        RuntimeError: the channel is another process's.
    """
    descriptor = os.environ.get(contract.CHANNEL_FD)
    return None if descriptor is None else _take_up(int(descriptor))


@functools.cache
def _take_up(descriptor: int) -> AgentChannel:
    try:
        return AgentChannel(descriptor)
    except OSError as error:
        raise RuntimeError(
            f"{contract.CHANNEL_FD} is {descriptor}, which is not open here ({error.strerror}): the agent talks to the "
            "process that it started; for a State in another one, start that without the variable"
        ) from error
