"""Writing durable checkpoints.

Every file is written under a private name, flushed to disk and renamed; the manifest comes last and is the commit
point. Whatever happens before it leaves the older checkpoints as they were, and the attempt takes back the files that
it had put in place, so that the same step can be tried again. Otherwise a writer deletes only what its own run's
manifests say it kept, never what it sees in the directory: another run, or a group that does not know that it is no
longer the current one, may be at work there.

What it does not clean up: the files of a writer that was killed while writing. Those with names that begin with a dot
are private; the others have no manifest.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import secrets
import shutil
import time
from typing import IO, TYPE_CHECKING, Any, cast

import torch

from trainer_runtime.checkpoint import CheckpointError, warn
from trainer_runtime.manifest import Manifest, StoredFile, encode, stem_of

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path


class Writer:
    """Writes one run's checkpoints and deletes those that it superseded."""

    def __init__(self, directory: Path, run: str, group: int, *, keep: int, resumed: Manifest | None) -> None:
        self._directory = directory
        self._run = run
        self._group = group
        self._keep = keep
        # Inherited from the writer before us, so that restarts do not leave checkpoints that nobody deletes.
        self._kept = [*resumed.previous, resumed.stem] if resumed and resumed.run == run else []
        self._placed: list[Path] = []  # files under their final names that no durable manifest vouches for yet

    def write(
        self,
        content: dict[str, Any],
        *,
        step: int,
        world_size: int,
        metrics: dict[str, float | None],
        hooks: Sequence[Callable[[Path], object]] = (),
    ) -> Manifest:
        """Write a checkpoint; when this returns it is on disk and will survive a power failure.

        Args:
            content: plain values and tensors only.
            step: steps committed; at most one checkpoint per step.
            world_size: number of ranks that trained it.
            metrics: noted in the manifest.
            hooks: called with an empty directory to write further files into.

        Raises:
            CheckpointError: this run and group already have a file for this step.
            OSError: it could not be written. The checkpoints before it are untouched, and it may be tried again.
        """
        self._directory.mkdir(parents=True, exist_ok=True)
        stem = stem_of(self._run, self._group, step)
        self._take_back()  # again, if the last attempt was kept from it
        self._require_unused(stem)
        private = self._directory / f".{stem}.{secrets.token_hex(4)}"
        private_extra = private.with_name(f"{private.name}.d")
        try:
            bytes_, sha256 = _write_state(private, content)
            extra = _run_hooks(hooks, private_extra, f"{stem}.d") if hooks else ()
            manifest = Manifest(
                run=self._run,
                group=self._group,
                step=step,
                file=f"{stem}.pt",
                bytes=bytes_,
                sha256=sha256,
                extra=extra,
                world_size=world_size,
                saved_at=time.time(),
                metrics=metrics,
                previous=tuple(self._kept),
            )
            self._place(private, manifest.file)
            if hooks:
                self._place(private_extra, f"{stem}.d")
            _sync_directory(self._directory)
            _write_synced(private, encode(manifest))
            self._place(private, f"{stem}.json")
            _sync_directory(self._directory)
            self._placed.clear()
        except OSError as error:
            error.add_note(f"checkpoint {stem} was NOT written in {self._directory}; the older ones are untouched")
            raise
        finally:
            with contextlib.suppress(OSError):  # the error under way, if any, is the one to be told
                private.unlink(missing_ok=True)
                shutil.rmtree(private_extra, ignore_errors=True)
                self._take_back()
        self._kept.append(stem)
        self._delete_superseded()
        return manifest

    def _place(self, private: Path, name: str) -> None:
        private.rename(self._directory / name)
        self._placed.append(self._directory / name)

    def _take_back(self) -> None:
        """Remove what an attempt put in place that did not succeed: nobody refers to it. The manifest goes first."""
        while self._placed:
            path = self._placed[-1]
            if path.is_dir():
                shutil.rmtree(path)
            else:
                path.unlink(missing_ok=True)
            self._placed.pop()

    def _require_unused(self, stem: str) -> None:
        for suffix in (".json", ".pt", ".d"):
            path = self._directory / f"{stem}{suffix}"
            if path.exists():
                raise CheckpointError(
                    f"wanted to write {path}, which exists; a name is never used twice: "
                    "start every group of a run under a number of its own"
                )

    def _delete_superseded(self) -> None:
        while len(self._kept) > self._keep:
            stem = self._kept.pop(0)
            try:
                # The manifest first, durably: a manifest without its files would look like damage.
                (self._directory / f"{stem}.json").unlink(missing_ok=True)
                _sync_directory(self._directory)
                (self._directory / f"{stem}.pt").unlink(missing_ok=True)
                shutil.rmtree(self._directory / f"{stem}.d", ignore_errors=True)
            except OSError as error:
                warn(f"could not delete the superseded checkpoint {stem} ({error}); it may be removed by hand")


class _HashingFile:
    """A file for `torch.save` that hashes what passes through and remembers why a write failed."""

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


def _write_state(path: Path, content: dict[str, Any]) -> tuple[int, str]:
    """Save `content` durably at `path`; return size and SHA-256."""
    with path.open("xb") as file:
        hashing = _HashingFile(file)
        try:
            torch.save(content, cast("IO[bytes]", hashing))  # it needs no more than write and flush
        except RuntimeError as error:
            # torch reports a full disk as a wrong position in the archive.
            raise hashing.error or error from None
        file.flush()
        os.fsync(file.fileno())
    return hashing.bytes, hashing.sha256.hexdigest()


def _run_hooks(hooks: Sequence[Callable[[Path], object]], private: Path, final_name: str) -> tuple[StoredFile, ...]:
    """Let the hooks write into `private`, make that durable, and list it under its final name."""
    private.mkdir()
    for hook in hooks:
        hook(private)
    paths = sorted(private.rglob("*"))
    for directory in (private, *(path for path in paths if path.is_dir())):
        _sync_directory(directory)
    return tuple(
        StoredFile(f"{final_name}/{path.relative_to(private).as_posix()}", *_sync_and_hash(path))
        for path in paths
        if path.is_file()
    )


def _sync_and_hash(path: Path) -> tuple[int, str]:
    with path.open("rb") as file:
        os.fsync(file.fileno())
        return os.fstat(file.fileno()).st_size, hashlib.file_digest(file, "sha256").hexdigest()


def _write_synced(path: Path, data: bytes) -> None:
    with path.open("xb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def _sync_directory(path: Path) -> None:
    """Make renames and deletions in `path` survive a power failure."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
