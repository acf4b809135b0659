"""What a server keeps of its shard on disk, and what a new one finds there.

`whole-N` has all rows of a shard; `since-N-M` has those that changed after `whole-N`, or after the one with M - 1. A
server that begins takes the newest whole one that is not damaged, and what follows it up to the first that is missing
or damaged. A shard is written whole again once what has changed since outweighs it.
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
_KEPT_WHOLE = 2
_AGAIN_AFTER = 1.0
"""Rows in what has changed, by those in the whole one."""


@dataclass(frozen=True)
class Ownership:
    """Which ids belong to one of so many shards."""

    shard: int
    shards: int

    def mask(self, ids: torch.Tensor) -> torch.Tensor:
        """Which of them."""
        return slots_of(ids) * self.shards // SLOTS == self.shard


@dataclass(frozen=True)
class AppliedPushes:
    """A copy of what is to be written."""

    said: dict[str, Any]
    arrays: list[torch.Tensor]
    versions: dict[str, int]
    """Of each table: what a later one is to begin after."""
    rows: int
    drops: int


def take(shard: Shard, since: dict[str, int]) -> AppliedPushes:
    """Copy what has changed after these versions of its tables. For the thread that may change the shard."""
    arrays: list[torch.Tensor] = []
    rows = 0
    for table in shard.tables:
        part = table.changed_since(since.get(table.spec.name, 0))
        arrays += part
        rows += len(part.ids)
    said = {"tables": [table.spec.to_json() for table in shard.tables], **said_of(shard), "at": time.time()}
    versions = {table.spec.name: table.version for table in shard.tables}
    return AppliedPushes(said, arrays, versions, rows, sum(table.drops for table in shard.tables))


def put(shard: Shard, said: dict[str, Any], arrays: Sequence[torch.Tensor], owns: Ownership | None = None) -> None:
    """Let a shard have what was taken; of another's only the rows that it owns, and not who had pushed them."""
    for number, told in enumerate(said["tables"]):
        table = shard.tables[shard.declare(spec_of(told))]
        part = TablePart(*arrays[3 * number : 3 * number + 3])
        if owns is not None:
            mine = owns.mask(part.ids)
            part = TablePart(part.ids[mine], part.rows[mine], part.touched[mine])
        table.put(part)
    if owns is None:
        take_said(shard, said)


def said_of(shard: Shard) -> dict[str, Any]:
    """What a shard has beside rows."""
    return {
        "applied": [[*author, step] for author, step in shard.applied.items()],
        "done": shard.pace.done,
        "passes": {name: [leases.parts, leases.ranges()] for name, leases in shard.passes.items()},
    }


def take_said(shard: Shard, said: dict[str, Any]) -> None:
    """Let a shard have that. Raises `ValueError`: it is not what `said_of` says."""
    try:
        applied = {Author(worker, incarnation): step for worker, incarnation, step in said["applied"]}
        passes = {name: leases_of(parts, done) for name, (parts, done) in said["passes"].items()}
        numbers = [said["done"], *applied.values(), *(number for author in applied for number in author)]
        numbers += [number for leases in passes.values() for number in (leases.parts, leases.done_before, *leases.done)]
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"this says nothing of a shard: {error}") from None
    if not all(type(number) is int for number in numbers):
        raise ValueError("steps and parts are whole numbers")
    shard.applied, shard.pace.done, shard.passes = applied, said["done"], passes


def save(shard: Shard, lock: threading.Condition, directory: Path, place: Ownership) -> None:
    """Write all of a shard into a directory that the shards share. Raises OSError."""
    with lock:
        taken = take(shard, {})
    files.write(directory / f"part-{place.shard}-of-{place.shards}.rows", taken.said, taken.arrays)


def load(shard: Shard, directory: Path, owns: Ownership) -> None:
    """Take a shard's rows from all that was saved in a directory. Raises OSError, `DamagedError`."""
    paths = sorted(directory.glob("part-*-of-*.rows"))
    shards = {path.stem.rpartition("-")[2] for path in paths}
    if len(shards) != 1 or len(paths) != int(*shards):
        raise FileNotFoundError(f"{directory} holds no whole set of parts, but {[path.name for path in paths]}")
    for path in paths:
        put(shard, *files.read(path), owns=owns)


def note_finished(directory: Path, shard: str = "*") -> None:
    """Note that the run whose shards, or this shard, are kept in a directory has finished. An error is logged."""
    for place in directory.glob(f"shard-{shard}-of-*"):
        try:
            if place.is_dir():
                _marker(place).touch()
        except OSError as error:
            log.error("%s: the next run will go on with these rows: %s", place, error)  # noqa: TRY400 - in one line


def is_unfinished(place: Path) -> bool:
    """Whether this is the directory of a shard whose run has not finished."""
    return place.is_dir() and not _marker(place).exists()


def set_aside_finished(place: Path) -> Path | None:
    """Rename the directory of a shard if its run has finished, in place of what an earlier run left under that name.

    Returns:
        Its new path; None: there is none, or its run has not finished. Renamed back, a later run goes on with it.

    Raises:
        OSError: it cannot be renamed.
    """
    marker = _marker(place)
    if not marker.exists():
        return None
    aside = place.with_name(f"finished-{place.name}")
    if place.exists():
        if aside.exists():
            shutil.rmtree(aside)
        place.rename(aside)
    marker.unlink()
    return aside


