"""Copying while training goes on: what was copied is what was there at the commit, or it is no snapshot."""

from __future__ import annotations

import copy
import os
import threading
import time
from contextlib import contextmanager
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch
from cases import some
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from waiting import wait_for

import trainer_runtime as tr
from trainer_runtime import snapshot_copy, snapshot_memory
from trainer_runtime.contents import Contents
from trainer_runtime.flat import Flattener, unflatten
from trainer_runtime.snapshot_copy import SnapshotCopier
from trainer_runtime.snapshot_memory import SnapshotMemory, read_copy
from trainer_runtime.snapshot_page import KEPT, SLOTS, create_memory, read_slots

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from trainer_runtime.snapshot_memory import Unfinished

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
        self.memory = SnapshotMemory(self.descriptor, 0)
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

    def replay(self) -> None:
        """Take a step as a CUDA graph does that holds the optimizer's: no hook is called, and no tensor counts it."""
        tensors = snapshot_copy._changed_by(self.opt)
        versions = snapshot_copy._versions(tensors)
        for tensor in tensors:
            tensor.data.add_(1)
        assert snapshot_copy._versions(tensors) == versions
        self.step += 1

    def snapshot(self) -> None:
        common, part = self._flatteners
        self.copier.join()
        flat = common.flatten(self.contents.read()), part.flatten(self.contents.parts.read())
        self.capture = self.copier.copy(self.memory.begin(self.step, 1, *flat), may_defer=True)
        self.was_deferred = self.copier.is_copying

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


class Hold:
    """Keeps the thread that copies from doing so until it may."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.may_copy, self.has_begun = threading.Event(), threading.Event()
        self._copy_now = snapshot_copy._copy
        patch.setattr(snapshot_copy, "_copy", self._copy)

    def _copy(self, *lists: list[torch.Tensor]) -> None:
        if threading.current_thread() is not threading.main_thread():
            self.has_begun.set()
            assert self.may_copy.wait(BOUND_S)
        self._copy_now(*lists)


@pytest.fixture
def hold(monkeypatch: pytest.MonkeyPatch, rank: Rank) -> Iterator[Hold]:  # ends before the rank
    held = Hold(monkeypatch)
    yield held
    held.may_copy.set()
    rank.copier.join()


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


@pytest.mark.parametrize("count", some([100], of=[100, 1000]))
@pytest.mark.usefixtures("load")
def test_snapshots_under_load_are_what_was_there_at_the_commit(rank: Rank, count: int) -> None:
    """Forward passes have changed the buffers meanwhile, and a thread has copied the rest."""
    expected: dict[str, Any] = {}
    for _ in range(count):
        rank.train()  # waits for the copy of the step before, and only then changes what is copied
        rank.copier.join()
        if expected:
            assert_equal(rank.saved(rank.step - 1), expected)
        rank.snapshot()
        expected = copy.deepcopy(rank.contents.read())
    rank.copier.join()
    assert rank.told == list(range(1, count + 1))
    assert rank.was_deferred


def test_the_next_step_does_not_wait_for_the_checksum(rank: Rank, monkeypatch: pytest.MonkeyPatch) -> None:
    may_finish = threading.Event()
    finish = rank.memory.finish

    def wait_and_finish(begun: Unfinished) -> None:
        assert may_finish.wait(BOUND_S)
        finish(begun)

    rank.train()
    monkeypatch.setattr(rank.memory, "finish", wait_and_finish)
    rank.snapshot()
    expected = copy.deepcopy(rank.contents.read())
    rank.train()
    assert rank.told == []
    may_finish.set()
    rank.copier.join()
    assert rank.told == [1]
    assert_equal(rank.saved(1), expected)


def test_each_gpu_of_a_rank_copies_on_a_stream_of_its_own_and_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """With stand-ins for CUDA's: a source is copied on the current stream of its own GPU."""
    gpus = [torch.device("cuda", index) for index in range(2)]
    sources: Any = [SimpleNamespace(device=gpus[index % 2], is_cuda=True) for index in range(5)]
    assert snapshot_copy._split(sources, {1, 2, 4}, []).gpus == [gpus[1], gpus[0]]
    done: list[tuple[str, torch.device]] = []

    class Stream:
        def __init__(self, device: torch.device) -> None:
            self.device = device

        def synchronize(self) -> None:
            done.append(("synchronize", self.device))

    @contextmanager
    def current(stream: Stream) -> Iterator[None]:
        done.append(("enter", stream.device))
        yield
        done.append(("leave", stream.device))

    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "stream", current)
    monkeypatch.setattr(torch, "_foreach_copy_", lambda *_, **_options: done.append(("copy", torch.device("cpu"))))
    events: Any = [
        SimpleNamespace(device=gpu, wait=lambda stream: done.append(("wait", stream.device))) for gpu in gpus
    ]
    snapshot_copy._copy_on_streams([], [], events)
    zero, one = gpus
    begun = [("enter", zero), ("wait", zero), ("enter", one), ("wait", one), ("copy", torch.device("cpu"))]
    assert done == [*begun, ("synchronize", zero), ("synchronize", one), ("leave", one), ("leave", zero)]


