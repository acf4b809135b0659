"""Files of a checkpoint: write them durably, rename the checkpoint to its final name, and delete superseded ones.

Durable means that a file survives a power failure. `writer` calls these functions in the order that makes it so.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import tempfile
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, cast

import torch

from trainer_runtime.checkpoint import MANIFEST_BYTES, CheckpointError, read_file, warn
from trainer_runtime.manifest import EXTRA, MANIFEST, STATE, StoredFile, final_name
from trainer_runtime.object_store import (
    UnclearError,
    delete_object,
    delete_objects,
    is_remote,
    new_file,
    put_new,
    remove_tree,
    upload,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence


class HashingFile:
    """A file for `torch.save` that hashes the data written and remembers why a write failed."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self.sha256 = hashlib.sha256()
        self.bytes = 0
        self.error: OSError | None = None

    def write(self, data: bytes) -> int:
        """Write and hash; called by `torch.save`."""
        try:
            self._file.write(data)
        except OSError as error:
            self.error = error
            raise
        self.sha256.update(data)
        self.bytes += len(data)
        return len(data)

    def flush(self) -> None:
        """Flush the file; called by `torch.save`."""
        self._file.flush()

    def save(self, value: object) -> None:
        """Append what `torch.save` makes of a value."""
        try:
            torch.save(value, cast("IO[bytes]", self))  # torch.save needs only write and flush
        except RuntimeError as error:
            # torch reports a full disk as a wrong position in the archive; raise the original error.
            raise self.error or error from None


def write_state(checkpoint_dir: Path, content: dict[str, Any]) -> StoredFile:
    """Save `content` durably as the state file in a checkpoint's directory."""
    with new_file(checkpoint_dir / STATE) as file:
        hashing = HashingFile(file)
        hashing.save(content)
    return StoredFile(STATE, hashing.bytes, hashing.sha256.hexdigest())


def call_hooks(checkpoint_dir: Path, hooks: Sequence[Callable[[Path], object]]) -> Path | None:
    """Call the hooks with a new directory, inside the checkpoint's unless that is in an object store; return it."""
    if not hooks:
        return None
    if is_remote(checkpoint_dir):
        extra = Path(tempfile.mkdtemp(prefix="trainer_runtime-"))
    else:
        extra = checkpoint_dir / EXTRA
        extra.mkdir()
    try:
        for hook in hooks:
            hook(extra)
    except BaseException:
        shutil.rmtree(extra, ignore_errors=True)
        raise
    return extra


def seal(checkpoint_dir: Path, extra: Path | None) -> tuple[StoredFile, ...]:
    """Make the files that hooks wrote durable, as `extra` of the checkpoint; return their entries."""
    if extra is None or not extra.exists():
        return ()
    paths = sorted(extra.rglob("*"))
    entries = {path: f"{EXTRA}/{path.relative_to(extra).as_posix()}" for path in paths if path.is_file()}
    if is_remote(checkpoint_dir):
        for path, name in entries.items():
            upload(path, checkpoint_dir / name)
    else:
        for directory in (extra, *(path for path in paths if path.is_dir())):
            sync_directory(directory)
    return tuple(StoredFile(name, *_sync_and_hash(path)) for path, name in entries.items())


def write_synced(path: Path, data: bytes) -> None:
    """Write a new file durably."""
    with new_file(path) as file:
        file.write(data)


def sync_directory(path: Path) -> None:
    """Make renames and deletions in `path` survive a power failure."""
    if is_remote(path):
        return
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def delete_checkpoint(checkpoint_dir: Path) -> None:
    """Delete a checkpoint's directory; FileNotFoundError if it does not exist, or was renamed meanwhile."""
    # The manifest first, durably: a manifest without its files would be taken for damage.
    if is_remote(checkpoint_dir):
        delete_object(checkpoint_dir / MANIFEST)
        delete_objects(checkpoint_dir)
        return
    (checkpoint_dir / MANIFEST).unlink(missing_ok=True)
    sync_directory(checkpoint_dir)
    shutil.rmtree(checkpoint_dir)


def require_unused(path: Path) -> None:
    """Raise CheckpointError if a checkpoint's final name is in use. In an object store the commit notices that."""
    if not is_remote(path) and path.exists():
        raise name_in_use(path)


def name_in_use(path: Path) -> CheckpointError:
    """Return the error that a checkpoint's final name is in use."""
    return CheckpointError(
        f"wanted to write {path}, which exists; a checkpoint's name is never used twice: "
        "start every group of a run under a number of its own"
    )


@contextlib.contextmanager
def removed_on_error(private: Path) -> Iterator[None]:
    """Remove the checkpoint's directory if the block fails: nothing refers to it before it is committed."""
    try:
        yield
    except BaseException as error:
        if isinstance(error, OSError):
            name = final_name(private.name)
            error.add_note(f"checkpoint {name} was NOT written in {private.parent}; the older ones are untouched")
        if not isinstance(error, UnclearError):
            remove_tree(private)  # the original error is the one to report
        raise


def rename_to_final(private: Path) -> None:
    """Rename the directory to its final name, durably; OSError if that fails or the final name is in use.

    In an object store: write a copy of the manifest there (`object_store.py`).
    """
    final = private.with_name(final_name(private.name))
    if is_remote(private):
        put_new(final / MANIFEST, read_file(private / MANIFEST, MANIFEST_BYTES))
        return
    private.rename(final)
    try:
        sync_directory(private.parent)
    except OSError:
        with contextlib.suppress(OSError):
            final.rename(private)
        raise


def rename_committed(private: Path) -> bool:
    """Rename a committed checkpoint to its final name; return whether that succeeded."""
    try:
        rename_to_final(private)
    except (FileNotFoundError, FileExistsError):
        warn(f"{private.name} was renamed, or superseded, by a later group")
    except OSError as error:
        warn(f"{private.name} is committed but could not be renamed ({error}); the next group will do so")
    else:
        return True
    return False


def exists(private: Path) -> bool:
    """Return whether the checkpoint exists, under its private or its final name; in an object store, that it may."""
    return is_remote(private) or private.exists() or private.with_name(final_name(private.name)).exists()


def delete_superseded(private: Path) -> bool:
    """Delete a superseded checkpoint, under its private or its final name; return whether it is gone."""
    final = private.with_name(final_name(private.name))
    for path in (final, private) if is_remote(private) else (private, final):
        try:
            delete_checkpoint(path)
        except FileNotFoundError:
            continue
        except OSError as error:
            warn(f"could not delete the superseded checkpoint {path.name} ({error}); the next save tries again")
            return False
    return True


def _sync_and_hash(path: Path) -> tuple[int, str]:
    with path.open("rb") as file:
        os.fsync(file.fileno())
        return os.fstat(file.fileno()).st_size, hashlib.file_digest(file, "sha256").hexdigest()
