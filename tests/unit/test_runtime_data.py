"""Which samples a rank takes, what they count, and where a loader begins again."""

from __future__ import annotations

import contextlib
import io
from itertools import count, pairwise
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch.utils.data import Dataset, IterableDataset

import trainer_runtime as tr
from trainer_runtime import dist

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture(scope="module", autouse=True)
def _world_of_one() -> None:
    tr.init()


class Numbers(Dataset[int]):
    """Every sample is its own index."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> int:
        return index


@contextlib.contextmanager
def place(rank: int, world: int) -> Iterator[None]:
    with patch.object(dist, "rank", lambda: rank), patch.object(dist, "world_size", lambda: world):
        yield


def take(loader: tr.DataLoader, world: int, *, epoch: int = 0, done: int = 0) -> list[list[dict[str, Any]]]:
    """Return what each rank of a world is given, batch by batch."""
    ranks = []
    for rank in range(world):
        with place(rank, world):
            ranks.append(
                [
                    {
                        "batch": batch,
                        "indices": loader.indices,
                        "weight": loader.weight,
                        "ends": loader.ends_step,
                        "samples": loader.samples,
                    }
                    for batch in loader.begin(epoch=epoch, done=done)
                ]
            )
    return ranks


def as_steps(ranks: list[list[dict[str, Any]]]) -> list[list[list[dict[str, Any]]]]:
    """Cut each rank's batches where a step ends, and return for each step the batches of each rank."""
    by_rank = []
    for batches in ranks:
        ends = [0, *(number + 1 for number, batch in enumerate(batches) if batch["ends"])]
        assert ends[-1] == len(batches), "an epoch ends with a step"
        by_rank.append([batches[start:end] for start, end in pairwise(ends)])
    return [list(step) for step in zip(*by_rank, strict=True)]


def counted(step: list[list[dict[str, Any]]]) -> list[int]:
    return [index for rank in step for batch in rank for index in batch["indices"]]


@settings(deadline=None, max_examples=150)
@given(
    length=st.integers(1, 50),
    global_batch=st.integers(1, 20),
    micro_batch=st.none() | st.integers(1, 6),
    resizes=st.lists(st.tuples(st.integers(1, 6), st.integers(0, 4)), max_size=4),
    last_world=st.integers(1, 6),
    epoch=st.integers(0, 3),
)
def test_each_sample_counts_once_whatever_the_world_does_within_the_epoch(
    length: int,
    global_batch: int,
    micro_batch: int | None,
    resizes: list[tuple[int, int]],
    last_world: int,
    epoch: int,
) -> None:
    """Each step takes the next samples of the one order, and its weights make DDP's average the mean over them."""
    loader = tr.DataLoader(Numbers(length), global_batch=global_batch, micro_batch=micro_batch)
    (alone,) = take(tr.DataLoader(Numbers(length), global_batch=length), 1, epoch=epoch)[0]
    order, done = list(alone["indices"]), 0
    assert sorted(order) == list(range(length))
    for world, steps in [*resizes, (last_world, length)]:
        for step in as_steps(take(loader, world, epoch=epoch, done=done))[:steps]:
            size = min(global_batch, length - done)
            assert counted(step) == order[done : done + size]
            done += size
            require_exact(step, world, size, done, micro_batch)
    assert done == length


def require_exact(step: list[list[dict[str, Any]]], world: int, size: int, done: int, micro_batch: int | None) -> None:
    """One step: equal collectives, equal shares, weights by samples, and batches of what is counted."""
    assert len({len(rank) for rank in step}) == 1
    shares = [sum(len(batch["indices"]) for batch in rank) for rank in step]
    assert max(shares) - min(shares) <= 1
    batches = [batch for rank in step for batch in rank]
    assert sum(batch["weight"] for batch in batches) == pytest.approx(world)
    for batch in batches:
        assert batch["samples"] == done
        assert batch["weight"] == len(batch["indices"]) * world / size
        assert len(batch["indices"]) <= (micro_batch or max(shares))
        loaded = batch["batch"].tolist()
        if batch["weight"]:
            assert loaded == list(batch["indices"])
        else:
            assert loaded == counted(step)[:1]


