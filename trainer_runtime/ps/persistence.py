"""Keeps a shard on disk, and restores it.

`whole-N` has all rows of a shard. `since-N-M` has the rows that changed after `whole-N` (M = 1) or after
`since-N-(M - 1)`. A server restores the newest undamaged `whole-N` and the files that follow it, up to the first one
that is missing or damaged. A shard is written whole again once the changes since have more rows than the whole file.
"""

from __future__ import annotations

import logging
import re
import shutil
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from trainer_runtime.checkpoint import DamagedError
from trainer_runtime.ps import files
from trainer_runtime.ps.hashing import SLOTS, slots_of
from trainer_runtime.ps.leases import leases_of
from trainer_runtime.ps.shard import Author, Shard
from trainer_runtime.ps.table import TablePart, spec_of

log = logging.getLogger(__name__)

_NAME = re.compile(r"(whole|since)-(\d{6})(?:-(\d{6}))?\.rows")
_KEEP_WHOLE_FILES = 2
_REWRITE_RATIO = 1.0
"""Rows in the changes, relative to the whole file, from which on the shard is written whole again."""


@dataclass(frozen=True)
class Ownership:
    """The ids that belong to one shard of a given number of shards."""

    shard: int
    shards: int

    def mask(self, ids: torch.Tensor) -> torch.Tensor:
        """Return a mask of the ids that belong to the shard."""
        return slots_of(ids) * self.shards // SLOTS == self.shard


@dataclass(frozen=True)
class ShardSnapshot:
    """A copy of all rows of a shard, or of the changed ones, with the rest of its state."""

    state: dict[str, Any]
    arrays: list[torch.Tensor]
    versions: dict[str, int]
    """Version of each table, from which the next snapshot of changes starts."""
    rows: int
    drops: int


def capture(shard: Shard, since: dict[str, int]) -> ShardSnapshot:
    """Copy the rows that changed after these versions of the tables. Call it with the shard's lock."""
    arrays: list[torch.Tensor] = []
    rows = 0
    for table in shard.tables:
        part = table.changed_since(since.get(table.spec.name, 0))
        arrays += part
        rows += len(part.ids)
    state = {"tables": [table.spec.to_json() for table in shard.tables], **state_of(shard), "at": time.time()}
    versions = {table.spec.name: table.version for table in shard.tables}
    return ShardSnapshot(state, arrays, versions, rows, sum(table.drops for table in shard.tables))


def apply_snapshot(
    shard: Shard, state: dict[str, Any], arrays: Sequence[torch.Tensor], ownership: Ownership | None = None
) -> None:
    """Store a snapshot in a shard. With `ownership`, store only the rows that it owns, without pushes and passes."""
    for number, record in enumerate(state["tables"]):
        table = shard.tables[shard.declare(spec_of(record))]
        part = TablePart(*arrays[3 * number : 3 * number + 3])
        if ownership is not None:
            mine = ownership.mask(part.ids)
            part = TablePart(part.ids[mine], part.rows[mine], part.touched[mine])
        table.put(part)
    if ownership is None:
        restore_state(shard, state)


def state_of(shard: Shard) -> dict[str, Any]:
    """Return the state of a shard besides its rows."""
    return {
        "applied": [[*author, step] for author, step in shard.applied.items()],
        "done": shard.progress.done,
        "passes": {name: [leases.parts, leases.ranges()] for name, leases in shard.passes.items()},
    }


def restore_state(shard: Shard, state: dict[str, Any]) -> None:
    """Set the state of a shard besides its rows. Raises `ValueError` if it is not what `state_of` returns."""
    try:
        applied = {Author(worker, incarnation): step for worker, incarnation, step in state["applied"]}
        passes = {name: leases_of(parts, done) for name, (parts, done) in state["passes"].items()}
        numbers = [state["done"], *applied.values(), *(number for author in applied for number in author)]
        numbers += [number for leases in passes.values() for number in (leases.parts, leases.done_before, *leases.done)]
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"wanted the state of a shard, got something else: {error}") from None
    if not all(type(number) is int for number in numbers):
        raise ValueError("steps and parts must be whole numbers")
    shard.applied, shard.progress.done, shard.passes = applied, state["done"], passes


