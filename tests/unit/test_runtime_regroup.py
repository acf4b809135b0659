"""What a process of a script with `State.run` does to enter another group: in parts, in a world of one."""

from __future__ import annotations

import copy
import os
import socket
import sys
import threading
from typing import TYPE_CHECKING

import pytest
import torch
import torch.distributed as dist
from fake_agent import start_without_agent
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data.distributed import DistributedSampler

import trainer_runtime as tr
from trainer_runtime import contract
from trainer_runtime.agent_events import AgentEvents
from trainer_runtime.agreement import digest_of_learning_rates, digest_of_parameters
from trainer_runtime.connections import Connections
from trainer_runtime.contents import Contents
from trainer_runtime.dist import _one_excepthook, join_again, membership
from trainer_runtime.regroup import Regrouping, enter_group, find_obstacle
from trainer_runtime.set_up import set_up

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    Opened = tuple[Connections, socket.socket, socket.socket]


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A world of one rank, opened anew."""
    if dist.is_initialized():
        dist.destroy_process_group()
    start_without_agent(monkeypatch)
    set_up.read_at = set_up.group_taken_at = ""
    set_up.samplers.clear()
    tr.init()
    yield
    set_up.end()


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    """Two ends of a TCP connection."""
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as one:
        other, _ = server.accept()
        with other:
            yield one, other


@pytest.fixture
def opened() -> Iterator[tuple[Connections, socket.socket, socket.socket]]:
    """A connection that was opened within the block, of which this process has both ends."""
    connections = Connections()
    with socket.create_server(("127.0.0.1", 0)) as server, connections.recorded():
        one = socket.create_connection(server.getsockname())
        other, _ = server.accept()
    with one, other:
        yield connections, one, other


def test_connections_that_were_opened_before_are_left_alone(
    pair: tuple[socket.socket, socket.socket], opened: Opened
) -> None:
    connections, one, other = opened
    assert not connections.are_broken()
    connections.shut_down()
    assert connections.are_broken()
    assert one.recv(1) == other.recv(1) == b""
    pair[0].sendall(b"x")
    assert pair[1].recv(1) == b"x"


def test_a_descriptor_that_is_another_file_now_is_left_alone(
    pair: tuple[socket.socket, socket.socket], opened: Opened
) -> None:
    connections, one, other = opened
    descriptor = one.fileno()
    other.close()
    os.dup2(pair[0].fileno(), descriptor)
    assert connections.are_broken()
    connections.shut_down()
    pair[0].sendall(b"x")
    assert pair[1].recv(1) == b"x"


def test_a_connection_that_the_other_end_has_closed_is_broken(opened: Opened) -> None:
    connections, _, other = opened
    other.close()
    assert connections.are_broken()


def test_a_late_word_of_the_end_of_a_group_does_not_break_the_next_one(monkeypatch: pytest.MonkeyPatch) -> None:
    page, descriptor = contract.ControlPage.create("late")
    event = os.eventfd(0, os.EFD_NONBLOCK)
    monkeypatch.setenv(contract.GROUP, "5")
    events = AgentEvents(page, event)
    events.begin_group()
    monkeypatch.setenv(contract.GROUP, "6")
    events.begin_group()
    page.over = 5
    os.eventfd_write(event, 1)
    assert not wait_until_over(events, within_s=0.2)
    page.over = 6
    os.eventfd_write(event, 1)
    assert wait_until_over(events, within_s=10.0)
    os.close(descriptor)


def test_torchs_hook_for_exceptions_is_around_the_scripts_own_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise each group would add its rank to the lines of a traceback."""

    def own(*_: object) -> None:
        pass

    monkeypatch.setattr(sys, "excepthook", own)
    for _ in range(3):
        with _one_excepthook():
            assert sys.excepthook is own
            monkeypatch.setattr(sys, "excepthook", lambda *_: None)  # as torch's `init_process_group`
    monkeypatch.setattr(sys, "excepthook", other := lambda *_: None)
    with _one_excepthook():
        assert sys.excepthook is other, "the script has set another one since"


def wait_until_over(events: AgentEvents, within_s: float) -> bool:
    waiting = threading.Event()
    for _ in range(100):
        if events.is_over:
            return True
        waiting.wait(within_s / 100)
    return False


