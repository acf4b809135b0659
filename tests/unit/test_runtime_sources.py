"""Where items come from: each kind of source goes on at its own place after a restart, or is refused before a save."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any

import pytest
import torch
from fake_agent import start_without_agent
from torch.utils.data import DataLoader as TorchLoader
from torch.utils.data import IterableDataset
from torchdata.stateful_dataloader import StatefulDataLoader

import trainer_runtime as tr

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
    from pathlib import Path

ITEMS = 9


@pytest.fixture(autouse=True)
def _start(monkeypatch: pytest.MonkeyPatch) -> None:
    """Begin without an agent's variables."""
    start_without_agent(monkeypatch)


class Stream(IterableDataset[int]):
    """Items that know themselves how far they are."""

    def __init__(self) -> None:
        self.at = 0

    def __iter__(self) -> Iterator[int]:
        while self.at < ITEMS:
            self.at += 1
            yield self.at

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = state["at"]


class CountsLate(Stream):
    """Its state says that an item was drawn only when the next one is."""

    def __iter__(self) -> Iterator[int]:
        while self.at < ITEMS:
            yield self.at + 1
            self.at += 1


WRAPPERS: dict[str, Callable[[Iterable[int]], Iterable[Any]]] = {
    "enumerate": lambda items: (item for _, item in enumerate(items)),
    "islice": lambda items: itertools.islice(items, None),
    "zip": lambda items: (item for item, _ in zip(items, itertools.count())),
    "map": lambda items: map(int, items),
    "a torch DataLoader": lambda items: (int(item) for item in TorchLoader(items, batch_size=None)),  # type: ignore[arg-type]
}


@pytest.mark.parametrize("wrap", WRAPPERS.values(), ids=WRAPPERS)
@pytest.mark.parametrize("stop_at", [1, 4, ITEMS])
def test_a_stream_that_is_named_as_the_source_of_a_wrapper_goes_on_by_itself(
    tmp_path: Path, wrap: Callable[[Iterable[int]], Iterable[int]], stop_at: int
) -> None:
    def run(stop_at: int | None) -> list[int]:
        stream, drawn = Stream(), []
        state = tr.State(checkpoint_dir=tmp_path, stream=tr.PerRank(stream))
        for _ in state.epochs(1):
            for item in state.steps(wrap(stream), source=stream):
                drawn.append(item)
                state.commit()
                if state.step == stop_at:
                    state.save()
                    return drawn
        return drawn

    assert run(stop_at) + run(None) == [*range(1, ITEMS + 1)]


@pytest.mark.parametrize("wrap", WRAPPERS.values(), ids=WRAPPERS)
def test_one_that_is_not_named_is_found_out_at_the_first_commit(
    tmp_path: Path, wrap: Callable[[Iterable[int]], Iterable[int]]
) -> None:
    stream = Stream()
    state = tr.State(checkpoint_dir=tmp_path, stream=tr.PerRank(stream))
    state.restore()
    next(state.steps(wrap(stream)))
    with pytest.raises(RuntimeError, match=r"come from State's 'stream': .* Write state\.steps\(\.\.\., source="):
        state.commit()


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")
def test_torchdatas_loader_in_a_wrapper_is_found_out_too_and_is_left_alone_before_it_is_drawn_from(
    tmp_path: Path,
) -> None:
    """To ask for its state before would make another iterator of it, with workers of its own."""
    loader = StatefulDataLoader(range(ITEMS), batch_size=None)  # type: ignore[arg-type]
    state = tr.State(checkpoint_dir=tmp_path, loader=loader)
    state.restore()
    steps = state.steps(iter(loader))
    assert loader._iterator is not None
    next(steps)
    with pytest.raises(RuntimeError, match="come from State's 'loader'"):
        state.commit()


