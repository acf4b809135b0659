"""The flat form of a state, written as a snapshot is."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from trainer_runtime.flat import Flattened


def written(flat: Flattened) -> memoryview:
    """Write it into a memory of its own."""
    data = bytearray(flat.bytes)
    target = torch.frombuffer(data, dtype=torch.uint8)
    flat.write_values(data, 0)
    for source, place in zip(flat.layout.sources, flat.targets(target), strict=True):
        place.copy_(source)
    return memoryview(data)