@settings(deadline=None, max_examples=60)
@given(
    length=st.integers(1, 40),
    size=st.integers(1, 15),
    world=st.integers(1, 5),
    micro_batch=st.none() | st.integers(1, 4),
    drop_last=st.booleans(),
    per_rank=st.booleans(),
)
def test_lengths_are_those_of_the_loop(
    length: int, size: int, world: int, micro_batch: int | None, *, drop_last: bool, per_rank: bool
) -> None:
    """Schedules are made with them."""
    batch = {"batch_size" if per_rank else "global_batch": size}
    loader = tr.DataLoader(Numbers(length), **batch, micro_batch=micro_batch, drop_last=drop_last)
    full_step = size * world if per_rank else size
    assume(length >= full_step or not drop_last)
    ranks = take(loader, world)
    with place(0, world):
        assert {len(rank) for rank in ranks} == {len(loader)}
        assert len(as_steps(ranks)) == loader.steps_per_epoch
        assert loader.global_batch == full_step
    sizes = [len(counted(step)) for step in as_steps(ranks)]
    tail = 0 if drop_last else length % full_step
    assert sizes == [full_step] * (length // full_step) + [tail] * (tail > 0)


def test_the_order_depends_on_seed_and_epoch_alone() -> None:
    """And unshuffled it is that of the data set."""

    def order(epoch: int, **options: int) -> list[int]:
        (batches,) = take(tr.DataLoader(Numbers(40), global_batch=7, **options), 1, epoch=epoch)
        return [index for batch in batches for index in batch["indices"]]

    assert order(3) == order(3)
    assert len({tuple(order(epoch, seed=seed)) for epoch in range(3) for seed in range(3)}) == 9
    assert order(3, shuffle=False) == list(range(40))


def test_nor_on_where_tensors_are_made() -> None:
    expected = [list(tr.DataLoader(Numbers(9), global_batch=2, collate_fn=tuple)) for _ in range(2)]
    torch.set_default_device("meta")
    try:
        found = [list(tr.DataLoader(Numbers(9), global_batch=2, collate_fn=tuple, num_workers=n)) for n in (0, 1)]
    finally:
        torch.set_default_device(None)
    assert found == expected


def test_a_plain_loop_takes_the_next_epoch_each_time() -> None:
    """Also when the one before was left early, or when another was begun by its number."""
    loader = tr.DataLoader(Numbers(10), global_batch=5)
    epochs = [[batch["batch"].tolist() for batch in take(loader, 1, epoch=epoch)[0]] for epoch in range(7)]
    loader = tr.DataLoader(Numbers(10), global_batch=5)
    assert [batch.tolist() for batch in loader] == epochs[0]
    assert next(iter(loader)).tolist() == epochs[1][0]
    assert [batch.tolist() for batch in loader.begin(5, 5)] == epochs[5][1:]
    assert [batch.tolist() for batch in loader] == epochs[6]


def test_nothing_is_loaded_of_what_was_done() -> None:
    loaded: list[int] = []

    class Watched(Numbers):
        def __getitem__(self, index: int) -> int:
            loaded.append(index)
            return index

    loader = tr.DataLoader(Watched(100), global_batch=10, shuffle=False)
    assert len(list(loader.begin(0, 80))) == 2
    assert loaded == list(range(80, 100))
    assert list(loader.begin(0, 100)) == []
    with pytest.raises(ValueError, match="wanted to begin after 0 to 100 samples, got 101"):
        loader.begin(0, 101)


def test_an_iterator_ends_where_another_begins() -> None:
    """Its batches would be counted as those of the newer one."""
    loader = tr.DataLoader(Numbers(10), global_batch=5)
    older = iter(loader)
    next(older)
    newer = iter(loader)
    next(newer)
    with pytest.raises(RuntimeError, match="use one iterator at a time"):
        next(older)
    assert len(list(newer)) == 1


def test_what_a_batch_counts_is_unknown_before_the_first() -> None:
    loader = tr.DataLoader(Numbers(10), global_batch=5)
    for name in ("weight", "indices", "ends_step"):
        with pytest.raises(RuntimeError, match="yielded no batch yet"):
            getattr(loader, name)


class Endless(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return count()


class Unmeasured(Dataset[int]):
    pass


@pytest.mark.parametrize(
    ("dataset", "options", "error", "line"),
    [
        (Numbers(3), {}, ValueError, "wanted either global_batch .* got global_batch=None and batch_size=None"),
        (Numbers(3), {"global_batch": 2, "batch_size": 1}, ValueError, "got global_batch=2 and batch_size=1"),
        (Numbers(3), {"global_batch": 0}, ValueError, "wanted global_batch to be .* at least 1, got 0"),
        (Numbers(3), {"batch_size": 2, "micro_batch": 0.5}, ValueError, "wanted micro_batch .* got 0.5"),
        (Numbers(3), {"global_batch": 2, "sampler": [0]}, ValueError, "sampler is not free to choose"),
        (Numbers(3), {"global_batch": 2, "colate_fn": list}, TypeError, "unexpected keyword argument 'colate_fn'"),
        (Numbers(0), {"global_batch": 2}, ValueError, "got an empty Numbers"),
        (Unmeasured(), {"global_batch": 2}, TypeError, "got Unmeasured without __len__"),
        (Endless(), {"global_batch": 2}, TypeError, r"StatefulDataLoader .* tr\.PerRank\(loader\)"),
    ],
)
def test_mistakes_are_one_clear_line(
    dataset: Dataset[int], options: dict[str, Any], error: type[Exception], line: str
) -> None:
    with pytest.raises(error, match=line) as caught:
        tr.DataLoader(dataset, **options)
    assert "\n" not in str(caught.value)


def test_a_world_too_large_for_a_single_step_does_not_train_nothing_in_silence() -> None:
    """All epochs would be over at once. What is left of an epoch may be too little for one."""
    loader = tr.DataLoader(Numbers(100), batch_size=8, drop_last=True)
    assert len(take(loader, 12)[0]) == 1
    assert not take(loader, 12, done=96)[0]
    line = "wanted samples for a step, got 100 in all for a global batch of 104, with 13 ranks; make the batch smaller"
    with pytest.raises(ValueError, match=line):
        take(loader, 13)


@pytest.mark.parametrize(
    ("length", "options", "named"),
    [
        (30, {"global_batch": 6, "seed": 2}, ["seed=1", "seed=2"]),
        (31, {"global_batch": 6, "seed": 1}, ["length=30", "length=31"]),
        (30, {"global_batch": 5, "seed": 1}, ["global_batch=6", "global_batch=5"]),
        (30, {"batch_size": 6, "seed": 1}, ["batch_size=None", "batch_size=6"]),
        (30, {"global_batch": 6, "seed": 1, "shuffle": False}, ["shuffle=True", "shuffle=False"]),
    ],
)
def test_a_checkpoint_of_another_order_is_refused(length: int, options: dict[str, Any], named: list[str]) -> None:
    """Both values are named. The same order is taken on, out of a file too."""
    file = io.BytesIO()
    torch.save(tr.DataLoader(Numbers(30), global_batch=6, seed=1).state_dict(), file)
    file.seek(0)
    saved = torch.load(file, weights_only=True)
    tr.DataLoader(Numbers(30), global_batch=6, seed=1, micro_batch=2, drop_last=True).load_state_dict(saved)
    with pytest.raises(ValueError, match=".*".join(named)):
        tr.DataLoader(Numbers(length), **options).load_state_dict(saved)
