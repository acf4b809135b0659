"""What a worker shows its agent of how far it is: phases, the first step, stacks, its own time."""

from __future__ import annotations

import copy
import ctypes
import os
import signal
import subprocess
import sys
import threading
import time
from typing import TYPE_CHECKING

import pytest
import torch
from fake_agent import FakeAgent, agent_of_this_process, control_page, start_without_agent
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from waiting import wait_for

import trainer_runtime as tr
from trainer_runtime import agent_channel, contract, phases
from trainer_runtime.agent_channel import AgentChannel
from trainer_runtime.stacks import register_stack_dump

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@pytest.fixture(autouse=True)
def _start(monkeypatch: pytest.MonkeyPatch) -> None:
    """Begin without an agent's variables, and as a new process."""
    monkeypatch.delenv(contract.STACKS_FD, raising=False)
    monkeypatch.setattr(phases, "_phases", phases._Phases())
    start_without_agent(monkeypatch)
    monkeypatch.setattr(agent_channel.milestones, "joined", 0.0)
    monkeypatch.setattr(agent_channel.milestones, "set_up", 0.0)
    monkeypatch.setattr(agent_channel.milestones, "loaded", 0.0)


@pytest.fixture
def page(monkeypatch: pytest.MonkeyPatch) -> Iterator[contract.ControlPage]:
    with control_page(monkeypatch) as page:
        yield page


@pytest.fixture
def agent(tmp_path: Path, page: contract.ControlPage, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeAgent]:
    """An agent that this process is a worker of."""
    assert page.step == 0
    with agent_of_this_process(tmp_path, monkeypatch) as agent:
        yield agent