def save(shard: Shard, lock: threading.Condition, directory: Path, ownership: Ownership) -> None:
    """Write a whole shard into a directory that all shards share. Raises OSError."""
    with lock:
        snapshot = capture(shard, {})
    files.write(directory / f"part-{ownership.shard}-of-{ownership.shards}.rows", snapshot.state, snapshot.arrays)


def load(shard: Shard, directory: Path, ownership: Ownership) -> None:
    """Load a shard's rows from what all shards have saved in a directory. Raises OSError, `DamagedError`."""
    paths = sorted(directory.glob("part-*-of-*.rows"))
    shards = {path.stem.rpartition("-")[2] for path in paths}
    if len(shards) != 1 or len(paths) != int(*shards):
        raise FileNotFoundError(f"wanted a complete set of parts in {directory}, got {[path.name for path in paths]}")
    for path in paths:
        apply_snapshot(shard, *files.read(path), ownership=ownership)


def note_finished(directory: Path, shard: str = "*") -> None:
    """Mark the shards in a directory, or one shard, as those of a finished run. Errors are logged."""
    for shard_dir in directory.glob(f"shard-{shard}-of-*"):
        try:
            if shard_dir.is_dir():
                _finished_marker(shard_dir).touch()
        except OSError as error:
            log.error("cannot mark %s as finished, the next run will continue with its rows: %s", shard_dir, error)  # noqa: TRY400 - in one line


def is_unfinished(shard_dir: Path) -> bool:
    """Return whether this is the directory of a shard whose run has not finished."""
    return shard_dir.is_dir() and not _finished_marker(shard_dir).exists()


def set_aside_finished(shard_dir: Path) -> Path | None:
    """Rename the directory of a shard if its run has finished, replacing an earlier one of the new name.

    Returns:
        The new path; None: there is no directory, or its run has not finished. A later run continues with the rows
        if the directory is renamed back.

    Raises:
        OSError: it cannot be renamed.
    """
    marker = _finished_marker(shard_dir)
    if not marker.exists():
        return None
    aside = shard_dir.with_name(f"finished-{shard_dir.name}")
    if shard_dir.exists():
        if aside.exists():
            shutil.rmtree(aside)
        shard_dir.rename(aside)
    marker.unlink()
    return aside


def _finished_marker(shard_dir: Path) -> Path:
    return shard_dir.with_name(f"{shard_dir.name}.finished")


