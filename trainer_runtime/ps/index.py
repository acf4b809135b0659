"""Which row each id has: a hash table over tensors, searched and filled in whole batches.

Buckets of eight ids lie in one cache line each and fill from their front. Who finds no place goes to the next bucket;
so a search goes on past a bucket only if that is full, and most end after the first. Nothing is removed: who drops rows
builds a new index.
"""

from __future__ import annotations

import torch

from trainer_runtime.ps.hashing import mix

NOBODY = -(1 << 63)
"""The one 64-bit integer that is no id."""
ABSENT = -1
_WAYS = 8
_PLACE_OF_BYTE = 0x0001020304050607
"""Times a word of which byte n is 1, and the others 0: the uppermost byte of the product is n."""
_MOST_FULL = 0.5
_SMALLEST = 128


class Index:
    """Maps ids to whole numbers from 0 on."""

    def __init__(self, expected: int = 0) -> None:
        buckets = _SMALLEST
        while expected > buckets * _WAYS * _MOST_FULL:
            buckets *= 2
        self.size = 0
        self._keys = torch.full((buckets, _WAYS), NOBODY)
        self._values = torch.empty(buckets * _WAYS, dtype=torch.int64)

    def find(self, ids: torch.Tensor) -> torch.Tensor:
        """What each id is mapped to, or `ABSENT`. They may repeat."""
        bucket = self._home(ids)
        found = asked = ids
        places: torch.Tensor | None = None  # of those still sought; None: all, as in the first round
        while True:
            keys = self._keys.index_select(0, bucket)
            matches = (keys == asked[:, None]).view(torch.int64).squeeze(1)  # a byte for each place in the bucket
            way = (matches * _PLACE_OF_BYTE) >> 56
            here = self._values.index_select(0, bucket * _WAYS + way)
            rest = (matches == 0).nonzero().squeeze(1)
            if len(rest):
                here[rest] = ABSENT
                rest = rest[keys[rest, -1] != NOBODY]
            if places is None:
                found = here
            else:
                found[places] = here
            if not len(rest):
                return found
            places = rest if places is None else places[rest]
            asked, bucket = asked[rest], self._next(bucket[rest])

    def add(self, ids: torch.Tensor, values: torch.Tensor) -> None:
        """Map ids that differ, and are not here yet."""
        if self.size + len(ids) > self._keys.numel() * _MOST_FULL:
            self._grow(self.size + len(ids))
        self.size += len(ids)
        bucket = self._home(ids)
        while len(ids):
            order = bucket.argsort(stable=True)
            ids, values, bucket = ids[order], values[order], bucket[order]
            way = (self._keys[bucket] != NOBODY).sum(1) + _rank_in_run(bucket)
            fits = way < _WAYS
            place = (bucket * _WAYS + way)[fits]
            self._keys.view(-1)[place] = ids[fits]
            self._values[place] = values[fits]
            ids, values, bucket = ids[~fits], values[~fits], self._next(bucket[~fits])

    def items(self) -> tuple[torch.Tensor, torch.Tensor]:
        """All ids, and what each is mapped to, in no particular order."""
        keys = self._keys.view(-1)
        taken = (keys != NOBODY).nonzero().squeeze(1)
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
    """How many equal ones stand before each, in what is sorted."""
    places = torch.arange(len(ordered))
    begins = torch.ones_like(ordered, dtype=torch.bool)
    begins[1:] = ordered[1:] != ordered[:-1]
    return places - torch.where(begins, places, 0).cummax(0).values
