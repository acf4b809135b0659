"""The checksum of a piece of a snapshot: what a plain sum of its words would not notice."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from trainer_runtime.snapshot_sum import piece_sum

HALF = bytes(range(256)) * 64
DATA = HALF + HALF[::-1]


def flipped(data: bytes, *bits: int) -> bytes:
    """Return the data with these bits changed."""
    changed = bytearray(data)
    for bit in bits:
        changed[bit // 8] ^= 1 << bit % 8
    return bytes(changed)


@pytest.mark.parametrize(
    "change",
    [
        lambda data: flipped(data, 12345),
        lambda data: flipped(data, 63, 64 + 63),
        lambda data: data[len(HALF) :] + data[: len(HALF)],
        lambda data: data + bytes(8),
        lambda data: data[:-8],
        lambda data: bytes(len(data)),
    ],
    ids=["a bit", "bit 63 of two words", "swapped halves", "zeros at the end", "the end is missing", "zeros"],
)
def test_changed_bytes_are_noticed(change: Callable[[bytes], bytes]) -> None:
    before = piece_sum(memoryview(DATA), rank=3, step=7, world_size=4)
    assert piece_sum(memoryview(change(DATA)), rank=3, step=7, world_size=4) != before


@pytest.mark.parametrize(("rank", "step", "world_size"), [(2, 7, 4), (None, 7, 4), (3, 8, 4), (3, 7, 5)])
def test_the_same_bytes_of_another_piece_are_noticed(rank: int | None, step: int, world_size: int) -> None:
    before = piece_sum(memoryview(DATA), rank=3, step=7, world_size=4)
    assert piece_sum(memoryview(DATA), rank=rank, step=step, world_size=world_size) != before


def test_the_sum_fits_into_its_field() -> None:
    assert 0 <= piece_sum(memoryview(b""), rank=0, step=1, world_size=1) < 2**64
