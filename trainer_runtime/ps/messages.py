"""The body of a push: the gradients of one step of a worker, for several tables.

8 bytes   number of the worker's step
8 bytes   weight of this worker's gradients in a mean, a 64-bit float
for each part: 4 bytes table, 4 bytes zero, 8 bytes rows, 8 bytes learning rate, a 64-bit float; NaN: the table's own
for each part: ids (rows x 8 bytes, sorted), gradients (rows x dim x 4 bytes), zeros up to a multiple of 8
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable
from dataclasses import dataclass

import torch

from trainer_runtime.ps.frames import MalformedError, bytes_of
from trainer_runtime.ps.table import check_ids

MAX_MESSAGE_PARTS = 4096
_HEAD = struct.Struct("<Qd")
_PART = struct.Struct("<IIQd")


@dataclass(frozen=True)
class Gradients:
    """Gradients of one table."""

    table: int
    ids: torch.Tensor
    """(rows,), sorted 64-bit integers."""
    values: torch.Tensor
    """(rows, dim), 32-bit floats."""
    lr: float | None = None
    """Learning rate of this step. None: the table's own."""


@dataclass(frozen=True)
class Push:
    """The gradients of one step."""

    step: int
    weight: float
    parts: tuple[Gradients, ...]

    def body(self) -> list[memoryview | bytes]:
        """Return the buffers of the body, in order."""
        head = _HEAD.pack(self.step, self.weight)
        head += b"".join(_pack_part(part) for part in self.parts)
        return [head, *(piece for part in self.parts for piece in _pieces(part))]


def _pack_part(part: Gradients) -> bytes:
    return _PART.pack(part.table, 0, len(part.ids), math.nan if part.lr is None else part.lr)


def _pieces(part: Gradients) -> tuple[memoryview | bytes, ...]:
    odd = part.values.numel() % 2
    return bytes_of(part.ids), bytes_of(part.values), b"\0" * (4 * odd)


def _padded(length: int) -> int:
    """Round up to a multiple of 8, at which 64-bit integers can begin."""
    return (length + 7) & ~7


def parse_push(data: bytearray | memoryview, parts: int, dim_of: Callable[[int], int]) -> Push:
    """Parse a push; its tensors share the memory of `data`. Raises `MalformedError`, and what `dim_of` raises."""
    if parts > MAX_MESSAGE_PARTS or len(data) < _HEAD.size + parts * _PART.size:
        raise MalformedError("the head of a push is truncated")
    step, weight = _HEAD.unpack_from(data)
    if not math.isfinite(weight) or weight < 0:
        raise MalformedError(f"wanted a finite weight from 0 on, got weight {weight}")
    at = _HEAD.size + parts * _PART.size
    found = []
    for number in range(parts):
        table, _zero, rows, lr = _PART.unpack_from(data, _HEAD.size + number * _PART.size)
        dim = dim_of(table)
        end = at + 8 * rows + _padded(4 * rows * dim)
        if end > len(data):
            raise MalformedError("a push is shorter than its head declares")
        ids, values = _tensors(data, at, rows, dim)
        found.append(Gradients(table, ids, values, None if math.isnan(lr) else lr))
        at = end
    if at != len(data):
        raise MalformedError("a push is longer than its head declares")
    return Push(step, weight, tuple(found))


def _tensors(data: bytearray | memoryview, at: int, rows: int, dim: int) -> tuple[torch.Tensor, torch.Tensor]:
    if not rows:
        return torch.empty(0, dtype=torch.int64), torch.empty(0, dim, dtype=torch.float32)
    ids = torch.frombuffer(data, dtype=torch.int64, count=rows, offset=at)
    try:
        check_ids(ids)
    except ValueError as error:
        raise MalformedError(str(error)) from None
    values = torch.frombuffer(data, dtype=torch.float32, count=rows * dim, offset=at + 8 * rows)
    return ids, values.view(rows, dim)
