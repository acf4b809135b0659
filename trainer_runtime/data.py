"""DataLoader: torch's, over batches that count every sample exactly once per epoch, in any world size.

`sampling` decides which samples a rank takes, `fetching` loads them; torch's own loader provides worker processes,
prefetching and pinning. Worker processes run ahead of the training. Therefore the attributes `weight`, `indices`,
`ends_step` and `samples` describe the micro-batch that was yielded last, not the one loaded last.
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
from trainer_runtime.position import ENOUGH_ITEMS
from trainer_runtime.sampling import Batching, MicroBatch, SamplePosition, cut, epoch_order
from trainer_runtime.set_up import set_up

if TYPE_CHECKING:
    from collections.abc import Iterator

_DECIDED_HERE = {
    "sampler": "the order comes from seed and epoch",
    "batch_sampler": "the order comes from seed and epoch",
    "generator": "all randomness comes from seed",
    "in_order": "batches come in the order in which they are counted",
}
"""Options of torch's loader that cannot be chosen, and why."""

_END = object()


class DataLoader:
    """Batches of a map-style data set for this rank; each sample counts once per epoch, in any world size.

    The order of an epoch depends only on `seed` and the epoch's number. A step takes the next `global_batch` samples of
    that order, and every rank takes a contiguous share of them, as equal as possible. Multiply the mean loss of a batch
    by `weight` before `backward()`: DDP's average over the ranks, summed over the micro-batches, is then the mean
    gradient over the samples of the step, even if the shares are uneven.

    Each direct iteration begins the next epoch at its first batch: epochs 0, 1, 2 and so on. If the loader is given to
    State, its first iteration after a restart continues after the last committed step. `State.steps(loader)` begins at
    the epoch and sample that were committed last; `State.steps` over something that iterates the loader
    (`enumerate(loader)`) begins at the start of that epoch, and State skips the committed items.

    Args:
        dataset: has `__len__` and `__getitem__`; its length must not change.
        global_batch: samples of a step over all ranks, the same in every world size. Give this or `batch_size`.
        batch_size: samples of a step for each rank. The step then grows with the world, and the learning rate should
            be scaled with it.
        micro_batch: largest number of samples that a rank takes at once. A step then consists of several batches, the
            same number on every rank; `ends_step` is true for the last one. Can be combined with `batch_size`.
        seed: seed of the order, and of the random states while samples are loaded (see `sample_rng`).
        shuffle: use a new order in each epoch; False: the order of the data set.
        drop_last: leave out the last step of an epoch if it would be smaller than the others.
        **options: options of `torch.utils.data.DataLoader`: num_workers, collate_fn, pin_memory, persistent_workers,
            prefetch_factor, worker_init_fn and so on. Samplers, `generator` and `in_order` are not allowed.

    Raises:
        TypeError: the data set is not map-style, or torch does not know an option.
        ValueError: a number is out of range, both or none of `global_batch` and `batch_size` are given, the data set is
            empty, or an option cannot be chosen.
    """

    under_way: ClassVar[WeakSet[DataLoader]] = WeakSet()
    """Loaders within an epoch: they have yielded a batch, and their iterator is not exhausted."""

    drawn_from: ClassVar[WeakSet[DataLoader]] = WeakSet()
    """Loaders that have yielded a batch since the body of State's epoch began."""

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
        """Where the next iteration begins."""
        self._begun: _Start | None = None
        """Where the newest iteration began; it may not have drawn a batch yet."""
        self._waiting: WeakSet[_Start] = WeakSet()
        """Starts of all iterations that have not drawn a batch yet."""
        self._epoch = 0
        self._samples = 0
        self._at_body: tuple[int, int] | None = None
        """Epoch and samples of the next iteration as the body of State's epoch began; None: an iterator was in use."""
        self._body: tuple[int, int] | None = None
        """The same, if the body iterates the loader before `State.steps`. A restart returns the loader to there."""
        self._committed = (0, 0)
        """Epoch and samples at the commit that was restored."""
        self._ahead = _DrawnAhead()
        self._yielded: MicroBatch | None = None
        self.is_endless = False
        """The loader is iterated by `endless`, which continues across epochs."""
        collate = options.pop("collate_fn", None) or default_collate
        self._torch = TorchLoader(
            KeyedDataset(dataset, collate, seed),
            batch_size=None,  # an item of KeyedDataset is a whole batch
            sampler=self._ahead,
            collate_fn=_pass_on,
            # Without a generator of its own, torch would draw from the training's random state at every iteration.
            generator=torch.Generator().manual_seed(0),
            **options,
        )

    @property
    def global_batch(self) -> int:
        """Samples of a full step over all ranks."""
        if self.batch_size is not None:
            self._note_reader()
        return self._size if self.batch_size is None else self._size * dist.world_size()

    @property
    def steps_per_epoch(self) -> int:
        """Optimizer steps of a complete epoch, in this world."""
        if self.batch_size is not None:  # with `global_batch` it is the same in each world
            self._note_reader()
        return self._batching().count_steps(self._length)

    def __len__(self) -> int:
        """Return the number of batches that this rank takes in a complete epoch, in this world."""
        self._note_reader()
        return self._batching().count_micro_batches(self._length, dist.world_size())

    def _note_reader(self) -> None:
        if self.varies_with_world:
            set_up.note_reader(above=1)

    @property
    def weight(self) -> float:
        """Factor for the mean loss of this batch; 0.0 if none of its samples counts."""
        return self._require_yielded().weight

    @property
    def indices(self) -> tuple[int, ...]:
        """Indices of the samples of this batch that count; empty if the batch is only a stand-in."""
        return self._require_yielded().indices

    @property
    def ends_step(self) -> bool:
        """Whether this is the last batch of its step: take the optimizer step after it."""
        return self._require_yielded().ends_step

    @property
    def varies_with_world(self) -> bool:
        """Whether the number of batches of a step's samples depends on the number of ranks."""
        return self.batch_size is not None or self._micro_batch is not None

    @property
    def returns_in_body(self) -> bool:
        """Whether the body of State's epoch iterates this loader before `State.steps`."""
        return self._body is not None

    @property
    def is_shuffled(self) -> bool:
        """Whether each epoch has another order."""
        return self._shuffle

    @property
    def samples(self) -> int:
        """Samples of the epoch, over all ranks, that are consumed once the current step is committed."""
        return self._samples

    def __iter__(self) -> Iterator[Any]:
        """Begin the next epoch, whether or not the previous one was finished."""
        return self._iterate(self._take_start())

    def endless(self) -> Iterator[Any]:
        """Yield batches across epochs without end, for a second loader beside the one in `State.steps`.

        If the loader is given to State, it continues after the last committed step, independent of State's epochs.
        """
        self.is_endless = True
        while True:
            yield from self

    def set_epoch(self, epoch: int) -> None:
        """Set the number of the next epoch, for a loader that is iterated directly.

        A restored position within that epoch stays, so that a script may call this at the beginning of each epoch.
        """
        starts = [self._start, *self._waiting]
        self.go_to(epoch, next((each.done for each in starts if each.epoch == epoch), 0))

    def go_to(self, epoch: int, done: int) -> None:
        """Set where the next iteration begins; also that of an iteration that has not drawn a batch yet.

        Args:
            epoch: number of the epoch.
            done: samples of it, over all ranks, to leave out.
        """
        for each in self._waiting:
            each.is_void = True
        self._start = _Start(epoch, done)

    def begin_body(self, *, is_resumed: bool) -> None:
        """Note where the body of State's epoch begins; if the epoch is resumed and that is known, return to there."""
        if not is_resumed:
            self._at_body = (self._start.epoch, self._start.done) if self._is_idle() else None
            self._body = None
        elif self._body is not None:
            self.go_to(*self._body)

    def end_body(self, *, is_resumed: bool) -> None:
        """Note that `State.steps` begins, and may be given batches that the body has taken from this loader.

        If so (`batches = list(loader)`), a restart must let the body take the same. This is known only of a body that
        has iterated the loader and has no iterator left: one that is in use continues after the commit.
        """
        if not self._is_idle():
            return
        if not is_resumed:
            self._body = self._at_body if self in DataLoader.drawn_from else None
        elif self._body is not None:
            self.go_to(*self._committed)

    def _is_idle(self) -> bool:
        return self not in DataLoader.under_way and not self._waiting

    @contextmanager
    def beginning_at(self, epoch: int, done: int, begun: list[DataLoader]) -> Iterator[None]:
        """Make iterations that draw their first batch within the block begin here; others keep their position.

        `enumerate`, for instance, creates its iterator before `State.steps` gets it.

        Args:
            epoch: number of the epoch.
            done: samples of it, over all ranks, to leave out.
            begun: this loader is appended at the end, if such an iteration began.
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
    def has_passed_over_as_many_as_committed(self) -> bool:
        """Whether as many samples as were committed in the restored epoch were drawn since, and one more batch."""
        epoch, committed = self._committed
        passed_over = self._samples - 2 * committed
        is_within = self._epoch == epoch and committed >= ENOUGH_ITEMS * self.global_batch
        return is_within and 0 < passed_over <= self.global_batch

    @property
    def is_within_epoch(self) -> bool:
        """Whether an iterator has yielded a batch and is not exhausted."""
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
        """Return the batches of an epoch after its first `done` samples, without loading these.

        The previous iterator can no longer be used.

        Raises:
            RuntimeError: there is no process group yet; or, from an iterator, another one was begun since.
            ValueError: the epoch has fewer than `done` samples, or not enough for one step.
        """
        self._require_steps(done)
        self.go_to(epoch, done)
        return iter(self)

    def _require_steps(self, done: int) -> None:
        if self.steps_per_epoch == 0:  # otherwise all epochs would end at once, and the job would succeed
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
        with torch.device("cpu"):  # torch draws a number from the CPU generator, whatever the default device is
            batches = iter(self._torch)
        return self._follow(batches, drawn)

    def state_dict(self) -> dict[str, Any]:
        """Return the options that define the order, and the position: the epoch, and its samples that were drawn.

        `body` is the position to which a restart returns at the beginning of the body of State's epoch, or None.
        """
        begun, place = self._begun, (self._start.epoch, self._start.done)
        if self in DataLoader.under_way:
            place = self._epoch, self._samples
        elif begun is not None and not (begun.is_settled or begun.is_void):
            place = begun.epoch, begun.done
        return {**self._order(), "epoch": place[0], "samples": place[1], "body": self._body}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue at the position of the saved loader.

        Raises:
            ValueError: an option that defines the order has another value here; the message has both values.
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
        self._committed = state_dict["epoch"], state_dict["samples"]
        self._body = state_dict.get("body")  # not in checkpoints of older versions
        self.go_to(*self._committed)

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
                    # Persistent workers serve one iterator: the older one would get the batches of the newer one.
                    raise RuntimeError(
                        "this DataLoader was begun anew; use one iterator at a time, or a second DataLoader"
                    )
                batch = next(batches, _END)
                if batch is _END:
                    return
                self._yielded = drawn.popleft()
                self._samples = self._yielded.samples
                DataLoader.under_way.add(self)
                DataLoader.drawn_from.add(self)
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
    """Samples of the epoch to leave out."""
    is_settled: bool = False
    """The iteration has drawn a batch."""
    is_void: bool = False
    """`go_to` has moved the beginning before a batch was drawn."""


class _DrawnAhead(Sampler[tuple[int, tuple[int, ...]]]):
    """Sampler that tells torch's loader what to load next, and keeps each micro-batch until it is yielded."""

    def __init__(self) -> None:
        self.drawn: deque[MicroBatch] = deque()
        self._epoch = 0
        self._micro_batches: Iterator[MicroBatch] = iter(())

    def plan(self, epoch: int, micro_batches: Iterator[MicroBatch]) -> deque[MicroBatch]:
        """Set what the next iterator draws; return the queue of what it has drawn."""
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
    """Replace torch's collate function: the item is a batch already."""
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
