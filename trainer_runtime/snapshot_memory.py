"""A rank's side of the memory for copies of its State, of which one is a complete snapshot at any moment.

Usually this is the memory that the agent holds. Without an agent, or without snapshots, it is a memory of this process,
for the copies from which checkpoints are written.

`snapshot_page` has the layout. Each slot has an area of its own, twice as large as its first copy: pages that are not
written take no memory. A copy that no longer fits gets a new area behind the others, and the memory of the old area is
freed. A slot that is leased is not filled again: a checkpoint is being written from it.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import threading
import weakref
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from trainer_runtime import contract
from trainer_runtime.flat import unflatten
from trainer_runtime.free_memory import free_memory
from trainer_runtime.pinned_memory import PinnedMemory
from trainer_runtime.snapshot_page import (
    HEADER_BYTES,
    KEPT,
    MEMORY_NAME,
    SLOTS,
    Slot,
    clear_header,
    empty_slot,
    fill_slot,
)
from trainer_runtime.snapshot_sum import piece_sum

if TYPE_CHECKING:
    from collections.abc import Sequence

    from trainer_runtime.flat import Flattened, Layout

_LEAST_PREPARED_BYTES = 32 << 20
"""Smaller areas are not allocated ahead: the copy needs only some hundredths of a second for that."""
_CHUNK_BYTES = 1 << 20
"""What is taken ahead in one call of the system, during which no other thread of the process can map memory."""
_MADV_POPULATE_WRITE = 23
"""As in <linux/mman.h>; `mmap` of Python does not have it."""
_NICE = 10
_OWN_SLACK_BYTES = 1 << 20
"""What a copy may grow by before it gets another memory of this process."""


@dataclass(frozen=True, slots=True)
class _Area:
    """The memory of a slot."""

    at: int
    """Offset in the agent's memory."""
    map: mmap.mmap
    bytes: torch.Tensor
    """Uint8, all of the map."""


def _area(at: int, memory: mmap.mmap) -> _Area:
    return _Area(at, memory, torch.frombuffer(memory, dtype=torch.uint8))


@dataclass(frozen=True, slots=True)
class MemoryPiece:
    """A part of a snapshot: each source is to be copied to its target."""

    where: torch.Tensor
    layout: Layout | None = None
    """None: there is nothing to copy."""
    sources: Sequence[torch.Tensor] = ()
    targets: Sequence[torch.Tensor] = ()


@dataclass(frozen=True, slots=True)
class Unfinished:
    """A copy whose sources are still to be copied."""

    index: int
    area: _Area
    step: int
    world_size: int
    is_snapshot: bool
    """False: other ranks may have no copy of the same moment, so nothing is restored from it."""
    common: MemoryPiece
    part: MemoryPiece


