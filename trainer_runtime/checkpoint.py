"""Reading checkpoints from a directory, and choosing one where no agent's record does.

Without an agent: our own run's newest by (group, step, save); without any, and unless a fresh start was asked for, the
newest of the run that saved last among the others. A damaged checkpoint is passed over with a line on stderr. Training
never starts silently from step 0 where a checkpoint was made: if there are manifests and none is usable, or if reading
fails, that is an error.

Under an agent `resume.py` chooses, by the job's record; a listing shows it other runs' checkpoints only.
"""

from __future__ import annotations

import hashlib
import mmap
import os
import stat
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, BinaryIO

from trainer_runtime.manifest import MANIFEST, Manifest, StoredFile, decode, parse_stem

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

_CHUNK_BYTES = 8 << 20
_MANIFEST_BYTES = 64 << 20
"""Of the largest manifest that is read. An entry for a file takes some 150."""


class CheckpointError(RuntimeError):
    """The operator must act: there are checkpoints, but none to resume from; or a name would be used twice."""


class DamagedError(Exception):
    """This checkpoint cannot be used; the message says why."""


@dataclass(frozen=True, slots=True)
class FoundCheckpoint:
    """A checkpoint whose files were all read and have the right checksums."""

    manifest: Manifest
    manifest_sha256: str
    data: mmap.mmap
    """The bytes of its state file."""


def warn(message: str) -> None:
    """Print one line on stderr."""
    sys.stderr.write(f"trainer_runtime: {message}\n")
    sys.stderr.flush()


