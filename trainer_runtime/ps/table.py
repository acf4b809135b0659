"""A table of rows by id, as one server holds a part of it. No clock, no I/O: who calls says what time it is.

A row that was never pushed to is a pure function of (seed, table, id), so it takes no memory, reading changes nothing,
and any server that is asked for it gives the same numbers. With the first push that counts it is stored.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any, NamedTuple

import torch

from trainer_runtime.ps.arena import Arena
from trainer_runtime.ps.frames import is_integer
from trainer_runtime.ps.hashing import seed_of, uniform
from trainer_runtime.ps.index import ABSENT, NOBODY, Index
from trainer_runtime.ps.rules import Rule, rule_of

MAX_DIM = 1 << 16
_TOUCHED, _VERSION = 0, 1
_EVICT_TO = 0.9
_CACHED = 1 << 16
"""So many numbers of rows are changed at once: what was read is written while a core's cache still has it."""


@dataclass(frozen=True)
class TableSpec:
    """What all servers and workers know of a table."""

    name: str
    dim: int
    """Numbers in a row that are trained."""
    rule: Rule
    initial: str = "uniform"
    """What rows begin with: `zeros`, `uniform` in [-scale, scale), `normal` with that deviation."""
    scale: float = 0.01
    seed: int = 0
    admit_after: int = 1
    """Pushes of an id until it has a row: the rare ones get none."""
    max_rows: int = 0
    """More than that on one server, and those untouched for longest lose theirs. 0: no limit."""
    layout: str = ""
    """Of a model's own parameters: what lies where. Their rows are never dropped. Empty: rows are of ids."""

    def __post_init__(self) -> None:
        """Raises `ValueError` where a law does not hold."""
        numbers = (self.dim, self.seed, self.admit_after, self.max_rows)
        words = (self.name, self.initial, self.layout)
        if not (all(isinstance(word, str) for word in words) and isinstance(self.scale, int | float)):
            raise ValueError(f"table {self.name!r}: names are words, and scale is a number")
        if not all(map(is_integer, numbers)):
            raise ValueError(f"table {self.name!r}: dim, seed, admit_after and max_rows are whole numbers of 64 bits")
        try:
            self.name.encode()
        except UnicodeEncodeError:
            raise ValueError(f"table {self.name!r}: its name is no text") from None
        if not 1 <= self.dim <= MAX_DIM:
            raise ValueError(f"table {self.name!r}: dim must be from 1 to {MAX_DIM}, not {self.dim}")
        if self.initial not in {"zeros", "uniform", "normal"}:
            raise ValueError(f"table {self.name!r}: initial must be zeros, uniform or normal, not {self.initial!r}")
        if self.admit_after < 1 or self.max_rows < 0:
            raise ValueError(f"table {self.name!r}: admit_after must be at least 1, and max_rows at least 0")

    def difference(self, other: TableSpec) -> str:
        """In words, how another of the same name differs, but for the learning rate. Empty: it does not."""
        if self.is_same(other):
            return ""
        if self.layout != other.layout:
            return f"{self.name}: the model's parameters there have other names or shapes than this worker's"
        return f"table {self.name!r} was declared as {self}, now as {other}"

    def is_same(self, other: TableSpec) -> bool:
        """Whether this is the other, but for the learning rate, which each push may say."""
        return replace(self, rule=replace(self.rule, lr=other.rule.lr)) == other

    def to_json(self) -> dict[str, Any]:
        """What `spec_of` reads."""
        return {**asdict(self), "rule": self.rule.to_json()}

    def initial_rows(self, ids: torch.Tensor) -> torch.Tensor:
        """What rows begin with, (ids, dim): the same wherever it is asked."""
        seed = seed_of(self.seed, self.name)
        if self.initial == "zeros":
            return torch.zeros(len(ids), self.dim, dtype=torch.float32)
        if self.initial == "uniform":
            return uniform(ids, self.dim, seed).mul_(2).sub_(1).mul_(self.scale)
        # Box and Muller's transform
        drawn = uniform(ids, 2 * self.dim, seed)
        radius = (1 - drawn[:, : self.dim]).log_().mul_(-2).sqrt_()
        return radius.mul_((drawn[:, self.dim :] * (2 * torch.pi)).cos_()).mul_(self.scale)


def spec_of(told: Mapping[str, Any]) -> TableSpec:
    """The table that `TableSpec.to_json` describes. Raises `ValueError`."""
    try:
        return TableSpec(**{**told, "rule": rule_of(told["rule"])})
    except (TypeError, KeyError, OverflowError) as error:
        raise ValueError(f"this describes no table: {error}") from None


class TablePart(NamedTuple):
    """Rows with all that belongs to them, to be kept or to be handed on."""

    ids: torch.Tensor
    """(rows,), 64-bit integers."""
    rows: torch.Tensor
    """(rows, dim + memory), 32-bit floats."""
    touched: torch.Tensor
    """(rows,), 64-bit integers: seconds since 1970 of the last push."""


