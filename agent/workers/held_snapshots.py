"""The snapshots of one group that this node holds, in the memories of its ranks and as parts from neighbours."""

from __future__ import annotations

import mmap
import os
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from agent.core.saved_states import Replica, StateId
from agent.links.snapshot_parts import SNAPSHOTS_PER_RANK, add_newest
from agent.workers.replica_space import is_in_memory
from trainer_runtime.contract import MAX_DESCRIPTORS
from trainer_runtime.snapshot_page import HEADER_BYTES, KEPT, MEMORY_NAME, Slot, clear_header, fill_slot, read_slots

if TYPE_CHECKING:
    from collections.abc import Iterator

    from agent.workers.memory_release import MemoryRelease

_BLOCK_BYTES = 512
"""Unit of `st_blocks`."""


@dataclass(frozen=True)
class PieceSource:
    """The run and the world size of the ranks whose snapshots are kept."""

    run: str
    world_size: int


@dataclass(frozen=True)
class SnapshotPiece:
    """A piece of a snapshot that this node holds, as it is described to a worker."""

    kind: Literal["common", "part"]
    rank: int
    at: int
    bytes: int
    sum: int
    world_size: int


@dataclass(frozen=True)
class NeighbourPart:
    """A part that a neighbour has sent."""

    copy: StateId
    world_size: int
    rank: int
    checksum: int
    size_bytes: int
    source: bytes | int
    """The bytes; of a large part, the descriptor of a memory or file with them."""

    def drop(self, release: MemoryRelease) -> None:
        """Release its memory."""
        if isinstance(self.source, int):
            release.close_soon(self.source)


