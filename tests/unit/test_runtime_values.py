"""What may be saved, and modules saved as if nothing wrapped them."""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from flattened import written
from torch import nn

import trainer_runtime as tr
from trainer_runtime.contents import Contents
from trainer_runtime.flat import Flattener, unflatten
from trainer_runtime.hostcopy import HostCopier
from trainer_runtime.values import as_floats, finite_or_none, load_state, read_state, require_loadable

if TYPE_CHECKING:
    from collections.abc import Callable

# torch.compile's own import uses what torch deprecates.
pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated")


@pytest.fixture(scope="module", autouse=True)
def _world_of_one() -> None:
    tr.init()


class Net(nn.Module):
    """Two layers with buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(2, 3)
        self.norm = nn.BatchNorm1d(3)

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.norm(self.first(batch))
        return result


def part_compiled() -> Net:
    net = Net()
    net.first = torch.compile(net.first)  # type: ignore[assignment]
    return net


WRAPPINGS = {
    "plain": Net,
    "ddp": lambda: nn.parallel.DistributedDataParallel(Net()),
    "compiled": lambda: torch.compile(Net()),
    "ddp of compiled": lambda: nn.parallel.DistributedDataParallel(torch.compile(Net())),
    "compiled ddp": lambda: torch.compile(nn.parallel.DistributedDataParallel(Net())),
    "one layer compiled": part_compiled,
}


@pytest.mark.parametrize("saved_as", WRAPPINGS)
@pytest.mark.parametrize("loaded_as", WRAPPINGS)
def test_wrapping_leaves_no_trace_in_a_checkpoint(saved_as: str, loaded_as: str) -> None:
    source, target = WRAPPINGS[saved_as](), WRAPPINGS[loaded_as]()
    state = read_state(source)
    assert list(state) == list(Net().state_dict())
    load_state(target, state)
    for name, tensor in read_state(target).items():
        assert torch.equal(tensor, state[name]), name


def test_a_child_that_is_called_module_is_no_wrapper() -> None:
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.module, self.head = nn.Linear(1, 1), nn.Linear(1, 1)

    assert {key.split(".")[0] for key in read_state(Odd())} == {"module", "head"}


@pytest.mark.parametrize(
    "value",
    [
        1,
        0.5,
        "text",
        True,
        None,
        torch.ones(2),
        nn.Parameter(torch.ones(2)),
        [1, (2.0, {"deep": [None, torch.ones(1)]})],
        OrderedDict(a=1),
        torch.float16,
        torch.ones(2).to_sparse(),
        torch.ones(2, requires_grad=True) * 2,
    ],
)
def test_what_loads_back_is_accepted(value: object) -> None:
    require_loadable("value", value)


class Mine:
    """An object of the user's that has no state_dict."""


@pytest.mark.parametrize(
    ("value", "blamed"),
    [
        (Mine(), r"value: .* got .*Mine;"),
        (lambda: 0, r"value: .* got builtins.function;"),
        (Fraction(1, 2), r"value: .* got fractions.Fraction;"),
        ({"a": [1, {"path": Path()}]}, r"value\['a'\]\[1\]\['path'\]: .* got pathlib\.(_local\.)?PosixPath;"),
        ([torch.ones(1), (Mine(),)], r"value\[1\]\[0\]: .* got .*Mine;"),
        (defaultdict(int, a=1), r"value: .* got collections.defaultdict;"),
        ({Mine(): 1}, r"value: .* got builtins.dict;"),
        (torch.ones(1).numpy()[0], r"value: .* got numpy.float32;"),
    ],
)
def test_what_does_not_is_refused_by_its_place(value: object, blamed: str) -> None:
    with pytest.raises(TypeError, match=f"State cannot save {blamed}"):
        require_loadable("value", value)


def test_metrics_become_numbers_that_json_can_hold() -> None:
    given = {"a": 1, "b": torch.tensor([2.5], requires_grad=True), "c": float("nan"), "d": torch.tensor(torch.inf)}
    assert finite_or_none(as_floats(given)) == {"a": 1.0, "b": 2.5, "c": None, "d": None}


def test_a_metric_that_is_no_number_is_named() -> None:
    with pytest.raises(TypeError, match=r"commit\(loss=...\) wants a number or a tensor with one element"):
        as_floats({"loss": torch.ones(3)})


def sgd() -> torch.optim.Optimizer:
    return torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=0.1)


def take_step(optimizer: torch.optim.Optimizer) -> None:
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.grad = torch.ones_like(parameter)
    optimizer.step()


