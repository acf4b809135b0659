"""Durable checkpoints in a directory: choosing what to resume from, and reading it.

Our own run's newest by (group, step); without any, and unless a fresh start was asked for, the newest of
the other runs. A damaged checkpoint is passed over with a line on stderr. Training never starts silently from step 0
where a checkpoint was made: if there are manifests and none is usable, or if reading fails, that is an error.

What it does not know: two groups of a run may both have trained on from the same checkpoint. The higher group wins.
"""

from __future__ import annotations

import hashlib
import mmap
import os
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING

from trainer_runtime.manifest import Manifest, StoredFile, decode, parse_stem

if TYPE_CHECKING:
    from pathlib import Path

_CHUNK_BYTES = 8 << 20


class CheckpointError(RuntimeError):
    """The operator must act: there are checkpoints, but none to resume from; or a name would be used twice."""


class _DamagedError(Exception):
    """This checkpoint cannot be used; the message says why."""


@dataclass(frozen=True, slots=True)
class Found:
    """A checkpoint whose files were all read and have the right checksums."""

    manifest: Manifest
    data: mmap.mmap
    """The bytes of its state file."""


def warn(message: str) -> None:
    """Print one line on stderr."""
    sys.stderr.write(f"trainer_runtime: {message}\n")
    sys.stderr.flush()


def find(directory: Path, run: str, *, fresh: bool) -> Found | None:
    """Return the checkpoint to resume `run` from; None if there is none to be found.

    Args:
        directory: where the checkpoints are; need not exist.
        run: our own run.
        fresh: leave other runs' checkpoints alone.

    Raises:
        CheckpointError: there are manifests, but no checkpoint that is undamaged.
        OSError: the directory or a file cannot be read. That is no damage: it may work elsewhere, or later.
    """
    places = [(stem, place) for stem in _stems(directory, ".json") if (place := parse_stem(stem))]
    stems = [stem for stem, place in places if place[0] == run or not fresh]
    manifests = [manifest for stem in stems if (manifest := _read_manifest(directory, stem))]
    ours = sorted((m for m in manifests if m.run == run), key=lambda m: (m.group, m.step))
    others = sorted((m for m in manifests if m.run != run), key=lambda m: (m.saved_at, m.group, m.step))
    for manifest in (*reversed(ours), *reversed(others)):
        try:
            return Found(manifest, _read_files(directory, manifest))
        except _DamagedError as damage:
            warn(f"skipped checkpoint {directory / manifest.stem}: {damage}")
    if stems:
        raise CheckpointError(
            f"wanted a checkpoint to resume from, found {len(stems)} in {directory} and all are damaged (see above); "
            "restore one, or start over in an empty directory"
        )
    return None


def first_free_group(directory: Path, run: str) -> int:
    """Return a group number under which `run` has no file yet, for a script that no agent gave one."""
    names = [*_stems(directory, ".json"), *_stems(directory, ".pt")]
    places = [place for name in names if (place := parse_stem(name)) and place[0] == run]
    return max((group for _, group, _ in places), default=0) + 1


def _stems(directory: Path, suffix: str) -> list[str]:
    try:
        names = sorted(path.name for path in directory.iterdir())
    except FileNotFoundError:
        return []
    return [name.removesuffix(suffix) for name in names if name.endswith(suffix)]


def _read_manifest(directory: Path, stem: str) -> Manifest | None:
    path = directory / f"{stem}.json"
    try:
        return decode(path.read_bytes(), stem)
    except FileNotFoundError:
        return None  # superseded by its writer since we listed the directory
    except ValueError as damage:
        warn(f"skipped manifest {path}: {damage}")
        return None


def _read_files(directory: Path, manifest: Manifest) -> mmap.mmap:
    """Read and check all files of a checkpoint; return the state's bytes."""
    for entry in manifest.extra:
        _read_checked(directory, entry)
    return _read_checked(directory, manifest.files[0])


def _read_checked(directory: Path, entry: StoredFile) -> mmap.mmap:
    """Read a file once, hashing on the way, and compare it with its entry."""
    try:
        with (directory / entry.file).open("rb") as file:
            bytes_ = os.fstat(file.fileno()).st_size
            if bytes_ != entry.bytes:
                raise _DamagedError(f"{entry.file} should have {entry.bytes} bytes, has {bytes_}")
            data, sha256 = mmap.mmap(-1, max(bytes_, 1)), hashlib.sha256()
            while chunk := file.read(_CHUNK_BYTES):
                data.write(chunk)
                sha256.update(chunk)
    except FileNotFoundError:
        raise _DamagedError(f"{entry.file} is missing") from None
    if sha256.hexdigest() != entry.sha256:
        raise _DamagedError(f"{entry.file} does not have the SHA-256 that its manifest lists")
    data.seek(0)
    return data