class SnapshotMemory:
    """The memory for copies of this rank's State.

    Args:
        descriptor: descriptor of the agent's memory; None: memory of this process is used. Snapshots of earlier States
            of this process are cleared.
        rank: this rank.
    """

    def __init__(self, descriptor: int | None, rank: int) -> None:
        self._descriptor = descriptor
        self._rank = rank
        self._areas: list[_Area | None] = [None] * SLOTS
        self._seqs = [0] * SLOTS
        self._leased: set[int] = set()
        self.newest = 0
        """Step of the snapshot that was finished last; 0: there is none, or it was revoked."""
        self._pinned = PinnedMemory()
        # Else CUDA would copy into these pages for whatever is mapped at their address later.
        weakref.finalize(self, self._pinned.unpin_all).atexit = False
        self._known: dict[tuple[int, str], tuple[Layout, int, list[torch.Tensor]]] = {}
        if descriptor is None:
            self._header = mmap.mmap(-1, HEADER_BYTES)
        else:
            os.set_inheritable(descriptor, False)  # child processes of the script must not inherit it
            used = os.fstat(descriptor).st_size
            os.ftruncate(descriptor, max(used, HEADER_BYTES))
            if used > HEADER_BYTES:
                mmap.mmap(descriptor, used).madvise(mmap.MADV_REMOVE, HEADER_BYTES)
            self._header = mmap.mmap(descriptor, HEADER_BYTES)
        clear_header(self._header)

    def begin(
        self, step: int, world_size: int, common: Flattened | None, part: Flattened, *, is_snapshot: bool = True
    ) -> Unfinished:
        """Begin to replace the oldest copy; writes only its values.

        Args:
            step: the step after which the snapshot is taken.
            world_size: number of ranks.
            common: the state that is equal on all ranks; None if another rank of this node writes it.
            part: this rank's own part.
            is_snapshot: count it as a snapshot once it is finished.
        """
        free = [index for index in range(SLOTS) if index not in self._leased]
        index = min(free[:KEPT] if is_snapshot else free, key=self._seqs.__getitem__)
        self._seqs[index] = 0
        common_bytes = common.bytes if common is not None else 0
        empty_slot(self._header, index)
        area = self._make_room(index, common_bytes + part.bytes)
        return Unfinished(
            index,
            area,
            step,
            world_size,
            is_snapshot,
            self._begin_piece((index, "common"), area, common, area.bytes[:common_bytes]),
            self._begin_piece((index, "part"), area, part, area.bytes[common_bytes:][: part.bytes]),
        )

    def prepare(self, size: int, slots: int) -> None:
        """Let a thread allocate the memory of those of the first `slots` slots that have none yet. Returns at once.

        Otherwise the first copy into a slot waits while the system clears each page, which can take a second per
        gigabyte or more. Memory for a third slot is allocated ahead only if twice as much is free.

        Args:
            size: bytes of each copy.
            slots: number of slots, from the first one.
        """
        if size < _LEAST_PREPARED_BYTES:
            return
        missing = [index for index in range(slots) if self._areas[index] is None]
        if slots > KEPT and free_memory() < 2 * size * len(missing):
            return
        areas = [self._make_room(index, size) for index in missing]
        if areas:
            threading.Thread(target=_take_memory, args=(areas, size), name="snapshot-memory", daemon=True).start()

    def pin(self, begun: Unfinished, device: torch.device) -> None:
        """Pin the memory of a snapshot, so that this GPU can copy into it by itself. May be called on any thread.

        A slot's next snapshot has the same place and about the same size, so this takes time for the first ones only.
        """
        common, part = begun.common.where, begun.part.where  # side by side
        self._pinned.pin(begun.index, common.data_ptr(), common.nbytes + part.nbytes, len(begun.area.map), device)

    def finish(self, begun: Unfinished) -> None:
        """Mark a snapshot as complete, once its sources have been copied. May be called on another thread."""
        slot = Slot(
            seq=max(self._seqs) + 1,
            step=begun.step,
            world_size=begun.world_size,
            common_at=begun.area.at + int(begun.common.where.storage_offset()),
            common_bytes=len(begun.common.where),
            common_sum=self._sum(begun, begun.common, None),
            part_at=begun.area.at + int(begun.part.where.storage_offset()),
            part_bytes=len(begun.part.where),
            part_sum=self._sum(begun, begun.part, self._rank),
        )
        fill_slot(self._header, begun.index, slot)
        self._seqs[begun.index] = slot.seq
        self.newest = begun.step

    def _sum(self, begun: Unfinished, piece: MemoryPiece, rank: int | None) -> int:
        data = _view(begun.area.map, piece.where)
        return piece_sum(data, rank=rank, step=begun.step, world_size=begun.world_size)

    def revoke(self, begun: Unfinished) -> None:
        """Discard the snapshot that was finished last."""
        self.newest = 0
        self._seqs[begun.index] = 0
        empty_slot(self._header, begun.index)

    def forget(self) -> None:
        """Keep no reference to what was copied."""
        self._known.clear()

    @property
    def is_leased(self) -> bool:
        """Whether a copy is kept as it is."""
        return bool(self._leased)

    def lease(self, begun: Unfinished) -> None:
        """Keep a copy as it is until `release`. At most one is leased at a time."""
        self._leased.add(begun.index)

    def release(self, begun: Unfinished) -> None:
        """Let a leased copy be replaced. May be called on another thread."""
        self._leased.discard(begun.index)

    def _begin_piece(
        self, place: tuple[int, str], area: _Area, flattened: Flattened | None, where: torch.Tensor
    ) -> MemoryPiece:
        if flattened is None:
            return MemoryPiece(where)
        flattened.write_values(area.map, int(where.storage_offset()))
        layout, begin = flattened.layout, where.data_ptr()
        known = self._known.get(place)
        if known is None or known[0] is not layout or known[1] != begin:  # usually the same each time
            known = self._known[place] = layout, begin, flattened.targets(where)
        return MemoryPiece(where, layout, layout.sources, known[2])

    def _make_room(self, index: int, size: int) -> _Area:
        """Return this slot's area, or a new one with room for `size` bytes."""
        area = self._areas[index]
        if area is not None and size <= len(area.map):
            return area
        self._pinned.unpin(index)
        if self._descriptor is None:
            area = _area(0, mmap.mmap(-1, size + _OWN_SLACK_BYTES))
        else:
            if area is not None:
                area.map.madvise(mmap.MADV_REMOVE)
            end = _whole_pages(os.fstat(self._descriptor).st_size)
            capacity = _whole_pages(2 * size)
            os.ftruncate(self._descriptor, end + capacity)
            area = _area(end, mmap.mmap(self._descriptor, capacity, offset=end))
        self._areas[index] = area
        return area


def _take_memory(areas: Sequence[_Area], size: int) -> None:
    """Allocate and map the first bytes of these areas. What is there stays. Before Linux 5.14 it does nothing."""
    os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICE)
    advise = ctypes.CDLL(None).madvise
    advise.argtypes = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
    for area in areas:
        begin = area.bytes.data_ptr()
        for at in range(0, size, _CHUNK_BYTES):
            if advise(begin + at, min(_CHUNK_BYTES, size - at), _MADV_POPULATE_WRITE) != 0:
                return  # the copy that needs it says what is wrong


def _whole_pages(size: int) -> int:
    return -(-size // mmap.PAGESIZE) * mmap.PAGESIZE


def read_copy(begun: Unfinished) -> tuple[Any, Any]:
    """Return the common part, or None, and this rank's own part, once the sources have been copied.

    Their tensors are views of the memory, whose slot must be leased. May be called on another thread.
    """
    common, part = (_view(begun.area.map, piece.where) for piece in (begun.common, begun.part))
    return (unflatten(common) if common else None), unflatten(part)


def _view(memory: mmap.mmap, where: torch.Tensor) -> memoryview:
    at = int(where.storage_offset())
    return memoryview(memory)[at : at + len(where)]


def replace_snapshot_memory(descriptor: int) -> None:
    """Let `snapshot_descriptor` return this memory from now on, under the old number; the given number is closed."""
    os.dup2(descriptor, int(os.environ[contract.SNAPSHOT_FD]), inheritable=False)
    os.close(descriptor)


def snapshot_descriptor() -> int | None:
    """Return the descriptor of the agent's memory; None if there is none.

    A program that the script started inherits the variable, and may have another file under the number.
    """
    descriptor = int(os.environ.get(contract.SNAPSHOT_FD, "-1"))
    with suppress(OSError):
        if MEMORY_NAME in str(Path(f"/proc/self/fd/{descriptor}").readlink()):
            return descriptor
    return None