@pytest.fixture
def stacks(page: contract.ControlPage, monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    """A file for stacks, as an agent hands it down."""
    descriptor = os.memfd_create(contract.STACKS_NAME)
    monkeypatch.setenv(contract.STACKS_FD, str(descriptor))
    yield descriptor
    if page.stacks:
        import faulthandler  # noqa: PLC0415 - of this process, whose handler goes with the file

        faulthandler.unregister(page.stacks)
    os.close(descriptor)


def test_no_steps_are_expected_while_it_restores_saves_and_after_the_last_epoch(
    agent: FakeAgent, page: contract.ControlPage
) -> None:
    seen: dict[str, list[int]] = {"save": [], "train": [], "load": []}
    agent.on_publish = lambda _asked: seen["save"].append(page.phase)
    state = tr.State(best=0.0, save_every=1000)

    @state.on_save
    def note(_place: Path) -> None:
        seen["save"].append(page.phase)

    assert (page.restored, page.phase) == (0, 0)
    for _ in state.epochs(2):
        for _ in state.steps(range(2)):
            seen["train"].append(page.phase)
            state.commit()
        state.save()
        seen["train"].append(page.phase)
    assert seen["train"] == [0] * 6
    assert seen["save"] == [1] * 6
    assert (page.restored, page.phase) == (1, 1)
    for _ in state.epochs(3):
        assert page.phase == 0, "an epoch is trained after all"
    assert page.phase == 1

    page.restored = 0  # a new process has a new page
    again = tr.State(best=0.0)

    @again.on_load
    def note_load(_place: Path) -> None:
        seen["load"].append(page.phase)

    again.restore()
    assert seen["load"] == [1]
    assert page.phase == 0, "who restores is about to train"


def test_the_first_step_is_reported_once_with_the_times_of_the_milestones(agent: FakeAgent) -> None:
    began = agent_channel.boot_time()
    state = tr.State(best=0.0)
    for _ in state.epochs(1):
        for _ in state.steps(range(3)):
            state.commit()
    wait_for(lambda: agent.started, "the message")
    [told] = agent.started
    step = told.pop("step")
    assert [*told] == ["entered", "joined", "set_up", "loaded", "stepped"]
    assert step == 1
    assert [*told.values()] == sorted(told.values())
    assert told["entered"] <= began <= told["joined"]
    assert told["stepped"] <= agent_channel.boot_time()


def test_a_first_step_is_not_held_up_by_a_verdict_that_is_waited_for() -> None:
    with_agent = FakeAgent()
    try:
        ours = AgentChannel(os.dup(with_agent.theirs.fileno()))
        with ours._lock:
            ours.report_first_step(1)
        with_agent.end()
        ours.report_first_step(1)  # nor by an agent that is gone
        ours._sock.close()
    finally:
        with_agent.close()
    assert with_agent.started == []


def test_stacks_are_dumped_while_c_code_holds_the_interpreters_lock(page: contract.ControlPage, stacks: int) -> None:
    register_stack_dump(page)
    register_stack_dump(page)
    assert signal.SIGRTMIN <= page.stacks <= signal.SIGRTMAX
    assert not os.get_inheritable(stacks)
    asker = subprocess.Popen(
        [sys.executable, "-c", f"import os, time; time.sleep(0.2); os.kill({os.getpid()}, {page.stacks})"]
    )
    ctypes.PyDLL(None).usleep(900_000)  # PyDLL: keeps the lock. The signal cuts it short
    assert asker.wait() == 0
    wait_for(lambda: b"in test_stacks_are_dumped_while_c_code_holds" in os.pread(stacks, 100_000, 0), "stacks")
    text = os.pread(stacks, 100_000, 0).decode()
    assert f'File "{__file__}", line' in text


def test_a_number_that_means_another_file_is_left_alone(
    page: contract.ControlPage, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """As in a program that the script starts: the variable is handed on, the file is not."""
    with (tmp_path / "data").open("wb") as file:
        monkeypatch.setenv(contract.STACKS_FD, str(file.fileno()))
        register_stack_dump(page)
    register_stack_dump(page)  # and now it is none at all
    assert page.stacks == 0


def test_a_program_that_the_script_starts_can_join_a_group_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """It has the agent's variables, and none of what they mean."""
    monkeypatch.setenv(contract.CONTROL_FD, "1000000")
    monkeypatch.setenv(contract.STACKS_FD, "1000001")
    tr.init()


def test_a_signal_that_something_catches_is_not_taken(page: contract.ControlPage, stacks: int) -> None:
    assert stacks
    before = signal.signal(signal.SIGRTMAX, lambda *_: None)
    try:
        register_stack_dump(page)
        assert page.stacks == signal.SIGRTMAX - 1
    finally:
        signal.signal(signal.SIGRTMAX, before)


class _Slow(DistributedDataParallel):
    """Waits for its peers as long as it is told to."""

    wait_s = 0.0

    def _pre_forward(self, *inputs: object, **kwargs: object) -> object:
        time.sleep(self.wait_s)
        return super()._pre_forward(*inputs, **kwargs)


def _slow_sum(state, bucket):  # type: ignore[no-untyped-def] # noqa: ANN001, ANN202 - DDP compares classes, not names
    """Stand in for the sum over all ranks: it is there after `state` seconds."""
    summed: torch.futures.Future[torch.Tensor] = torch.futures.Future()

    def finish() -> None:
        time.sleep(state)
        summed.set_result(bucket.buffer())

    threading.Thread(target=finish).start()
    return summed


@pytest.mark.parametrize("net", [nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))])
def test_own_time_is_what_a_step_takes_without_the_waiting(
    agent: FakeAgent, page: contract.ControlPage, net: nn.Module
) -> None:
    assert agent
    model = _Slow(net)
    model.register_comm_hook(0.1, _slow_sum)
    model.wait_s = 0.1 if any(True for _ in net.buffers()) else 0.0
    state = tr.State(model=model)
    state.restore()

    def step(own_s: float) -> None:
        time.sleep(own_s)
        model(torch.ones(2, 4)).sum().backward()
        with tr.phase("eval"):
            time.sleep(0.05)
        state.commit()

    step(0.0)
    assert page.own_us == 0, "the first one is not counted: it is unlike the others"
    began = time.monotonic()
    for _ in range(10):
        step(0.02)
    passed_s = time.monotonic() - began
    # The sum is on its way a little before the last gradient is there; long before, where this process stops between.
    waited_s = 10 * (0.1 + model.wait_s + 0.05)
    assert 10 * 0.02 <= page.own_us / 1e6 <= passed_s - 0.8 * waited_s


def test_copies_of_a_watched_module_can_be_made_and_saved(
    agent: FakeAgent, page: contract.ControlPage, tmp_path: Path
) -> None:
    """A script keeps its best model as a copy, and saves it whole."""
    assert agent
    model = DistributedDataParallel(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)))
    state = tr.State(model=model)
    state.restore()
    model(torch.ones(2, 4)).sum().backward()
    model(torch.ones(2, 4))
    before = page.own_us
    torch.save(model.module, tmp_path / "module.pt")
    loaded = torch.load(tmp_path / "module.pt", weights_only=False)
    copied = copy.deepcopy(model)
    for each in (loaded, copied, copy.deepcopy(copied)):
        assert each(torch.ones(2, 4)).shape == (2, 4)
    assert page.own_us == before


def test_without_a_ddp_module_own_time_is_unknown(agent: FakeAgent, page: contract.ControlPage) -> None:
    assert agent
    model = nn.Linear(4, 4)
    state = tr.State(model=model)
    state.restore()
    for _ in range(3):
        model(torch.ones(2, 4)).sum().backward()
        state.commit()
    assert page.own_us == 0
