"""Copying while training goes on: what was copied is what was there at the commit, or it is no snapshot."""

from __future__ import annotations

import copy
import os
import threading
import time
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn
from waiting import wait_for

import trainer_runtime as tr
from trainer_runtime import snapshot_copy
from trainer_runtime.contents import Contents
from trainer_runtime.flat import Flattener, unflatten
from trainer_runtime.snapshot_copy import SnapshotCopier
from trainer_runtime.snapshot_memory import SnapshotMemory
from trainer_runtime.snapshot_page import create_memory, read_slots

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

WIDTH = 128
BOUND_S = 60.0


class Rank:
    """A model with BatchNorm, its optimizer, and its snapshots."""

    def __init__(self) -> None:
        tr.init()
        torch.manual_seed(1)
        self.model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, WIDTH))
        self.opt = torch.optim.AdamW(self.model.parameters())
        self.contents = Contents({"model": self.model, "opt": self.opt, "mean": torch.zeros(WIDTH)})
        self.descriptor = create_memory("test")
        self.memory = SnapshotMemory(self.descriptor)
        self.told: list[int] = []
        self.copier = SnapshotCopier(self.contents, self.memory, self.told.append)
        self._flatteners = Flattener(), Flattener()
        self.step = 0

    def train(self) -> None:
        self.opt.zero_grad()
        output = self.model(torch.randn(4, WIDTH))
        output.square().sum().backward()
        self.contents.get("mean").add_(output.detach().mean(0))
        self.opt.step()
        self.step += 1

    def snapshot(self) -> None:
        common, part = self._flatteners
        self.copier.join()
        flat = common.flatten(self.contents.read()), part.flatten(self.contents.parts.read())
        self.copier.copy(self.memory.begin(self.step, 1, *flat))

    def saved(self, step: int) -> dict[str, Any]:
        slot = next(slot for slot in read_slots(self.descriptor) if slot.step == step)
        data = bytearray(os.pread(self.descriptor, slot.common_bytes, slot.common_at))
        found: dict[str, Any] = unflatten(memoryview(data))
        return found


@pytest.fixture
def rank() -> Iterator[Rank]:
    made = Rank()
    yield made
    made.copier.join()
    os.close(made.descriptor)


@pytest.fixture
def load() -> Iterator[None]:
    """Threads that take the processors from the one that copies."""
    is_over = threading.Event()

    def work() -> None:
        matrix = torch.ones(200, 200)
        while not is_over.is_set():
            matrix @ matrix

    threads = [threading.Thread(target=work) for _ in range(2)]
    for thread in threads:
        thread.start()
    yield
    is_over.set()
    for thread in threads:
        thread.join()


def assert_equal(one: Any, other: Any) -> None:  # noqa: ANN401 - states
    if isinstance(one, torch.Tensor):
        assert torch.equal(one, other)
    elif isinstance(one, dict):
        assert one.keys() == other.keys()
        for key in one:
            assert_equal(one[key], other[key])
    else:
        assert one == other


@pytest.mark.timeout(600)
@pytest.mark.usefixtures("load")
def test_a_thousand_snapshots_under_load_are_what_was_there_at_the_commit(rank: Rank) -> None:
    """Forward passes have changed the buffers meanwhile, and a thread has copied the rest."""
    expected: dict[str, Any] = {}
    for _ in range(1000):
        rank.train()  # waits for the copy of the step before, and only then changes what is copied
        if expected:
            assert_equal(rank.saved(rank.step - 1), expected)
        rank.snapshot()
        expected = copy.deepcopy(rank.contents.read())
    rank.copier.join()
    assert rank.told == list(range(1, 1001))
    assert rank.copier._tensors


def test_the_next_step_waits_for_the_copy(rank: Rank, monkeypatch: pytest.MonkeyPatch) -> None:
    """The forward and backward passes before it do not."""
    may_copy, has_begun = threading.Event(), threading.Event()
    rank.train()
    rank.snapshot()
    rank.train()
    copy_now = snapshot_copy._copy

    def copy_later(*lists: list[torch.Tensor]) -> None:
        if threading.current_thread() is not threading.main_thread():
            has_begun.set()
            assert may_copy.wait(BOUND_S)
        copy_now(*lists)

    monkeypatch.setattr(snapshot_copy, "_copy", copy_later)
    rank.snapshot()
    assert has_begun.wait(BOUND_S)
    rank.model(torch.randn(4, WIDTH)).sum().backward()
    assert rank.told == [1]

    def copy_at_last() -> None:
        wait_for(lambda: rank.copier._copying is None, "training waits for it", BOUND_S)
        time.sleep(0.2)
        may_copy.set()

    threading.Thread(target=copy_at_last).start()
    rank.opt.step()
    assert rank.told == [1, 2]
    assert rank.copier.take_waited_s() > 0.1


