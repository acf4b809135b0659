"""The flat form of a state, written as a snapshot is."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from trainer_runtime.flat import Flattened


def written(flat: Flattened) -> memoryview:
    """Write it into a memory of its own."""
    return memoryview(flat.to_bytes())