class Table:
    """The rows of a table that are stored here."""

    def __init__(self, spec: TableSpec) -> None:
        self.spec = spec
        self.version = 0
        """Counts the changes."""
        self.drops = 0
        """Counts how often rows were dropped."""
        self._index = Index()
        self._rows = Arena(spec.dim + spec.rule.memory(spec.dim))
        self._at_once = max(1, _CACHED // self._rows.columns)
        self._meta = Arena(2, torch.int64)
        self._used = 0
        self._free = torch.empty(0, dtype=torch.int64)
        """Numbers of rows that were dropped."""
        self._waiting = _Counts()

    def __len__(self) -> int:
        return self._index.size

    def pull(self, ids: torch.Tensor) -> torch.Tensor:
        """The rows of ids, (ids, dim). They may repeat."""
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
        """Which of the ids, that differ, have a row or are to have one, as a mask; the others are counted."""
        admitted = torch.ones(len(ids), dtype=torch.bool)
        if self.spec.admit_after > 1:
            absent = self._index.find(ids) == ABSENT
            admitted[absent] = self._waiting.add(ids[absent]) >= self.spec.admit_after
        return admitted

    def begin(self, ids: torch.Tensor, values: torch.Tensor) -> None:
        """Let those of the ids that have no row have one that begins with these values, (ids, dim)."""
        absent = self._index.find(ids) == ABSENT
        rows = self._create(ids[absent])
        self.version += 1
        self._rows.write(rows, values[absent])
        self._touch(rows, torch.zeros_like(rows))

    def apply(self, ids: torch.Tensor, gradients: torch.Tensor, now_s: int, lr: float | None = None) -> None:
        """Change the rows of ids that differ by gradients (ids, dim). `lr`: another learning rate than the table's."""
        rule = self.spec.rule if lr is None else replace(self.spec.rule, lr=lr)
        rows = self._find_or_create(ids)
        self.version += 1
        for begin in range(0, len(ids), self._at_once):
            some = slice(begin, begin + self._at_once)
            values = self._rows.read(rows[some])
            rule.apply(values, gradients[some])
            self._rows.write(rows[some], values)
        self._touch(rows, torch.full_like(rows, now_s))
        if self.spec.max_rows and len(self) > self.spec.max_rows:
            self._evict(int(self.spec.max_rows * _EVICT_TO))

    def put(self, part: TablePart) -> None:
        """Store rows as they are, in place of what was there."""
        rows = self._find_or_create(part.ids)
        self.version += 1
        self._rows.write(rows, part.rows)
        self._touch(rows, part.touched)

    def changed_since(self, version: int) -> TablePart:
        """All rows that were changed after that version; 0: all rows."""
        ids, rows = self._index.items()
        meta = self._meta.read(rows)
        changed = meta[:, _VERSION] > version
        ids, rows = ids[changed], rows[changed]
        return TablePart(ids, self._rows.read(rows), meta[changed, _TOUCHED].contiguous())

    def shrink(self, before_s: int) -> int:
        """Drop the rows that nobody has pushed to since then; return how many."""
        if self.spec.layout:
            return 0
        ids, rows = self._index.items()
        keep = self._meta.read(rows)[:, _TOUCHED] >= before_s
        self._keep(ids, rows, keep)
        self._waiting = _Counts()
        return len(ids) - int(keep.sum())

    def _evict(self, most: int) -> None:
        ids, rows = self._index.items()
        touched = self._meta.read(rows)
        order = touched[:, _VERSION].argsort(descending=True)
        keep = torch.zeros_like(ids, dtype=torch.bool)
        keep[order[:most]] = True
        self._keep(ids, rows, keep)

    def _keep(self, ids: torch.Tensor, rows: torch.Tensor, keep: torch.Tensor) -> None:
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
        begun = torch.empty(len(ids), self._rows.columns, dtype=torch.float32)
        begun[:, : self.spec.dim] = self.spec.initial_rows(ids)
        self.spec.rule.begin(begun[:, self.spec.dim :])
        self._rows.write(rows, begun)
        self._index.add(ids, rows)
        return rows


class _Counts:
    """How often ids were asked for that have no row yet."""

    def __init__(self) -> None:
        self._index = Index()
        self._counts = Arena(1, torch.int64)

    def add(self, ids: torch.Tensor) -> torch.Tensor:
        """Count each once more; return the counts."""
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
    """Raises `ValueError` if the ids do not grow, or one is none."""
    if len(ids) and (int(ids[0]) == NOBODY or not bool((ids[1:] > ids[:-1]).all())):
        raise ValueError("ids must grow from each to the next, and be none of -2**63")
