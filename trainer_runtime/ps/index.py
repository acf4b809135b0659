"""A hash table in tensors that maps ids to rows, searched and filled in whole batches.

A bucket of eight ids fits in one cache line and fills from its front. An id that finds no free place goes to the next
bucket, so a search continues after a bucket only if that is full, and most searches end after the first bucket. Ids are
never removed: dropping rows builds a new index.
"""

from __future__ import annotations

import torch

from trainer_runtime.ps.hashing import mix

NO_ID = -(1 << 63)
"""The one 64-bit integer that is not an id. It marks free places."""
ABSENT = -1
_WAYS = 8
_PLACE_OF_BYTE = 0x0001020304050607
"""A word whose byte n is 1 and all others 0, times this number, has n in its uppermost byte."""
_MOST_FULL = 0.5
_SMALLEST = 128


class Index:
    """Maps ids to whole numbers from 0 on."""

    def __init__(self, expected: int = 0) -> None:
        buckets = _SMALLEST
        while expected > buckets * _WAYS * _MOST_FULL:
            buckets *= 2
        self.size = 0
        self._keys = torch.full((buckets, _WAYS), NO_ID)
        self._values = torch.empty(buckets * _WAYS, dtype=torch.int64)

    def find(self, ids: torch.Tensor) -> torch.Tensor:
        """Return the value of each id, or `ABSENT`. Ids may repeat."""
        bucket = self._home(ids)
        found = asked = ids
        places: torch.Tensor | None = None  # positions of the ids still searched; None: all, in the first round
        while True:
            keys = self._keys.index_select(0, bucket)
            matches = (keys == asked[:, None]).view(torch.int64).squeeze(1)  # a byte for each place in the bucket
            way = (matches * _PLACE_OF_BYTE) >> 56
            here = self._values.index_select(0, bucket * _WAYS + way)
            rest = (matches == 0).nonzero().squeeze(1)
            if len(rest):
                here[rest] = ABSENT
                rest = rest[keys[rest, -1] != NO_ID]
            if places is None:
                found = here
            else:
                found[places] = here
            if not len(rest):
                return found
            places = rest if places is None else places[rest]
            asked, bucket = asked[rest], self._next(bucket[rest])

    def add(self, ids: torch.Tensor, values: torch.Tensor) -> None:
        """Add distinct ids that are not in the index yet."""
        if self.size + len(ids) > self._keys.numel() * _MOST_FULL:
            self._grow(self.size + len(ids))
        self.size += len(ids)
        bucket = self._home(ids)
        while len(ids):
            order = bucket.argsort(stable=True)
            ids, values, bucket = ids[order], values[order], bucket[order]
            way = (self._keys[bucket] != NO_ID).sum(1) + _rank_in_run(bucket)
            fits = way < _WAYS
            place = (bucket * _WAYS + way)[fits]
            self._keys.view(-1)[place] = ids[fits]
            self._values[place] = values[fits]
            ids, values, bucket = ids[~fits], values[~fits], self._next(bucket[~fits])

    def items(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return all ids and their values, in no particular order."""
        keys = self._keys.view(-1)
        taken = (keys != NO_ID).nonzero().squeeze(1)
        return keys[taken], self._values[taken]

    def _grow(self, size: int) -> None:
        ids, values = self.items()
        grown = Index(size)
        grown.add(ids, values)
        self._keys, self._values = grown._keys, grown._values

    def _home(self, ids: torch.Tensor) -> torch.Tensor:
        return mix(ids) & (len(self._keys) - 1)

    def _next(self, bucket: torch.Tensor) -> torch.Tensor:
        return (bucket + 1) & (len(self._keys) - 1)


def _rank_in_run(ordered: torch.Tensor) -> torch.Tensor:
    """Return for each element of a sorted tensor how many equal ones precede it."""
    places = torch.arange(len(ordered))
    begins = torch.ones_like(ordered, dtype=torch.bool)
    begins[1:] = ordered[1:] != ordered[:-1]
    return places - torch.where(begins, places, 0).cummax(0).values
