"""Replication of snapshot parts to neighbours.

The part of a snapshot that only one rank has, for instance its random states, would be lost with its node. Therefore
each agent sends the parts of its ranks to the agents that it is linked with as soon as the parts are made, and stores
the parts that those send. A snapshot of which a part has not arrived cannot be resumed from. An older one can, until
its memory is used again.

A part is sent as one frame on the link and proven as a whole, because it becomes part of the training state. The next
one is sent after the neighbour has stored the last, so that a heartbeat waits for at most one part. A neighbour that
stores parts more slowly than they are made receives only the newest.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import TYPE_CHECKING, Protocol, TypeVar

import msgspec

from agent.core.bounds import Count, WorldSize
from agent.core.saved_states import StateId
from agent.links.frames import FrameKind, LinkBroken, LinkConnection, decode_or_break
from agent.links.handshake import LinkSession

if TYPE_CHECKING:
    from collections.abc import Callable

SNAPSHOTS_PER_RANK = 2
"""Ranks may be one step apart. Among the newest two snapshots of each rank, one is common to all ranks."""


class SnapshotPart(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The part of a snapshot that only one rank has."""

    copy: StateId
    world_size: WorldSize
    rank: Count
    checksum: int
    """Checksum of the data, computed by the rank; see `trainer_runtime.snapshot_page`."""
    data: bytes


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(SnapshotPart)


PartId = tuple[StateId, int]
"""The snapshot and the rank of a part."""


def id_of(part: SnapshotPart) -> PartId:
    """Return what tells this part from all others."""
    return part.copy, part.rank


class _OfSnapshot(Protocol):
    @property
    def copy(self) -> StateId: ...


_Part = TypeVar("_Part", bound=_OfSnapshot)


def add_newest(parts: tuple[_Part, ...], part: _Part) -> tuple[_Part, ...]:
    """Return the newest parts of one rank, including this one, oldest first."""
    others = (each for each in parts if each.copy != part.copy)
    return tuple(sorted((*others, part), key=lambda each: (each.copy.group, each.copy.step)))[-SNAPSHOTS_PER_RANK:]


def encode_part(part: SnapshotPart, session: LinkSession) -> bytes:
    """Return the payload of a frame that carries a part."""
    return session.prove(b"keep", _encoder.encode(part))


def decode_part(payload: bytes, session: LinkSession) -> SnapshotPart:
    """Return the part in such a payload. Raises `LinkBroken` if it is malformed or not proven."""
    part = decode_or_break(_decoder.decode, session.check(b"keep", payload))
    if not 0 <= part.rank < part.world_size:
        raise LinkBroken("it sent an impossible snapshot part")
    return part


class PartOutbox:
    """The parts that one neighbour is still to be sent. Used on the links' thread only."""

    def __init__(self) -> None:
        self._pending: dict[int, tuple[SnapshotPart, ...]] = {}
        """By rank, oldest first. A part stays until the neighbour has stored it, because the link may break."""
        self._has_pending = asyncio.Event()
        self._was_stored = asyncio.Event()
        self._awaited: list[tuple[set[PartId], Callable[[], None]]] = []
        """Parts, and what to call once none of them is pending."""

    def put(self, part: SnapshotPart) -> None:
        """Send this part as soon as the link allows."""
        self._pending[part.rank] = add_newest(self._pending.get(part.rank, ()), part)
        self._has_pending.set()
        self._call_awaited()

    def pending(self) -> set[PartId]:
        """Return the parts that the neighbour has not stored yet."""
        return {id_of(part) for parts in self._pending.values() for part in parts}

    def when_stored(self, parts: set[PartId], then: Callable[[], None]) -> None:
        """Call `then` once, as soon as the neighbour has stored these parts, or newer ones of the same ranks."""
        self._awaited.append((parts, then))
        self._call_awaited()

    async def deliver(self, connection: LinkConnection, session: LinkSession) -> None:
        """Send the pending parts, and later ones, until the connection breaks."""
        with suppress(LinkBroken):  # the task that receives on this connection handles it
            while True:
                await self._has_pending.wait()
                part = next(iter(self._pending.values()))[0]
                self._was_stored.clear()
                await connection.deliver(FrameKind.STORE_PART, encode_part(part, session))
                await self._was_stored.wait()
                self._drop(part)

    def on_stored(self) -> None:
        """Note that the neighbour has stored the part that was sent last."""
        self._was_stored.set()

    def _drop(self, part: SnapshotPart) -> None:
        """Remove a part that was sent. The other ranks' parts come before the next part of this rank."""
        rest = tuple(each for each in self._pending.pop(part.rank, ()) if each.copy != part.copy)
        if rest:
            self._pending[part.rank] = rest
        if not self._pending:
            self._has_pending.clear()
        self._call_awaited()

    def _call_awaited(self) -> None:
        pending = self.pending()
        ready = [then for parts, then in self._awaited if not parts & pending]
        self._awaited = [(parts, then) for parts, then in self._awaited if parts & pending]
        for then in ready:
            then()