def test_a_stream_that_is_drawn_from_within_the_steps_is_none_of_their_source(tmp_path: Path) -> None:
    def run(stop_at: int | None) -> list[tuple[int, int]]:
        stream, drawn = Stream(), []
        state = tr.State(checkpoint_dir=tmp_path, stream=tr.PerRank(stream))
        for _ in state.epochs(1):
            beside = iter(stream)
            for item in state.steps(range(ITEMS)):
                drawn.append((item, next(beside)))
                state.commit()
                if state.step == stop_at:
                    state.save()
                    return drawn
        return drawn

    assert run(4) + run(None) == [(item, item + 1) for item in range(ITEMS)]


@pytest.mark.parametrize("is_wrapped", [False, True])
def test_a_source_whose_state_does_not_change_with_an_item_is_refused(tmp_path: Path, *, is_wrapped: bool) -> None:
    """It would yield that item again after a restart."""
    stream = CountsLate()
    state = tr.State(checkpoint_dir=tmp_path, stream=tr.PerRank(stream))
    state.restore()
    next(state.steps(map(int, stream), source=stream) if is_wrapped else state.steps(stream))
    with pytest.raises(RuntimeError, match="its state_dict\\(\\) is the same as before"):
        state.commit()


def test_a_source_that_state_does_not_save_is_refused(tmp_path: Path) -> None:
    state = tr.State(checkpoint_dir=tmp_path)
    state.restore()
    with pytest.raises(ValueError, match="wanted a source that State saves, got a Stream that it does not"):
        next(state.steps(map(int, Stream()), source=Stream()))


def loader(seed: int, length: int = 12, **options: Any) -> tr.DataLoader:  # noqa: ANN401 - passed on
    return tr.DataLoader(torch.arange(length), **{"global_batch": 2, "seed": seed} | options)


def test_a_loader_that_is_named_begins_after_its_committed_samples(tmp_path: Path) -> None:
    """Nothing is loaded twice, where a wrapper that is not named draws and drops."""

    def run(stop_at: int | None) -> list[list[int]]:
        data, drawn = loader(0), []
        state = tr.State(checkpoint_dir=tmp_path, data=data)
        for _ in state.epochs(2):
            for batch in state.steps(map(torch.Tensor.tolist, data), source=data):
                drawn.append(batch)
                state.commit()
                if state.step == stop_at:
                    state.save()
                    return drawn
        return drawn

    expected = [batch.tolist() for epoch in range(2) for batch in loader(0).begin(epoch, 0)]
    assert run(8) + run(None) == expected


def commit_each(
    state: tr.State, epochs: int, items_of: Callable[[int], Iterable[Any]], stop_at: int | None
) -> Iterator[Any]:
    """Yield each epoch's items, and commit them; end with a save after step `stop_at`."""
    for epoch in state.epochs(epochs):
        for item in state.steps(items_of(epoch)):
            yield item
            state.commit()
            if state.step == stop_at:
                state.save()
                return


OTHER_EPOCHS = {
    "as long": (12, iter),
    "longer": (30, iter),
    "endless": (6, lambda other: other.endless()),
}


@pytest.mark.parametrize(("length", "begin"), OTHER_EPOCHS.values(), ids=OTHER_EPOCHS)
@pytest.mark.parametrize("stop_at", [2, 6, 8, 12])
@pytest.mark.parametrize("way", ["plain", "enumerate", "zip"])
def test_a_second_loader_goes_on_at_its_own_place(
    tmp_path: Path, length: int, begin: Callable[[tr.DataLoader], Iterator[Any]], stop_at: int, way: str
) -> None:
    """Whatever is drawn from it first, and also where the job is killed in an evaluation after an epoch's last step."""

    def run(directory: Path, stop_at: int | None) -> list[tuple[list[int], list[int]]]:
        first, second, drawn = loader(1), loader(2, length), []
        state = tr.State(checkpoint_dir=directory, first=first, second=second)
        for _ in state.epochs(2):
            others = begin(second)
            items: Iterable[Any] = {"plain": first, "enumerate": enumerate(first), "zip": zip(first)}[way]
            for item in state.steps(items):
                one = item if way == "plain" else item[-1] if way == "enumerate" else item[0]
                drawn.append((one.tolist(), next(others).tolist()))
                state.commit()
                if state.step == stop_at:
                    state.save()
                    return drawn
        return drawn

    whole = run(tmp_path / "whole", None)
    assert len(whole) == 12
    assert run(tmp_path / "cut", stop_at) + run(tmp_path / "cut", None) == whole


