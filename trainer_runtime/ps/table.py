"""One server's part of a table: rows by id. It uses no clock and no I/O; callers pass the time.

A row that was never pushed to is a pure function of (seed, table, id). It takes no memory, reading it changes nothing,
and every server returns the same numbers for it. The first push that counts stores the row.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any, NamedTuple

import torch

from trainer_runtime.ps.arena import Arena
from trainer_runtime.ps.frames import is_integer
from trainer_runtime.ps.hashing import seed_of, uniform
from trainer_runtime.ps.index import ABSENT, NO_ID, Index
from trainer_runtime.ps.rules import Rule, rule_of

MAX_DIM = 1 << 16
_TOUCHED, _VERSION = 0, 1
_EVICT_TO = 0.9
_CHUNK_NUMBERS = 1 << 16
"""Numbers of rows that are updated at a time, so that they are written while they are still in a core's cache."""


@dataclass(frozen=True)
class TableSpec:
    """The description of a table, the same on all servers and workers."""

    name: str
    dim: int
    """Trained numbers in a row."""
    rule: Rule
    initial: str = "uniform"
    """Initial values of rows: `zeros`, `uniform` in [-scale, scale), or `normal` with standard deviation `scale`."""
    scale: float = 0.01
    seed: int = 0
    admit_after: int = 1
    """Number of pushes until an id has a row; rarer ids have none."""
    max_rows: int = 0
    """With more rows than this on one server, those that were not touched for longest are dropped. 0: no limit."""
    layout: str = ""
    """Hash of names and shapes of parameters that fill the rows, which are never dropped then. Empty: rows of ids."""

    def __post_init__(self) -> None:
        """Raise `ValueError` if a field is invalid."""
        numbers = (self.dim, self.seed, self.admit_after, self.max_rows)
        texts = (self.name, self.initial, self.layout)
        if not (all(isinstance(text, str) for text in texts) and isinstance(self.scale, int | float)):
            raise ValueError(f"table {self.name!r}: name, initial and layout must be strings, and scale a number")
        if not all(map(is_integer, numbers)):
            raise ValueError(f"table {self.name!r}: dim, seed, admit_after and max_rows must be 64-bit integers")
        try:
            self.name.encode()
        except UnicodeEncodeError:
            raise ValueError(f"table {self.name!r}: the name is not valid Unicode") from None
        if not 1 <= self.dim <= MAX_DIM:
            raise ValueError(f"table {self.name!r}: dim must be from 1 to {MAX_DIM}, not {self.dim}")
        if self.initial not in {"zeros", "uniform", "normal"}:
            raise ValueError(f"table {self.name!r}: initial must be zeros, uniform or normal, not {self.initial!r}")
        if self.admit_after < 1 or self.max_rows < 0:
            raise ValueError(f"table {self.name!r}: admit_after must be at least 1, and max_rows at least 0")

    def difference(self, other: TableSpec) -> str:
        """Describe how another table of this name differs, except in the learning rate. Empty: it does not."""
        if self.is_same(other):
            return ""
        if self.layout != other.layout:
            return f"{self.name}: the model's parameters there have other names or shapes than this worker's"
        return f"table {self.name!r} was declared as {self}, now as {other}"

    def is_same(self, other: TableSpec) -> bool:
        """Return whether the tables are equal except for the learning rate, which each push can set."""
        return replace(self, rule=replace(self.rule, lr=other.rule.lr)) == other

    def to_json(self) -> dict[str, Any]:
        """Return the table as JSON for `spec_of`."""
        return {**asdict(self), "rule": self.rule.to_json()}

    def initial_rows(self, ids: torch.Tensor) -> torch.Tensor:
        """Return the initial values of rows, (ids, dim); the same on every server."""
        seed = seed_of(self.seed, self.name)
        if self.initial == "zeros":
            return torch.zeros(len(ids), self.dim, dtype=torch.float32)
        if self.initial == "uniform":
            return uniform(ids, self.dim, seed).mul_(2).sub_(1).mul_(self.scale)
        # Box-Muller transform
        drawn = uniform(ids, 2 * self.dim, seed)
        radius = (1 - drawn[:, : self.dim]).log_().mul_(-2).sqrt_()
        return radius.mul_((drawn[:, self.dim :] * (2 * torch.pi)).cos_()).mul_(self.scale)


