"""Embeddings whose rows lie on the servers: a forward pass pulls the rows that it needs, a step pushes their gradients.

There are as many rows as 64-bit integers: an id needs no vocabulary.
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
    """Of a table: `initial`, `scale` and `seed` say what rows begin with, see `TableSpec`.

    `admit_after`: steps that must push an id until it has a row of its own. `max_rows`: on each server; those untouched
    for longest lose theirs, 0: no limit.
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
        name: of its table; by default its place in the model.
        rule: how gradients change the rows; by default as the dense parameters are changed.
        padding_idx: an id whose row is zeros, and stays so; in bags it does not count.
        settings: what rows begin with, and which ids have one.

    Raises:
        ValueError: a setting makes no sense.
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
        rows, places, padding = self._pull(ids)
        return functional.embedding(places, rows, padding)

    def take_gradients(self, lr: float | None) -> Gradients | None:
        """What was found since this was called last; None: nothing. `lr`: of this step, unless it has its own rule."""
        found = self.found()
        self._found = []
        if found is None:
            return None
        ids, values = found
        return Gradients(self._table, ids, values, None if self.rule else lr)

    def found(self) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Ids that grow, and the gradients of their rows, which may be changed in place. None: nothing was found."""
        if not self._found:
            return None
        if len(self._found) > 1:
            ids, places = torch.cat([ids for ids, _ in self._found]).unique(return_inverse=True)  # type: ignore[no-untyped-call]
            values = torch.cat([gradient for _, gradient in self._found])
            self._found = [(ids, torch.zeros(len(ids), self.dim, device="cpu").index_add_(0, places, values))]
        return self._found[0]

    def __getstate__(self) -> dict[str, Any]:
        """A copy is on no server."""
        return {**self.__dict__, "_client": None, "_found": []}

    def drop_gradients(self) -> None:
        """Forget what was found."""
        self._found = []

    def extra_repr(self) -> str:
        """What `print(model)` shows of it."""
        return f"{self.dim}, name={self.name!r}"

    def _pull(self, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, int | None]:
        """The rows of those of the ids that differ, of which row each is, and which row is of padding."""
        if self._client is None:
            raise RuntimeError("this model's rows are on no server yet: give it to ps.distributed_optimizer()")
        if ids.is_floating_point() or ids.is_complex() or ids.dtype == torch.uint64:
            raise TypeError(f"ids must be integers of at most 64 bits with a sign, not {ids.dtype}")
        differing, places = ids.reshape(-1).cpu().to(torch.int64).unique(return_inverse=True)  # type: ignore[no-untyped-call]
        rows = self._client.pull(self._table, differing).to(ids.device)
        padding = None
        if self.padding_idx is not None and bool((is_padding := differing == self.padding_idx).any()):
            padding = int(is_padding.nonzero())
            rows[padding] = 0.0
        if torch.is_grad_enabled():

            def take(gradient: torch.Tensor) -> None:
                # Not read from the rows later: gradients may be forgotten between a forward and its backward pass.
                here = gradient.detach().cpu()
                keep = slice(None) if padding is None else differing != self.padding_idx
                self._found.append((differing[keep], here[keep]))

            rows.requires_grad_().register_hook(take)  # type: ignore[no-untyped-call]
        return rows, places.view(ids.shape).to(ids.device), padding


class EmbeddingBag(SparseEmbedding):
    """Looks up bags of ids and combines each, as `torch.nn.EmbeddingBag`.

    Args:
        dim: numbers in a row.
        mode: how a bag is combined.
        include_last_offset: offsets have one more, the end of the last bag.
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
        """Bags of ids (bags, ids), or one after the other with offsets: (bags, dim). Raises `NotReadyError`."""
        rows, places, padding = self._pull(ids)
        if not places.numel() and offsets is None:
            return rows.sum() + rows.new_zeros(len(ids), self.dim)  # torch refuses bags without room
        return functional.embedding_bag(
            places,
            rows,
            offsets,
            mode=self.mode,
            per_sample_weights=per_sample_weights,
            include_last_offset=self.include_last_offset,
            padding_idx=padding,
        )
