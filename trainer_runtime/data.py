"""DataLoader: torch's, over batches that count every sample once whatever the world does.

Which samples a rank takes is decided in `sampling`, how they are loaded in `fetching`; torch's own loader brings the
worker processes, the prefetching and the pinning. Worker processes run ahead of the training, so what this loader says
of itself (`weight`, `indices`, `ends_step`, `samples`) is about the micro-batch that was yielded last.
"""

from __future__ import annotations

from collections import deque
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar
from weakref import WeakSet

import torch
from torch.utils.data import DataLoader as TorchLoader
from torch.utils.data import Dataset, IterableDataset, Sampler, default_collate

from trainer_runtime import dist
from trainer_runtime.fetching import KeyedDataset
from trainer_runtime.sampling import Batching, MicroBatch, SamplePosition, cut, epoch_order

if TYPE_CHECKING:
    from collections.abc import Iterator

_DECIDED_HERE = {
    "sampler": "the order comes from seed and epoch",
    "batch_sampler": "the order comes from seed and epoch",
    "generator": "all randomness comes from seed",
    "in_order": "batches come in the order in which they are counted",
}
"""Options of torch's loader that are not free to choose, and why."""

_END = object()


class DataLoader:
    """Batches for this rank from a map-style data set; each sample counts once an epoch, in any world.

    The order of an epoch depends on `seed` and the epoch's number alone. A step takes the next `global_batch` samples
    of it, and every rank its contiguous, as equal as possible share of these. Multiply the mean loss of a batch by
    `weight` before `backward()`: then DDP's average over the ranks, summed over micro-batches, is the mean gradient
    over the samples of the step, also where shares are uneven.

    Iterated directly it begins a new epoch each time, with the first batch: 0, 1, 2 and so on. Given to State, its
    first iteration after a restart goes on where the last commit left it. `State.steps(loader)` begins at the epoch and
    the sample that were committed last, `State.steps` of something that iterates it (`enumerate(loader)`) at that
    epoch.

    Args:
        dataset: has `__len__` and `__getitem__`; its length must not change.
        global_batch: samples of a step over all ranks, the same in every world. Give this or `batch_size`.
        batch_size: samples of a step for each rank. A step then grows with the world, and the learning rate should be
            scaled with it.
        micro_batch: the most samples that a rank takes at once. A step is then several batches long, as many on every
            rank; `ends_step` tells where it ends. With `batch_size` too.
        seed: of the order, and of the randomness while samples are loaded (see `sample_rng`).
        shuffle: a new order each epoch; else that of the data set.
        drop_last: leave out the step at the end of an epoch that would be smaller than the others.
        **options: of `torch.utils.data.DataLoader`: num_workers, collate_fn, pin_memory, persistent_workers,
            prefetch_factor, worker_init_fn and so on.

    Raises:
        TypeError: the data set is not map-style, or torch knows no such option.
        ValueError: a number is out of its range, both or none of `global_batch` and `batch_size` are given, the data
            set is empty, or an option is not free to choose.
    """

    under_way: ClassVar[WeakSet[DataLoader]] = WeakSet()
    """Those that stand within an epoch: they have yielded a batch, and their iterator is not over."""

    def __init__(
        self,
        dataset: Dataset[Any],
        *,
        global_batch: int | None = None,
        batch_size: int | None = None,
        micro_batch: int | None = None,
        seed: int = 0,
        shuffle: bool = True,
        drop_last: bool = False,
        **options: Any,  # noqa: ANN401 - torch's
    ) -> None:
        self._length = _require_length(dataset)
        self._size = _require_one(global_batch, batch_size)
        _require_usable({"global_batch": global_batch, "batch_size": batch_size, "micro_batch": micro_batch}, options)
        self.dataset = dataset
        self.batch_size = batch_size
        self._micro_batch = micro_batch
        self._seed = seed
        self._shuffle = shuffle
        self._drop_last = drop_last
        self._start = _Start(0)
        """Of the next iteration."""
        self._begun: _Start | None = None
        """Of the newest iteration; it may not have drawn anything yet."""
        self._waiting: WeakSet[_Start] = WeakSet()
        """Of all iterations that have not."""
        self._epoch = 0
        self._samples = 0
        self._ahead = _DrawnAhead()
        self._yielded: MicroBatch | None = None
        self.is_endless = False
        """It is iterated by `endless`, which goes on across epochs."""
        collate = options.pop("collate_fn", None) or default_collate
        self._torch = TorchLoader(
            KeyedDataset(dataset, collate, seed),
            batch_size=None,  # an item of that data set is a whole batch
            sampler=self._ahead,
            collate_fn=_pass_on,
            # Without one of its own, torch would draw from the training's random state at every begin.
            generator=torch.Generator().manual_seed(0),
            **options,
        )

    @property
    def global_batch(self) -> int:
        """Samples of a full step over all ranks."""
        return self._size if self.batch_size is None else self._size * dist.world_size()

    @property
    def steps_per_epoch(self) -> int:
        """Optimizer steps of a whole epoch."""
        return self._batching().count_steps(self._length)

    def __len__(self) -> int:
        """Return the batches that each rank takes in a whole epoch, in this world."""
        return self._batching().count_micro_batches(self._length, dist.world_size())

    @property
    def weight(self) -> float:
        """What to multiply the mean loss of this batch by; 0.0 if none of its samples counts."""
        return self._require_yielded().weight

    @property
    def indices(self) -> tuple[int, ...]:
        """The samples of this batch that count; empty if it only stands in."""
        return self._require_yielded().indices

    @property
    def ends_step(self) -> bool:
        """Whether the optimizer step comes after this batch."""
        return self._require_yielded().ends_step

    @property
    def samples(self) -> int:
        """Samples of the epoch, over all ranks, that are consumed when the step under way is committed."""
        return self._samples

    def __iter__(self) -> Iterator[Any]:
        """Begin the next epoch, whether or not the one before was finished."""
        return self._iterate(self._take_start())

    def endless(self) -> Iterator[Any]:
        """Yield the batches of one epoch after the other, for what is drawn from beside the steps of another loader.

        Given to State, it goes on after a restart where the last commit left it, whatever the epochs of State are.
        """
        self.is_endless = True
        while True:
            yield from self

    def set_epoch(self, epoch: int) -> None:
        """Say which epoch is next where this is iterated directly."""
        self.go_to(epoch, 0)

    def go_to(self, epoch: int, done: int) -> None:
        """Say where the next iteration begins, or one that has begun and drawn nothing yet.

        Args:
            epoch: its number.
            done: samples of it, over all ranks, that are left out.
        """
        for each in self._waiting:
            each.is_void = True
        self._start = _Start(epoch, done)

    @contextmanager
    def beginning_at(self, epoch: int, done: int, begun: list[DataLoader]) -> Iterator[None]:
        """Have an iteration that draws its first batch within begin there; one that does not keeps its place.

        `enumerate`, for instance, made its iterator before `State.steps` is told of it.

        Args:
            epoch: its number.
            done: samples of it, over all ranks, that are left out.
            begun: this loader is added at the end, if such an iteration was begun.
        """
        waiting = [*self._waiting, self._start]
        places = [(each.epoch, each.done) for each in waiting]
        for each in waiting:
            each.epoch, each.done = epoch, done
        yield
        if any(each.is_settled for each in waiting):
            begun.append(self)
        for each, place in zip(waiting, places, strict=True):
            if not each.is_settled:
                each.epoch, each.done = place

    @property
    def is_within_epoch(self) -> bool:
        """Whether an iterator has yielded a batch and is not over."""
        return self in DataLoader.under_way

    def _take_start(self) -> _Start:
        start = self._begun = self._start
        self._start = _Start(start.epoch + 1)
        self._waiting.add(start)
        return start

    def _iterate(self, start: _Start) -> Iterator[Any]:
        if start.is_void:
            start = self._take_start()
        start.is_settled = True
        self._waiting.discard(start)
        yield from self._begin(start.epoch, start.done)

    def begin(self, epoch: int, done: int) -> Iterator[Any]:
        """Return the batches of an epoch that come after its first `done` samples, without loading those.

        It takes the place of the iterator before, which can no longer be used.

        Raises:
            RuntimeError: there is no process group yet; or, from an iterator, another one was begun since.
            ValueError: the epoch does not have `done` samples, or is not even one step.
        """
        self._require_steps(done)
        self.go_to(epoch, done)
        return iter(self)

    def _require_steps(self, done: int) -> None:
        if self.steps_per_epoch == 0:  # else all epochs would be over at once, and the job a success
            raise ValueError(
                f"wanted samples for a step, got {self._length} in all for a global batch of {self.global_batch}, "
                f"with {dist.world_size()} ranks; make the batch smaller, or let drop_last be False"
            )
        if not 0 <= done <= self._length:
            raise ValueError(f"wanted to begin after 0 to {self._length} samples, got {done}; is it another data set?")

    def _begin(self, epoch: int, done: int) -> Iterator[Any]:
        self._require_steps(done)
        order = epoch_order(self._length, seed=self._seed, epoch=epoch, shuffle=self._shuffle)
        place = SamplePosition(dist.rank(), dist.world_size())
        drawn = self._ahead.plan(epoch, cut(order, done, self._batching(), place))
        self._epoch, self._samples = epoch, done
        self._yielded = None
        with torch.device("cpu"):  # where its generator is: torch draws a number from it, wherever tensors are made
            batches = iter(self._torch)
        return self._follow(batches, drawn)

    def state_dict(self) -> dict[str, Any]:
        """Return what the order depends on, and the place in it: the epoch, and its samples that were drawn."""
        begun, place = self._begun, (self._start.epoch, self._start.done)
        if self in DataLoader.under_way:
            place = self._epoch, self._samples
        elif begun is not None and not (begun.is_settled or begun.is_void):
            place = begun.epoch, begun.done
        return {**self._order(), "epoch": place[0], "samples": place[1]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on at the place, and with the order, of the loader that was saved.

        Raises:
            ValueError: it has another value for what the order depends on; names both.
        """
        own = self._order()
        others = [name for name in own if state_dict.get(name) != own[name]]
        if others:
            saved = ", ".join(f"{name}={state_dict.get(name)}" for name in others)
            here = ", ".join(f"{name}={own[name]}" for name in others)
            raise ValueError(
                f"the checkpoint was made with a DataLoader of {saved}, this one has {here}: samples would be left "
                "out or repeated; make it as before, or start over in another directory"
            )

        self.go_to(state_dict["epoch"], state_dict["samples"])

    def _order(self) -> dict[str, Any]:
        return {
            "seed": self._seed,
            "shuffle": self._shuffle,
            "length": self._length,
            "global_batch": self._size if self.batch_size is None else None,
            "batch_size": self.batch_size,
        }

    def _batching(self) -> Batching:
        return Batching(self.global_batch, self._micro_batch, self._drop_last)

    def _follow(self, batches: Iterator[Any], drawn: deque[MicroBatch]) -> Iterator[Any]:
        try:
            while True:
                if drawn is not self._ahead.drawn:
                    # Persistent workers serve one iterator: the older one would be given what the newer one asked for.
                    raise RuntimeError(
                        "this DataLoader was begun anew; use one iterator at a time, or a second DataLoader"
                    )
                batch = next(batches, _END)
                if batch is _END:
                    return
                self._yielded = drawn.popleft()
                self._samples = self._yielded.samples
                DataLoader.under_way.add(self)
                yield batch
        finally:
            if drawn is self._ahead.drawn:
                DataLoader.under_way.discard(self)

    def _require_yielded(self) -> MicroBatch:
        if self._yielded is None:
            raise RuntimeError("this DataLoader has yielded no batch yet; ask for this inside the loop over it")
        return self._yielded


@dataclass(slots=True, eq=False, weakref_slot=True)
class _Start:
    """Where an iteration begins."""

    epoch: int
    done: int = 0
    """Samples of it that are left out."""
    is_settled: bool = False
    """It has drawn a batch."""
    is_void: bool = False
    """It was told to begin elsewhere, before it drew one."""


class _DrawnAhead(Sampler[tuple[int, tuple[int, ...]]]):
    """Tells torch's loader what to load next and remembers what was told until it is yielded."""

    def __init__(self) -> None:
        self.drawn: deque[MicroBatch] = deque()
        self._epoch = 0
        self._micro_batches: Iterator[MicroBatch] = iter(())

    def plan(self, epoch: int, micro_batches: Iterator[MicroBatch]) -> deque[MicroBatch]:
        """Set what the next iterator draws; return where it notes what it drew."""
        self._epoch, self._micro_batches, self.drawn = epoch, micro_batches, deque()
        return self.drawn

    def __iter__(self) -> Iterator[tuple[int, tuple[int, ...]]]:
        return self._draw(self._epoch, self._micro_batches, self.drawn)

    @staticmethod
    def _draw(
        epoch: int, micro_batches: Iterator[MicroBatch], drawn: deque[MicroBatch]
    ) -> Iterator[tuple[int, tuple[int, ...]]]:
        for micro_batch in micro_batches:
            drawn.append(micro_batch)
            yield epoch, micro_batch.loaded


def _pass_on(batch: object) -> object:
    """Stand in for torch's collate function: the batch is one already."""
    return batch


def _require_length(dataset: object) -> int:
    if isinstance(dataset, IterableDataset):
        raise TypeError(
            f"wanted a map-style data set (with __len__ and __getitem__), got {type(dataset).__name__}, an "
            "IterableDataset; load it with torchdata's StatefulDataLoader and give that to State as "
            "tr.PerRank(loader)"
        )
    if not hasattr(dataset, "__len__"):
        raise TypeError(f"wanted a data set with __len__ and __getitem__, got {type(dataset).__name__} without __len__")
    length = len(dataset)
    if length == 0:
        raise ValueError(f"wanted a data set with samples in it, got an empty {type(dataset).__name__}")
    return length


def _require_one(global_batch: int | None, batch_size: int | None) -> int:
    match global_batch, batch_size:
        case int(size), None:
            return size
        case None, int(size):
            return size
        case _:
            raise ValueError(
                "wanted either global_batch (samples of a step over all ranks) or batch_size (samples of a step for "
                f"each rank), got global_batch={global_batch!r} and batch_size={batch_size!r}"
            )


def _require_usable(numbers: dict[str, int | None], options: dict[str, Any]) -> None:
    for name, number in numbers.items():
        if number is not None and (not isinstance(number, int) or number < 1):
            raise ValueError(f"wanted {name} to be a whole number of at least 1, got {number!r}")
    for name in options.keys() & _DECIDED_HERE.keys():
        raise ValueError(f"{name} is not free to choose: {_DECIDED_HERE[name]}; leave it out")
