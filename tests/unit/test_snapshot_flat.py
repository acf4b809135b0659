"""The flat form of a state, when snapshots are due, and how much memory is free."""

from __future__ import annotations

import os
from collections import Counter, OrderedDict
from typing import TYPE_CHECKING, Any

import pytest
import torch
from flattened import written
from torch import nn

from trainer_runtime.flat import Flattener, UnknownKindError, unflatten
from trainer_runtime.free_memory import free_memory
from trainer_runtime.hostcopy import HostCopier
from trainer_runtime.snapshot_page import KEPT, SLOTS, Slot, create_memory, read_slots
from trainer_runtime.snapshot_schedule import Schedule, first_schedule, next_schedule, schedule_of, text_of

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


def through(value: object) -> Any:  # noqa: ANN401 - as it was
    return unflatten(written(Flattener().flatten(value)))


@pytest.mark.parametrize(
    "value",
    [
        1,
        (1, [2.5, None, "x", b"y", True, 1j]),
        {"a": OrderedDict([(3, ((), {}))]), "b": torch.float16, "c": torch.Size([2])},
        tuple(range(700)),
        [Counter("abca"), {1, 2}, {"deep": bytearray(b"x")}, ({3}, 4)],
    ],
)
def test_plain_values_come_back_as_they_were(value: object) -> None:
    assert through(value) == value


@pytest.mark.parametrize(
    "tensor",
    [
        torch.arange(6).view(2, 3).t(),
        torch.arange(9, dtype=torch.bfloat16)[2:7:2],
        torch.tensor(3.5),
        torch.empty(0, 4),
        torch.tensor([True, False]),
        torch.tensor([1 + 2j]).conj(),
        torch.eye(3).to_sparse(),
        nn.Parameter(torch.ones(2), requires_grad=False),
        torch.ones(2, requires_grad=True),
    ],
)
def test_tensors_come_back_as_they_were(tensor: torch.Tensor) -> None:
    (found,) = through([tensor])
    assert (type(found), found.dtype, found.shape, found.layout) == (
        type(tensor),
        tensor.dtype,
        tensor.shape,
        tensor.layout,
    )
    assert torch.equal(found.to_dense(), tensor.to_dense())
    assert found.requires_grad == tensor.requires_grad


def test_what_shares_memory_is_there_once_and_shares_it_again() -> None:
    whole = torch.zeros(100_000)
    flat = Flattener().flatten({"a": whole, "b": whole[10:20]})
    assert flat.bytes < 2 * 400_000
    found = unflatten(written(flat))
    found["a"][10] = 5
    assert found["b"][0] == 5


def test_a_models_state_keeps_the_versions_of_its_parts() -> None:
    state = nn.BatchNorm1d(2).state_dict()
    assert through({"model": state})["model"]._metadata == state._metadata  # type: ignore[attr-defined]


@pytest.fixture
def elsewhere() -> Iterator[None]:
    """Make tensors where the script says, which is not where states lie in memory."""
    torch.set_default_device("meta")
    yield
    torch.set_default_device(None)


@pytest.mark.usefixtures("elsewhere")
def test_a_state_comes_back_on_the_cpu_wherever_tensors_are_made() -> None:
    state = [torch.ones(2, device="cpu"), torch.empty(0, device="cpu"), torch.eye(3, device="cpu").to_sparse(), {1}]
    for found in (through(state), HostCopier().copy(state)):
        assert [str(each.device) for each in found[:3]] == ["cpu"] * 3
        assert [found[0].tolist(), found[2].to_dense().tolist(), found[3]] == [
            [1, 1],
            [[1, 0, 0], [0, 1, 0], [0, 0, 1]],
            {1},
        ]


def test_classes_that_the_user_declares_safe_are_restored_with_their_tensors() -> None:
    with torch.serialization.safe_globals([Mine]):
        assert torch.equal(through({"mine": Mine(torch.arange(3))})["mine"].weight, torch.arange(3))


class Mine:
    """A class that no loader knows by itself."""

    def __init__(self, weight: torch.Tensor) -> None:
        self.weight = weight


@pytest.mark.parametrize("value", [object(), {"a": [frozenset({1})]}, (print,), {object()}])
def test_what_would_not_load_back_is_refused(value: object) -> None:
    with pytest.raises(UnknownKindError, match="wanted what loads back, got builtins"):
        Flattener().flatten(value)


def test_so_are_keys_that_would_not() -> None:
    flattener = Flattener()
    flattener.flatten({"counts": {}})
    with pytest.raises(UnknownKindError, match="wanted keys that load back"):
        flattener.flatten({"counts": {torch.ones(1).numpy()[0]: 1}})


def test_so_is_what_would_have_loaded_back_before() -> None:
    flattener, value = Flattener(), {1}
    flattener.flatten([value])
    value.add(2)
    assert unflatten(written(flattener.flatten([value]))) == [{1, 2}]
    value.add(object())  # type: ignore[arg-type] # as scripts may
    with pytest.raises(UnknownKindError, match=r"got builtins\.set"):
        flattener.flatten([value])


