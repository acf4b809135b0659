"""Pinned memory for snapshots, with a stand-in for CUDA's runtime: what is registered, and what failures do."""

from __future__ import annotations

import gc
from typing import TYPE_CHECKING

import pytest
import torch

from trainer_runtime import pinned_memory
from trainer_runtime.flat import Flattener
from trainer_runtime.pinned_memory import PinnedMemory
from trainer_runtime.snapshot_memory import SnapshotMemory
from trainer_runtime.snapshot_page import create_memory

if TYPE_CHECKING:
    from collections.abc import Iterator

GPU = torch.device("cuda", 1)
PAGE = 4096


class Runtime:
    """Stands in for `torch.cuda.cudart()`: ranges may not overlap, and `error` is what registering returns."""

    def __init__(self) -> None:
        self.ranges: dict[int, int] = {}
        self.error = 0

    def cudaHostRegister(self, begin: int, size: int, flags: int) -> int:  # noqa: N802 - CUDA's name
        assert begin % PAGE == size % PAGE == flags == 0
        if not self.error:
            assert all(begin + size <= at or at + length <= begin for at, length in self.ranges.items())
            self.ranges[begin] = size
        return self.error

    def cudaHostUnregister(self, begin: int) -> int:  # noqa: N802 - likewise
        del self.ranges[begin]
        return 0


@pytest.fixture
def runtime(monkeypatch: pytest.MonkeyPatch) -> Iterator[Runtime]:
    made = Runtime()
    monkeypatch.setattr(torch.cuda, "cudart", lambda: made)
    return made


def test_a_range_stays_pinned_until_it_moves_or_grows(runtime: Runtime) -> None:
    memory, pinned = torch.zeros(100 * PAGE, dtype=torch.uint8), PinnedMemory()
    at = memory.data_ptr()
    pinned.pin(0, at, 20 * PAGE, 50 * PAGE, GPU)
    first = dict(runtime.ranges)
    assert len(first) == 1
    begin, size = next(iter(first.items()))
    assert begin <= at
    assert at + 20 * PAGE <= begin + size <= at + 24 * PAGE
    for grown in range(2):
        pinned.pin(0, at, (20 + grown) * PAGE, 50 * PAGE, GPU)
        assert runtime.ranges == first
    pinned.pin(1, at + 52 * PAGE, 4 * PAGE, 5 * PAGE, GPU)
    assert len(runtime.ranges) == 2
    pinned.pin(1, at + 52 * PAGE, 30 * PAGE, 30 * PAGE, GPU)
    assert len(runtime.ranges) == 2
    assert max(runtime.ranges.values()) <= 31 * PAGE
    pinned.unpin_all()
    assert runtime.ranges == {}


def test_nothing_stays_pinned_of_a_memory_that_is_gone(runtime: Runtime) -> None:
    memory = SnapshotMemory(create_memory("test"), 0)
    flat = Flattener().flatten({"weights": torch.zeros(PAGE)})
    memory.pin(memory.begin(1, 1, flat, Flattener().flatten({})), GPU)
    assert len(runtime.ranges) == 1
    del memory
    gc.collect()
    assert runtime.ranges == {}


def test_memory_that_cannot_be_pinned_is_used_as_it_is_and_said_once(
    runtime: Runtime, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    cleared = []
    monkeypatch.setattr(pinned_memory, "_clear_error", cleared.append)
    runtime.error = 2
    pinned = PinnedMemory()
    for _ in range(2):
        pinned.pin(0, PAGE, PAGE, PAGE, GPU)
    assert cleared == [GPU], "CUDA keeps the error for the thread's next kernel"
    assert capsys.readouterr().err.count("cannot be pinned (CUDA error 2)") == 1
    pinned.unpin_all()
