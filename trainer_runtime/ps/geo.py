"""Training on copies: a worker changes rows of its own, and every so many steps what has become of them is added up.

Prior art: Paddle's GEO mode; and what it is after, EASGD (Zhang, Choromanska and LeCun, 2015): few messages for many
steps, at the price of copies that differ meanwhile.
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
    """Stands before a client, and asks it seldom.

    Args:
        client: the servers.
        every: steps from one exchange to the next.
        workers: whose differences are added up; each counts so much less.
    """

    def __init__(self, client: Client, every: int, workers: int) -> None:
        self._client = client
        self._every = every
        self._share = 1.0 / workers
        self._copies: list[_Copy] = []
        self.step = 0

    def declare(self, spec: TableSpec) -> int:
        """As `Client.declare`."""
        self._copies.append(_Copy(spec))
        return self._client.declare(replace(spec, rule=Sum(self._share)))

    @property
    def present(self) -> Callable[[], Sequence[Gradients]]:
        """As of `Client`."""
        return self._client.present

    @present.setter
    def present(self, present: Callable[[], Sequence[Gradients]]) -> None:
        self._client.present = present

    def begin(self, values: Sequence[Gradients]) -> None:
        """As `Client.begin`."""
        self._client.begin(values)

    def pull(self, table: int, ids: torch.Tensor) -> torch.Tensor:
        """This worker's copy of rows, (ids, dim). Raises `NotReadyError`."""
        copy = self._copies[table]
        wanted = copy.to_pull(ids)
        if len(wanted):
            copy.take(wanted, self._client.pull(table, wanted))
        return copy.read(ids)

    def push(self, gradients: Sequence[Gradients], weight: float = 1.0) -> None:  # noqa: ARG002 - as of `Client`
        """Change the copies; every so many steps exchange what has become of them. Raises `NotReadyError`."""
        for each in gradients:
            self._copies[each.table].apply(each)
        self.step += 1
        if self.step % self._every == 0:
            self.exchange()

    def exchange(self) -> None:
        """Add what has become of the copies to what the servers have. Raises `NotReadyError`.

        All copies are pulled again before they are next used: others have changed them too.
        """
        changed = [(table, *copy.differences()) for table, copy in enumerate(self._copies)]
        self._client.push([Gradients(table, ids, values) for table, ids, values in changed if len(ids)])
        for copy in self._copies:
            copy.expire()


class _Copy:
    """What a worker has of a table: what it trains, and what that was when it was pulled."""

    def __init__(self, spec: TableSpec) -> None:
        self._dim = spec.dim
        self._rule: Rule = spec.rule
        self._index = Index()
        self._trained = Arena(spec.dim + spec.rule.memory(spec.dim))
        self._pulled = Arena(spec.dim)
        self._pulled_in = Arena(1, torch.int64)
        """Between which exchanges each was pulled."""
        self._exchanges = 0
        self._changed: list[torch.Tensor] = []

    def to_pull(self, ids: torch.Tensor) -> torch.Tensor:
        """Those that are not here, or have expired."""
        rows = self._index.find(ids)
        wanted = rows == ABSENT
        here = ~wanted
        wanted[here] = self._pulled_in.read(rows[here]).squeeze(1) != self._exchanges
        return ids[wanted]

    def expire(self) -> None:
        """Let all be pulled again before they are used."""
        self._exchanges += 1

    def read(self, ids: torch.Tensor) -> torch.Tensor:
        return self._trained.read(self._index.find(ids), self._dim)

    def take(self, ids: torch.Tensor, values: torch.Tensor) -> None:
        """Let rows be what the servers say, and what was not exchanged yet; what a rule remembers of them stays."""
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
        """The ids of rows that were changed, and by how much; from then on they count as exchanged."""
        ids = torch.cat(self._changed).unique() if self._changed else torch.empty(0, dtype=torch.int64)  # type: ignore[no-untyped-call]
        self._changed = []
        rows = self._index.find(ids)
        found = self._difference(rows)
        self._pulled.write(rows, self._trained.read(rows, self._dim))
        return ids, found

    def _difference(self, rows: torch.Tensor) -> torch.Tensor:
        return self._trained.read(rows, self._dim) - self._pulled.read(rows)