def test_the_next_step_waits_for_the_copy(rank: Rank, hold: Hold) -> None:
    """The forward and backward passes before it do not."""
    rank.train()
    rank.snapshot()
    hold.may_copy.set()
    rank.train()
    hold.may_copy.clear()
    hold.has_begun.clear()
    rank.snapshot()
    assert hold.has_begun.wait(BOUND_S)
    rank.model(torch.randn(4, WIDTH)).sum().backward()
    assert rank.told == [1]

    def copy_at_last() -> None:
        time.sleep(0.2)  # the wait that is measured below
        hold.may_copy.set()

    threading.Thread(target=copy_at_last).start()
    rank.opt.step()
    assert hold.may_copy.is_set(), "the step has waited"
    rank.copier.join()  # the step does not wait for the checksum
    assert rank.told == [1, 2]
    assert rank.copier.take_waited_s() > 0.1


def assert_copied_at_once(rank: Rank, hold: Hold) -> None:
    """What a snapshot has is of its step, although the next one is done before a thread may copy."""
    rank.snapshot()
    expected = copy.deepcopy(rank.contents.read())
    rank.replay()
    hold.may_copy.set()
    rank.copier.join()
    assert_equal(rank.saved(rank.step - 1), expected)


def test_the_changes_of_an_unobserved_step_are_copied_at_once(rank: Rank, hold: Hold) -> None:
    """The next one may change it as silently, while a thread would still copy."""
    rank.train()
    hold.may_copy.set()
    rank.snapshot()
    rank.copier.join()
    for _ in range(3):
        rank.replay()
        hold.may_copy.clear()
        assert_copied_at_once(rank, hold)
    assert rank.told == [1, 2, 4, 6]


def test_a_snapshot_before_any_observed_step_is_copied_at_once(
    rank: Rank, hold: Hold, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(snapshot_copy, "LEAST_BYTES", 1)
    rank.replay()
    rank.snapshot()
    assert rank.told == [1]
    assert not hold.has_begun.is_set()


def test_once_a_step_is_captured_everything_is_copied_at_once(
    rank: Rank, hold: Hold, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also after a step that was observed: the next one may be done by a graph."""
    rank.train()
    with monkeypatch.context() as patch:
        patch.setattr(snapshot_copy, "_is_capturing", lambda: True)
        rank.train()
    rank.train()
    assert_copied_at_once(rank, hold)


def test_a_step_is_not_captured_where_there_is_no_gpu() -> None:
    assert not snapshot_copy._is_capturing()


def test_of_several_optimizers_the_state_of_those_that_were_observed_is_copied_later(
    rank: Rank, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What two of them have, only where both were."""
    monkeypatch.setattr(snapshot_copy, "LEAST_BYTES", 1)
    first, both, second = rank.model[0].weight, rank.model[2].weight, rank.model[2].bias
    opts = [torch.optim.SGD([first, both], lr=0.1), torch.optim.SGD([both, second], lr=0.1)]
    contents = Contents({"model": rank.model, "one": opts[0], "other": opts[1]})
    copier = SnapshotCopier(contents, rank.memory, rank.told.append)
    layout = Flattener().flatten(contents.read()).layout

    def deferred(*stepping: int) -> set[int]:
        for each in stepping:
            opts[each].step()
        picked = copier._split_up(layout)
        copier._stepped.clear()
        return {source.data_ptr() for source in picked.later(layout.sources)}

    addresses = [each.data_ptr() for each in (first, both, second)]
    assert deferred() == set()
    assert deferred(0) == {addresses[0]}
    assert deferred(0, 1) == {*addresses}
    assert deferred(1) == {addresses[2]}
    assert deferred(0) == {addresses[0]}


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


def test_what_a_rank_holds_of_a_sharded_model_is_copied_later_and_a_change_of_it_is_noticed(hold: Hold) -> None:
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))
    fully_shard(model, mesh=init_device_mesh("cpu", (1,)))
    opt = torch.optim.AdamW(model.parameters())
    contents = Contents({"model": model, "opt": opt})
    descriptor = create_memory("test")
    memory, told = SnapshotMemory(descriptor, 0), list[int]()
    copier, flattener = SnapshotCopier(contents, memory, told.append), Flattener()

    def take(step: int) -> None:
        model(torch.randn(4, WIDTH)).square().sum().backward()
        opt.step()
        copier.copy(memory.begin(step, 1, None, flattener.flatten(contents.read_part())), may_defer=True)

    take(1)
    weight = model[0].weight.to_local().clone()
    assert hold.has_begun.wait(BOUND_S), "a thread copies it"
    hold.may_copy.set()
    copier.join()
    assert told == [1]
    slot = read_slots(descriptor)[0]
    data = memoryview(bytearray(os.pread(descriptor, slot.part_bytes, slot.part_at)))
    (found,) = unflatten(data)["sharded"]["model"]["0.weight"].values()
    assert torch.equal(found, weight)
    hold.may_copy.clear()
    take(2)
    with torch.no_grad():
        model[0].weight.mul_(2)
    hold.may_copy.set()
    copier.join()
    assert told == [1], "neither the weights of before nor those of after"
    take(3)
    assert told == [1, 3], "at once, from now on"
    os.close(descriptor)


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
    opt = torch.optim.SGD(model.parameters())
    contents = Contents({"model": model, "opt": opt})
    descriptor = create_memory("test")
    copier = SnapshotCopier(contents, SnapshotMemory(descriptor, 0), lambda _step: None)
    opt.step()
    assert copier._split_up(Flattener().flatten(contents.read()).layout).tensors == []
    os.close(descriptor)


