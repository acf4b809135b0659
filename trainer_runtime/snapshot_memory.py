"""A rank's end of the memory that its agent keeps: two snapshots, of which one is whole at any moment.

`snapshot_page` has the layout. Each slot has an area of its own, twice as large as it was needed at first: what is not
written takes no memory. A snapshot that does not fit any more gets a new area behind the others, and the old one's
memory is given back.
"""

from __future__ import annotations

import mmap
import os
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from trainer_runtime import contract
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
    """A part of a snapshot: each source is to be copied over its target."""

    where: torch.Tensor
    layout: Layout | None = None
    """None: there is nothing."""
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
    """Where this rank's snapshots are.

    Args:
        descriptor: of the agent's memory. What older States of this process have put there is forgotten.
    """

    def __init__(self, descriptor: int) -> None:
        os.set_inheritable(descriptor, False)  # the programs that the script starts have no part in this
        used = os.fstat(descriptor).st_size
        os.ftruncate(descriptor, max(used, HEADER_BYTES))
        self._descriptor = descriptor
        self._areas: list[tuple[int, int]] = [_NOWHERE] * SLOTS
        self._seq = 0
        self.newest = 0
        """The step of what was finished last; 0: of nothing, or it was taken back."""
        self._known: dict[tuple[int, str], tuple[Layout, int, list[torch.Tensor]]] = {}
        self._map_all()
        clear_header(self._map)
        if used > HEADER_BYTES:
            self._map.madvise(mmap.MADV_REMOVE, HEADER_BYTES, used - HEADER_BYTES)

    def begin(self, step: int, world_size: int, common: Flattened | None, part: Flattened) -> Unfinished:
        """Begin to put a snapshot in place of the older one of the two: only its values.

        Args:
            step: the step after which it is taken.
            world_size: number of ranks.
            common: what is equal on all ranks; None if another rank of this node puts it.
            part: what is this rank's own.
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

    def finish(self, begun: Unfinished) -> None:
        """Say that it is whole, when its sources have been copied. May be called on another thread."""
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
        """Take back what was finished last."""
        self._seq -= 1
        self.newest = 0
        empty_slot(self._map, self._seq % SLOTS)

    def _begin_piece(self, place: tuple[int, str], flattened: Flattened | None, where: torch.Tensor) -> MemoryPiece:
        if flattened is None:
            return MemoryPiece(where)
        flattened.write_values(self._map, int(where.storage_offset()))
        layout, begin = flattened.layout, where.data_ptr()
        known = self._known.get(place)
        if known is None or known[0] is not layout or known[1] != begin:  # the same again and again, as a rule
            known = self._known[place] = layout, begin, flattened.targets(where)
        return MemoryPiece(where, layout, layout.sources, known[2])

    def _make_room(self, index: int, size: int) -> int:
        """Return where so many bytes fit in this slot's area, or in a new one."""
        at, capacity = self._areas[index]
        if size <= capacity:
            return at
        if capacity:
            self._map.madvise(mmap.MADV_REMOVE, at, capacity)
        end, capacity = len(self._map), -(-2 * size // mmap.PAGESIZE) * mmap.PAGESIZE
        # At first for all: each time it is mapped anew, all of it is slow once more.
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
    """Return what `snapshot_page` says of checksums; `data` is as many bytes as make whole words."""
    return int(data.view(torch.int64).sum().item()) % _WORDS


def handed_down() -> int | None:
    """Return the descriptor of the agent's memory; None where there is none, as in a program that the script started.

    That one has the variable, and may have something else under the number.
    """
    descriptor = int(os.environ.get(contract.SNAPSHOT_FD, "-1"))
    with suppress(OSError):
        if MEMORY_NAME in str(Path(f"/proc/self/fd/{descriptor}").readlink()):
            return descriptor
    return None
