"""The agent's end of the channel to one rank. `trainer_runtime.contract` describes the messages.

Nothing here blocks: a rank has at most one open question, so there is always room for its answer.

A script can do anything with its descriptors, so packets are not trusted. An invalid packet is logged in one line and
ignored.
"""

from __future__ import annotations

import socket
from contextlib import suppress
from typing import TYPE_CHECKING, Literal

import msgspec

from agent.core.bounds import Count, Seconds, WallClock
from agent.core.saved_states import Checkpoint, RestorePoint, StateId
from trainer_runtime import contract

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from agent.workers.held_snapshots import SnapshotPiece

_SHOWN_BYTES = 100
_LARGEST_VARIABLE = 32 << 10
"""Characters of an environment variable that still fits into a message. Longer ones are left out."""
_UNREADABLE_CHARACTERS = 1000
"""Limit of the description of an unreadable state, which is written to records."""


class _Publication(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A checkpoint to be committed: a checkpoint record without a number."""

    copy: StateId
    name: str
    private: str
    manifest_sha256: str
    kept: tuple[str, ...]
    superseded: tuple[str, ...]
    is_rollback: bool
    handoff: Count
    node: str
    size_bytes: Count
    took_s: Seconds
    at: WallClock


class StartedMessage(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A worker has completed its first step: times in seconds since boot, and the number of the step."""

    entered: Seconds
    joined: Seconds
    set_up: Seconds
    loaded: Seconds
    stepped: Seconds
    step: Count


class SnapshotMessage(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A worker has taken a snapshot."""

    step: Count
    at_s: Seconds
    """When it was complete, on the monotonic clock."""


class QuiescedMessage(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A worker is quiesced for a handoff, as all ranks are, with a snapshot of this step."""

    handoff: Count
    step: Count


class DamagedMessage(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A piece of the snapshot that a worker should start from is damaged."""

    kind: Literal["common", "part"]
    rank: Count


class ReplicaMessage(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A parameter server reports whether the replica of a shard is complete."""

    map: Count
    shard: Count
    is_complete: bool


class _Message(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A packet from a worker. One field is set; `snapshot`, `quiesced`, `can_move` may come beside an open question."""

    ask: Literal["restore_point", "leave", "place"] | None = None
    can_move: bool | None = None
    moved: Literal[True] | None = None
    publish: _Publication | None = None
    unreadable: str | None = None
    started: StartedMessage | None = None
    snapshot: SnapshotMessage | None = None
    quiesced: QuiescedMessage | None = None
    damaged: DamagedMessage | None = None
    replica: ReplicaMessage | None = None


class MessageError(Exception):
    """An invalid packet from a worker. The text describes the error."""


_OTHER_KINDS = len(_Message.__struct_fields__) - 1
_decoder = msgspec.json.Decoder(_Message)


class Channel:
    """One rank's socket, and the questions that the rank has open. Used by two threads, which share a lock."""

    def __init__(self) -> None:
        self._sock, self.theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._sock.setblocking(False)
        self.awaits_restore_point = False
        """The worker waits for its restore point."""
        self.has_asked_restore_point = False
        """The worker has asked for its restore point once: its script uses checkpoints."""
        self.awaits_leave_answer = False
        """The worker has asked whether its group is over, and has sent nothing since. It may have stopped waiting."""
        self.awaits_place = False
        """The worker has set up, and waits until it is sent into a group."""
        self.can_move = False
        """The worker can enter another group without a new process."""
        self.is_moving = False
        """The worker was sent into another group, and may not have noticed: what it sends is of the old group."""
        self.pending_publish: Checkpoint | None = None
        """The checkpoint whose commit the worker waits for."""
        self.unreadable = ""
        """Why the worker could not read the state that it must start from, in one line."""
        self.started: StartedMessage | None = None
        """Report of its first step. None: there was none yet."""
        self.snapshot: SnapshotMessage | None = None
        """Its newest snapshot; None: there was none yet."""
        self.quiesced: QuiescedMessage | None = None
        """The newest handoff for which it was quiesced with a snapshot."""
        self.damaged: DamagedMessage | None = None
        """The piece that it reported last as damaged."""
        self.replica_messages: list[ReplicaMessage] = []
        """Reports on replicas of shards that were not handled yet."""

    def begin_group(self) -> None:
        """Forget what the worker reported in the group that it is about to leave."""
        self.is_moving = True
        self.awaits_restore_point = self.has_asked_restore_point = self.awaits_leave_answer = self.awaits_place = False
        self.snapshot = self.started = self.quiesced = self.damaged = None

    def fileno(self) -> int:
        """Return the socket. It is readable when there is a packet, and when the worker's end is closed."""
        return self._sock.fileno()

    def receive(self) -> bool:
        """Read one packet. Return False if there will be no more.

        Raises:
            MessageError: the packet is invalid.
        """
        try:
            packet, _, flags, _ = self._sock.recvmsg(contract.MESSAGE_BYTES)
        except BlockingIOError:
            return True
        except OSError:
            return False
        if not packet:
            return False
        if flags & socket.MSG_TRUNC:
            raise MessageError(f"more than {contract.MESSAGE_BYTES} bytes: {_quote(packet)}")
        self._note(packet)
        return True

    def send(self, answer: dict[str, object], descriptors: Sequence[int] = ()) -> None:
        """Answer the worker, if it is still alive. The descriptors stay open here."""
        with suppress(OSError):
            socket.send_fds(self._sock, [msgspec.json.encode(answer)], descriptors)

    def close(self) -> None:
        """Close the socket. The worker reads the end of its own."""
        self._sock.close()

    def _note_report(self, message: _Message) -> bool:
        """Note what may come while a question is open. Return whether the message is such a report."""
        if message.snapshot is not None:
            self.snapshot = message.snapshot
        elif message.quiesced is not None:
            self.quiesced = message.quiesced
        elif message.can_move is not None:
            self.can_move = message.can_move
        else:
            return False
        return True

    def _note(self, packet: bytes) -> None:
        message = _decode(packet)
        if self.is_moving:
            self.is_moving = not message.moved
            return
        fields = msgspec.structs.astuple(message)
        if fields.count(None) == _OTHER_KINDS and self._note_report(message):
            return
        if fields.count(None) != _OTHER_KINDS or self.pending_publish is not None:
            raise MessageError(f"only one question at a time is allowed: {_quote(packet)}")
        self.awaits_leave_answer = message.ask == "leave"  # a later message shows that the worker stopped waiting
        self.awaits_place = message.ask == "place"
        if message.ask == "restore_point":
            self.awaits_restore_point = self.has_asked_restore_point = True
        elif message.publish is not None:
            self.pending_publish = Checkpoint(number=0, **msgspec.structs.asdict(message.publish))
        elif message.unreadable is not None:
            self.unreadable = " ".join(message.unreadable.split())[:_UNREADABLE_CHARACTERS]
        elif message.started is not None:
            self.started = message.started
        elif message.damaged is not None:
            self.damaged = message.damaged
        elif message.replica is not None:
            self.replica_messages.append(message.replica)


def _decode(packet: bytes) -> _Message:
    try:
        return _decoder.decode(packet)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise MessageError(f"{error}: {_quote(packet)}") from None


def restore_point_answer(restore_point: RestorePoint, memory: Sequence[SnapshotPiece]) -> dict[str, object]:
    """Answer a question for the restore point, with the pieces of it that this node holds in memory."""
    return {"restore_point": {"copy": restore_point.copy, "checkpoint": restore_point.checkpoint, "memory": memory}}


def publish_answer(
    copy: StateId, checkpoint: Checkpoint | None, reason: str, *, is_saved: bool = False
) -> dict[str, object]:
    """Answer a request to publish a checkpoint.

    Args:
        copy: the state that it is of.
        checkpoint: the checkpoint as committed. None: it is not committed.
        reason: why it is not.
        is_saved: another checkpoint of this very state is committed.
    """
    return {"verdict": {"copy": copy, "checkpoint": checkpoint, "reason": reason, "is_saved": is_saved}}


def leave_answer() -> dict[str, object]:
    """Answer the question whether the group is over, once it is."""
    return {"leave": True}


def move_answer(variables: Mapping[str, str | None]) -> dict[str, object]:
    """Answer the same question: the rank goes on in another group.

    Args:
        variables: the environment variables of its place there; None: such a variable is not set.
    """
    large = {name for name, value in variables.items() if len(value or "") > _LARGEST_VARIABLE}
    return {"move": {name: None if name in large else value for name, value in variables.items()}}


def _quote(packet: bytes) -> str:
    return repr(packet[:_SHOWN_BYTES])
