"""Read checkpoints from a directory, and choose one where no record of the job names it.

Without an agent: the newest checkpoint of this run, by (group, step, save). If this run has none, and no fresh start
was requested: the newest checkpoint of the other run that saved last. A damaged checkpoint is skipped with a line on
stderr. Training never starts silently from step 0 where checkpoints exist: if there are manifests but none is usable,
or if reading fails, that is an error.

Under an agent `resume.py` chooses by the job's record; the directory listing is used for other runs' checkpoints only.
"""

from __future__ import annotations

import errno
import hashlib
import os
import resource
import stat
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING

from trainer_runtime import contract
from trainer_runtime.manifest import MANIFEST, Manifest, StoredFile, decode, parse_stem
from trainer_runtime.node_memory import NodeMemory, allocate
from trainer_runtime.object_store import is_remote, list_names, open_remote

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path
    from typing import IO

_CHUNK_BYTES = 8 << 20
MANIFEST_BYTES = 64 << 20
"""Largest manifest that is read. The entry of one file takes about 150 bytes."""


class CheckpointError(RuntimeError):
    """The operator must act: no checkpoint can be used although there are some, or a name would be used twice."""


class DamagedError(Exception):
    """A checkpoint cannot be used; the message says why."""


@dataclass(frozen=True, slots=True)
class FoundCheckpoint:
    """A checkpoint whose files were all read and whose checksums are correct."""

    manifest: Manifest
    manifest_sha256: str
    data: NodeMemory
    """Content of the state file."""


def warn(message: str) -> None:
    """Print one line on stderr, with the prefix `trainer_runtime: `."""
    sys.stderr.write(f"trainer_runtime: {message}\n")
    sys.stderr.flush()


def refuse(message: str) -> SystemExit:
    """Print why this script must not be started again; return the exit to raise. The agent repeats the line."""
    warn(f"error: {message}")
    return SystemExit(contract.EXIT_NO_RESTART)


def limit_behind(error: Exception) -> str:
    """Return the limit of this process that caused the error, for a message; empty if there is none."""
    size_bytes, _ = resource.getrlimit(resource.RLIMIT_FSIZE)
    if not isinstance(error, OSError) or error.errno != errno.EFBIG or size_bytes == resource.RLIM_INFINITY:
        return ""
    return f" (a file may have no more than {size_bytes >> 20} MiB: ulimit -f)"


