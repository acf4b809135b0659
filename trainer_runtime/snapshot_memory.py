"""A rank's end of the memory that its agent keeps: two snapshots, of which one is whole at any moment.

`snapshot_page` has the layout. Each slot has an area of its own, twice as large as it was needed at first: what is not
written takes no memory. A snapshot that does not fit any more gets a new area behind the others, and the old one's
memory is given back.
"""

from __future__ import annotations

import mmap
import os
from contextlib import suppress
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
    from trainer_runtime.flat import Flattened

_WORDS = 2**64


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
        self._areas = [(0, 0)] * SLOTS
        self._seq = 0
        self._map_all()
        clear_header(self._map)
        if used > HEADER_BYTES:
            self._map.madvise(mmap.MADV_REMOVE, HEADER_BYTES, used - HEADER_BYTES)

    def put(self, step: int, world_size: int, common: Flattened | None, part: Flattened) -> None:
        """Copy a snapshot in place of the older one of the two.

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
        if common is not None:
            common.write(self._bytes[common_at:part_at])
        part.write(self._bytes[part_at:][: part.bytes])
        self._seq += 1
        slot = Slot(
            seq=self._seq,
            step=step,
            world_size=world_size,
            common_at=common_at,
            common_bytes=common_bytes,
            common_sum=checksum(self._bytes[common_at:part_at]),
            part_at=part_at,
            part_bytes=part.bytes,
            part_sum=checksum(self._bytes[part_at:][: part.bytes]),
        )
        fill_slot(self._map, index, slot)

    def _make_room(self, index: int, size: int) -> int:
        """Return where so many bytes fit in this slot's area, or in a new one."""
        at, capacity = self._areas[index]
        if size <= capacity:
            return at
        if capacity:
            self._map.madvise(mmap.MADV_REMOVE, at, capacity)
        at, capacity = len(self._map), -(-2 * size // mmap.PAGESIZE) * mmap.PAGESIZE
        os.ftruncate(self._descriptor, at + capacity)
        self._areas[index] = at, capacity
        self._map_all()
        return at

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