def _marker(place: Path) -> Path:
    return place.with_name(f"{place.name}.finished")


class ShardPersistence:
    """Keeps a shard in a directory of its own.

    Args:
        directory: made where missing.
        shard: what is kept. It may be changed only with `lock` held.
        every_s: how often what has changed is written.
    """

    def __init__(self, directory: Path, shard: Shard, lock: threading.Condition, every_s: float = 10.0) -> None:
        self._directory = directory
        self._every_s = every_s
        self._shard = shard
        self._lock = lock
        self._whole = 0
        """Number of the newest that was read or written here; 0: none was."""
        self._follows = False
        """Others may have written some, which are to be looked for before one is written here."""
        self._since = 0
        self._versions: dict[str, int] = {}
        self._said: dict[str, Any] = {}
        self._drops = 0
        self._whole_rows = 0
        self._since_rows = 0
        self._is_closed = threading.Event()
        self._is_dropped = False
        self._thread: threading.Thread | None = None

    def restore(self) -> float | None:
        """Take up what is there; return when it was written, in seconds since 1970. None: nothing is there.

        Raises:
            DamagedError: all that is there is damaged.
        """
        self._directory.mkdir(parents=True, exist_ok=True)
        numbers = sorted({number for kind, number, *_ in self._there() if kind == "whole"}, reverse=True)
        for whole in numbers:
            with suppress(DamagedError), self._lock:
                return self._restore_from(whole)
            log.warning("whole-%06d in %s is damaged: taking the one before", whole, self._directory)
        if numbers:
            raise DamagedError(f"all of what is kept in {self._directory} is damaged")
        return None

    def follow(self) -> None:
        """Take up nothing of what is there: it is older than what the shard has. A disk that is away is no matter."""
        self._follows = True

    def begin(self) -> None:
        """Write what has changed every so often, from now on."""
        self._thread = threading.Thread(target=self._keep_on, name="ps-keeper", daemon=True)
        self._thread.start()

    def write(self) -> None:
        """Write what has changed, if anything has. Raises OSError."""
        with self._lock:
            said = said_of(self._shard)
            versions = {table.spec.name: table.version for table in self._shard.tables}
            if (said, versions) == (self._said, self._versions):
                return
            is_whole = self._whole == 0 or self._since_rows > _AGAIN_AFTER * self._whole_rows
            drops = sum(table.drops for table in self._shard.tables)
            is_whole |= drops != self._drops
            taken = take(self._shard, {} if is_whole else self._versions)
        if is_whole:
            self._write_whole(taken)
            self._prune()
        else:
            name = f"since-{self._whole:06d}-{self._since + 1:06d}.rows"
            files.write(self._directory / name, taken.said, taken.arrays)
            self._since += 1
            self._since_rows += taken.rows
        self._versions, self._drops, self._said = taken.versions, taken.drops, said

    def _write_whole(self, taken: AppliedPushes) -> None:
        self._directory.mkdir(parents=True, exist_ok=True)
        there = self._there()
        newest = max((number for kind, number, *_ in there if kind == "whole"), default=0)
        number = 1 + (newest if self._follows else self._whole)
        for kind, whole, _, path in there:
            if (kind, whole) == ("since", number):
                path.unlink()  # one of this number was damaged, and its rows were others
        files.write(self._directory / f"whole-{number:06d}.rows", taken.said, taken.arrays)
        self._whole, self._since, self._follows = number, 0, False
        self._whole_rows, self._since_rows = taken.rows, 0

    def close(self) -> None:
        """Write what has changed, and no more."""
        if self._thread is not None:
            self._is_closed.set()
            self._thread.join()

    def drop(self) -> None:
        """Write no more: another server has the shard."""
        self._is_dropped = True
        self.close()

    def _keep_on(self) -> None:
        while True:
            is_last = self._is_closed.wait(self._every_s)
            if self._is_dropped:
                return
            try:
                self.write()
            except Exception as error:  # noqa: BLE001 - no disk, no memory: later there may be
                log.error("what this server has cannot be kept in %s: %s", self._directory, error)  # noqa: TRY400 - in one line
            if is_last:
                return

    def _restore_from(self, whole: int) -> float:
        said, arrays = files.read(self._directory / f"whole-{whole:06d}.rows")
        put(self._shard, said, arrays)
        self._whole, self._since = whole, 0
        self._whole_rows = sum(len(table) for table in self._shard.tables)
        self._drops = sum(table.drops for table in self._shard.tables)
        while (path := self._directory / f"since-{whole:06d}-{self._since + 1:06d}.rows").exists():
            try:
                said, arrays = files.read(path)
            except DamagedError as error:
                log.warning("%s: what changed since the one before is lost", error)
                break
            put(self._shard, said, arrays)
            self._since += 1
        for kind, number, since, path in self._there():
            if (kind, number) == ("since", whole) and since > self._since:
                path.unlink()  # it follows one that is gone
        self._versions = {table.spec.name: table.version for table in self._shard.tables}
        self._said = said_of(self._shard)
        return float(said["at"])

    def _there(self) -> list[tuple[str, int, int, Path]]:
        matches = [(_NAME.fullmatch(path.name), path) for path in self._directory.iterdir()]
        return [(match[1], int(match[2]), int(match[3] or 0), path) for match, path in matches if match]

    def _prune(self) -> None:
        for _, number, _, path in self._there():
            if number <= self._whole - _KEPT_WHOLE:
                path.unlink(missing_ok=True)