def open_file(path: Path) -> IO[bytes]:
    """Open a file of a checkpoint for reading. Every file of a checkpoint is opened by this function.

    A foreign file in its place must not block the ranks: opening a FIFO without `O_NONBLOCK` waits for a writer, and a
    device may never end. Symbolic links are followed, because users move files to other disks.

    Raises:
        DamagedError: the path is not a regular file.
        OSError: the file does not exist or cannot be read.
    """
    if is_remote(path):
        return open_remote(path)
    file = os.fdopen(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb", closefd=True)
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        raise DamagedError(f"{path.name} is not a regular file")
    return file


def read_file(path: Path, most_bytes: int) -> bytes:
    """Return the content of a small file of a checkpoint.

    Raises:
        DamagedError: the path is not a regular file, or the file is larger than `most_bytes`.
        OSError: the file does not exist or cannot be read.
    """
    with open_file(path) as file:
        data = file.read(most_bytes + 1)
    if len(data) > most_bytes:
        raise DamagedError(f"{path.name} should have at most {most_bytes} bytes, has more")
    return data


def find(directory: Path, run: str, *, fresh: bool) -> FoundCheckpoint | None:
    """Return the checkpoint from which `run` resumes; None if there is none.

    Args:
        directory: directory of the checkpoints; need not exist.
        run: name of this run.
        fresh: ignore the checkpoints of other runs.

    Raises:
        CheckpointError: there are manifests, but every checkpoint is damaged.
        OSError: the directory or a file cannot be read. This is not damage: another node, or a later try, may succeed.
    """
    return _find(directory, run, lambda its_run: its_run == run or not fresh)


def find_of_others(directory: Path, run: str) -> FoundCheckpoint | None:
    """Return the newest checkpoint of the other runs, or None. Raises as `find`."""
    return _find(directory, run, lambda its_run: its_run != run)


def read(directory: Path, stem: str, manifest_sha256: str | None = None) -> FoundCheckpoint:
    """Read a checkpoint by its name and verify all of its files.

    Raises:
        DamagedError: a file is missing, or differs from the manifest, or the manifest from `manifest_sha256`.
        OSError: a file cannot be read. This is not damage.
    """
    try:
        manifest, found_sha256 = _read_manifest(directory / stem, manifest_sha256)
    except (FileNotFoundError, NotADirectoryError):
        raise DamagedError("it has no manifest") from None
    return FoundCheckpoint(manifest, found_sha256, _read_files(files_of(directory, manifest), manifest))


def files_of(directory: Path, manifest: Manifest) -> Path:
    """Return where the files of a committed checkpoint are."""
    return directory / (manifest.private if is_remote(directory) else manifest.stem)


def first_free_group(directory: Path, run: str) -> int:
    """Return a group number for which `run` has no checkpoint yet, for a script that runs without an agent."""
    names = [name for stem in _stems(directory) if (name := parse_stem(stem)) and name[0] == run]
    return max((group for _, group, *_ in names), default=0) + 1


def has_any(directory: Path) -> bool:
    """Return whether the directory has a checkpoint of any run, damaged or not; False if it cannot be read."""
    try:
        return any(parse_stem(stem) for stem in _stems(directory))
    except OSError:
        return False


def is_listed(directory: Path, stem: str) -> bool:
    """Return whether a directory has this name, though it may not be possible to open it yet. Raises `OSError`."""
    return stem in _stems(directory)


def _find(directory: Path, run: str, is_wanted: Callable[[str], bool]) -> FoundCheckpoint | None:
    manifests, damaged = [], 0
    for stem in _stems(directory):
        named = parse_stem(stem)
        if named is None or not is_wanted(named[0]):
            continue
        try:
            manifests.append(_read_manifest(directory / stem))
        except (FileNotFoundError, NotADirectoryError):
            continue  # superseded, and its writer is deleting it
        except DamagedError as damage:
            damaged += 1
            warn(f"skipped checkpoint {directory / stem}: {damage}")
    order = _order([manifest for manifest, _ in manifests], run)
    for manifest, sha256 in sorted(manifests, key=lambda pair: order(pair[0]), reverse=True):
        try:
            return FoundCheckpoint(manifest, sha256, _read_files(files_of(directory, manifest), manifest))
        except DamagedError as damage:
            damaged += 1
            warn(f"skipped checkpoint {directory / manifest.stem}: {damage}")
    if damaged:
        raise CheckpointError(
            f"wanted a checkpoint to resume from, found {damaged} in {directory} and all are damaged (see above); "
            "restore one, or start over in an empty directory"
        )
    return None


def _order(manifests: Sequence[Manifest], run: str) -> Callable[[Manifest], tuple[bool, float, str, int, int, int]]:
    """Return a sort key that puts the best checkpoint to resume from last.

    This run's checkpoints come last, other runs' in the order of their latest save. Within a run the order is group,
    step and save, because the clocks of nodes differ.
    """
    last = {}
    for each in sorted(manifests, key=lambda each: each.saved_at):
        last[each.run] = each.saved_at
    return lambda each: (each.run == run, last[each.run], each.run, each.group, each.step, each.save)


def _stems(directory: Path) -> list[str]:
    try:
        return sorted(list_names(directory))
    except FileNotFoundError:
        return []


def _read_manifest(checkpoint_dir: Path, wanted_sha256: str | None = None) -> tuple[Manifest, str]:
    """Return the manifest in a checkpoint's directory, and its SHA-256.

    Raises:
        DamagedError: the file is not a manifest, or its SHA-256 differs from `wanted_sha256`.
        OSError: the file does not exist or cannot be read.
    """
    raw = read_file(checkpoint_dir / MANIFEST, MANIFEST_BYTES)
    sha256 = hashlib.sha256(raw).hexdigest()
    if wanted_sha256 not in {None, sha256}:
        raise DamagedError("its manifest does not have the SHA-256 that the job's record lists")
    try:
        return decode(raw, checkpoint_dir.name), sha256
    except ValueError as damage:
        raise DamagedError(f"its manifest: {damage}") from None


def _read_files(checkpoint_dir: Path, manifest: Manifest) -> NodeMemory:
    """Read and verify all files of a checkpoint; return the content of the state file."""
    state, *others = manifest.files
    for entry in others:
        _read_checked(checkpoint_dir, entry, None)
    memory = allocate(max(state.bytes, 1))
    try:
        _read_checked(checkpoint_dir, state, memory)
    except BaseException:
        memory.close()
        raise
    return memory


def _read_checked(checkpoint_dir: Path, entry: StoredFile, memory: NodeMemory | None) -> None:
    """Read a file once, computing its hash on the way, and compare size and hash with the manifest's entry.

    Args:
        checkpoint_dir: directory of the checkpoint.
        entry: the manifest's entry.
        memory: memory of that size for the content; None: it is not kept.
    """
    try:
        path = checkpoint_dir / entry.file
        with open_file(path) as file:
            bytes_ = file.seek(0, os.SEEK_END)
            file.seek(0)
            if bytes_ != entry.bytes:
                raise DamagedError(f"{entry.file} should have {entry.bytes} bytes, has {bytes_}")
            sha256 = hashlib.sha256()
            buffer = memoryview(bytearray(_CHUNK_BYTES) if memory is None else memory.data)
            for at in range(0, bytes_, _CHUNK_BYTES):  # reads no more than that, should the file grow meanwhile
                length = min(_CHUNK_BYTES, bytes_ - at)
                chunk = buffer[:length] if memory is None else buffer[at : at + length]
                sha256.update(chunk[: file.readinto(chunk)])  # type: ignore[attr-defined] # both kinds of files have it
    except (FileNotFoundError, NotADirectoryError):
        raise DamagedError(f"{entry.file} is missing") from None
    if sha256.hexdigest() != entry.sha256:
        raise DamagedError(f"{entry.file} does not have the SHA-256 that its manifest lists")
