"""The agent's end of the channel to one rank; `trainer_runtime.contract` describes the messages.

Nothing here waits: a rank has at most one question open, so there is room for its answer.

What comes from a worker is the work of a script that may do anything with its descriptors: what is no message is said
in one line and ignored.
"""

from __future__ import annotations

import socket
from contextlib import suppress
from typing import TYPE_CHECKING, Literal

import msgspec

from agent.core.model import Checkpoint, Count, RestorePoint, Seconds, StateId, WallClock
from trainer_runtime import contract

if TYPE_CHECKING:
    from collections.abc import Sequence

    from agent.workers.snapshot_store import SnapshotPiece

_SHOWN_BYTES = 100
_SENTENCE_CHARACTERS = 1000
"""Of what a rank could not read: it goes into records."""


class _Publication(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A checkpoint that asks to be committed: a record without a number."""

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
    """What a worker tells of its first step: seconds since boot, and its number."""

    entered: Seconds
    joined: Seconds
    loaded: Seconds
    stepped: Seconds
    step: Count


class _SnapshotMessage(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A worker has made a snapshot."""

    step: Count


class QuiescedMessage(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A worker stands still for a handoff, as all do, with a snapshot of this step."""

    handoff: Count
    step: Count


class DamagedMessage(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A piece of what a worker was given to begin from is not what it should be."""

    kind: Literal["common", "part"]
    rank: Count


class ReplicaMessage(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A parameter server says whether the copy of a shard is whole."""

    map: Count
    shard: Count
    is_whole: bool


class _Message(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A packet from a worker: one of these."""

    ask: Literal["resume", "leave"] | None = None
    publish: _Publication | None = None
    unreadable: str | None = None
    began: StartedMessage | None = None
    snapped: _SnapshotMessage | None = None
    stood: QuiescedMessage | None = None
    damaged: DamagedMessage | None = None
    copy: ReplicaMessage | None = None


class MessageError(Exception):
    """A worker sent what is no message; the text says what was wrong."""


_OTHER_KINDS = len(_Message.__struct_fields__) - 1
_decoder = msgspec.json.Decoder(_Message)


class Channel:
    """One rank's socket, and what the rank waits for. Used by two threads, which share a lock."""

    def __init__(self) -> None:
        self._sock, self.theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._sock.setblocking(False)
        self.asks_resume = False
        """The worker waits to be told where to begin."""
        self.has_asked_resume = False
        """It did so once: its script commits."""
        self.asks_leave = False
        """The worker waits to be told that its group is over, or has waited, and said nothing since."""
        self.asked: Checkpoint | None = None
        """The worker waits for the verdict on this."""
        self.unreadable = ""
        """What it could not read of what it must begin from, in one line."""
        self.began: StartedMessage | None = None
        """Its first step; None: there was none yet."""
        self.snapped = 0
        """The step of its newest snapshot; 0: there was none yet."""
        self.stood: QuiescedMessage | None = None
        """Where it stood still last with a snapshot."""
        self.damaged: DamagedMessage | None = None
        """What it found damaged last."""
        self.copies: list[ReplicaMessage] = []
        """What it has said of copies of shards, and nobody has taken."""

    def fileno(self) -> int:
        """Readable when the worker has said something, or nobody has its end any more."""
        return self._sock.fileno()

    def receive(self) -> bool:
        """Take one message; False: there will be no more.

        Raises:
            GarbageError: it was none.
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
            raise MessageError(f"more than {contract.MESSAGE_BYTES} bytes: {_shown(packet)}")
        self._note(packet)
        return True

    def send(self, answer: dict[str, object], descriptors: Sequence[int] = ()) -> None:
        """Answer the worker, if it is still there. The descriptors stay open here."""
        with suppress(OSError):
            socket.send_fds(self._sock, [msgspec.json.encode(answer)], descriptors)

    def close(self) -> None:
        """Let go of it: the worker's end reads its end."""
        self._sock.close()

    def _note(self, packet: bytes) -> None:
        try:
            message = _decoder.decode(packet)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise MessageError(f"{error}: {_shown(packet)}") from None
        said = msgspec.structs.astuple(message)
        if said.count(None) == _OTHER_KINDS and (message.snapped or message.stood):  # beside whatever it asks
            self.snapped = message.snapped.step if message.snapped else self.snapped
            self.stood = message.stood or self.stood
            return
        if said.count(None) != _OTHER_KINDS or self.asked is not None:
            raise MessageError(f"one question at a time is allowed: {_shown(packet)}")
        self.asks_leave = message.ask == "leave"  # if it was given up, a later message shows that
        if message.ask == "resume":
            self.asks_resume = self.has_asked_resume = True
        elif message.publish is not None:
            self.asked = Checkpoint(number=0, **msgspec.structs.asdict(message.publish))
        elif message.unreadable is not None:
            self.unreadable = " ".join(message.unreadable.split())[:_SENTENCE_CHARACTERS]
        elif message.began is not None:
            self.began = message.began
        elif message.damaged is not None:
            self.damaged = message.damaged
        elif message.copy is not None:
            self.copies.append(message.copy)


def resume_answer(resume: RestorePoint, memory: Sequence[SnapshotPiece]) -> dict[str, object]:
    """What a rank is told that asks where to begin, with what is held of that in memory."""
    return {"resume": {"copy": resume.copy, "checkpoint": resume.checkpoint, "memory": memory}}


def verdict_answer(copy: StateId, checkpoint: Checkpoint | None, reason: str) -> dict[str, object]:
    """What a rank is told that asks whether its checkpoint counts."""
    return {"verdict": {"copy": copy, "checkpoint": checkpoint, "reason": reason}}


def leave_answer() -> dict[str, object]:
    """What a rank is told that asks whether its group is over, once it is."""
    return {"leave": True}


def _shown(packet: bytes) -> str:
    return repr(packet[:_SHOWN_BYTES])