@dataclass
class HeldGroup:
    """The snapshots of one group."""

    run: str
    number: int
    world_size: int = 0
    own: dict[int, int] = field(default_factory=dict)
    """Descriptors of the local ranks' memories, by rank."""
    parts: dict[int, tuple[NeighbourPart, ...]] = field(default_factory=dict)
    """Parts that neighbours have sent, by rank."""
    damaged: set[tuple[int, str, int]] = field(default_factory=set)
    """Damaged pieces: step, kind, rank."""

    def slots_of(self, rank: int) -> list[Slot]:
        """Return the snapshots that a rank's memory describes, without those that cannot be valid."""
        size = os.fstat(self.own[rank]).st_size
        return [
            slot
            for slot in read_slots(self.own[rank])
            if slot.world_size == self.world_size
            and max(slot.common_at + slot.common_bytes, slot.part_at + slot.part_bytes) <= size
        ]

    def slots(self) -> list[tuple[int, Slot]]:
        """Return the snapshots of the local ranks, each with its rank."""
        return [(rank, slot) for rank in sorted(self.own) for slot in self.slots_of(rank)]

    def replicas(self) -> tuple[Replica, ...]:
        """Return the snapshots that this node holds, completely or in part."""
        sizes, commons, ranks = dict[int, int](), set[int](), dict[int, list[int]]()
        for step in sorted(
            {slot.step for _, slot in self.slots()} | {part.copy.step for part in self._neighbour_parts()}
        ):
            for piece, _ in self.pieces(step):
                sizes.setdefault(step, piece.world_size)
                if piece.kind == "common":
                    commons.add(step)
                else:
                    ranks.setdefault(step, []).append(piece.rank)
        return tuple(
            Replica(
                copy=StateId(run=self.run, group=self.number, step=step),
                world_size=size,
                has_common=step in commons,
                parts=tuple(sorted(ranks.get(step, [])[: MAX_DESCRIPTORS - 1])),
            )
            for step, size in sorted(sizes.items())
        )

    def used_bytes(self) -> int:
        """Return the size of the memory that these snapshots take now."""
        parts = [part.source for kept in self.parts.values() for part in kept if isinstance(part.source, int)]
        memories = [*self.own.values(), *(source for source in parts if is_in_memory(source))]
        return sum(_BLOCK_BYTES * os.fstat(memory).st_blocks for memory in memories)

    def expected_bytes(self, part_bytes: int) -> int:
        """Return the size of the memory that two snapshots will take, and as many copies of parts of this size."""
        newest = [next(iter(self.slots_of(rank)), None) for rank in self.own]
        own = sum(part_bytes if slot is None else slot.common_bytes + slot.part_bytes for slot in newest)
        return KEPT * (own + len(self.own) * part_bytes)

    def keep_only(self, step: int, release: MemoryRelease) -> None:
        """Release all other snapshots."""
        slots = {rank: slot for rank, slot in self.slots() if slot.step == step}
        for rank in [*self.own]:
            if rank in slots:
                _release_all_but(self.own[rank], slots[rank], release)
            else:
                release.close_soon(self.own.pop(rank))
        for rank, parts in [*self.parts.items()]:
            self._keep_parts(rank, tuple(part for part in parts if part.copy.step == step), release)

    def close(self, release: MemoryRelease) -> None:
        """Release everything."""
        while self.own:
            release.close_soon(self.own.popitem()[1])
        for rank in [*self.parts]:
            self._keep_parts(rank, (), release)

    def add(self, part: NeighbourPart, release: MemoryRelease) -> None:
        """Keep a part, and of its rank's parts only the newest."""
        newest = add_newest(self.parts.get(part.rank, ()), part)
        self._keep_parts(part.rank, newest, release)
        if part not in newest:
            part.drop(release)

    def make_room(self, rank: int, step: int) -> int | None:
        """Remove the part that one of this step replaces, and return its memory; None: it replaces none.

        That is a part of this very step, whose receipt the sender has not seen; else the older one of two.
        """
        parts = self.parts.get(rank, ())
        same = tuple(part for part in parts if part.copy.step == step)
        replaced = same or parts[: len(parts) - SNAPSHOTS_PER_RANK + 1]
        if not replaced or not isinstance(replaced[0].source, int):
            return None
        self.parts[rank] = tuple(part for part in parts if part is not replaced[0])
        return replaced[0].source

    def _keep_parts(self, rank: int, kept: tuple[NeighbourPart, ...], release: MemoryRelease) -> None:
        for part in self.parts.pop(rank, ()):
            if part not in kept:
                part.drop(release)
        if kept:
            self.parts[rank] = kept

    def pieces(self, step: int) -> Iterator[tuple[SnapshotPiece, int | bytes]]:
        """Yield all pieces of a snapshot, each with its memory or its bytes."""
        return (
            (piece, source)
            for piece, source in self._pieces(step)
            if (step, piece.kind, piece.rank) not in self.damaged
        )

    def _pieces(self, step: int) -> Iterator[tuple[SnapshotPiece, int | bytes]]:
        for rank, slot in self.slots():
            if slot.step != step:
                continue
            fd = self.own[rank]
            if slot.common_bytes:
                yield (
                    SnapshotPiece("common", rank, slot.common_at, slot.common_bytes, slot.common_sum, slot.world_size),
                    fd,
                )
            yield SnapshotPiece("part", rank, slot.part_at, slot.part_bytes, slot.part_sum, slot.world_size), fd
        for part in self._neighbour_parts():
            if part.copy.step == step:
                yield SnapshotPiece("part", part.rank, 0, part.size_bytes, part.checksum, part.world_size), part.source

    def _neighbour_parts(self) -> list[NeighbourPart]:
        return [part for rank, parts in sorted(self.parts.items()) if rank not in self.own for part in parts]


def _release_all_but(fd: int, kept: Slot, release: MemoryRelease) -> None:
    """Leave only this snapshot in a memory."""
    ranges = [
        (0, HEADER_BYTES),
        (kept.common_at, kept.common_at + kept.common_bytes),
        (kept.part_at, kept.part_at + kept.part_bytes),
    ]
    with mmap.mmap(fd, HEADER_BYTES) as header:  # not by `pwrite`, which would block while the memory is being freed
        clear_header(header)
        fill_slot(header, 0, kept)
    size = os.fstat(fd).st_size
    free_from = 0
    for begin, end in [*sorted(ranges), (size, size)]:
        if free_from < begin:
            release.punch_hole_soon(fd, free_from, begin)
        free_from = max(free_from, end)


def memory_with(data: bytes, opened: ExitStack) -> int:
    """Return the descriptor of a new memory with these bytes, which `opened` closes."""
    fd = os.memfd_create(f"{MEMORY_NAME}:kept", os.MFD_CLOEXEC)
    opened.callback(os.close, fd)
    os.write(fd, data)
    return fd
