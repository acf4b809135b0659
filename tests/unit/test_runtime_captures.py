"""Checkpoints that are written from copies which a thread makes while training continues."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from typing import TYPE_CHECKING, Any

import pytest
import torch
from fake_agent import FakeAgent, start_without_agent
from torch import nn
from waiting import wait_for

import trainer_runtime as tr
from trainer_runtime import contract, snapshot_copy, writer
from trainer_runtime import state as state_
from trainer_runtime.main_thread import call_on_main_thread
from trainer_runtime.snapshot_page import create_memory, read_slots

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

BOUND_S = 60.0
WIDTH = 300  # enough to be left to a thread


class Gate:
    """Lets a function go on in other threads than the main one only when it is open."""

    def __init__(self, patch: pytest.MonkeyPatch, module: Any, name: str) -> None:  # noqa: ANN401 - any module
        self._is_open, self.is_reached = threading.Event(), threading.Event()
        self._function = getattr(module, name)
        patch.setattr(module, name, self._pass)

    def open(self) -> None:
        self._is_open.set()

    def close(self) -> None:
        self.is_reached.clear()
        self._is_open.clear()

    def _pass(self, *given: Any) -> Any:  # noqa: ANN401 - passed on
        if threading.current_thread() is not threading.main_thread():
            self.is_reached.set()
            assert self._is_open.wait(BOUND_S)
        return self._function(*given)


@pytest.fixture
def copies(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gate]:
    gate = Gate(monkeypatch, snapshot_copy, "_copy")
    yield gate
    gate.open()


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gate]:
    gate = Gate(monkeypatch, writer, "write_state")
    yield gate
    gate.open()


@pytest.fixture
def memory(monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    """The agent's memory for the snapshots of this rank, which takes one at step 1, and at every second one."""
    agent, descriptor = FakeAgent(), create_memory("test")
    channel = agent.open()
    monkeypatch.setattr(state_, "open_channel", lambda: channel)
    given = {contract.RUN_ID: "us", contract.GROUP: "1", contract.SNAPSHOT_FD: str(descriptor)}
    for name, value in {**given, contract.SNAPSHOT_OVERHEAD: "1e9"}.items():
        monkeypatch.setenv(name, value)
    yield descriptor
    agent.close()
    os.close(descriptor)


@pytest.fixture(autouse=True)
def _start(monkeypatch: pytest.MonkeyPatch) -> None:
    start_without_agent(monkeypatch)
    tr.init()


class Training:
    """A model whose weights are the number of the step, and an optimizer that changes all of them."""

    def __init__(self, directory: Path, save_every: int) -> None:
        self.model = nn.Linear(WIDTH, WIDTH, bias=False)
        self.opt = torch.optim.SGD(self.model.parameters(), lr=1.0)
        nn.init.zeros_(self.model.weight)
        self.directory = directory
        self.state = tr.State(checkpoint_dir=directory, save_every=save_every, keep=9, model=self.model, opt=self.opt)
        self.state.restore()

    def step(self) -> None:
        self.model.weight.grad = torch.full((WIDTH, WIDTH), -1.0)
        self.opt.step()
        self.state.commit()

    def saved(self) -> dict[int, set[float]]:
        """The weights in each checkpoint."""
        found = [torch.load(path / "state.pt", weights_only=True) for path in self.directory.glob("[!.]*")]
        return {each["position"]["step"]: {*each["objects"]["model"]["weight"].unique().tolist()} for each in found}


def step_copied_later(training: Training, copies: Gate) -> None:
    """Take a step whose weights are not copied before the gate is opened again."""
    training.state.settle()
    copies.close()
    training.step()
    assert copies.is_reached.wait(BOUND_S)


def snapshots(memory: int) -> list[int]:
    return sorted(slot.step for slot in read_slots(memory))


@pytest.mark.usefixtures("memory")
def test_a_checkpoint_has_the_weights_of_its_step_although_they_are_copied_later(tmp_path: Path, copies: Gate) -> None:
    training = Training(tmp_path, save_every=2)
    copies.open()
    for _ in range(3):
        training.step()
    wait_for(lambda: training.saved().keys() == {2}, "the first one", BOUND_S)
    step_copied_later(training, copies)
    copies.open()
    training.step()
    training.state.save()
    assert training.saved() == {2: {2.0}, 4: {4.0}, 5: {5.0}}


@pytest.mark.usefixtures("memory")
def test_a_step_whose_weights_were_changed_by_hand_while_they_were_copied_is_not_saved(
    tmp_path: Path, copies: Gate, capsys: pytest.CaptureFixture[str]
) -> None:
    training = Training(tmp_path, save_every=1)
    copies.open()
    training.step()
    wait_for(lambda: training.saved().keys() == {1}, "the first one", BOUND_S)
    step_copied_later(training, copies)
    with torch.no_grad():
        training.model.weight[0] += 100
    copies.open()
    training.state.settle()
    training.step()
    training.state.save()
    assert training.saved() == {1: {1.0}, 3: {3.0, 103.0}}
    told = capsys.readouterr().err
    assert "step 2 was NOT saved" in told
    assert "changed other than by an optimizer's step" in told