class Wrapper(torch.optim.Optimizer):
    """An optimizer by its class alone, as those of frameworks are: its steps are another's, or are not observed."""

    def __init__(self, inner: object) -> None:
        self.optimizer = inner

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        return self.optimizer.param_groups


def test_the_steps_of_a_wrapped_optimizer_are_observed(rank: Rank) -> None:
    rank.train()
    layout = Flattener().flatten(rank.contents.read()).layout
    wrapped, unobserved = (
        SnapshotCopier(Contents({"model": rank.model, "opt": Wrapper(inner)}), rank.memory, rank.told.append)
        for inner in (rank.opt, None)
    )
    rank.opt.step()
    assert wrapped._split_up(layout).tensors
    assert unobserved._split_up(layout).tensors == []


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
    assert rank.was_deferred
    rank.copier.join()
    assert rank.told == [1]
    found = rank.saved(1)["model"].get("adjacency")
    assert (found is not None) == persistent
    assert found is None or torch.equal(found.to_dense(), torch.eye(3))


def test_the_memory_of_later_copies_is_taken_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    """By a thread, for the slots that were asked for, and what was copied stays."""
    monkeypatch.setattr(snapshot_memory, "_LEAST_PREPARED_BYTES", 1)
    descriptor = create_memory("test")
    memory = SnapshotMemory(descriptor, 0)
    values = torch.arange(1 << 18, dtype=torch.int64)
    flat = Flattener().flatten({"values": values})

    def copy_at(step: int) -> Unfinished:
        begun = memory.begin(step, 1, None, flat)
        snapshot_copy._copy(begun.part.sources, begun.part.targets)
        memory.finish(begun)
        return begun

    def taken() -> int:
        return os.fstat(descriptor).st_blocks * 512

    first = copy_at(1)
    assert flat.bytes <= taken() < 2 * flat.bytes
    memory.prepare(flat.bytes, KEPT)
    wait_for(lambda: taken() >= 2 * flat.bytes, "the second slot's memory", BOUND_S)
    memory.prepare(flat.bytes, SLOTS)
    wait_for(lambda: taken() >= SLOTS * flat.bytes, "all memory", BOUND_S)
    assert torch.equal(read_copy(first)[1]["values"], values)
    copy_at(2)
    copy_at(3)
    memory.prepare(flat.bytes, SLOTS)
    assert taken() < (SLOTS + 1) * flat.bytes, "it is there already"


def test_no_memory_is_taken_ahead_for_saves_if_little_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(snapshot_memory, "_LEAST_PREPARED_BYTES", 1)
    memory = SnapshotMemory(create_memory("test"), 0)
    monkeypatch.setattr(snapshot_memory, "free_memory", lambda: 1 << 20)
    memory.prepare(1 << 20, SLOTS)
    assert memory._areas[KEPT:] == [None] * (SLOTS - KEPT)