def _peek(data: tr.DataLoader) -> Iterable[Any]:
    next(iter(data))
    return data


BODIES: dict[str, Callable[[tr.DataLoader], Iterable[Any]]] = {
    "all in a list": list,
    "all, in another order": lambda data: list(data)[::-1],
    "the first is looked at": _peek,
    "the same, and a wrapper": lambda data: (batch for batch in _peek(data)),
    "all, three times": lambda data: [*data, *data, *data],
    "all, and again as a wrapper": lambda data: (batch for _ in [list(data)] for batch in data),
    "the epoch is set": lambda data: [data.set_epoch(5), *data][1:],
}


@pytest.mark.parametrize("begin", BODIES.values(), ids=BODIES)
@pytest.mark.parametrize("stop_at", [1, 4, 5, 7, 9])
def test_a_body_that_draws_from_a_loader_before_the_steps_draws_the_same_after_a_restart(
    tmp_path: Path, begin: Callable[[tr.DataLoader], Iterable[Any]], stop_at: int
) -> None:
    def run(directory: Path, stop_at: int | None) -> list[Any]:
        data = loader(0)
        state = tr.State(checkpoint_dir=directory, data=data)
        return [batch.tolist() for batch in commit_each(state, 3, lambda _: begin(data), stop_at)]

    whole = run(tmp_path / "whole", None)
    assert run(tmp_path / "cut", stop_at) + run(tmp_path / "cut", None) == whole


@pytest.mark.parametrize("stop_at", [2, 6, 8])
def test_a_second_loader_that_the_body_passes_over_does_not_come_to_other_epochs(tmp_path: Path, stop_at: int) -> None:
    def run(directory: Path, stop_at: int | None) -> list[Any]:
        first, second, drawn = loader(1), loader(2, 6), []
        state = tr.State(checkpoint_dir=directory, first=first, second=second)

        def items_of(epoch: int) -> tr.DataLoader:
            if epoch < 2:
                drawn.append([batch.tolist() for _ in range(3) for batch in second])
            return first if epoch < 2 else second

        drawn.extend(batch.tolist() for batch in commit_each(state, 4, items_of, stop_at))
        return drawn

    whole = run(tmp_path / "whole", None)
    cut = run(tmp_path / "cut", stop_at)
    assert whole[: len(cut)] == cut
    again = run(tmp_path / "cut", None)
    body = whole[7 * ((stop_at - 1) // 6)]  # it runs again
    assert again == [body, *whole[len(cut) :]]


@pytest.mark.parametrize("begin", [iter, tr.DataLoader.endless], ids=["iter", "endless"])
def test_an_iterator_that_the_body_begins_is_reported(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], begin: Callable[[tr.DataLoader], Iterator[Any]]
) -> None:
    first, second = loader(1), loader(2)
    state = tr.State(checkpoint_dir=tmp_path, first=first, second=second)
    for _ in state.epochs(2):
        others = begin(second)
        next(others)
        for _batch in state.steps(first):
            state.commit()
    assert capfd.readouterr().err.count("Take batches within the loop over state.steps()") == 1


@pytest.mark.parametrize(
    ("take", "is_reported"),
    [
        (list, True),
        (lambda stream: [next(iter(stream)), 2], True),
        (lambda _: [1, 2], False),
        (lambda stream: iter([next(iter(stream)), 2]), False),
    ],
    ids=["all", "some", "none", "not in a list"],
)
def test_a_stream_that_the_body_takes_items_from_is_reported(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], take: Callable[[Stream], list[int]], *, is_reported: bool
) -> None:
    """A restart would begin the body behind these items: the list would have others, or none."""
    stream = Stream()
    state = tr.State(checkpoint_dir=tmp_path, stream=tr.PerRank(stream))
    for _ in state.epochs(2):
        for _item in state.steps(take(stream)):
            state.commit()
    assert capfd.readouterr().err.count("State's 'stream' were taken in the body of an epoch") == is_reported


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")
def test_a_loader_of_torchdata_that_has_only_begun_is_not_reported(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    data = StatefulDataLoader(range(ITEMS), batch_size=None)  # type: ignore[arg-type]
    state = tr.State(checkpoint_dir=tmp_path, data=data)
    for _ in state.epochs(1):
        iter(data)
        for _item in state.steps([1, 2]):
            state.commit()
    assert "were taken in the body" not in capfd.readouterr().err


@pytest.mark.parametrize("is_passed_over", [True, False], ids=["passed over", "taken"])
@pytest.mark.parametrize("way", ["steps", "the loader itself"])
def test_a_script_that_passes_over_items_by_its_own_count_is_told(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], *, way: str, is_passed_over: bool
) -> None:
    """State and the loader continue after the committed items by themselves, so others would be left out."""

    def run(stop_at: int | None) -> None:
        data = loader(0, 60)
        state = tr.State(checkpoint_dir=tmp_path, data=data)
        state.restore()
        resumed = state.step
        for number, _batch in enumerate(state.steps(data) if way == "steps" else data):
            if is_passed_over and number < resumed:
                continue
            state.commit()
            if state.step == stop_at:
                state.save()
                return

    run(8)
    assert "as many items were taken" not in capfd.readouterr().err
    run(None)
    assert ("as many items were taken" in capfd.readouterr().err) == is_passed_over


