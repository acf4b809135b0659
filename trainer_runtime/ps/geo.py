"""Training on copies: a worker trains copies of the rows, and adds the differences up on the servers every few steps.

Prior art: Paddle's GEO mode, and EASGD (Zhang, Choromanska and LeCun, 2015), on which it is based: few messages for
many steps, while the workers' copies differ between exchanges.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from trainer_runtime.ps.arena import Arena
from trainer_runtime.ps.client import Client
from trainer_runtime.ps.index import ABSENT, Index
from trainer_runtime.ps.messages import Gradients
from trainer_runtime.ps.rules import Rule, Sum
from trainer_runtime.ps.table import TableSpec


class GeoClient:
    """A client that trains on copies and calls the servers only at exchanges.

    Args:
        client: client of the servers.
        every: number of steps between exchanges.
        workers: number of workers; the differences of each are divided by it.
    """

    def __init__(self, client: Client, every: int, workers: int) -> None:
        self._client = client
        self._every = every
        self._share = 1.0 / workers
        self._copies: list[_Copy] = []
        self.step = 0

    def declare(self, spec: TableSpec) -> int:
        """Declare a table, as `Client.declare`."""
        self._copies.append(_Copy(spec))
        return self._client.declare(replace(spec, rule=Sum(self._share)))

    @property
    def local_values(self) -> Callable[[], Sequence[Gradients]]:
        """As `Client.local_values`."""
        return self._client.local_values

    @local_values.setter
    def local_values(self, compute: Callable[[], Sequence[Gradients]]) -> None:
        self._client.local_values = compute

    def initialize(self, values: Sequence[Gradients]) -> None:
        """As `Client.initialize`."""
        self._client.initialize(values)

    def pull(self, table: int, ids: torch.Tensor) -> torch.Tensor:
        """Return this worker's copy of rows, (ids, dim). Raises `NotReadyError`."""
        copy = self._copies[table]
        wanted = copy.to_pull(ids)
        if len(wanted):
            copy.load(wanted, self._client.pull(table, wanted))
        return copy.read(ids)

    def push(self, gradients: Sequence[Gradients], weight: float = 1.0) -> None:  # noqa: ARG002 - as `Client.push`
        """Update the copies, and exchange the differences every so many steps. Raises `NotReadyError`."""
        for each in gradients:
            self._copies[each.table].apply(each)
        self.step += 1
        if self.step % self._every == 0:
            self.exchange()

    def exchange(self) -> None:
        """Add the differences of the copies to the rows on the servers. Raises `NotReadyError`.

        All copies are pulled again before they are next used, since other workers have changed the rows too.
        """
        changed = [(table, *copy.differences()) for table, copy in enumerate(self._copies)]
        self._client.push([Gradients(table, ids, values) for table, ids, values in changed if len(ids)])
        for copy in self._copies:
            copy.expire()


class _Copy:
    """A worker's copy of a table: the trained rows, and the rows as they were pulled."""

    def __init__(self, spec: TableSpec) -> None:
        self._dim = spec.dim
        self._rule: Rule = spec.rule
        self._index = Index()
        self._trained = Arena(spec.dim + spec.rule.memory(spec.dim))
        self._pulled = Arena(spec.dim)
        self._pulled_in = Arena(1, torch.int64)
        """Number of exchanges before the row was pulled."""
        self._exchanges = 0
        self._changed: list[torch.Tensor] = []

    def to_pull(self, ids: torch.Tensor) -> torch.Tensor:
        """Return the ids whose rows are missing or expired."""
        rows = self._index.find(ids)
        wanted = rows == ABSENT
        here = ~wanted
        wanted[here] = self._pulled_in.read(rows[here]).squeeze(1) != self._exchanges
        return ids[wanted]

    def expire(self) -> None:
        """Let all rows be pulled again before they are used."""
        self._exchanges += 1

    def read(self, ids: torch.Tensor) -> torch.Tensor:
        return self._trained.read(self._index.find(ids), self._dim)

    def load(self, ids: torch.Tensor, values: torch.Tensor) -> None:
        """Set rows to the servers' values plus the differences that were not exchanged; the optimizer state is kept."""
        rows = self._index.find(ids)
        new = rows == ABSENT
        if new.any():
            begin, count = self._index.size, int(new.sum())
            rows[new] = torch.arange(begin, begin + count)
            self._index.add(ids[new], rows[new])
            self._trained.reserve(begin + count)
            self._pulled.reserve(begin + count)
            self._pulled_in.reserve(begin + count)
            begun = torch.zeros(count, self._trained.columns)
            self._rule.begin(begun[:, self._dim :])
            self._trained.write(rows[new], begun)
            self._pulled.write(rows[new], begun[:, : self._dim])
        self._trained.write(rows, values + self._difference(rows))
        self._pulled.write(rows, values)
        self._pulled_in.write(rows, torch.full((len(rows), 1), self._exchanges))

    def apply(self, gradients: Gradients) -> None:
        rows = self._index.find(gradients.ids)
        values = self._trained.read(rows)
        rule = self._rule if gradients.lr is None else replace(self._rule, lr=gradients.lr)
        rule.apply(values, gradients.values)
        self._trained.write(rows, values)
        self._changed.append(gradients.ids)

    def differences(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the ids of the changed rows and their differences, which count as exchanged from now on."""
        ids = torch.cat(self._changed).unique() if self._changed else torch.empty(0, dtype=torch.int64)  # type: ignore[no-untyped-call]
        self._changed = []
        rows = self._index.find(ids)
        found = self._difference(rows)
        self._pulled.write(rows, self._trained.read(rows, self._dim))
        return ids, found

    def _difference(self, rows: torch.Tensor) -> torch.Tensor:
        return self._trained.read(rows, self._dim) - self._pulled.read(rows)
