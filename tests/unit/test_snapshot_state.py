"""Snapshots of a State in a world of 1: what they hold, when they are taken, and resuming from one."""

from __future__ import annotations

import gc
import os
import random
import resource
import time
from collections import Counter
from contextlib import nullcontext, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch
from fake_agent import FakeAgent
from torch import nn
from waiting import wait_for

import trainer_runtime as tr
from trainer_runtime import contract, snapshot_copy, snapshot_memory, snapshots
from trainer_runtime import state as state_
from trainer_runtime.agent_channel import boot_time
from trainer_runtime.capture.capturing import Capturer
from trainer_runtime.flat import unflatten
from trainer_runtime.snapshot_page import HEADER_BYTES, Slot, create_memory, read_slots
from trainer_runtime.snapshot_schedule import Schedule
from trainer_runtime.snapshot_sum import piece_sum

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from trainer_runtime.snapshot_copy import Capture

BOUND_S = 60.0


@pytest.fixture
def memory() -> Iterator[int]:
    """What the agent keeps of the rank."""
    descriptor = create_memory("test")
    yield descriptor
    os.close(descriptor)


@pytest.fixture
def start(tmp_path: Path, memory: int, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., FakeAgent]]:
    """Begin a group as a worker of an agent that holds nothing, or a snapshot."""
    agents: list[FakeAgent] = []

    def begin(group: int, *, into: int = memory, **variables: str) -> FakeAgent:
        agents.append(FakeAgent())
        made = agents[-1].open()
        monkeypatch.setattr(state_, "open_channel", lambda: made)
        given = {contract.RUN_ID: "us", contract.GROUP: str(group), contract.CHECKPOINT_DIR: str(tmp_path)}
        given[contract.SNAPSHOT_FD] = str(into)
        for name, value in {**given, contract.SNAPSHOT_OVERHEAD: "1e9", **variables}.items():
            monkeypatch.setenv(name, value)
        return agents[-1]

    monkeypatch.setattr(Capturer, "took_s", 0.0)  # else the interval would follow from it: steps take no time
    for name in (contract.FRESH, contract.CONTROL_FD, contract.SNAPSHOT_MEMORY, "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    tr.init()
    yield begin
    for agent in agents:
        agent.close()


class Training:
    """A small model with all kinds of things to be saved, that trains on noise."""

    def __init__(self, **options: Any) -> None:  # noqa: ANN401 - passed on
        torch.manual_seed(1)
        random.seed(1)
        self.model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
        self.opt = torch.optim.AdamW(self.model.parameters())
        self.state = tr.State(model=self.model, opt=self.opt, best=0.0, history=[], save_every=100, **options)

    def train(self, steps: int, *, until: int = 99) -> Training:
        """Take so many steps, with the random states that are there."""
        for _ in self.state.epochs(1):
            for item in self.state.steps(range(until)):
                self.opt.zero_grad()
                self.model(torch.randn(5, 3)).sum().backward()
                self.opt.step()
                self.state.history.append((item, random.random()))
                self.state.commit()
                steps -= 1
                if not steps:
                    return self
        return self

    def all(self) -> dict[str, Any]:
        """Everything that must be equal in the end."""
        return {
            **{name: value.tolist() for name, value in self.model.state_dict().items()},
            "opt": str(self.opt.state_dict()),
            "history": self.state.history,
            "step": self.state.step,
        }


def train_without_items(training: Training) -> None:
    training.opt.zero_grad()
    training.model(torch.randn(5, 3)).sum().backward()
    training.opt.step()
    training.state.commit()


def slots(memory: int) -> dict[int, Slot]:
    return {slot.step: slot for slot in read_slots(memory)}


def content(memory: int, step: int) -> dict[str, Any]:
    """The common part of a snapshot, whose checksums are right."""
    slot = slots(memory)[step]
    for at, size, rank, sum_ in (
        (slot.common_at, slot.common_bytes, None, slot.common_sum),
        (slot.part_at, slot.part_bytes, 0, slot.part_sum),
    ):
        data = memoryview(os.pread(memory, size, at))
        assert piece_sum(data, rank=rank, step=step, world_size=1) == sum_
    common: dict[str, Any] = unflatten(memoryview(bytearray(os.pread(memory, slot.common_bytes, slot.common_at))))
    return common


def test_a_training_that_resumes_from_memory_ends_like_one_that_was_never_interrupted(
    start: Callable[..., FakeAgent], memory: int, capfd: pytest.CaptureFixture[str]
) -> None:
    start(1, into=create_memory("undisturbed"))
    undisturbed = Training().train(99).all()
    start(1)
    Training().train(7)
    agent = start(2, into=create_memory("next"))
    agent.hold(7, {0: memory})
    again = Training()
    again.state.restore()
    assert again.state.step == 7
    assert "resumed at step 7 from memory" in capfd.readouterr().err
    assert again.train(92).all() == undisturbed


@pytest.mark.parametrize("where", ["phase", "after the loop", "settle"])
def test_nothing_is_being_copied_within_a_phase_or_after_the_loop(start: Callable[..., FakeAgent], where: str) -> None:
    """Weights may be changed there in ways that nobody sees, as an average that takes their place by `.data`."""
    start(1)
    model = nn.Linear(1000, 600)  # enough to be left to a thread
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    state = tr.State(model=model, opt=opt, save_every=1000)
    for _ in state.epochs(1):
        for _ in state.steps(range(4)):
            opt.zero_grad()
            model(torch.ones(1, 1000)).sum().backward()
            opt.step()
            state.commit()
            capturer = state._saver.capturer  # type: ignore[union-attr] # it was restored
            if state.step == 3 and where != "after the loop":
                assert capturer.is_copying, "else this shows nothing"
                if where == "settle":
                    state.settle()
                with tr.phase("eval") if where == "phase" else nullcontext():
                    assert not capturer.is_copying
        if where == "after the loop":
            assert not capturer.is_copying


@pytest.mark.parametrize(("save_every", "saved"), [(100, [12, 20]), (10, [20])])
def test_a_checkpoint_that_the_group_before_did_not_come_to_is_due_at_once(
    start: Callable[..., FakeAgent], memory: int, save_every: int, saved: list[int]
) -> None:
    """Else twice as much would be lost with all nodes as was asked for."""
    first = start(1)
    state = tr.State(best=0.0, save_every=save_every)
    state.restore()
    for _ in range(11):
        state.commit()
    wait_for(lambda: first.committed or save_every > 11, "the checkpoint of step 10", BOUND_S)
    agent = start(2, into=create_memory("next"))
    agent.committed = first.committed
    agent.hold(11, {0: memory})
    again = tr.State(best=0.0, save_every=10)
    again.restore()
    for _ in range(9):
        again.commit()
    again.save()
    assert [asked["copy"]["step"] for asked in agent.asked] == saved


def test_so_does_one_whose_tensors_are_made_elsewhere_unless_it_says_so(
    start: Callable[..., FakeAgent], memory: int
) -> None:
    """As after torch.set_default_device("cuda"): states in memory are on the CPU all the same."""
    start(1)
    state = tr.State(best=torch.zeros(1), save_every=100, check_finite=True)
    state.restore()
    state.best = torch.full((1,), 3.0)
    state.commit(loss=torch.zeros(()))
    agent = start(2, into=create_memory("next"))
    agent.hold(1, {0: memory})
    torch.set_default_device("meta")
    try:
        again = tr.State(best=torch.zeros(1, device="cpu"), check_finite=True)
        again.restore()
        again.commit(loss=torch.zeros((), device="cpu"))
    finally:
        torch.set_default_device(None)
    assert again.best.tolist() == [3.0]


def test_a_snapshot_is_reported_and_the_two_newest_are_kept(start: Callable[..., FakeAgent], memory: int) -> None:
    agent = start(1)
    Training().train(5)
    assert sorted(slots(memory)) == [3, 5]
    assert [content(memory, step)["position"]["step"] for step in (3, 5)] == [3, 5]
    wait_for(lambda: agent.snapshots == [1, 3, 5], "what was said of them", BOUND_S)


def test_a_snapshot_that_has_outgrown_its_place_gets_another(start: Callable[..., FakeAgent], memory: int) -> None:
    """What was there before gives its memory back."""
    start(1)
    state = tr.State(table=torch.zeros(1000), save_every=100)
    state.restore()
    for size in (1000, 300_000, 300_000, 700_000, 700_000):
        state.table = torch.full((size,), float(size))
        state.commit()
        assert torch.equal(content(memory, state.step)["objects"]["table"], state.table)
        state.commit()  # without a snapshot
    assert os.fstat(memory).st_blocks * 512 < 2.2 * 4 * 700_000


@pytest.mark.parametrize("change", [lambda weight: weight.mul_(2), lambda weight: weight.data.mul_(2)])
def test_what_is_changed_before_the_commit_is_in_the_snapshot(
    start: Callable[..., FakeAgent], memory: int, change: Callable[[torch.Tensor], object]
) -> None:
    start(1)
    training = Training().train(2)
    with torch.no_grad():
        change(training.model[0].weight)
    training.state.commit()
    assert torch.equal(content(memory, 3)["objects"]["model"]["0.weight"], training.model[0].weight)


def test_state_that_is_only_in_memory_is_saved_when_the_script_asks_for_it(
    start: Callable[..., FakeAgent], memory: int, tmp_path: Path
) -> None:
    """No file has the step that was resumed from."""
    start(1)
    Training().train(3)
    agent = start(2, into=create_memory("next"))
    agent.hold(3, {0: memory})
    again = Training()
    again.state.restore()
    assert not list(tmp_path.glob("*/manifest.json"))
    again.state.save()
    assert [path.parent.name for path in tmp_path.glob("*/manifest.json")] == ["us-g000002-s000000003"]


def test_the_restored_memory_is_released_at_the_first_step(start: Callable[..., FakeAgent], memory: int) -> None:
    """Else there would be a third and a fourth copy of the model on this node."""
    _, again, name = _resumed(start, memory)
    taken = _open_here().count(name)
    again.train(1)
    maps = Path("/proc/self/maps").read_text().splitlines()
    assert taken - _open_here().count(name) == 2
    assert not [line for line in maps if name in line and "rw-p" in line]


def test_a_report_and_release_that_wait_at_the_first_step_follow_at_a_later_one(
    start: Callable[..., FakeAgent], memory: int
) -> None:
    """A checkpoint that waits for its verdict has the channel."""
    agent, again, name = _resumed(start, memory)
    taken = _open_here().count(name)
    assert again.state._channel
    with again.state._channel._lock:
        again.state.commit()
        not_later_than = boot_time()
        again.state.commit()
    assert (agent.started, _open_here().count(name)) == ([], taken)
    for _ in range(2):
        again.state.commit()
    assert taken - _open_here().count(name) == 2
    wait_for(lambda: agent.started, "the message", BOUND_S)
    [told] = agent.started
    assert told["step"] == 4
    assert told["stepped"] <= not_later_than


def _resumed(start: Callable[..., FakeAgent], memory: int) -> tuple[FakeAgent, Training, str]:
    """What has begun from a snapshot of step 3, and the name of the memory that has it."""
    gc.collect()  # what other tests have left must not go while this one counts
    start(1)
    Training().train(3)
    agent = start(2, into=create_memory("next"))
    agent.hold(3, {0: memory})
    again = Training()
    again.state.restore()
    return agent, again, _target(Path(f"/proc/self/fd/{memory}"))


def _open_here() -> list[str]:
    return [_target(fd) for fd in Path("/proc/self/fd").iterdir()]


def _target(fd: Path) -> str:
    with suppress(OSError):
        return str(fd.readlink())
    return ""


def test_snapshots_that_take_too_much_memory_are_left_out(
    start: Callable[..., FakeAgent], memory: int, capfd: pytest.CaptureFixture[str]
) -> None:
    """Once and for all, with one line."""
    agent = start(1, **{contract.SNAPSHOT_MEMORY: str(10 << 10)})
    training = Training().train(5)
    assert (read_slots(memory), agent.snapshots, training.state._pos.due) == ((), [], 100)
    assert capfd.readouterr().err.count("no snapshots in memory: they would take") == 1


def test_a_save_without_snapshots_holds_up_the_training_no_longer(
    start: Callable[..., FakeAgent], memory: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its memory is taken ahead, and a thread copies the weights."""
    monkeypatch.setattr(snapshot_memory, "_LEAST_PREPARED_BYTES", 1)
    monkeypatch.setattr(snapshot_copy, "LEAST_BYTES", 1)
    agent = start(1, **{contract.SNAPSHOT_MEMORY: str(10 << 10)})
    training = Training()
    training.state._save_every = 3
    training.state.restore()
    train_without_items(training)
    wait_for(lambda: os.fstat(memory).st_blocks > 8, "memory beyond the header", BOUND_S)
    train_without_items(training)
    train_without_items(training)
    assert training.state._saver
    assert training.state._saver.capturer.is_copying
    wait_for(lambda: agent.committed is not None, "the checkpoint", BOUND_S)
    assert read_slots(memory) == ()


def test_where_the_memory_cannot_grow_training_goes_on_without_snapshots(
    start: Callable[..., FakeAgent], capfd: pytest.CaptureFixture[str]
) -> None:
    """`ulimit -f` limits it as it limits files."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    agent = start(1)
    resource.setrlimit(resource.RLIMIT_FSIZE, (HEADER_BYTES, hard))
    try:
        training = Training().train(5)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert (agent.snapshots, training.state._pos.due) == ([], 100)
    (line,) = [each for each in capfd.readouterr().err.splitlines() if "no snapshots in memory" in each]
    assert "File too large (a file may have no more than" in line


@pytest.mark.parametrize(("sizes_free", "steps"), [(3.5, [4, 6]), (2.5, [])])
def test_what_was_begun_from_counts_as_free(
    start: Callable[..., FakeAgent], memory: int, monkeypatch: pytest.MonkeyPatch, sizes_free: float, steps: list[int]
) -> None:
    """It is let go of after some snapshots: else a State that had some could have none after a restart."""
    start(1)
    Training().train(3)
    held = slots(memory)[3]
    size = held.common_bytes + held.part_bytes
    monkeypatch.setattr(snapshots, "free_memory", lambda: int(sizes_free * size))
    agent = start(2, into=(into := create_memory("next")))
    agent.hold(3, {0: memory})
    Training().train(3)
    assert sorted(slots(into)) == steps
    os.close(into)


@pytest.mark.parametrize("variables", [{contract.SNAPSHOT_OVERHEAD: "0"}, {contract.SNAPSHOT_FD: "0"}])
def test_there_are_none_where_there_is_no_memory_for_them_or_no_time(
    start: Callable[..., FakeAgent], memory: int, variables: dict[str, str]
) -> None:
    """The variable may be another process's: what is under that number is no memory then, and is left alone."""
    start(1, **variables)
    training = Training().train(2)
    assert (training.state._snapshots, os.fstat(memory).st_size) == (None, 0)


def test_a_script_that_reads_files_of_its_own_has_no_snapshots(
    start: Callable[..., FakeAgent], memory: int, capfd: pytest.CaptureFixture[str]
) -> None:
    """What on_save wrote is in no snapshot, so on_load could not be called."""
    start(1)
    training = Training()
    training.state.on_load(lambda _path: None)
    training.train(2)
    assert read_slots(memory) == ()
    assert "no snapshots in memory: the script resumes from files of its own" in capfd.readouterr().err


def test_a_value_that_could_not_be_loaded_back_is_named(start: Callable[..., FakeAgent]) -> None:
    """Also if it has become one since the first step."""
    start(1)
    training = Training().train(2)
    training.state.best = object()
    with pytest.raises(TypeError, match="State cannot save best: wanted a tensor"):
        training.state.commit()


def test_a_schedule_that_counts_its_milestones_is_in_the_snapshot(start: Callable[..., FakeAgent], memory: int) -> None:
    """MultiStepLR's state has a Counter."""
    start(1)
    opt = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1)
    state = tr.State(sched=torch.optim.lr_scheduler.MultiStepLR(opt, [2, 4]), opt=opt, save_every=100)
    state.restore()
    state.commit()
    assert content(memory, 1)["objects"]["sched"]["milestones"] == Counter((2, 4))


def test_how_often_follows_from_what_was_measured(
    start: Callable[..., FakeAgent], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Snapshots that take almost 3 % of a step are taken at every third, if 1 % is allowed.

    The first ones take longer, and so does one later on: that is the machine's doing.
    """
    now, longer_s = [0.0], {1: 0.5, 3: 0.5, 16: 0.9}
    monkeypatch.setattr(snapshots, "time", SimpleNamespace(monotonic=lambda: now[0]))
    agent = start(1, **{contract.SNAPSHOT_OVERHEAD: "1"})
    state = tr.State(best=0.0, save_every=100)
    state.restore()
    assert state._snapshots
    put = state._snapshots._copy_state

    def take_long(*, is_snapshot: bool) -> Capture | None:
        now[0] += longer_s.get(state.step, 0.028)
        return put(is_snapshot=is_snapshot)

    monkeypatch.setattr(state._snapshots, "_copy_state", take_long)
    for _ in range(26):
        now[0] += 1.0
        state.commit()
    taken = [1, 3, 5, 7, 10, 13, 16, 19, 22, 25]
    wait_for(lambda: agent.snapshots == taken, "every third step", BOUND_S)
    assert state._snapshots._schedule == Schedule(anchor=25, every=3, until=25 + 3 * 8)


def test_a_commit_with_nothing_due_costs_next_to_nothing(start: Callable[..., FakeAgent]) -> None:
    start(1, **{contract.SNAPSHOT_OVERHEAD: "1e-9"})
    training = Training(seed=1).train(3)
    took = []
    for _ in range(90):
        began = time.perf_counter()
        training.state.commit()
        took.append(time.perf_counter() - began)
    assert sorted(took)[45] < 1e-5, took  # usually 1e-6


@pytest.mark.parametrize(("in_memory", "overhead"), [(1, "1e9"), (0, "1e9"), (1, "0")])
def test_a_handoff_takes_a_snapshot_if_that_is_enough_and_can_be_and_else_a_checkpoint(
    start: Callable[..., FakeAgent], memory: int, monkeypatch: pytest.MonkeyPatch, in_memory: int, overhead: str
) -> None:
    """Whatever snapshots cost, and whenever the next would be due."""
    page, descriptor = contract.ControlPage.create("test")
    os.close(descriptor)
    monkeypatch.setattr(state_, "open_control_page", lambda: page)
    monkeypatch.setattr(state_, "restart_at_exit", lambda: None)  # it would end the tests
    agent = start(1, **{contract.SNAPSHOT_OVERHEAD: overhead})
    training = Training()

    def train() -> None:
        for _ in training.state.epochs(1):
            for item in training.state.steps(range(9)):
                if item == 4:
                    page.in_memory, page.handoff = in_memory, 5
                training.state.commit()

    with pytest.raises(SystemExit) as left:
        train()
    assert left.value.code == contract.EXIT_RESTART
    if in_memory and overhead != "0":
        assert (agent.quiesced, agent.asked, agent.snapshots[-1]) == ([(5, 5)], [], 5)
        assert content(memory, 5)["position"]["step"] == 5
    else:
        assert (agent.quiesced, [asked["handoff"] for asked in agent.asked]) == ([], [5])