def test_a_list_with_a_source_is_refused(tmp_path: Path) -> None:
    data = loader(0)
    state = tr.State(checkpoint_dir=tmp_path, data=data)
    state.restore()
    for _batch in state.steps(list(data), source=data):
        with pytest.raises(RuntimeError, match=r"was given a list and source=: .*leave it out"):
            state.commit()
        break


@pytest.mark.parametrize(("options", "is_reported"), [({}, True), ({"shuffle": False}, False)])
def test_a_loader_that_state_does_not_save_is_named_where_the_items_may_be_its_batches(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], options: dict[str, Any], *, is_reported: bool
) -> None:
    data = loader(0, **options)
    state = tr.State(checkpoint_dir=tmp_path)
    for _ in state.epochs(2):
        for _batch in state.steps(list(data)):
            state.commit()
    assert capfd.readouterr().err.count("that State does not save") == is_reported


def test_a_loader_that_is_not_saved_is_refused_where_a_step_is_made_of_its_batches(tmp_path: Path) -> None:
    state = tr.State(checkpoint_dir=tmp_path, save_every=1)
    state.restore()
    others = iter(loader(2))
    for _ in state.steps(loader(1)):
        next(others)
        with pytest.raises(RuntimeError, match=r"and State does not save it: .* give it to State"):
            state.commit()
        break


def test_an_evaluation_may_iterate_a_loader_that_is_not_saved(tmp_path: Path) -> None:
    """Over all of it, or with a break."""
    held_out = loader(3)
    state = tr.State(checkpoint_dir=tmp_path, save_every=1)
    for _ in state.epochs(1):
        for _ in state.steps(loader(1)):
            assert len(list(held_out)) == 6
            for _batch in held_out:
                break
            state.commit()
    assert state.step == 6


