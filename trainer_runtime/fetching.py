"""Load samples with random states that depend on the sample, not on the process that loads it.

Before a sample is loaded, the global random states of Python, NumPy and torch (CPU) are set from (seed, epoch, index).
So random augmentation gives the same sample in any worker process, in any world size, and after any restart. In the
main process (`num_workers=0`) the states are restored afterwards, so that loading does not change the training's own.
"""

from __future__ import annotations

import contextlib
import random
import sys
from contextvars import ContextVar
from hashlib import blake2b
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data import Dataset, Subset, get_worker_info

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

_loading: ContextVar[tuple[int, int] | None] = ContextVar("trainer_runtime_loading", default=None)
"""Seed and epoch of the samples that are being loaded in this thread."""


def sample_rng(index: int) -> torch.Generator:
    """Return a new random generator (CPU) that depends only on the loader's seed, the epoch and `index`.

    Call it in a data set's `__getitem__` (or `__getitems__`, or in `collate_fn`) where a generator is needed instead of
    the global random state. Two calls with the same index in the same epoch give the same numbers.

    Args:
        index: index of the sample.

    Raises:
        RuntimeError: no `trainer_runtime.DataLoader` is loading in this thread.
    """
    key = _loading.get()
    if key is None:
        raise RuntimeError(
            "sample_rng() knows seed and epoch only while a trainer_runtime.DataLoader loads a sample; "
            "call it in the data set's __getitem__, in the same thread"
        )
    return torch.Generator().manual_seed(int.from_bytes(_digest("rng", *key, index)[:8], signed=True))


class KeyedDataset(Dataset[Any]):
    """The user's data set, indexed by whole micro-batches: an item is (epoch, indices) and is returned collated.

    `__getitems__` is used if the data set has one. The global random states are then set once per micro-batch instead
    of once per sample; `sample_rng` stays exact.

    Args:
        dataset: the user's data set; worker processes find it at `get_worker_info().dataset.dataset`.
        collate: makes a batch from a list of samples.
        seed: determines all random states, together with the epoch and the index.
    """

    def __init__(self, dataset: Dataset[Any], collate: Callable[[list[Any]], Any], seed: int) -> None:
        self.dataset = dataset
        self._collate = collate
        self._seed = seed
        self._fetch_all = _find_getitems(dataset)

    def __getitem__(self, wanted: tuple[int, tuple[int, ...]]) -> Any:  # noqa: ANN401 - what the user's collate returns
        epoch, indices = wanted
        token = _loading.set((self._seed, epoch))
        try:
            # A worker process does not need its earlier states.
            with _kept_random_states() if get_worker_info() is None else contextlib.nullcontext():
                return self._load(epoch, indices)
        finally:
            _loading.reset(token)

    def _load(self, epoch: int, indices: tuple[int, ...]) -> Any:  # noqa: ANN401 - see above
        if self._fetch_all is None:
            samples = [self._load_one(epoch, index) for index in indices]
            _seed_global_states("batch", self._seed, epoch, indices[0])
        else:
            _seed_global_states("batch", self._seed, epoch, indices[0])
            samples = self._fetch_all(list(indices))
        return self._collate(samples)

    def _load_one(self, epoch: int, index: int) -> Any:  # noqa: ANN401 - see above
        _seed_global_states("sample", self._seed, epoch, index)
        return self.dataset[index]


def _find_getitems(dataset: Any) -> Callable[[list[int]], list[Any]] | None:  # noqa: ANN401 - `__getitems__` is in no type
    """Return the data set's `__getitems__`; None also for a Subset whose `__getitems__` would only loop."""
    source = dataset
    while isinstance(source, Subset):
        source = source.dataset
    return dataset.__getitems__ if callable(getattr(source, "__getitems__", None)) else None


@contextlib.contextmanager
def _kept_random_states() -> Iterator[None]:
    numpy = sys.modules.get("numpy")
    of_python, of_torch = random.getstate(), torch.default_generator.get_state()
    of_numpy = numpy.random.get_state() if numpy else None
    try:
        yield
    finally:
        random.setstate(of_python)
        torch.default_generator.set_state(of_torch)
        if numpy:
            numpy.random.set_state(of_numpy)


def _seed_global_states(what: str, seed: int, epoch: int, index: int) -> None:
    """Seed the three global states differently: all are Mersenne twisters, so equal seeds would give equal numbers."""
    digest = _digest(what, seed, epoch, index)
    random.seed(int.from_bytes(digest[:8]))
    # Not torch.manual_seed, which also sets the states of all GPUs.
    torch.default_generator.manual_seed(int.from_bytes(digest[8:12]))
    numpy = sys.modules.get("numpy")
    if numpy:
        numpy.random.seed(int.from_bytes(digest[12:16]))


def _digest(what: str, seed: int, epoch: int, index: int) -> bytes:
    return blake2b(f"{what} {seed} {epoch} {index}".encode(), digest_size=16).digest()
