"""Pieces of a snapshot that the agent keeps in files on disk: read as those in memory, and verified."""

from __future__ import annotations

import errno
import os
from dataclasses import replace
from pathlib import Path
from typing import NoReturn

import pytest

from trainer_runtime import snapshot_load
from trainer_runtime.record import ReplicaPiece
from trainer_runtime.snapshot_sum import piece_sum

DATA = bytes(range(256)) * 64
STEP = 7


@pytest.fixture
def piece(tmp_path: Path) -> ReplicaPiece:
    """A part that begins in the middle of a file. Its descriptor is closed with the process, as a rank's is."""
    path = tmp_path / "part"
    path.write_bytes(b"before" + DATA)
    total = piece_sum(memoryview(DATA), rank=1, step=STEP, world_size=2)
    return ReplicaPiece(
        is_common=False, rank=1, at=6, bytes=len(DATA), sum=total, world_size=2, descriptor=os.open(path, os.O_RDONLY)
    )


def test_a_piece_on_disk_is_read(piece: ReplicaPiece, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(snapshot_load, "_CHUNK_BYTES", 1000)
    assert snapshot_load._map(piece, STEP) == DATA


def test_a_piece_on_disk_with_another_sum_or_too_few_bytes_is_damaged(piece: ReplicaPiece) -> None:
    assert snapshot_load._map(replace(piece, sum=piece.sum ^ 1), STEP) is None
    assert snapshot_load._map(piece, STEP + 1) is None
    assert snapshot_load._map(replace(piece, bytes=piece.bytes + 1), STEP) is None


def test_a_disk_that_fails_is_damage_and_kills_nobody(piece: ReplicaPiece, monkeypatch: pytest.MonkeyPatch) -> None:
    """A mapping of it would end the process by SIGBUS."""

    def fail(*_: object) -> NoReturn:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(snapshot_load.os, "preadv", fail)
    assert snapshot_load._map(piece, STEP) is None