def open_file(path: Path) -> BinaryIO:
    """Open a file of a checkpoint for reading. All of them are opened here.

    What others put in its place must not stop the ranks: opening a FIFO without `O_NONBLOCK` waits for a writer, and a
    device may have no end. A link is followed, since users move files to other disks.

    Raises:
        DamagedError: it is not a regular file.
        OSError: it is not there, or cannot be read.
    """
    file = os.fdopen(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb", closefd=True)
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        raise DamagedError(f"{path.name} is not a regular file")
    return file


def read_file(path: Path, most_bytes: int) -> bytes:
    """Read all of a small file of a checkpoint.

    Raises:
        DamagedError: it is not a regular file, or larger than `most_bytes`.
        OSError: it is not there, or cannot be read.
    """
    with open_file(path) as file:
        data = file.read(most_bytes + 1)
    if len(data) > most_bytes:
        raise DamagedError(f"{path.name} should have at most {most_bytes} bytes, has more")
    return data


def find(directory: Path, run: str, *, fresh: bool) -> FoundCheckpoint | None:
    """Return the checkpoint to resume `run` from; None if there is none to be found.

    Args:
        directory: where the checkpoints are; need not exist.
        run: our own run.
        fresh: leave other runs' checkpoints alone.

    Raises:
        CheckpointError: there are manifests, but no checkpoint that is undamaged.
        OSError: the directory or a file cannot be read. That is no damage: it may work elsewhere, or later.
    """
    return _find(directory, run, lambda its_run: its_run == run or not fresh)


def find_of_others(directory: Path, run: str) -> FoundCheckpoint | None:
    """Return the newest checkpoint of the other runs, or None; raises what `find` does."""
    return _find(directory, run, lambda its_run: its_run != run)


def read(directory: Path, stem: str, manifest_sha256: str | None = None) -> FoundCheckpoint:
    """Read a checkpoint by its name, and check all of it.

    Raises:
        DamagedError: something is missing, or is not what the manifest, or the job's record of the manifest, says.
        OSError: it cannot be read. That is no damage.
    """
    try:
        manifest, found_sha256 = _read_manifest(directory / stem, manifest_sha256)
    except (FileNotFoundError, NotADirectoryError):
        raise DamagedError("it has no manifest") from None
    return FoundCheckpoint(manifest, found_sha256, _read_files(directory / stem, manifest))


def first_free_group(directory: Path, run: str) -> int:
    """Return a group number under which `run` has no checkpoint yet, for a script that no agent gave one."""
    places = [place for stem in _stems(directory) if (place := parse_stem(stem)) and place[0] == run]
    return max((group for _, group, *_ in places), default=0) + 1


def has_any(directory: Path) -> bool:
    """Tell whether there is a checkpoint of any run, damaged or not; not if that cannot be read."""
    try:
        return any(parse_stem(stem) for stem in _stems(directory))
    except OSError:
        return False


def _find(directory: Path, run: str, is_wanted: Callable[[str], bool]) -> FoundCheckpoint | None:
    manifests, damaged = [], 0
    for stem in _stems(directory):
        named = parse_stem(stem)
        if named is None or not is_wanted(named[0]):
            continue
        try:
            manifests.append(_read_manifest(directory / stem))
        except (FileNotFoundError, NotADirectoryError):
            continue  # superseded, and its writer has begun to delete it
        except DamagedError as damage:
            damaged += 1
            warn(f"skipped checkpoint {directory / stem}: {damage}")
    order = _order([manifest for manifest, _ in manifests], run)
    for manifest, sha256 in sorted(manifests, key=lambda pair: order(pair[0]), reverse=True):
        try:
            return FoundCheckpoint(manifest, sha256, _read_files(directory / manifest.stem, manifest))
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
    """Return what to sort by, the best to resume from last: ours last, others by what their run saved last.

    Within a run group, step and save decide, for clocks of nodes differ.
    """
    last = {}
    for each in sorted(manifests, key=lambda each: each.saved_at):
        last[each.run] = each.saved_at
    return lambda each: (each.run == run, last[each.run], each.run, each.group, each.step, each.save)


def _stems(directory: Path) -> list[str]:
    try:
        return sorted(path.name for path in directory.iterdir())
    except FileNotFoundError:
        return []


def _read_manifest(place: Path, wanted_sha256: str | None = None) -> tuple[Manifest, str]:
    """Return the manifest in a checkpoint's directory, and its SHA-256.

    Raises:
        DamagedError: it is none, or not the wanted one.
        OSError: it is not there, or cannot be read.
    """
    raw = read_file(place / MANIFEST, _MANIFEST_BYTES)
    sha256 = hashlib.sha256(raw).hexdigest()
    if wanted_sha256 not in {None, sha256}:
        raise DamagedError("its manifest does not have the SHA-256 that the job's record lists")
    try:
        return decode(raw, place.name), sha256
    except ValueError as damage:
        raise DamagedError(f"its manifest: {damage}") from None


def _read_files(place: Path, manifest: Manifest) -> mmap.mmap:
    """Read and check all files of a checkpoint; return the state's bytes."""
    state, *extra = manifest.files
    for entry in extra:
        _read_checked(place, entry)
    return _read_checked(place, state)


def _read_checked(place: Path, entry: StoredFile) -> mmap.mmap:
    """Read a file once, hashing on the way, and compare it with its entry."""
    try:
        with open_file(place / entry.file) as file:
            bytes_ = os.fstat(file.fileno()).st_size
            if bytes_ != entry.bytes:
                raise DamagedError(f"{entry.file} should have {entry.bytes} bytes, has {bytes_}")
            data, sha256 = mmap.mmap(-1, max(bytes_, 1)), hashlib.sha256()
            for at in range(0, bytes_, _CHUNK_BYTES):  # and no more, should it grow meanwhile
                chunk = file.read(min(_CHUNK_BYTES, bytes_ - at))
                data.write(chunk)
                sha256.update(chunk)
    except (FileNotFoundError, NotADirectoryError):
        raise DamagedError(f"{entry.file} is missing") from None
    if sha256.hexdigest() != entry.sha256:
        raise DamagedError(f"{entry.file} does not have the SHA-256 that its manifest lists")
    data.seek(0)
    return data
