"""Parts of snapshots on their way to neighbours.

What one rank alone has of a snapshot, its random states for instance, would be lost with its node. So each agent hands
the parts of its ranks to the agents that it is linked with, as they are made, and keeps what those hand over. What
does not arrive is not there to be resumed from, and an older copy is.

A part goes as a frame of its own on the link, proven as a whole, for it becomes a part of the training. The next one
goes when the last has arrived, so that a heartbeat waits for one at most; a neighbour that takes them more slowly than
they are made gets the newest.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import TYPE_CHECKING

import msgspec

from agent.core.model import Count, StateId, WorldSize
from agent.links.frames import FrameKind, Handshake, LinkBroken, LinkConnection, understood

if TYPE_CHECKING:
    from collections.abc import Callable

KEPT_OF_A_RANK = 2
"""Snapshots. Ranks are a step apart at times: of the newest two of each, one is there of all."""


class SnapshotPart(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What one rank alone has of a snapshot."""

    copy: StateId
    world_size: WorldSize
    rank: Count
    checksum: int
    """Of the data, as the rank made it: see `trainer_runtime.snapshot_page`."""
    data: bytes


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(SnapshotPart)


def add_newest(parts: tuple[SnapshotPart, ...], part: SnapshotPart) -> tuple[SnapshotPart, ...]:
    """The newest of one rank's parts, oldest first, with this one."""
    others = (each for each in parts if each.copy != part.copy)
    return tuple(sorted((*others, part), key=lambda each: (each.copy.group, each.copy.step)))[-KEPT_OF_A_RANK:]


def seal(part: SnapshotPart, session: Handshake) -> bytes:
    """The payload of a frame that hands a part over."""
    return session.prove(b"keep", _encoder.encode(part))


def unseal(payload: bytes, session: Handshake) -> SnapshotPart:
    """The part in such a payload. Raises `LinkBroken` if it is none, or is not proven."""
    part = understood(_decoder.decode, session.check(b"keep", payload))
    if not 0 <= part.rank < part.world_size:
        raise LinkBroken("it hands over what cannot be")
    return part


class PartOutbox:
    """What one neighbour is still to be given. Used on the links' thread alone."""

    def __init__(self) -> None:
        self._waiting: dict[int, tuple[SnapshotPart, ...]] = {}
        """By rank, oldest first. A part stays until it has arrived: the link may be opened again."""
        self._has_some = asyncio.Event()
        self._has_arrived = asyncio.Event()
        self._when_empty: list[Callable[[], None]] = []

    def put(self, part: SnapshotPart) -> None:
        """Hand this over as soon as the link allows."""
        self._waiting[part.rank] = add_newest(self._waiting.get(part.rank, ()), part)
        self._has_some.set()

    def when_empty(self, then: Callable[[], None]) -> None:
        """Call this once, as soon as there is nothing that has not arrived."""
        self._when_empty.append(then)
        self._tell_if_empty()

    async def deliver(self, connection: LinkConnection, session: Handshake) -> None:
        """Hand over what is there, and what comes, until the connection breaks."""
        with suppress(LinkBroken):  # who follows the connection notices too
            while True:
                await self._has_some.wait()
                part = next(iter(self._waiting.values()))[0]
                self._has_arrived.clear()
                await connection.deliver(FrameKind.KEEP, seal(part, session))
                await self._has_arrived.wait()
                self._drop(part)

    def note_arrival(self) -> None:
        """The part that was sent last is there."""
        self._has_arrived.set()

    def _drop(self, part: SnapshotPart) -> None:
        """It is no longer to be given; the other ranks' turns come before the next one's of this rank."""
        rest = tuple(each for each in self._waiting.pop(part.rank, ()) if each.copy != part.copy)
        if rest:
            self._waiting[part.rank] = rest
        if not self._waiting:
            self._has_some.clear()
        self._tell_if_empty()

    def _tell_if_empty(self) -> None:
        while self._when_empty and not self._waiting:
            self._when_empty.pop()()
