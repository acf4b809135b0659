"""Pinned host memory, into which a GPU copies by itself.

Into ordinary memory the driver copies through a buffer of its own, and holds a lock meanwhile: kernels that the script
launches have to wait. With the memory pinned, a copy is a few times faster and holds up nobody.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from trainer_runtime.checkpoint import warn

if TYPE_CHECKING:
    from collections.abc import Hashable

_PAGE_BYTES = 4096
_SLACK = 16
"""One part in so many is pinned in addition."""


class PinnedMemory:
    """Pins ranges of this process's memory, one for each key."""

    def __init__(self) -> None:
        self._ranges: dict[Hashable, tuple[int, int]] = {}
        self._is_possible = True

    def pin(self, key: Hashable, address: int, size: int, most: int, device: torch.device) -> None:
        """Pin memory, and nothing else for this key any more. If it is impossible, one line says so.

        More is pinned than is needed now, so that what grows a little each time is not pinned anew each time.

        Args:
            key: what the memory is for.
            address: of its first byte.
            size: bytes needed.
            most: bytes that may be pinned.
            device: the GPU that copies into it.
        """
        had = self._ranges.get(key, (0, 0))
        if not self._is_possible or (had[0] <= address and address + size <= had[1]):
            return
        begin = address // _PAGE_BYTES * _PAGE_BYTES
        end = -(-(address + min(most, size + size // _SLACK + _PAGE_BYTES)) // _PAGE_BYTES) * _PAGE_BYTES
        self.unpin(key)
        error = torch.cuda.cudart().cudaHostRegister(begin, end - begin, 0)  # type: ignore[no-untyped-call]
        if int(error) == 0:
            self._ranges[key] = begin, end
            return
        self._is_possible = False
        warn(
            f"memory for snapshots cannot be pinned (CUDA error {int(error)}), so copies from {device} take longer "
            "and hold up training"
        )
        _clear_error(device)

    def unpin(self, key: Hashable) -> None:
        """Unpin what was pinned for this key, before its memory is unmapped."""
        found = self._ranges.pop(key, None)
        if found is not None:
            torch.cuda.cudart().cudaHostUnregister(found[0])  # type: ignore[no-untyped-call]

    def unpin_all(self) -> None:
        """Unpin everything."""
        for key in list(self._ranges):
            self.unpin(key)


def _clear_error(device: torch.device) -> None:
    """Let a failure that was dealt with not be taken for one of this thread's next kernel."""
    try:
        torch.zeros(1, device=device)
    except RuntimeError:
        return