def spec_of(record: Mapping[str, Any]) -> TableSpec:
    """Return the table that `TableSpec.to_json` described. Raises `ValueError`."""
    try:
        return TableSpec(**{**record, "rule": rule_of(record["rule"])})
    except (TypeError, KeyError, OverflowError) as error:
        raise ValueError(f"wanted a description of a table, got something else: {error}") from None


class TablePart(NamedTuple):
    """Rows with their optimizer state and times, to be written to disk or sent to a replica."""

    ids: torch.Tensor
    """(rows,), 64-bit integers."""
    rows: torch.Tensor
    """(rows, dim + optimizer state), 32-bit floats."""
    touched: torch.Tensor
    """(rows,), 64-bit integers: seconds since 1970 of the last push."""


class Table:
    """The rows of a table that are stored on this server."""

    def __init__(self, spec: TableSpec) -> None:
        self.spec = spec
        self.version = 0
        """Number of changes of the table."""
        self.drops = 0
        """Number of times that rows were dropped."""
        self._index = Index()
        self._rows = Arena(spec.dim + spec.rule.memory(spec.dim))
        self._chunk_rows = max(1, _CHUNK_NUMBERS // self._rows.columns)
        self._meta = Arena(2, torch.int64)
        self._used = 0
        self._free = torch.empty(0, dtype=torch.int64)
        """Numbers of rows that were dropped and can be used again."""
        self._push_counts = _Counts()

    def __len__(self) -> int:
        return self._index.size

    def pull(self, ids: torch.Tensor) -> torch.Tensor:
        """Return the rows of ids, (ids, dim). Ids may repeat."""
        rows = self._index.find(ids)
        absent = (rows == ABSENT).nonzero().squeeze(1)
        if not len(absent):
            return self._rows.read(rows, self.spec.dim)
        if len(absent) == len(ids):
            return self.spec.initial_rows(ids)
        rows[absent] = rows.max()
        values = self._rows.read(rows, self.spec.dim)
        values[absent] = self.spec.initial_rows(ids[absent])
        return values

    def admit(self, ids: torch.Tensor) -> torch.Tensor:
        """Return a mask of the distinct ids that have a row or get one with this push; count the others."""
        admitted = torch.ones(len(ids), dtype=torch.bool)
        if self.spec.admit_after > 1:
            absent = self._index.find(ids) == ABSENT
            admitted[absent] = self._push_counts.add(ids[absent]) >= self.spec.admit_after
        return admitted

    def initialize(self, ids: torch.Tensor, values: torch.Tensor) -> None:
        """Create rows with these values, (ids, dim), for those of the ids that have no row."""
        absent = self._index.find(ids) == ABSENT
        rows = self._create(ids[absent])
        self.version += 1
        self._rows.write(rows, values[absent])
        self._touch(rows, torch.zeros_like(rows))

    def apply(self, ids: torch.Tensor, gradients: torch.Tensor, now_s: int, lr: float | None = None) -> None:
        """Update the rows of distinct ids with gradients (ids, dim). `lr` replaces the table's learning rate."""
        rule = self.spec.rule if lr is None else replace(self.spec.rule, lr=lr)
        rows = self._find_or_create(ids)
        self.version += 1
        for begin in range(0, len(ids), self._chunk_rows):
            some = slice(begin, begin + self._chunk_rows)
            values = self._rows.read(rows[some])
            rule.apply(values, gradients[some])
            self._rows.write(rows[some], values)
        self._touch(rows, torch.full_like(rows, now_s))
        if self.spec.max_rows and len(self) > self.spec.max_rows:
            self._evict(int(self.spec.max_rows * _EVICT_TO))

    def put(self, part: TablePart) -> None:
        """Store rows as they are, replacing existing ones."""
        rows = self._find_or_create(part.ids)
        self.version += 1
        self._rows.write(rows, part.rows)
        self._touch(rows, part.touched)

    def changed_since(self, version: int) -> TablePart:
        """Return all rows that were changed after a version; 0: all rows."""
        ids, rows = self._index.items()
        meta = self._meta.read(rows)
        changed = meta[:, _VERSION] > version
        ids, rows = ids[changed], rows[changed]
        return TablePart(ids, self._rows.read(rows), meta[changed, _TOUCHED].contiguous())

    def shrink(self, before_s: int) -> int:
        """Drop the rows that received no push since a time, and return their number."""
        if self.spec.layout:
            return 0
        ids, rows = self._index.items()
        keep = self._meta.read(rows)[:, _TOUCHED] >= before_s
        self._retain(ids, rows, keep)
        self._push_counts = _Counts()
        return len(ids) - int(keep.sum())

    def _evict(self, most: int) -> None:
        ids, rows = self._index.items()
        touched = self._meta.read(rows)
        order = touched[:, _VERSION].argsort(descending=True)
        keep = torch.zeros_like(ids, dtype=torch.bool)
        keep[order[:most]] = True
        self._retain(ids, rows, keep)

    def _retain(self, ids: torch.Tensor, rows: torch.Tensor, keep: torch.Tensor) -> None:
        self.version += 1
        self.drops += 1
        self._free = torch.cat([self._free, rows[~keep]])
        self._index = Index(int(keep.sum()))
        self._index.add(ids[keep], rows[keep])

    def _touch(self, rows: torch.Tensor, touched: torch.Tensor) -> None:
        self._meta.write(rows, torch.stack([touched, torch.full_like(rows, self.version)], 1))

    def _find_or_create(self, ids: torch.Tensor) -> torch.Tensor:
        rows = self._index.find(ids)
        new = rows == ABSENT
        if new.any():
            rows[new] = self._create(ids[new])
        return rows

    def _create(self, ids: torch.Tensor) -> torch.Tensor:
        taken = self._free[: len(ids)]
        self._free = self._free[len(taken) :]
        fresh = len(ids) - len(taken)
        rows = torch.cat([taken, torch.arange(self._used, self._used + fresh)])
        self._used += fresh
        self._rows.reserve(self._used)
        self._meta.reserve(self._used)
        new_rows = torch.empty(len(ids), self._rows.columns, dtype=torch.float32)
        new_rows[:, : self.spec.dim] = self.spec.initial_rows(ids)
        self.spec.rule.begin(new_rows[:, self.spec.dim :])
        self._rows.write(rows, new_rows)
        self._index.add(ids, rows)
        return rows


class _Counts:
    """Numbers of pushes of ids that have no row yet."""

    def __init__(self) -> None:
        self._index = Index()
        self._counts = Arena(1, torch.int64)

    def add(self, ids: torch.Tensor) -> torch.Tensor:
        """Count each id once more, and return the counts."""
        places = self._index.find(ids)
        new = places == ABSENT
        if new.any():
            begin = self._index.size
            places[new] = torch.arange(begin, begin + int(new.sum()))
            self._index.add(ids[new], places[new])
            self._counts.reserve(self._index.size)
            self._counts.write(places[new], torch.zeros(int(new.sum()), 1, dtype=torch.int64))
        counts = self._counts.read(places) + 1
        self._counts.write(places, counts)
        return counts.squeeze(1)


def check_ids(ids: torch.Tensor) -> None:
    """Raise `ValueError` if ids are not sorted and distinct, or contain `NO_ID`."""
    if len(ids) and (int(ids[0]) == NO_ID or not bool((ids[1:] > ids[:-1]).all())):
        raise ValueError("wanted sorted, distinct ids other than -2**63, got others")
