"""The memory that a rank puts its snapshots into: what stands where. Read by the agent too, so without torch.

The agent makes a memfd of no bytes for each rank and keeps it when the process has ended, which is what snapshots are
for. The rank gives it its size: a header of `HEADER_BYTES`, then wherever it likes the bytes of two snapshots. The
header holds unsigned 64-bit little-endian integers: the layout's version, then two slots with the fields of `Slot` in
their order.

The rank empties the older slot (`seq` 0), writes its bytes, then its fields, and `seq` last. So one of the two is whole
at any moment, whenever the process is killed; the larger `seq` is the newer one. Who reads while the rank runs looks at
`seq` before and after. A checksum is the sum of the bytes as little-endian 64-bit words, padded with zeros, modulo
2**64: it finds memory that was torn or is not what it is taken for, at the speed of a copy.
"""

from __future__ import annotations

import os
import struct
from dataclasses import astuple, dataclass, fields
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import mmap

HEADER_BYTES = 4096
LAYOUT_VERSION = 1
MEMORY_NAME = "elastic-agent:snapshot"
"""What a memfd's name begins with, by which a process tells whether the number still means it."""

SLOTS = 2
_U64 = struct.Struct("<Q")


@dataclass(frozen=True, slots=True)
class Slot:
    """Where one snapshot of this rank is. Places count from the beginning of the memory."""

    seq: int
    """Grows from snapshot to snapshot. 0: there is none here, or it is being written."""
    step: int
    world_size: int
    common_at: int
    common_bytes: int
    """Of what is equal on all ranks; 0: another rank of the node has it."""
    common_sum: int
    part_at: int
    part_bytes: int
    """Of what is this rank's own."""
    part_sum: int


_FIELDS = struct.Struct(f"<{len(fields(Slot))}Q")


def create_memory(name: str) -> int:
    """Make the memory of a rank, for the agent; return its descriptor."""
    return os.memfd_create(f"{MEMORY_NAME}:{name}", os.MFD_CLOEXEC)


def read_slots(fd: int) -> tuple[Slot, ...]:
    """Return the snapshots that are there, the newest first; none if no rank of this version has written any."""
    header = os.pread(fd, HEADER_BYTES, 0)
    if len(header) < HEADER_BYTES or _U64.unpack_from(header)[0] != LAYOUT_VERSION:
        return ()
    slots = (Slot(*_FIELDS.unpack_from(header, _place(index))) for index in range(SLOTS))
    return tuple(sorted((slot for slot in slots if slot.seq), key=lambda slot: -slot.seq))


def clear_header(memory: mmap.mmap) -> None:
    """Begin with two empty slots."""
    memory[:HEADER_BYTES] = _U64.pack(LAYOUT_VERSION) + bytes(HEADER_BYTES - _U64.size)


def empty_slot(memory: mmap.mmap, index: int) -> None:
    """Say that what this slot tells of is no more."""
    _U64.pack_into(memory, _place(index), 0)


def fill_slot(memory: mmap.mmap, index: int, slot: Slot) -> None:
    """Say what is in an empty slot. It counts when `seq` is there, which is written last."""
    at = _place(index)
    memory[at + _U64.size : at + _FIELDS.size] = _FIELDS.pack(*astuple(slot))[_U64.size :]
    _U64.pack_into(memory, at, slot.seq)


def _place(index: int) -> int:
    return _U64.size + index * _FIELDS.size