def two_groups() -> torch.optim.Optimizer:
    one, two = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(3))
    return torch.optim.Adam([{"params": [one], "lr": 0.5}, {"params": [two]}], amsgrad=True)


def in_a_row() -> object:
    optimizer = sgd()
    parts = [schedulers.ConstantLR(optimizer), schedulers.MultiStepLR(optimizer, [2])]
    return schedulers.SequentialLR(optimizer, parts, milestones=[2])


schedulers = torch.optim.lr_scheduler
STATEFUL: dict[str, tuple[Callable[[], Any], Callable[[Any], object]]] = {
    "model": (Net, lambda net: net(torch.rand(4, 2))),
    "average": (lambda: torch.optim.swa_utils.AveragedModel(Net()), lambda average: average.update_parameters(Net())),
    "scaler": (lambda: torch.amp.GradScaler("cpu"), lambda scaler: (scaler.scale(torch.ones(1)), scaler.update(4.0))),
    "momentum": (lambda: torch.optim.SGD(Net().parameters(), lr=0.1, momentum=0.9), take_step),
    "adamw": (lambda: torch.optim.AdamW(Net().parameters()), take_step),
    "two groups": (two_groups, take_step),
    "step": (lambda: schedulers.StepLR(sgd(), 1), lambda schedule: schedule.step()),
    "several steps": (lambda: schedulers.MultiStepLR(sgd(), [1, 3]), lambda schedule: schedule.step()),
    "lambda": (lambda: schedulers.LambdaLR(sgd(), lambda step: 0.5**step), lambda schedule: schedule.step()),
    "cosine": (lambda: schedulers.CosineAnnealingWarmRestarts(sgd(), 3), lambda schedule: schedule.step()),
    "one cycle": (lambda: schedulers.OneCycleLR(sgd(), 0.1, total_steps=9), lambda schedule: schedule.step()),
    "plateau": (lambda: schedulers.ReduceLROnPlateau(sgd()), lambda schedule: schedule.step(1.0)),
    "in a row": (in_a_row, lambda schedule: schedule.step()),
}


def through_a_file(state: object, directory: Path) -> Any:  # noqa: ANN401 - as it was
    torch.save(HostCopier().copy(state), directory / "state.pt")
    return torch.load(directory / "state.pt", weights_only=True)


def through_memory(state: object, _directory: Path) -> Any:  # noqa: ANN401 - as it was
    return unflatten(written(Flattener().flatten(state)))


# The schedulers are stepped without their optimizer here.
@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step")
@pytest.mark.parametrize("through", [through_a_file, through_memory])
@pytest.mark.parametrize(("new", "advance"), STATEFUL.values(), ids=STATEFUL)
def test_what_scripts_are_made_of_comes_back(
    tmp_path: Path, new: Callable[[], Any], advance: Callable[[Any], object], through: Callable[[object, Path], Any]
) -> None:
    source, target = new(), new()
    advance(source)
    state = read_state(source)
    require_loadable("thing", state)
    assert str(state) != str(read_state(target)), "else there was nothing to bring back"
    load_state(target, through(state, tmp_path))
    assert str(read_state(target)) == str(state)


def test_only_what_the_script_gave_is_restored_in_place() -> None:
    """A process that stays in its job restores over what it has trained with: other shapes, or views of its data."""
    data, average, top = torch.arange(6.0).reshape(3, 2), torch.zeros(2), list[torch.Tensor]()
    contents = Contents({"memory": None, "best": None, "hardest": None, "average": average, "top": top})
    contents.note_given()

    def train(row: int) -> None:
        memory = contents.get("memory")
        contents.set("memory", torch.ones(1) if memory is None else torch.cat([memory, torch.ones(1)]))
        contents.set("hardest", data[row])
        top[:] = [data[row]]
        average.add_(1)

    train(0)
    saved, part = HostCopier().copy(contents.read()), contents.parts.read()
    train(2)
    contents.set("best", {"weight": torch.zeros(1)})
    contents.load(saved, part)
    assert data.tolist() == [[0.0, 1.0], [2.0, 3.0], [4.0, 5.0]]
    assert contents.get("memory").tolist() == [1.0]
    assert contents.get("best") is None
    assert contents.get("hardest").tolist() == [0.0, 1.0]
    assert (contents.get("top") is top, [each.tolist() for each in top]) == (True, [[0.0, 1.0]])
    assert (contents.get("average") is average, average.tolist()) == (True, [1.0, 1.0])