@pytest.mark.usefixtures("memory")
def test_a_checkpoint_does_not_wait_for_the_next_step(tmp_path: Path) -> None:
    """After a commit the script may evaluate for an hour."""
    training = Training(tmp_path, save_every=1)
    training.step()
    training.step()
    wait_for(lambda: training.saved() == {1: {1.0}, 2: {2.0}}, "while no step is taken", BOUND_S)


@pytest.mark.usefixtures("memory")
def test_a_script_that_ends_after_a_commit_has_saved_it(tmp_path: Path, copies: Gate) -> None:
    training = Training(tmp_path, save_every=2)
    copies.open()
    training.step()
    step_copied_later(training, copies)
    threading.Thread(target=lambda: (time.sleep(0.1), copies.open())).start()  # type: ignore[func-returns-value]
    training.state.save()
    assert training.saved() == {2: {2.0}}


@pytest.mark.usefixtures("memory")
def test_a_hook_may_change_weights_for_what_it_writes(tmp_path: Path, copies: Gate) -> None:
    """As an average of the weights that takes their place for a moment, by `.data`, which nothing counts."""
    training = Training(tmp_path, save_every=2)
    copies.open()

    @training.state.on_save
    def swap(_path: Path) -> None:
        kept = training.model.weight.data.clone()
        training.model.weight.data.fill_(-7.0)
        time.sleep(0.1)  # as long as writing takes
        training.model.weight.data.copy_(kept)

    for _ in range(3):
        training.step()
    training.state.save()
    assert training.saved() == {2: {2.0}, 3: {3.0}}


def test_without_an_agent_weights_may_be_changed_right_after_a_commit(tmp_path: Path) -> None:
    training = Training(tmp_path, save_every=1)
    training.step()
    training.model.weight.data.fill_(-7.0)
    training.state.save()
    assert training.saved()[1] == {1.0}


@pytest.mark.usefixtures("memory")
def test_a_signals_handler_may_save_while_a_step_waits_for_the_copy(tmp_path: Path, copies: Gate) -> None:
    training = Training(tmp_path, save_every=100)
    copies.open()
    for _ in range(2):
        training.step()
    step_copied_later(training, copies)
    previous = signal.signal(signal.SIGUSR1, lambda *_: training.state.save())
    try:
        threading.Timer(0.2, lambda: (os.kill(os.getpid(), signal.SIGUSR1), time.sleep(0.2), copies.open())).start()
        training.step()
    finally:
        signal.signal(signal.SIGUSR1, previous)
    assert training.saved() == {3: {3.0}}


def test_a_checkpoint_that_cannot_begin_leases_nothing(tmp_path: Path) -> None:
    training = Training(tmp_path, save_every=1)
    training.step()
    training.state.save()
    for _ in range(5):
        training.directory.rename(training.directory.with_name("away"))
        training.step()
        training.directory.with_name("away").rename(training.directory)
    training.step()
    training.state.save()
    assert max(training.saved()) == 7


def test_snapshots_go_on_in_other_slots_while_a_checkpoint_is_written_from_one(
    tmp_path: Path, memory: int, disk: Gate
) -> None:
    training = Training(tmp_path, save_every=3)
    for _ in range(3):
        training.step()
    assert disk.is_reached.wait(BOUND_S)
    for _ in range(2):
        training.step()
    training.state.settle()
    assert snapshots(memory) == [1, 3, 5]
    disk.open()
    training.step()
    training.state.save()
    assert training.saved() == {3: {3.0}, 6: {6.0}}


def test_a_copy_for_a_checkpoint_alone_is_no_snapshot(tmp_path: Path, memory: int) -> None:
    """Other ranks have none of the same moment, and the two newest snapshots stay."""
    training = Training(tmp_path, save_every=100)
    for _ in range(3):
        training.step()
    training.state.settle()
    training.state.save()
    assert training.saved() == {3: {3.0}}
    assert snapshots(memory) == [1, 3]


def test_the_main_thread_is_asked_between_two_of_its_operations() -> None:
    threads: list[threading.Thread] = []

    def ask() -> None:
        for _ in range(200):  # more than can be pending
            call_on_main_thread(lambda: threads.append(threading.current_thread()))

    asking = threading.Thread(target=ask)
    asking.start()
    asking.join()
    call_on_main_thread(lambda: None)
    wait_for(lambda: len(threads) == 200, "the calls", BOUND_S)
    assert {*threads} == {threading.main_thread()}


def test_the_layout_of_a_state_is_computed_once(tmp_path: Path) -> None:
    """It takes longer than all else that a commit does: random states and values change, and no tensor is replaced."""
    training = Training(tmp_path, save_every=100)
    for _ in range(2):
        training.step()
    capturer = training.state._saver.capturer  # type: ignore[union-attr] # it was restored
    before = [piece.layout for piece in capturer.flatten() if piece is not None]
    torch.rand(3)
    random.random()
    training.step()
    after = [piece.layout for piece in capturer.flatten() if piece is not None]
    assert len(after) == 2
    assert [*map(id, before)] == [*map(id, after)]