@pytest.mark.usefixtures("world")
def test_a_module_is_wrapped_again_with_its_arguments_hooks_and_mode() -> None:
    module = DistributedDataParallel(nn.Linear(2, 1), bucket_cap_mb=3, find_unused_parameters=True)
    calls = []
    module.register_forward_pre_hook(lambda *_: calls.append(1))
    module.eval()
    module.module.train()
    optimizer = torch.optim.SGD(module.parameters(), lr=1.0)
    module(torch.ones(1, 2)).sum().backward()
    before, reducer, weight = dist.group.WORLD, module.reducer, module.module.weight
    enter_group({"SOME": "x"}, [optimizer], lambda: None)
    assert os.environ.pop("SOME") == "x"
    assert dist.group.WORLD is not before
    assert module.reducer is not reducer
    assert module.module.weight is weight
    assert (module.training, module.module.training) == (False, True)
    assert (module.find_unused_parameters, weight.grad) == (True, None)
    module(torch.ones(1, 2)).sum().backward()
    assert len(calls) == 2
    assert weight.grad is not None
    assert torch.equal(weight.grad, torch.ones(1, 2))


@pytest.mark.usefixtures("world")
def test_a_module_whose_parameters_are_frozen_is_wrapped_as_it_was() -> None:
    module = DistributedDataParallel(nn.Linear(2, 1))
    module.requires_grad_(False)
    enter_group({}, [], lambda: None)
    assert [each.requires_grad for each in module.parameters()] == [False, False]
    module.requires_grad_(True)
    module(torch.ones(1, 2)).sum().backward()
    assert module.module.weight.grad is not None


@pytest.mark.usefixtures("world")
def test_a_copy_of_a_wrapped_module_moves_too() -> None:
    """An AveragedModel of one, or the best one so far: it would go on in the group that it was copied in."""
    module = DistributedDataParallel(nn.Linear(2, 1), static_graph=True)
    copied = copy.deepcopy(module)
    copied.requires_grad_(False)
    weight = copied.module.weight
    for _ in range(2):
        reducer = copied.reducer
        enter_group({}, [], lambda: None)
        assert copied.process_group is dist.group.WORLD
        assert copied.reducer is not reducer
        assert copied.module.weight is weight
        assert not weight.requires_grad
        weight.requires_grad_(True)
        copied(torch.ones(1, 2)).sum().backward()
        assert weight.grad is not None
        weight.requires_grad_(False)
    weight.requires_grad_(True)
    assert copy.deepcopy(copied).process_group is dist.group.WORLD


