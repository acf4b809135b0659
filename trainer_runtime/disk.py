"""Write files durably, so that they survive a power failure, and delete a checkpoint."""

from __future__ import annotations

import hashlib
import os
import shutil
from typing import IO, TYPE_CHECKING, Any, cast

import torch

from trainer_runtime.manifest import EXTRA, MANIFEST, STATE, StoredFile

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path


class _HashingFile:
    """A file for `torch.save` that hashes the data written and remembers why a write failed."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self.sha256 = hashlib.sha256()
        self.bytes = 0
        self.error: OSError | None = None

    def write(self, data: bytes) -> int:
        try:
            self._file.write(data)
        except OSError as error:
            self.error = error
            raise
        self.sha256.update(data)
        self.bytes += len(data)
        return len(data)

    def flush(self) -> None:
        self._file.flush()


def write_state(place: Path, content: dict[str, Any]) -> StoredFile:
    """Save `content` durably as the state file in a checkpoint's directory."""
    with (place / STATE).open("xb") as file:
        hashing = _HashingFile(file)
        try:
            torch.save(content, cast("IO[bytes]", hashing))  # torch.save needs only write and flush
        except RuntimeError as error:
            # torch reports a full disk as a wrong position in the archive; raise the original error.
            raise hashing.error or error from None
        file.flush()
        os.fsync(file.fileno())
    return StoredFile(STATE, hashing.bytes, hashing.sha256.hexdigest())


def call_hooks(place: Path, hooks: Sequence[Callable[[Path], object]]) -> None:
    """Call the hooks with a new directory inside the checkpoint's directory."""
    if hooks:
        extra = place / EXTRA
        extra.mkdir()
        for hook in hooks:
            hook(extra)


def seal(place: Path, part: str) -> tuple[StoredFile, ...]:
    """Make the files that others wrote into a subdirectory of the checkpoint durable; return their entries."""
    inside = place / part
    if not inside.exists():
        return ()
    paths = sorted(inside.rglob("*"))
    for directory in (inside, *(path for path in paths if path.is_dir())):
        sync_directory(directory)
    return tuple(
        StoredFile(path.relative_to(place).as_posix(), *_sync_and_hash(path)) for path in paths if path.is_file()
    )


def write_synced(path: Path, data: bytes) -> None:
    """Write a new file durably."""
    with path.open("xb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def sync_directory(path: Path) -> None:
    """Make renames and deletions in `path` survive a power failure."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def delete_checkpoint(place: Path) -> None:
    """Delete a checkpoint's directory; FileNotFoundError if it does not exist, or was renamed meanwhile."""
    # The manifest first, durably: a manifest without its files would be taken for damage.
    (place / MANIFEST).unlink(missing_ok=True)
    sync_directory(place)
    shutil.rmtree(place)


def _sync_and_hash(path: Path) -> tuple[int, str]:
    with path.open("rb") as file:
        os.fsync(file.fileno())
        return os.fstat(file.fileno()).st_size, hashlib.file_digest(file, "sha256").hexdigest()
