"""Layout of the memory that a rank writes its snapshots into. Also imported by the agent, so without torch.

The agent creates an empty memfd for each rank and keeps it after the process has exited, which is the purpose of
snapshots. The rank sets its size: a header of `HEADER_BYTES`, then the bytes of its snapshots at any offsets. The
header consists of unsigned 64-bit little-endian integers: the layout's version, then `SLOTS` slots with the fields of
`Slot` in their order.

Two slots take turns. While a checkpoint is written from one of them, the third takes its turn. The rank empties an old
slot (`seq` 0), writes the bytes, then the fields, and `seq` last. So one slot is complete at any moment, whenever the
process is killed; the one with the largest `seq` is the newest. A slot with `seq` 0 may hold a copy that is only
written to a checkpoint: one that other ranks do not have. A reader that runs beside the rank compares `seq` before and
after. `snapshot_sum` has the checksum, which shows that bytes were changed, or belong to another piece.
"""

from __future__ import annotations

import os
import struct
from dataclasses import astuple, dataclass, fields
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import mmap

HEADER_BYTES = 4096
LAYOUT_VERSION = 3
MEMORY_NAME = "elastic-agent:snapshot"
"""Prefix of the memfd's name, by which a process checks that the descriptor number still refers to it."""

SLOTS = 3
KEPT = 2
"""Slots that are in use while no checkpoint is written."""

LINK_PART_BYTES = 1 << 20
"""Largest part that agents send over the links between them. For larger ones they open a stream of its own."""

_U64 = struct.Struct("<Q")


@dataclass(frozen=True, slots=True)
class Slot:
    """Where one snapshot of this rank is. Offsets count from the beginning of the memory."""

    seq: int
    """Increases from snapshot to snapshot. 0: the slot is empty or being written."""
    step: int
    world_size: int
    common_at: int
    common_bytes: int
    """Size of the common part; 0: another rank of the node has it."""
    common_sum: int
    part_at: int
    part_bytes: int
    """Size of this rank's own part."""
    part_sum: int


_FIELDS = struct.Struct(f"<{len(fields(Slot))}Q")


def create_memory(name: str) -> int:
    """Create the memory of a rank, on the agent's side; return its descriptor."""
    return os.memfd_create(f"{MEMORY_NAME}:{name}", os.MFD_CLOEXEC)


def read_slots(fd: int) -> tuple[Slot, ...]:
    """Return the snapshots in a memory, the newest first; empty if no rank of this layout version has written any."""
    header = os.pread(fd, HEADER_BYTES, 0)
    if len(header) < HEADER_BYTES or _U64.unpack_from(header)[0] != LAYOUT_VERSION:
        return ()
    slots = (Slot(*_FIELDS.unpack_from(header, _place(index))) for index in range(SLOTS))
    return tuple(sorted((slot for slot in slots if slot.seq), key=lambda slot: -slot.seq))


def clear_header(memory: mmap.mmap) -> None:
    """Write a header with empty slots."""
    memory[:HEADER_BYTES] = _U64.pack(LAYOUT_VERSION) + bytes(HEADER_BYTES - _U64.size)


def empty_slot(memory: mmap.mmap, index: int) -> None:
    """Mark a slot as empty."""
    _U64.pack_into(memory, _place(index), 0)


def fill_slot(memory: mmap.mmap, index: int, slot: Slot) -> None:
    """Write the fields of an empty slot. It becomes valid with `seq`, which is written last."""
    at = _place(index)
    memory[at + _U64.size : at + _FIELDS.size] = _FIELDS.pack(*astuple(slot))[_U64.size :]
    _U64.pack_into(memory, at, slot.seq)


def _place(index: int) -> int:
    return _U64.size + index * _FIELDS.size