class Headed(DistributedDataParallel):
    """A wrapper with a part of its own."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__(module)
        self.head = nn.Linear(1, 1)


@pytest.mark.usefixtures("world")
def test_what_a_script_has_added_to_a_wrapped_module_stays() -> None:
    module = Headed(nn.Linear(2, 1))
    module.criterion = nn.MSELoss()
    module.note = "mine"
    module.register_buffer("count", torch.ones(1), persistent=False)
    head, criterion, state = module.head, module.criterion, set(module.state_dict())
    for _ in range(2):
        enter_group({}, [], lambda: None)
        assert (module.head, module.criterion, module.note) == (head, criterion, "mine")
        assert torch.equal(module.count, torch.ones(1))
        assert set(module.state_dict()) == state


@pytest.mark.usefixtures("world")
def test_what_cannot_be_moved_is_named() -> None:
    assert find_obstacle([]) == ""
    sampler = DistributedSampler([1, 2])
    assert "DistributedSampler" in find_obstacle([])
    del sampler
    module = DistributedDataParallel(nn.Linear(2, 1))
    module.register_comm_hook(None, lambda _, bucket: torch.futures.Future().set_result(bucket.buffer()))
    assert "communication hook" in find_obstacle([])
    del module
    own = dist.new_group([0])
    assert "process groups of its own" in find_obstacle([])
    dist.destroy_process_group(own)
    assert find_obstacle([]) == ""


@pytest.mark.usefixtures("world")
def test_a_set_up_that_takes_the_process_group_is_an_obstacle() -> None:
    """It is another one in the next group, and in a process that sets up alone a group of one, without an error."""
    DistributedDataParallel(nn.Linear(2, 1))
    dist.barrier()
    assert find_obstacle([]) == "", "torch's own functions take it each time"
    with set_up.paused():
        assert dist.group.WORLD
    assert find_obstacle([]) == "", "what is called in each group may take it"
    group = dist.group.WORLD
    assert "takes dist.group.WORLD at test_runtime_regroup.py:" in find_obstacle([])
    set_up.end()
    assert dist.GroupMember.WORLD is group
    assert type(dist.group).WORLD.fget.__module__ == dist.distributed_c10d.__name__, "torch's own again"


@pytest.mark.usefixtures("world")
def test_where_a_set_up_reads_its_rank_is_noted_and_torchs_functions_come_back() -> None:
    noting = dist.get_rank
    assert not set_up.read_at
    DistributedDataParallel(nn.Linear(2, 1))
    assert not set_up.read_at, "only the script's own calls count"
    for ask in (dist.get_rank, dist.get_world_size, tr.rank, tr.world_size, tr.is_main):
        set_up.read_at = ""
        ask()
        assert set_up.read_at.startswith("test_runtime_regroup.py:")
    fixed, varying = (tr.DataLoader(range(16), **size) for size in ({"global_batch": 4}, {"batch_size": 4}))
    for read in (len, lambda loader: loader.steps_per_epoch, lambda loader: loader.global_batch):
        set_up.read_at = ""
        read(fixed)
        assert not set_up.read_at, "it is the same in every world"
        read(varying)
        assert set_up.read_at.startswith("test_runtime_regroup.py:")
    set_up.read_at = ""
    in_parts = tr.DataLoader(range(16), global_batch=4, micro_batch=2)
    assert (in_parts.steps_per_epoch, in_parts.global_batch, set_up.read_at) == (4, 4, "")
    assert (len(in_parts), set_up.read_at[:24]) == (8, "test_runtime_regroup.py:")
    set_up.end()
    assert dist.get_rank is not noting


@pytest.mark.usefixtures("world")
def test_a_process_that_sets_up_alone_knows_its_place_and_is_not_the_main_one(monkeypatch: pytest.MonkeyPatch) -> None:
    dist.destroy_process_group()
    monkeypatch.setenv(contract.SETUP, "alone")
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "3")
    tr.init()
    assert (tr.rank(), tr.world_size(), tr.is_main()) == (0, 3, False)
    assert dist.get_world_size() == 1
    dist.destroy_process_group()
    for name in (contract.SETUP, "RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name)
    join_again()
    assert (tr.rank(), tr.world_size(), tr.is_main()) == (0, 1, True)
    assert not membership.is_alone


def test_a_digest_shows_another_learning_rate_and_another_parameter() -> None:
    module = nn.Linear(300, 7)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    rates, parameters = digest_of_learning_rates([optimizer]), digest_of_parameters([module])
    assert rates == digest_of_learning_rates([optimizer])
    assert parameters == digest_of_parameters([module])
    optimizer.param_groups[0]["lr"] = 0.2
    assert rates != digest_of_learning_rates([optimizer])
    with torch.no_grad():
        module.bias += 1
    assert parameters != digest_of_parameters([module])
    assert max(rates, parameters) < 2**24


@pytest.mark.usefixtures("world")
def test_what_cannot_be_run_is_refused_with_what_to_do(tmp_path: Path) -> None:
    state = tr.State(checkpoint_dir=tmp_path, model=nn.Linear(1, 1))
    with pytest.raises(RuntimeError, match=r"state\.run\(train\), not what it has returned"):
        state.run(None)
    assert state.run(lambda: 3) == 3
    with pytest.raises(RuntimeError, match="got a second one"):
        state.run(lambda: 3)
    other = tr.State(checkpoint_dir=tmp_path / "other", model=nn.Linear(1, 1))
    other.restore()
    with pytest.raises(RuntimeError, match=r"before state\.restore\(\) and state\.epochs\(\)"):
        other.run(lambda: 3)


@pytest.mark.usefixtures("world")
def test_torchs_modes_are_those_that_run_began_with_when_train_is_called_again() -> None:
    """An evaluation may have been interrupted that had switched gradients off by a call."""
    regrouping = Regrouping(Contents({"model": nn.Linear(1, 1)}), None, None)
    regrouping.begin()
    torch.set_grad_enabled(False)
    torch.set_default_dtype(torch.float64)
    try:
        regrouping.reset_modules()
        assert torch.is_grad_enabled()
        assert torch.get_default_dtype() == torch.float32
    finally:
        torch.set_grad_enabled(True)
        torch.set_default_dtype(torch.float32)
