"""An array of rows that grows in slabs: growth moves no rows, and memory that was not written takes no space."""

from __future__ import annotations

from collections.abc import Iterator

import torch

SLAB_ROWS = 1 << 18
_SLAB_NUMBERS = 1 << 28
"""Maximum numbers in a slab: very wide rows have smaller slabs."""


class Arena:
    """Rows of `columns` numbers, addressed by their number from 0 on."""

    def __init__(self, columns: int, dtype: torch.dtype = torch.float32, slab_rows: int = SLAB_ROWS) -> None:
        self.columns = columns
        self._dtype = dtype
        self._slab_rows = max(1, min(slab_rows, _SLAB_NUMBERS // columns))
        self._slabs: list[torch.Tensor] = []

    def reserve(self, rows: int) -> None:
        """Make room for so many rows. The content of new rows is undefined."""
        while len(self._slabs) * self._slab_rows < rows:
            self._slabs.append(torch.empty(self._slab_rows, self.columns, dtype=self._dtype))

    def read(self, rows: torch.Tensor, columns: int | None = None) -> torch.Tensor:
        """Return a copy of rows, (rows, columns); with `columns` only of the first columns."""
        wanted = columns or self.columns
        out = torch.empty(len(rows), wanted, dtype=self._dtype)
        for slab, here, inside in self._parts(rows):
            if here is None:
                return slab[:, :wanted].index_select(0, inside)
            out[here] = slab[:, :wanted].index_select(0, inside)
        return out

    def write(self, rows: torch.Tensor, values: torch.Tensor) -> None:
        """Set the first columns of distinct rows to values (rows, columns)."""
        for slab, here, inside in self._parts(rows):
            slab[:, : values.shape[1]].index_copy_(0, inside, values if here is None else values[here])

    def _parts(self, rows: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor | None, torch.Tensor]]:
        """Yield each slab with the positions of its rows, and their numbers in it. Positions None: all rows."""
        if len(self._slabs) == 1:
            yield self._slabs[0], None, rows
            return
        number = rows // self._slab_rows
        for each in number.unique().tolist():  # type: ignore[no-untyped-call]
            here = (number == each).nonzero().squeeze(1)
            yield self._slabs[each], here, rows[here] - each * self._slab_rows