@pytest.mark.parametrize("begin", [iter, tr.DataLoader.endless], ids=["iter", "endless"])
def test_a_second_loader_may_not_stand_inside_a_step_of_its_own(
    tmp_path: Path, begin: Callable[[tr.DataLoader], Iterator[Any]]
) -> None:
    """The rest of that step would be left out after a restart."""
    first, second = loader(1), loader(2, micro_batch=1)
    state = tr.State(checkpoint_dir=tmp_path, first=first, second=second)
    state.restore()
    others = begin(second)
    steps = state.steps(first)
    next(steps), next(others)
    with pytest.raises(RuntimeError, match="was called within a step"):
        state.commit()
    next(others)
    state.commit()
    assert state.step == 1


def test_a_save_that_closes_the_epoch_wants_to_know_where_a_second_loader_begins_the_next(tmp_path: Path) -> None:
    first, second = loader(1), loader(2, 30)
    state = tr.State(checkpoint_dir=tmp_path, first=first, second=second)
    for _ in state.epochs(1):
        others = iter(second)
        for _ in state.steps(first):
            next(others)
            state.commit()
        with pytest.raises(RuntimeError, match=r"Draw from loader\.endless\(\) to continue, or delete the iterator"):
            state.save()
        del others
        state.save()


@pytest.mark.parametrize("is_begun_first", [False, True])
@pytest.mark.parametrize("stop_at", [2, 6, 8])
def test_a_script_may_set_the_epoch_of_its_loaders_in_each_epoch(
    tmp_path: Path, stop_at: int, *, is_begun_first: bool
) -> None:
    """As with a DistributedSampler: a restored position within that epoch stays."""

    def run(directory: Path, stop_at: int | None) -> list[tuple[list[int], list[int]]]:
        first, second, drawn = loader(1), loader(2, 30), []
        state = tr.State(checkpoint_dir=directory, first=first, second=second)
        for epoch in state.epochs(2):
            first.set_epoch(epoch)
            others = iter(second) if is_begun_first else None
            second.set_epoch(epoch)
            others = others or iter(second)
            for one in state.steps(first):
                drawn.append((one.tolist(), next(others).tolist()))
                state.commit()
                if state.step == stop_at:
                    state.save()
                    return drawn
        return drawn

    whole = run(tmp_path / "whole", None)
    assert run(tmp_path / "cut", stop_at) + run(tmp_path / "cut", None) == whole


@pytest.mark.parametrize(("sizes", "what"), [((1, 2), "left out"), ((2, 1), "repeated"), ((1, 1), "")])
def test_a_wrapped_loader_whose_items_have_other_samples_than_before_is_reported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], sizes: tuple[int, int], what: str
) -> None:
    """As in a world of another size, where a step has another number of micro-batches."""
    for size in sizes:
        data = loader(1, micro_batch=size)
        state = tr.State(checkpoint_dir=tmp_path, data=data, save_every=1)
        for _ in itertools.islice(state.epochs(1), 1):
            for _, _ in state.steps(enumerate(data)):
                if data.ends_step:
                    state.commit()
                if state.step == 2:
                    break
        state.save()
    said = capsys.readouterr().err
    assert said.count("were committed: the samples between are ") == bool(what)
    assert what in said


@pytest.mark.parametrize("stop_at", [4, 8, 11])
def test_a_loader_that_a_chain_begins_in_some_epochs_only_keeps_its_own_count(tmp_path: Path, stop_at: int) -> None:
    def run(directory: Path, stop_at: int | None) -> list[list[int]]:
        first, second = loader(1, 6), loader(2, 6)
        state = tr.State(checkpoint_dir=directory, first=first, second=second)
        batches = commit_each(state, 4, lambda epoch: itertools.chain(first, second) if epoch % 2 else first, stop_at)
        return [batch.tolist() for batch in batches]

    whole = run(tmp_path / "whole", None)
    assert len(whole) == 18
    assert run(tmp_path / "cut", stop_at) + run(tmp_path / "cut", None) == whole


