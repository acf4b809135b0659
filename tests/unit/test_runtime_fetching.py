"""Randomness that belongs to the sample: whoever loads it, wherever, it is the same."""

from __future__ import annotations

import pickle
import random
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset, Subset, default_collate

import trainer_runtime as tr
from trainer_runtime.fetching import KeyedDataset

if TYPE_CHECKING:
    from collections.abc import Callable


@pytest.fixture(scope="module", autouse=True)
def _world_of_one() -> None:
    tr.init()


def chance() -> tuple[float, float, float]:
    """Return a number from each of the global sources that augmentation code uses."""
    return random.random(), float(np.random.rand()), float(torch.rand(()))  # noqa: NPY002 - the global one is meant


class Augmented(Dataset[Any]):
    """Samples made of chance alone."""

    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> tuple[float, ...]:
        return index, *chance(), float(torch.rand((), generator=tr.sample_rng(index)))


class Fetched(Augmented):
    """Samples that are read many at once."""

    def __getitems__(self, indices: list[int]) -> list[Any]:
        return [(index, float(torch.rand((), generator=tr.sample_rng(index)))) for index in indices]


def load(dataset: Dataset[Any], *, epoch: int = 0, done: int = 0, **options: object) -> dict[int, tuple[float, ...]]:
    """Return the samples of (the rest of) an epoch by their indices."""
    loader = tr.DataLoader(dataset, **{"global_batch": 6, "collate_fn": list} | options)
    return {sample[0]: sample[1:] for batch in loader.begin(epoch, done) for sample in batch}


def test_a_sample_is_the_same_in_any_batch_and_after_any_start() -> None:
    whole = load(Augmented())
    assert len(whole) == 24
    assert load(Augmented(), global_batch=7, micro_batch=2) == whole
    assert load(Augmented(), shuffle=False) == whole
    assert load(Augmented(), done=12).items() < whole.items()


def test_all_chance_differs_by_sample_epoch_seed_and_source() -> None:
    """No two numbers are equal among samples, epochs, seeds and the four sources."""
    runs = [load(Augmented(), epoch=epoch, seed=seed) for epoch in range(2) for seed in range(2)]
    numbers = [number for run in runs for sample in run.values() for number in sample]
    assert len(set(numbers)) == 4 * 24 * 4


def test_loading_leaves_the_random_states_of_training_alone() -> None:
    """In this process; else dropout would depend on how samples are loaded."""
    random.seed(1)
    np.random.seed(1)  # noqa: NPY002 - the global one is meant
    torch.manual_seed(1)
    undisturbed = chance()
    random.seed(1)
    np.random.seed(1)  # noqa: NPY002 - the global one is meant
    torch.manual_seed(1)
    load(Augmented())
    assert chance() == undisturbed


def test_a_sample_that_fails_leaves_the_random_states_alone_too() -> None:
    class Broken(Augmented):
        def __getitem__(self, index: int) -> tuple[float, ...]:
            raise OSError(f"cannot read {index}")

    torch.manual_seed(1)
    before = torch.get_rng_state()
    with pytest.raises(OSError, match="cannot read"):
        load(Broken())
    assert torch.equal(torch.get_rng_state(), before)
    with pytest.raises(RuntimeError, match="knows seed and epoch only while a trainer_runtime"):
        tr.sample_rng(0)


def test_the_sources_do_not_share_a_seed() -> None:
    """NumPy's and torch's generators are of one kind: from one seed they would give the same bits."""

    class Seeds(Augmented):
        def __getitem__(self, index: int) -> tuple[float, ...]:
            del index
            return int(np.random.get_state()[1][0]), torch.initial_seed() % 2**32  # noqa: NPY002 - as in `chance`

    (batch,) = tr.DataLoader(Seeds(), global_batch=24, collate_fn=list)
    assert all(of_numpy != of_torch for of_numpy, of_torch in batch)


def test_chance_in_the_collate_function_belongs_to_the_batch() -> None:
    """Mixup and masking are done there. It is neither a sample's nor does it depend on what samples drew."""

    def collated(dataset: Dataset[Any], done: int) -> list[tuple[float, ...]]:
        return list(tr.DataLoader(dataset, global_batch=6, collate_fn=lambda _: chance()).begin(0, done))

    class Still(Augmented):
        def __getitem__(self, index: int) -> tuple[float, ...]:
            return (index,)

    batches = collated(Augmented(), 0)
    of_batches = {number for batch in batches for number in batch}
    assert len(of_batches) == 4 * 3
    assert of_batches.isdisjoint(number for sample in load(Augmented()).values() for number in sample)
    assert collated(Augmented(), 12) == batches[2:]
    assert collated(Still(), 0) == batches


def test_the_collate_function_may_ask_for_a_samples_generator() -> None:
    def collate(samples: list[tuple[float, ...]]) -> list[bool]:
        return [sample[-1] == float(torch.rand((), generator=tr.sample_rng(int(sample[0])))) for sample in samples]

    (batch,) = tr.DataLoader(Augmented(), global_batch=24, collate_fn=collate)
    assert batch == [True] * 24


def test_a_data_set_that_reads_many_at_once_is_asked_to() -> None:
    """A Subset always can; it counts only if what is behind it can."""
    whole = load(Fetched())
    assert {len(sample) for sample in whole.values()} == {1}
    assert load(Fetched(), global_batch=5) == whole
    assert {len(sample) for sample in load(Subset(Fetched(), range(8))).values()} == {1}
    part = load(Subset(Subset(Augmented(), range(20)), range(4, 12)))
    assert part == load(Subset(Subset(Augmented(), range(20)), range(4, 12)), global_batch=3)
    assert {len(sample) for sample in part.values()} == {4}


@pytest.mark.parametrize("dataset", [Augmented(), Fetched()])
def test_what_is_sent_to_a_spawned_worker_loads_the_same_there(dataset: Augmented) -> None:
    """Where processes are not forked it is pickled."""
    here = KeyedDataset(dataset, default_collate, seed=0)
    there = pickle.loads(pickle.dumps(here))  # noqa: S301 - made in the line itself
    assert there[0, (1, 2)][1].tolist() == here[0, (1, 2)][1].tolist()


@pytest.mark.parametrize("collate", [None, default_collate])
def test_batches_are_collated_as_by_torch(collate: Callable[[Any], Any] | None) -> None:
    (batch,) = tr.DataLoader(Augmented(), global_batch=24, shuffle=False, collate_fn=collate)
    assert batch[0].tolist() == list(range(24))


def test_outside_of_a_loader_there_is_no_key() -> None:
    with pytest.raises(RuntimeError, match="call it in the data set's __getitem__"):
        tr.sample_rng(3)