class ShardPersistence:
    """Keeps a shard in a directory of its own.

    Args:
        directory: created if it is missing.
        shard: the shard. It may be changed only with `lock` held.
        every_s: interval at which changes are written.
    """

    def __init__(self, directory: Path, shard: Shard, lock: threading.Condition, every_s: float = 10.0) -> None:
        self._directory = directory
        self._every_s = every_s
        self._shard = shard
        self._lock = lock
        self._whole = 0
        """Number of the newest whole file that was read or written here; 0: none."""
        self._follows = False
        """Whether files of other servers may exist, whose numbers must be checked before the first one is written."""
        self._since = 0
        self._versions: dict[str, int] = {}
        self._written_state: dict[str, Any] = {}
        self._drops = 0
        self._whole_rows = 0
        self._since_rows = 0
        self._is_closed = threading.Event()
        self._is_dropped = False
        self._thread: threading.Thread | None = None

    def restore(self) -> float | None:
        """Load the files; return when they were written, in seconds since 1970. None: there are none.

        Raises:
            DamagedError: all files are damaged.
        """
        self._directory.mkdir(parents=True, exist_ok=True)
        numbers = sorted({number for kind, number, *_ in self._list_files() if kind == "whole"}, reverse=True)
        for whole in numbers:
            with suppress(DamagedError), self._lock:
                return self._restore_from(whole)
            log.warning("whole-%06d in %s is damaged: using the one before", whole, self._directory)
        if numbers:
            raise DamagedError(f"all rows in {self._directory} are damaged")
        return None

    def follow(self) -> None:
        """Load nothing: the files are older than the shard. This needs no disk."""
        self._follows = True

    def start(self) -> None:
        """Start to write the changes at intervals."""
        self._thread = threading.Thread(target=self._run, name="ps-persistence", daemon=True)
        self._thread.start()

    def write(self) -> None:
        """Write the changes, if there are any. Raises OSError."""
        with self._lock:
            state = state_of(self._shard)
            versions = {table.spec.name: table.version for table in self._shard.tables}
            if (state, versions) == (self._written_state, self._versions):
                return
            is_whole = self._whole == 0 or self._since_rows > _REWRITE_RATIO * self._whole_rows
            drops = sum(table.drops for table in self._shard.tables)
            is_whole |= drops != self._drops
            snapshot = capture(self._shard, {} if is_whole else self._versions)
        if is_whole:
            self._write_whole(snapshot)
            self._prune()
        else:
            name = f"since-{self._whole:06d}-{self._since + 1:06d}.rows"
            files.write(self._directory / name, snapshot.state, snapshot.arrays)
            self._since += 1
            self._since_rows += snapshot.rows
        self._versions, self._drops, self._written_state = snapshot.versions, snapshot.drops, state

    def _write_whole(self, snapshot: ShardSnapshot) -> None:
        self._directory.mkdir(parents=True, exist_ok=True)
        there = self._list_files()
        newest = max((number for kind, number, *_ in there if kind == "whole"), default=0)
        number = 1 + (newest if self._follows else self._whole)
        for kind, whole, _, path in there:
            if (kind, whole) == ("since", number):
                path.unlink()  # it followed a damaged file of this number, with other rows
        files.write(self._directory / f"whole-{number:06d}.rows", snapshot.state, snapshot.arrays)
        self._whole, self._since, self._follows = number, 0, False
        self._whole_rows, self._since_rows = snapshot.rows, 0

    def close(self) -> None:
        """Write the changes, and stop."""
        if self._thread is not None:
            self._is_closed.set()
            self._thread.join()

    def drop(self) -> None:
        """Stop without writing: another server has the shard."""
        self._is_dropped = True
        self.close()

    def _run(self) -> None:
        while True:
            is_last = self._is_closed.wait(self._every_s)
            if self._is_dropped:
                return
            try:
                self.write()
            except Exception as error:  # noqa: BLE001 - a full disk or memory may have room later
                log.error("rows cannot be written to %s: %s", self._directory, error)  # noqa: TRY400 - in one line
            if is_last:
                return

    def _restore_from(self, whole: int) -> float:
        state, arrays = files.read(self._directory / f"whole-{whole:06d}.rows")
        apply_snapshot(self._shard, state, arrays)
        self._whole, self._since = whole, 0
        self._whole_rows = sum(len(table) for table in self._shard.tables)
        self._drops = sum(table.drops for table in self._shard.tables)
        while (path := self._directory / f"since-{whole:06d}-{self._since + 1:06d}.rows").exists():
            try:
                state, arrays = files.read(path)
            except DamagedError as error:
                log.warning("%s: the changes since the file before it are lost", error)
                break
            apply_snapshot(self._shard, state, arrays)
            self._since += 1
        for kind, number, since, path in self._list_files():
            if (kind, number) == ("since", whole) and since > self._since:
                path.unlink()  # it follows a missing or damaged file
        self._versions = {table.spec.name: table.version for table in self._shard.tables}
        self._written_state = state_of(self._shard)
        return float(state["at"])

    def _list_files(self) -> list[tuple[str, int, int, Path]]:
        matches = [(_NAME.fullmatch(path.name), path) for path in self._directory.iterdir()]
        return [(match[1], int(match[2]), int(match[3] or 0), path) for match, path in matches if match]

    def _prune(self) -> None:
        for _, number, _, path in self._list_files():
            if number <= self._whole - _KEEP_WHOLE_FILES:
                path.unlink(missing_ok=True)
