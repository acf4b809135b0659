"""Which samples a rank takes: a pure function of the seed, the epoch, the position in it, the rank and the world size.

An epoch is one order of all samples, the same on every rank and in every world. A step takes the next `global_batch`
samples of it; the last step takes what is left. Each rank takes a contiguous part of the step, as equal as possible,
and cuts it into as many micro-batches as every other rank, so that collectives match. Nothing is rounded and nothing is
repeated: after a resize, the rest of the order is only cut differently.

A micro-batch without a sample of its own loads the first sample of the step, with weight 0.
"""

from __future__ import annotations

from dataclasses import dataclass
from hashlib import blake2b
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Iterator

Order = torch.Tensor | range
"""Sample indices; a range if they are not shuffled, because it takes no memory."""


@dataclass(frozen=True, slots=True)
class SamplePosition:
    """A rank and the size of its world."""

    rank: int
    world: int


@dataclass(frozen=True, slots=True)
class Batching:
    """How an order is cut into steps and micro-batches."""

    global_batch: int
    """Samples of a step, over all ranks."""
    micro_batch: int | None
    """Largest number of samples that a rank takes at once; None: its whole share."""
    drop_last: bool
    """Leave out the step at the end of an epoch that would have fewer than `global_batch` samples."""

    def count_steps(self, length: int) -> int:
        """Return the number of steps in an epoch of `length` samples."""
        return length // self.global_batch if self.drop_last else -(-length // self.global_batch)

    def count_micro_batches(self, length: int, world: int) -> int:
        """Return the number of micro-batches of each rank in an epoch of `length` samples."""
        full, rest = divmod(length, self.global_batch)
        tail = 0 if self.drop_last or not rest else self.pieces(rest, world)
        return full * self.pieces(self.global_batch, world) + tail

    def pieces(self, step_size: int, world: int) -> int:
        """Return the micro-batches per rank in a step of this many samples; the largest share decides."""
        largest_share = -(-step_size // world)
        return 1 if self.micro_batch is None else -(-largest_share // self.micro_batch)


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """The samples that a rank loads at once."""

    indices: tuple[int, ...]
    """Indices of the samples that count."""
    loaded: tuple[int, ...]
    """Indices of the samples to load: those that count, or one that stands in for them."""
    weight: float
    """Factor for the mean loss; the factors of a step, over all ranks and micro-batches, sum to the world size."""
    ends_step: bool
    """This is the last micro-batch of its step."""
    samples: int
    """Samples of the epoch, over all ranks, that are consumed when this step is done."""


def epoch_order(length: int, *, seed: int, epoch: int, shuffle: bool) -> Order:
    """Return the order of an epoch; equal on all ranks."""
    if not shuffle:
        return range(length)
    key = int.from_bytes(blake2b(f"order {seed} {epoch}".encode(), digest_size=7).digest())
    return torch.randperm(length, generator=torch.Generator().manual_seed(key), device="cpu")


def cut(order: Order, done: int, batching: Batching, place: SamplePosition) -> Iterator[MicroBatch]:
    """Yield the micro-batches of one rank, beginning after the first `done` samples of the order."""
    least = batching.global_batch if batching.drop_last else 1
    while len(order) - done >= least:
        step = order[done : done + batching.global_batch]
        done += len(step)
        yield from _cut_step(step, done, batching, place)


def _cut_step(step: Order, samples: int, batching: Batching, place: SamplePosition) -> Iterator[MicroBatch]:
    share = _part(step, place.rank, place.world)
    pieces = batching.pieces(len(step), place.world)
    for number in range(pieces):
        indices = _as_tuple(_part(share, number, pieces))
        yield MicroBatch(
            indices=indices,
            loaded=indices or _as_tuple(step[:1]),
            weight=len(indices) * place.world / len(step),
            ends_step=number == pieces - 1,
            samples=samples,
        )


def _part(items: Order, number: int, parts: int) -> Order:
    """Return one of `parts` contiguous parts whose sizes differ by at most one, the larger ones first."""
    size, larger = divmod(len(items), parts)
    start = number * size + min(number, larger)
    return items[start : start + size + (number < larger)]


def _as_tuple(items: Order) -> tuple[int, ...]:
    return tuple(items if isinstance(items, range) else items.tolist())
