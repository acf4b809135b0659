"""Embeddings whose rows lie on the servers: a forward pass pulls the rows that it needs, a step pushes their gradients.

There are as many rows as 64-bit integers: an id needs no vocabulary.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import nn
from torch.nn import functional

from trainer_runtime.ps.client import Client
from trainer_runtime.ps.geo import GeoClient
from trainer_runtime.ps.messages import Gradients
from trainer_runtime.ps.rules import Rule
from trainer_runtime.ps.table import TableSpec


class SparseEmbedding(nn.Module):
    """Looks up one row for each id, as `torch.nn.Embedding` without a number of rows.

    Args:
        dim: numbers in a row.
        name: of its table; by default its place in the model.
        rule: how gradients change the rows; by default as the dense parameters are changed.
        initial, scale, seed: what rows begin with, see `TableSpec`.
        admit_after: steps that must push an id until it has a row of its own.
        max_rows: on each server; those untouched for longest lose theirs. 0: no limit.
    """

    def __init__(
        self,
        dim: int,
        *,
        name: str | None = None,
        rule: Rule | None = None,
        initial: Literal["zeros", "uniform", "normal"] = "uniform",
        scale: float = 0.01,
        seed: int = 0,
        admit_after: int = 1,
        max_rows: int = 0,
    ) -> None:
        super().__init__()
        self.dim = dim
        self.name = name
        self.rule = rule
        self._settings: dict[str, Any] = {
            "initial": initial, "scale": scale, "seed": seed, "admit_after": admit_after, "max_rows": max_rows,
        }  # fmt: skip
        self._client: Client | GeoClient | None = None
        self._table = 0
        self._found: list[tuple[torch.Tensor, torch.Tensor]] = []
        """Ids, and the gradients of their rows."""

    def spec(self, name: str, rule: Rule) -> TableSpec:
        """Its table, if it is called so and nothing else was said."""
        return TableSpec(self.name or name, self.dim, self.rule or rule, **self._settings)

    def attach(self, client: Client | GeoClient, table: int) -> None:
        """Let its rows be those of this table."""
        self._client, self._table = client, table

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Rows of ids of any shape: (*ids, dim). Raises `NotReadyError`."""
        rows, places = self._pull(ids)
        return functional.embedding(places, rows)

    def take_gradients(self, lr: float | None) -> Gradients | None:
        """What was found since this was called last; None: nothing. `lr`: of this step, unless it has its own rule."""
        found, self._found = self._found, []
        if not found:
            return None
        ids = torch.cat([ids for ids, _ in found])
        values = torch.cat([gradient.cpu() for _, gradient in found])
        if len(found) > 1:
            ids, places = ids.unique(return_inverse=True)  # type: ignore[no-untyped-call]
            values = torch.zeros(len(ids), self.dim).index_add_(0, places, values)
        return Gradients(self._table, ids, values, None if self.rule else lr)

    def drop_gradients(self) -> None:
        """Forget what was found."""
        self._found = []

    def extra_repr(self) -> str:
        """What `print(model)` shows of it."""
        return f"{self.dim}, name={self.name!r}"

    def _pull(self, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The rows of those of the ids that differ, and of which row each is."""
        if self._client is None:
            raise RuntimeError("this model's rows are on no server yet: give it to ps.distributed_optimizer()")
        differing, places = ids.reshape(-1).cpu().to(torch.int64).unique(return_inverse=True)  # type: ignore[no-untyped-call]
        rows = self._client.pull(self._table, differing).to(ids.device)
        if torch.is_grad_enabled() and self.training:
            # Not read from the rows later: gradients may be forgotten between a forward pass and its backward pass.
            rows.requires_grad_().register_hook(  # type: ignore[no-untyped-call]
                lambda gradient: self._found.append((differing, gradient))
            )
        return rows, places.view(ids.shape).to(ids.device)


class EmbeddingBag(SparseEmbedding):
    """Looks up bags of ids and combines each, as `torch.nn.EmbeddingBag`.

    Args:
        dim: numbers in a row.
        mode: how a bag is combined.
        settings: as of `SparseEmbedding`.
    """

    def __init__(self, dim: int, *, mode: Literal["sum", "mean", "max"] = "mean", **settings: Any) -> None:  # noqa: ANN401
        super().__init__(dim, **settings)
        self.mode = mode

    def forward(
        self,
        ids: torch.Tensor,
        offsets: torch.Tensor | None = None,
        per_sample_weights: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Bags of ids (bags, ids), or one after the other with offsets: (bags, dim). Raises `NotReadyError`."""
        rows, places = self._pull(ids)
        return functional.embedding_bag(places, rows, offsets, mode=self.mode, per_sample_weights=per_sample_weights)
