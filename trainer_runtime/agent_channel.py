"""The worker's end of the channel to its agent, and the milestones that the worker reports over it.

`contract` describes the messages. Rank 0 sends a question and waits; the agent answers each question once, in order.
Waiting for an answer has no timeout, because the agent may be unable to reach etcd for an hour. The wait ends when the
agent exits, since that closes the channel, and when a signal handler raises.
"""

from __future__ import annotations

import array
import functools
import json
import math
import os
import select
import socket
import threading
import time
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING

from trainer_runtime import contract
from trainer_runtime.record import (
    CommittedCheckpoint,
    ReplicaPiece,
    RestorePoint,
    Verdict,
    parse_restore_point,
    parse_verdict,
    publish_message,
)

if TYPE_CHECKING:
    from collections.abc import Callable

_REASON_CHARACTERS = 1000
_LEAVE, _MOVE = b'{"leave"', b'{"move"'
_DESCRIPTOR_BYTES = array.array("i").itemsize


def boot_time() -> float:
    """Return the seconds since boot."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


@dataclass(frozen=True, slots=True)
class Move:
    """The answer to a quiesced rank that goes on in another group."""

    variables: dict[str, str | None]
    """Environment variables of its place there; None: such a variable is not set."""
    descriptor: int | None
    """Of another memory for snapshots; None: no snapshots are taken."""


@dataclass(frozen=True, slots=True)
class Leave:
    """The answer to a quiesced rank that ends."""


@dataclass(slots=True)
class Milestones:
    """Times at which a process reached its milestones, in seconds since boot; 0.0: not reached."""

    entered: float
    """This runtime had been imported."""
    joined: float = 0.0
    """This rank had joined a process group, or was found to be in one."""
    set_up: float = 0.0
    """The script had set up: it asked for its State."""
    loaded: float = 0.0
    """The State was restored."""

    def begin_again(self) -> None:
        """Note that the process goes on in another group."""
        self.entered, self.joined, self.set_up, self.loaded = boot_time(), 0.0, 0.0, 0.0

    def note_joined(self) -> None:
        """Note that the process is in a process group; only the first call counts."""
        self.joined = self.joined or boot_time()

    def note_joined_after_set_up(self, began: float) -> None:
        """Note that the process has joined a process group only now, after it had set up the script alone.

        The agent expects a process to join first and to set up then. So the reported times are those of a process that
        took as long for each, in that order.

        Args:
            began: when it began to join, in seconds since boot.
        """
        self.joined = self.entered + boot_time() - began

    def note_set_up(self) -> None:
        """Note that the script has set up; the last call counts."""
        self.note_joined()
        self.set_up = boot_time()

    def note_loaded(self) -> None:
        """Note that the State is restored; the last call counts."""
        self.loaded = boot_time()


milestones = Milestones(entered=boot_time())
"""Milestones of this process."""


class AgentGoneError(RuntimeError):
    """The agent has exited, so no answer will come. The guardian is about to kill this process."""


class ChannelError(RuntimeError):
    """The agent sent a message of another form than expected."""

    def __init__(self, wanted: str, got: object) -> None:
        super().__init__(
            f"wanted {wanted} from the agent, got {str(got)[:200]}; "
            "install the same elastic-agent for the agent and the training script"
        )


class AgentChannel:
    """The channel to the agent: sends questions and reports, and waits for answers. Thread-safe."""

    def __init__(self, descriptor: int) -> None:
        os.set_inheritable(descriptor, False)  # child processes of the script must not inherit the channel
        self._sock = socket.socket(fileno=descriptor)
        self._lock = threading.Lock()
        self._unanswered = 0
        self._restore_point: RestorePoint | None = None
        self._descriptors: list[int] = []
        """Descriptors that came with answers and were not taken yet."""
        self._milestones: dict[str, object] | None = None
        """Milestones up to the first committed step, not sent yet; None before the first step."""
        self._has_reported = False
        """The milestones were sent."""
        self._is_sent_on = False
        """This process was sent into another group, and has not left its own yet."""
        self.reported_snapshot = 0
        """Step of the last snapshot that was reported; 0: none."""

    def ask_restore_point(self) -> RestorePoint:
        """Return the group's restore point; once this process has committed checkpoints, with the newest of these.

        Raises:
            AgentGoneError: the agent has exited.
            ChannelError: the agent has another version than this package.
        """
        with self._lock:
            if self._restore_point is None:
                answer = self._ask({"ask": "restore_point"})
                descriptors, self._descriptors = self._descriptors, []
                try:
                    self._restore_point = parse_restore_point(answer, descriptors)
                except ValueError as error:
                    raise ChannelError("the restore point", error) from error
            return self._restore_point

    def publish(self, asked: CommittedCheckpoint, is_abandoned: Callable[[], bool] = lambda: False) -> Verdict:
        """Ask the agent to commit a checkpoint whose files are on disk under its private name; return the verdict.

        Args:
            asked: the checkpoint.
            is_abandoned: whether this process has left the group of the checkpoint; it is not committed then.

        Raises:
            AgentGoneError: the agent has exited; the checkpoint may or may not be committed.
            ChannelError: the agent has another version than this package.
        """
        with self._lock:
            if self._is_sent_on or is_abandoned():
                return Verdict(asked.copy, None, "its ranks are in another group now")
            verdict = _check_verdict(asked, self._ask(publish_message(asked)))
            committed = verdict.checkpoint
            if committed is not None and self._restore_point is not None:
                self._restore_point = replace(self._restore_point, copy=committed.copy, checkpoint=committed)
            return verdict

    def restored_snapshot_bytes(self) -> int:
        """Return the bytes that this node's memory holds of the restored snapshot; 0 once it is released.

        All ranks of the node are given the same pieces.
        """
        return sum(piece.bytes for piece in self._restore_point.memory) if self._restore_point is not None else 0

    def release_restored_snapshot(self) -> None:
        """Close the descriptors of the restored snapshot, which is as large as the model and no longer needed.

        Does not block: while a checkpoint waits for its verdict, the descriptors stay open until a later call.
        """
        if self._restore_point is None or not self._restore_point.memory or not self._lock.acquire(blocking=False):
            return
        try:
            for piece in self._restore_point.memory:
                os.close(piece.descriptor)
            self._restore_point = replace(self._restore_point, memory=())
        finally:
            self._lock.release()

    def report_snapshot(self, step: int) -> None:
        """Report that this rank's snapshot of the step is complete. Does not block, not even while a question is open.

        The report is dropped if the agent has exited, or if the socket's buffer is full.
        """
        with suppress(OSError):
            packet = json.dumps({"snapshot": {"step": step, "at_s": time.monotonic()}}).encode()
            self._sock.send(packet, socket.MSG_DONTWAIT)
            self.reported_snapshot = step

    def report_quiesced(self, handoff: int, step: int) -> None:
        """Report that all ranks are quiesced for this handoff, each with a snapshot of this step. Does not block."""
        with suppress(OSError):
            message = {"quiesced": {"handoff": handoff, "step": step}}
            self._sock.send(json.dumps(message).encode(), socket.MSG_DONTWAIT)

    def report_damaged(self, piece: ReplicaPiece) -> None:
        """Report that this piece of the snapshot to restore from is damaged.

        Raises:
            AgentGoneError: the agent has exited.
        """
        with self._lock:
            self._send({"damaged": {"kind": "common" if piece.is_common else "part", "rank": piece.rank}})

    def ask_leave(self, within_s: float) -> Leave | Move | None:
        """Ask what becomes of this rank, which is quiesced; None if no answer came within `within_s` seconds.

        Raises:
            AgentGoneError: the agent has exited.
        """
        give_up_at = time.monotonic() + within_s
        if not self._lock.acquire(timeout=within_s):  # a checkpoint is still waiting for its verdict
            return None
        try:
            self._send({"ask": "leave"})
            return self._await_leave(give_up_at)
        finally:
            self._lock.release()

    def ask_place(self, within_s: float | None = None) -> Move | None:
        """Report that this process is in no group, and wait until it is sent into one.

        Args:
            within_s: seconds to wait; None: for ever.

        Returns:
            The place; None if it did not come in time. Then this process must end.

        Raises:
            AgentGoneError: the agent has exited.
        """
        give_up_at = math.inf if within_s is None else time.monotonic() + within_s
        if not self._lock.acquire(timeout=-1 if within_s is None else within_s):  # a checkpoint waits for its verdict
            return None
        try:
            self._send({"ask": "place"})
            poll = select.poll()
            poll.register(self._sock, select.POLLIN)
            while True:
                left_s = give_up_at - time.monotonic()
                if not poll.poll(None if left_s == math.inf else 1000 * max(0.0, left_s)):
                    return None
                if (packet := self._receive()).startswith(_MOVE):
                    return self._read_move(packet)
        finally:
            self._lock.release()

    def late_answer(self) -> Leave | Move | None:
        """Return an answer that came after `ask_leave` had stopped waiting; does not wait.

        Raises:
            AgentGoneError: the agent has exited.
        """
        if not self._lock.acquire(blocking=False):
            return None
        try:
            return self._await_leave(0.0)
        finally:
            self._lock.release()

    def _await_leave(self, give_up_at: float) -> Leave | Move | None:
        poll = select.poll()  # not `select`: with many ranks on a node the descriptor can exceed 1023
        poll.register(self._sock, select.POLLIN)
        while poll.poll(1000 * max(0.0, give_up_at - time.monotonic())):
            packet = self._receive()
            if packet.startswith(_MOVE):
                return self._read_move(packet)
            if packet.startswith(_LEAVE):
                return Leave()
            self._unanswered -= 1
        return None

    def _read_move(self, packet: bytes) -> Move:
        self._is_sent_on = True
        descriptors, self._descriptors = self._descriptors, []
        try:
            return Move(json.loads(packet)["move"], descriptors[-1] if descriptors else None)
        except ValueError:
            raise ChannelError("an answer in JSON", packet) from None

    def begin_group(self) -> None:
        """Forget what belongs to the group that this process has left, and report that it has.

        Raises:
            AgentGoneError: the agent has exited.
        """
        self.release_restored_snapshot()
        with self._lock:
            self._restore_point, self._milestones, self._has_reported = None, None, False
            self._unanswered = 0
            self._is_sent_on = False
            self.reported_snapshot = 0
            self._send({"moved": True})

    def report_can_move(self, *, can_move: bool) -> None:
        """Report whether this process can enter another group. Does not block; dropped if the agent has exited."""
        with suppress(OSError):
            self._sock.send(json.dumps({"can_move": can_move}).encode(), socket.MSG_DONTWAIT)

    def report_unreadable(self, sentence: str) -> None:
        """Report, before exiting, why this rank cannot read the state that it must restore.

        Raises:
            AgentGoneError: the agent has exited.
        """
        with self._lock:
            self._send({"unreadable": sentence[:_REASON_CHARACTERS]})

    def report_first_step(self, step: int) -> None:
        """Report once that this process has committed its first step, with the times of the milestones before it.

        Does not block: while a checkpoint waits for its verdict, the report is left to a later call. It is dropped if
        the agent has exited.
        """
        if self._has_reported:
            return
        if self._milestones is None:
            self._milestones = {**asdict(milestones), "stepped": boot_time(), "step": step}
        if not self._lock.acquire(blocking=False):
            return
        self._has_reported = True
        try:
            with suppress(AgentGoneError):
                self._send({"started": self._milestones})
        finally:
            self._lock.release()

    def _ask(self, question: dict[str, object]) -> object:
        while self._unanswered:  # a signal handler raised during an earlier wait, and the script continued
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
            raise ValueError(
                f"wanted a message of at most {contract.MESSAGE_BYTES} bytes to the agent, got {len(packet)}"
            )
        try:
            self._sock.send(packet)
        except OSError as error:
            raise AgentGoneError(f"the agent has exited ({error.strerror})") from error

    def _receive_answer(self) -> bytes:
        while (packet := self._receive()).startswith((_LEAVE, _MOVE)):
            continue  # the answer to a question that was abandoned
        self._unanswered -= 1
        return packet

    def _receive(self) -> bytes:
        room = socket.CMSG_SPACE(contract.MAX_DESCRIPTORS * _DESCRIPTOR_BYTES)
        try:
            packet, attached, _, _ = self._sock.recvmsg(contract.MESSAGE_BYTES, room, socket.MSG_CMSG_CLOEXEC)
        except ConnectionResetError:  # the agent exited before it had read all questions
            packet, attached = b"", []
        for _, _, data in attached:
            self._descriptors += array.array("i", data[: len(data) - len(data) % _DESCRIPTOR_BYTES])
        if not packet:
            raise AgentGoneError("the agent has exited while this worker waited for its answer")
        return packet


def _check_verdict(asked: CommittedCheckpoint, answer: object) -> Verdict:
    try:
        verdict = parse_verdict(answer)
    except ValueError as error:
        raise ChannelError(f"a verdict on {asked.name}", error) from error
    committed = verdict.checkpoint
    if verdict.copy != asked.copy or (committed is not None and committed.private != asked.private):
        raise ChannelError(f"a verdict on {asked.private or asked.name}", verdict)
    return verdict


def open_channel() -> AgentChannel | None:
    """Open the channel that the agent handed down, once per process; return None without an agent.

    Raises:
        RuntimeError: the descriptor is not open in this process, which the agent did not start itself.
    """
    descriptor = os.environ.get(contract.CHANNEL_FD)
    return None if descriptor is None else _open_once(int(descriptor))


@functools.cache
def _open_once(descriptor: int) -> AgentChannel:
    try:
        return AgentChannel(descriptor)
    except OSError as error:
        what = f"not open here ({error.strerror})"
        raise contract.not_handed_down(contract.CHANNEL_FD, descriptor, what) from error