def test_what_was_found_out_before_holds_only_for_the_same_tensors() -> None:
    flattener = Flattener()
    model = nn.Linear(2, 2)
    first = flattener.flatten(model.state_dict()).layout
    with torch.no_grad():
        model.weight.add_(1)
    again = flattener.flatten(model.state_dict())
    assert again.layout is first
    assert torch.equal(unflatten(written(again))["weight"], model.weight)
    model.weight = nn.Parameter(torch.ones(2, 2))
    other = flattener.flatten(model.state_dict())
    assert other.layout is not first
    assert torch.equal(unflatten(written(other))["weight"], torch.ones(2, 2))


def test_values_that_take_a_little_more_room_move_nothing() -> None:
    """What stands behind them, and the places that were worked out for it, stay as they are."""
    assert len({Flattener().flatten([[10**digits], torch.ones(3)]).bytes for digits in range(100)}) == 1


def test_a_schedule_is_the_same_on_all_ranks_and_ends_as_defined() -> None:
    schedule = Schedule(anchor=10, every=4, until=22)
    assert [schedule.after(step) for step in (10, 11, 13, 14, 18)] == [14, 14, 14, 18, 22]
    assert schedule_of(text_of(schedule)) == schedule
    assert schedule_of(text_of(None)) is None
    assert first_schedule(5) == Schedule(5, 2, 7 + 2 * KEPT)


def settle(number: int, step: int, *, cost_s: float = 0.0, busy_s: float = 0.0) -> Schedule:
    return next_schedule(number, step, cost_s=cost_s, step_s=1.0, overhead=0.01, busy_s=busy_s)


@pytest.mark.parametrize(("cost_s", "every"), [(0.0, 2), (0.02, 2), (0.0201, 3), (0.1, 10), (7.0, 700)])
def test_what_a_snapshot_takes_stays_below_the_share_allowed(cost_s: float, every: int) -> None:
    assert settle(1, 100, cost_s=cost_s) == Schedule(100, every, 100 + 2 * every)


@pytest.mark.parametrize(("busy_s", "every"), [(0.0, 2), (0.9, 2), (1.1, 3), (10.0, 20)])
def test_parts_were_sent_in_half_of_the_interval(busy_s: float, every: int) -> None:
    assert settle(1, 100, busy_s=busy_s) == Schedule(100, every, 100 + 2 * every)


def test_what_is_measured_is_settled_more_and_more_rarely() -> None:
    periods = [settle(number, 0).until for number in range(1, 9)]
    assert periods == [4, 8, 16, 32, 64, 128, 128, 128]


def test_a_memory_that_no_rank_has_written_holds_nothing() -> None:
    descriptor = create_memory("test")
    assert read_slots(descriptor) == ()
    os.ftruncate(descriptor, 4096)
    assert read_slots(descriptor) == ()
    os.close(descriptor)
    assert (SLOTS, KEPT, Slot.__slots__[0]) == (3, 2, "seq")


def write(root: Path, **files: str) -> None:
    for name, text in files.items():
        path = root / name.replace("__", "/").replace("_DOT_", ".")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


@pytest.mark.parametrize(
    ("limit", "used", "cache", "free"), [("max", 0, 0, 9 << 20), (str(8 << 20), 5 << 20, 1 << 20, 4 << 20)]
)
def test_free_memory_is_what_the_groups_leave(tmp_path: Path, limit: str, used: int, cache: int, free: int) -> None:
    """What is cached may be taken; a group in the way of a path that a container does not see is left out."""
    job = "sys__fs__cgroup__job__memory"
    write(tmp_path, proc__meminfo="MemTotal: 20480 kB\nMemAvailable: 9216 kB\n", proc__self__cgroup="0::/job/worker\n")
    write(tmp_path, **{f"{job}_DOT_max": limit, f"{job}_DOT_current": str(used)})
    write(tmp_path, **{f"{job}_DOT_stat": f"inactive_file {cache}\n"})
    assert free_memory(tmp_path) == free


def test_free_memory_is_known_under_the_older_kind_of_groups(tmp_path: Path) -> None:
    job = "sys__fs__cgroup__memory__job__memory"
    write(tmp_path, proc__meminfo="MemAvailable: 9216 kB\n", proc__self__cgroup="7:cpu:/\n5:memory:/job\n")
    write(tmp_path, **{f"{job}_DOT_limit_in_bytes": str(4 << 20), f"{job}_DOT_usage_in_bytes": str(3 << 20)})
    write(tmp_path, **{f"{job}_DOT_stat": f"total_inactive_file {1 << 19}\n"})
    assert free_memory(tmp_path) == 3 << 19


def test_free_memory_of_this_machine_is_some() -> None:
    assert free_memory() > 1 << 20
