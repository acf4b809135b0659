"""A rank's side of the memory that its agent holds: two snapshots, of which one is complete at any moment.

`snapshot_page` has the layout. Each slot has an area of its own, twice as large as its first snapshot: pages that are
not written take no memory. A snapshot that no longer fits gets a new area behind the others, and the memory of the old
area is freed.
"""

from __future__ import annotations

import mmap
import os
import weakref
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from trainer_runtime import contract
from trainer_runtime.pinned_memory import PinnedMemory
from trainer_runtime.snapshot_page import (
    HEADER_BYTES,
    MEMORY_NAME,
    SLOTS,
    Slot,
    clear_header,
    empty_slot,
    fill_slot,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from trainer_runtime.flat import Flattened, Layout

_WORDS = 2**64
_NOWHERE = (0, 0)


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
    """A snapshot whose sources are still to be copied."""

    index: int
    step: int
    world_size: int
    common: MemoryPiece
    part: MemoryPiece


class SnapshotMemory:
    """The memory for this rank's snapshots.

    Args:
        descriptor: descriptor of the agent's memory. Snapshots of earlier States of this process are cleared.
    """

    def __init__(self, descriptor: int) -> None:
        os.set_inheritable(descriptor, False)  # child processes of the script must not inherit it
        used = os.fstat(descriptor).st_size
        os.ftruncate(descriptor, max(used, HEADER_BYTES))
        self._descriptor = descriptor
        self._areas: list[tuple[int, int]] = [_NOWHERE] * SLOTS
        self._seq = 0
        self.newest = 0
        """Step of the snapshot that was finished last; 0: there is none, or it was revoked."""
        self._pinned = PinnedMemory()
        # Else CUDA would copy into these pages for whatever is mapped at their address later.
        weakref.finalize(self, self._pinned.unpin_all).atexit = False
        self._known: dict[tuple[int, str], tuple[Layout, int, list[torch.Tensor]]] = {}
        self._map_all()
        clear_header(self._map)
        if used > HEADER_BYTES:
            self._map.madvise(mmap.MADV_REMOVE, HEADER_BYTES, used - HEADER_BYTES)

    def begin(self, step: int, world_size: int, common: Flattened | None, part: Flattened) -> Unfinished:
        """Begin to replace the older of the two snapshots; writes only its values.

        Args:
            step: the step after which the snapshot is taken.
            world_size: number of ranks.
            common: the state that is equal on all ranks; None if another rank of this node writes it.
            part: this rank's own part.
        """
        index = self._seq % SLOTS
        common_bytes = common.bytes if common is not None else 0
        empty_slot(self._map, index)
        common_at = self._make_room(index, common_bytes + part.bytes)
        part_at = common_at + common_bytes
        return Unfinished(
            index,
            step,
            world_size,
            self._begin_piece((index, "common"), common, self._bytes[common_at:part_at]),
            self._begin_piece((index, "part"), part, self._bytes[part_at:][: part.bytes]),
        )

    def pin(self, begun: Unfinished, device: torch.device) -> None:
        """Pin the memory of a snapshot, so that this GPU can copy into it by itself. May be called on any thread.

        A slot's next snapshot has the same place and about the same size, so this takes time for the first ones only.
        """
        common, part = begun.common.where, begun.part.where  # side by side
        capacity = self._areas[begun.index][1]
        self._pinned.pin(begun.index, common.data_ptr(), common.nbytes + part.nbytes, capacity, device)

    def finish(self, begun: Unfinished) -> None:
        """Mark a snapshot as complete, once its sources have been copied. May be called on another thread."""
        slot = Slot(
            seq=self._seq + 1,
            step=begun.step,
            world_size=begun.world_size,
            common_at=int(begun.common.where.storage_offset()),
            common_bytes=len(begun.common.where),
            common_sum=checksum(begun.common.where),
            part_at=int(begun.part.where.storage_offset()),
            part_bytes=len(begun.part.where),
            part_sum=checksum(begun.part.where),
        )
        fill_slot(self._map, begun.index, slot)
        self._seq += 1
        self.newest = begun.step

    def revoke(self) -> None:
        """Discard the snapshot that was finished last."""
        self._seq -= 1
        self.newest = 0
        empty_slot(self._map, self._seq % SLOTS)

    def _begin_piece(self, place: tuple[int, str], flattened: Flattened | None, where: torch.Tensor) -> MemoryPiece:
        if flattened is None:
            return MemoryPiece(where)
        flattened.write_values(self._map, int(where.storage_offset()))
        layout, begin = flattened.layout, where.data_ptr()
        known = self._known.get(place)
        if known is None or known[0] is not layout or known[1] != begin:  # usually the same each time
            known = self._known[place] = layout, begin, flattened.targets(where)
        return MemoryPiece(where, layout, layout.sources, known[2])

    def _make_room(self, index: int, size: int) -> int:
        """Return the offset of `size` bytes in this slot's area, or in a new area."""
        at, capacity = self._areas[index]
        if size <= capacity:
            return at
        self._pinned.unpin_all()
        if capacity:
            self._map.madvise(mmap.MADV_REMOVE, at, capacity)
        end, capacity = len(self._map), -(-2 * size // mmap.PAGESIZE) * mmap.PAGESIZE
        # At first for all slots: after each new mapping, the first access to every page is slow once more.
        wanting = [index] if self._areas != [_NOWHERE] * SLOTS else range(SLOTS)
        for slot in wanting:
            self._areas[slot] = end, capacity
            end += capacity
        os.ftruncate(self._descriptor, end)
        self._map_all()
        return self._areas[index][0]

    def _map_all(self) -> None:
        self._map = mmap.mmap(self._descriptor, 0)
        self._bytes = torch.frombuffer(self._map, dtype=torch.uint8)


def checksum(data: torch.Tensor) -> int:
    """Return the checksum that `snapshot_page` describes; the size of `data` must be a multiple of 8 bytes."""
    return int(data.view(torch.int64).sum().item()) % _WORDS


def snapshot_descriptor() -> int | None:
    """Return the descriptor of the agent's memory; None if there is none.

    A program that the script started inherits the variable, and may have another file under the number.
    """
    descriptor = int(os.environ.get(contract.SNAPSHOT_FD, "-1"))
    with suppress(OSError):
        if MEMORY_NAME in str(Path(f"/proc/self/fd/{descriptor}").readlink()):
            return descriptor
    return None