def test_a_parameter_changed_by_hand_drops_the_snapshot_and_is_copied_at_once_from_then_on(
    rank: Rank, capfd: pytest.CaptureFixture[str]
) -> None:
    for _ in range(2):
        rank.train()
        rank.snapshot()
    rank.copier.join()
    rank.train()
    rank.snapshot()
    wait_for(lambda: rank.told == [1, 2, 3], "the copy of step 3", BOUND_S)  # which may have been made meanwhile
    with torch.no_grad():
        rank.model[0].weight.zero_()
    rank.copier.join()
    assert [slot.step for slot in read_slots(rank.descriptor)] == [2]
    for _ in range(2):
        rank.train()
        rank.snapshot()
        expected = copy.deepcopy(rank.contents.read())
        with torch.no_grad():
            rank.model[0].weight.zero_()
        assert_equal(rank.saved(rank.step), expected)
    assert capfd.readouterr().err.count("were changed other than by an optimizer's step") == 1
    assert [slot.step for slot in read_slots(rank.descriptor)] == [5, 4]


def test_what_no_optimizer_here_changes_is_copied_at_once(rank: Rank) -> None:
    """Somebody else may change it at any moment: a frozen layer, or the weights of another optimizer."""
    rank.train()
    layout = Flattener().flatten(rank.contents.read()).layout
    copier = SnapshotCopier(Contents({"model": rank.model}), rank.memory, rank.told.append)
    assert copier._split_up(layout).tensors == []
    assert rank.copier._split_up(layout).tensors


def test_what_is_small_is_copied_at_once() -> None:
    """A thread would take longer to be told."""
    model = nn.Linear(10, 10)
    contents = Contents({"model": model, "opt": torch.optim.SGD(model.parameters())})
    descriptor = create_memory("test")
    copier = SnapshotCopier(contents, SnapshotMemory(descriptor), lambda _step: None)
    assert copier._split_up(Flattener().flatten(contents.read()).layout).tensors == []
    os.close(descriptor)


class Wrapper(torch.optim.Optimizer):
    """An optimizer by its class alone, as those of frameworks are: its steps are another's, or nobody hears of them."""

    def __init__(self, inner: object) -> None:
        self.optimizer = inner

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        return self.optimizer.param_groups


def test_a_wrapped_optimizers_steps_are_those_that_are_heard_of(rank: Rank) -> None:
    rank.train()
    layout = Flattener().flatten(rank.contents.read()).layout
    wrapped = Contents({"model": rank.model, "opt": Wrapper(rank.opt)})
    deaf = Contents({"model": rank.model, "opt": Wrapper(None)})
    assert SnapshotCopier(wrapped, rank.memory, rank.told.append)._split_up(layout).tensors
    assert SnapshotCopier(deaf, rank.memory, rank.told.append)._split_up(layout).tensors == []


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta state")
@pytest.mark.parametrize("persistent", [True, False])
@pytest.mark.parametrize("sparse", [torch.Tensor.to_sparse, torch.Tensor.to_sparse_csr])
def test_a_sparse_buffer_is_in_the_snapshot_if_it_is_saved_at_all(
    rank: Rank, sparse: Callable[[torch.Tensor], torch.Tensor], *, persistent: bool
) -> None:
    """It has no storage of its own; what else there is is copied as ever."""
    rank.model.register_buffer("adjacency", sparse(torch.eye(3)), persistent=persistent)
    rank.train()
    rank.snapshot()
    rank.train()
    assert rank.told == [1]
    assert rank.copier._tensors
    found = rank.saved(1)["model"].get("adjacency")
    assert (found is not None) == persistent
    assert found is None or torch.equal(found.to_dense(), torch.eye(3))