@pytest.mark.parametrize("kind", ["the same", "batches", "none", "another"])
def test_a_source_with_another_order_than_before_is_reported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], kind: str
) -> None:
    """For instance one list that is shuffled again in place in each epoch, or an iterator that outlives an epoch."""
    orders: list[list[Any]] = {
        "the same": [[3, 1, 2]] * 2,
        "batches": [[[3, 1], [2], [0, 4]], [[3, 1], [4], [0, 2]]],
        "none": [[torch.zeros(1)] * 3, [torch.ones(1)] * 3],
        "another": [["c", "a", "b"], ["c", "b", "a"]],
    }[kind]
    for order in orders:
        state = tr.State(checkpoint_dir=tmp_path)
        for _ in itertools.islice(state.epochs(1), 1):
            for _ in state.steps(order):
                state.commit()
                if state.step >= 2:
                    break
        state.save()
    said = capsys.readouterr().err
    wanted = {
        "batches": "item 2 of epoch 0 was [2] when it was committed, and is [4]",
        "another": "was 'a' when it was",
    }
    assert ("another order than before" in said) == (kind in wanted)
    assert wanted.get(kind, "") in said


@pytest.mark.parametrize("sizes", [(1, 2), (2, 1)])
@pytest.mark.parametrize("wrap", [enumerate, zip], ids=["enumerate", "zip"])
def test_in_another_world_a_wrapped_loader_goes_on_at_the_committed_sample(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    sizes: tuple[int, int],
    wrap: Callable[[Iterable[Any]], Iterable[Any]],
) -> None:
    """A step has another number of micro-batches there; the size of a micro-batch stands in for that of the world."""
    drawn: list[int] = []
    for size, stop_at in zip(sizes, (2, 6), strict=True):
        data = loader(1, micro_batch=size)
        state = tr.State(checkpoint_dir=tmp_path, data=data, save_every=1)
        for _ in itertools.islice(state.epochs(1), 1):
            state._pos.is_resized = state.step > 0
            for _item in state.steps(wrap(data)):
                drawn += data.indices
                if data.ends_step:
                    state.commit()
                if state.step == stop_at:
                    break
        state.save()
    assert sorted(drawn) == [*range(12)]
    assert "the samples between" not in capsys.readouterr().err


def test_what_a_script_changes_after_the_commit_in_which_it_has_moved_is_left_out_and_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It is not the epoch's body that has changed it."""
    state = tr.State(checkpoint_dir=tmp_path, best=0)
    for _ in state.epochs(1):
        for item in state.steps(range(3)):
            state.commit()
            if item == 1:
                state._contents.note_committed()  # as when a group is entered
                state._sources.on_move()
                state.best = 5
    assert state.best == 0
    said = capsys.readouterr().err
    assert "State's best changed between commit() and the next item, as the group changed" in said
    assert "the body of epoch" not in said


@pytest.mark.parametrize("has_generator", [True, False], ids=["a generator in State", "the global random state"])
@pytest.mark.parametrize("stop_after", [5, 15, 20])
def test_a_torch_loader_with_persistent_workers_has_its_order_after_a_restart(
    tmp_path: Path, stop_after: int, *, has_generator: bool
) -> None:
    """It draws a seed for its workers once, before its first order. The last save is between two epochs."""

    def train(directory: Path, stop_after: int) -> list[int]:
        torch.manual_seed(1)
        generator = torch.Generator().manual_seed(9)
        loader = TorchLoader(
            range(40),  # type: ignore[arg-type]
            batch_size=4,
            shuffle=True,
            generator=generator if has_generator else None,
            num_workers=1,
            persistent_workers=True,
        )
        state, taken = tr.State(generator=generator, checkpoint_dir=directory, save_every=10**9), list[int]()
        for _ in state.epochs(3):
            for batch in state.steps(loader):
                taken += batch.tolist()
                state.commit()
                if state.step == stop_after and stop_after % 10:
                    break
            if state.step == stop_after:
                state.save()
                return taken
        return taken

    expected = train(tmp_path / "undisturbed", 0)
    assert train(tmp_path / "broken", stop_after) + train(tmp_path / "broken", 0) == expected
