"""Embeddings whose rows are on the servers: a forward pass pulls the rows that it needs, a step pushes their gradients.

Any 64-bit integer is an id, so no vocabulary is needed.
"""

from __future__ import annotations

from typing import Any, Literal, TypedDict, Unpack

import torch
from torch import nn
from torch.nn import functional

from trainer_runtime.ps.client import Client
from trainer_runtime.ps.geo import GeoClient
from trainer_runtime.ps.messages import Gradients
from trainer_runtime.ps.rules import Rule, Sum
from trainer_runtime.ps.table import TableSpec


class RowSettings(TypedDict, total=False):
    """Settings of a table. `initial`, `scale` and `seed` determine the initial rows, see `TableSpec`.

    `admit_after`: number of steps that push an id until it has a row. `max_rows`: limit on each server; the rows that
    were not touched for longest are dropped. 0: no limit.
    """

    initial: Literal["zeros", "uniform", "normal"]
    scale: float
    seed: int
    admit_after: int
    max_rows: int


class SparseEmbedding(nn.Module):
    """Looks up one row for each id, as `torch.nn.Embedding` without a number of rows.

    Args:
        dim: numbers in a row.
        name: name of the table; by default the module's path in the model.
        rule: optimizer of the rows; by default that of the dense parameters.
        padding_idx: an id whose row is zeros and is not trained; bags ignore it.
        settings: initial values, and which ids have rows, see `RowSettings`.

    Raises:
        ValueError: a setting is invalid.
    """

    def __init__(
        self,
        dim: int,
        *,
        name: str | None = None,
        rule: Rule | None = None,
        padding_idx: int | None = None,
        **settings: Unpack[RowSettings],
    ) -> None:
        super().__init__()
        self.dim = dim
        self.name = name
        self.rule = rule
        self.padding_idx = padding_idx
        self._settings = settings
        self.spec(name or "embedding", rule or Sum())
        self._client: Client | GeoClient | None = None
        self._table = 0
        self._gradients: list[tuple[torch.Tensor, torch.Tensor]] = []
        """Ids, and the gradients of their rows, of each backward pass."""

    def spec(self, name: str, rule: Rule) -> TableSpec:
        """Return the table's description, with this name and rule unless the module has its own."""
        return TableSpec(self.name or name, self.dim, self.rule or rule, **self._settings)

    def attach(self, client: Client | GeoClient, table: int) -> None:
        """Use the rows of this table."""
        self._client, self._table = client, table

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Return the rows of ids of any shape, (*ids, dim). Raises `NotReadyError`."""
        rows, places, padding = self._pull(ids)
        return functional.embedding(places, rows, padding)

    def take_gradients(self, lr: float | None) -> Gradients | None:
        """Return and clear the gradients; None: there are none. `lr` is used unless the module has its own rule."""
        found = self.merged_gradients()
        self._gradients = []
        if found is None:
            return None
        ids, values = found
        return Gradients(self._table, ids, values, None if self.rule else lr)

    def merged_gradients(self) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Return sorted ids and the gradients of their rows, which may be changed in place. None: there are none."""
        if not self._gradients:
            return None
        if len(self._gradients) > 1:
            ids, places = torch.cat([ids for ids, _ in self._gradients]).unique(return_inverse=True)  # type: ignore[no-untyped-call]
            values = torch.cat([gradient for _, gradient in self._gradients])
            self._gradients = [(ids, torch.zeros(len(ids), self.dim, device="cpu").index_add_(0, places, values))]
        return self._gradients[0]

    def __getstate__(self) -> dict[str, Any]:
        """Leave the connection and the gradients out of copies."""
        return {**self.__dict__, "_client": None, "_gradients": []}

    def drop_gradients(self) -> None:
        """Clear the gradients."""
        self._gradients = []

    def extra_repr(self) -> str:
        """Return what `print(model)` shows."""
        return f"{self.dim}, name={self.name!r}"

    def _pull(self, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, int | None]:
        """Return the rows of the distinct ids, the row number of each id, and the row number of the padding id."""
        if self._client is None:
            raise RuntimeError(
                "this model has no rows on the servers yet: call ps.distributed_optimizer() with it first"
            )
        if ids.is_floating_point() or ids.is_complex() or ids.dtype == torch.uint64:
            raise TypeError(f"ids must be integers of at most 64 bits with a sign, not {ids.dtype}")
        differing, places = ids.reshape(-1).cpu().to(torch.int64).unique(return_inverse=True)  # type: ignore[no-untyped-call]
        rows = self._client.pull(self._table, differing).to(ids.device)
        padding = None
        if self.padding_idx is not None and bool((is_padding := differing == self.padding_idx).any()):
            padding = int(is_padding.nonzero())
            rows[padding] = 0.0
        if torch.is_grad_enabled():

            def record(gradient: torch.Tensor) -> None:
                # Recorded now, not read from `rows` later: zero_grad may come between a forward and its backward pass.
                here = gradient.detach().cpu()
                keep = slice(None) if padding is None else differing != self.padding_idx
                self._gradients.append((differing[keep], here[keep]))

            rows.requires_grad_().register_hook(record)  # type: ignore[no-untyped-call]
        return rows, places.view(ids.shape).to(ids.device), padding


class EmbeddingBag(SparseEmbedding):
    """Looks up bags of ids and combines each, as `torch.nn.EmbeddingBag`.

    Args:
        dim: numbers in a row.
        mode: how a bag is combined.
        include_last_offset: whether the offsets end with the end of the last bag.
        settings: as of `SparseEmbedding`.
    """

    def __init__(
        self,
        dim: int,
        *,
        mode: Literal["sum", "mean", "max"] = "mean",
        include_last_offset: bool = False,
        **settings: Any,  # noqa: ANN401 - of several types
    ) -> None:
        super().__init__(dim, **settings)
        self.mode = mode
        self.include_last_offset = include_last_offset

    def forward(
        self,
        ids: torch.Tensor,
        offsets: torch.Tensor | None = None,
        per_sample_weights: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return (bags, dim) for bags (bags, ids), or for flat ids with offsets. Raises `NotReadyError`."""
        rows, places, padding = self._pull(ids)
        if not places.numel() and offsets is None:
            return rows.sum() + rows.new_zeros(len(ids), self.dim)  # torch refuses empty bags
        return functional.embedding_bag(
            places,
            rows,
            offsets,
            mode=self.mode,
            per_sample_weights=per_sample_weights,
            include_last_offset=self.include_last_offset,
            padding_idx=padding,
        )
