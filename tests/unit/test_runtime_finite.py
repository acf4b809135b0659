"""The guard against steps that end in NaN: what it sees, what it says, and that such a step does not count."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch
from fake_agent import start_without_agent
from torch import nn

import trainer_runtime as tr
from trainer_runtime import contract

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


@pytest.fixture(autouse=True)
def _start(monkeypatch: pytest.MonkeyPatch) -> None:
    """Begin without an agent's variables."""
    start_without_agent(monkeypatch)


def a_state(directory: Path, model: nn.Module, *, check_finite: bool = True) -> tr.State:
    state = tr.State(model=model, checkpoint_dir=directory, save_every=1, check_finite=check_finite)
    state.restore()
    state.commit(loss=1.0)
    return state


def refusal(state: tr.State, capsys: pytest.CaptureFixture[str], **metrics: float | torch.Tensor) -> str:
    """What is said at a commit that ends the job."""
    with pytest.raises(SystemExit) as ended:
        state.commit(**metrics)
    assert ended.value.code == contract.EXIT_NO_RESTART
    assert state.step == 1, "it does not count"
    return capsys.readouterr().err


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_a_weight_that_is_not_finite_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str], value: float) -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    state = a_state(tmp_path, model)
    with torch.no_grad():
        model[0].bias[1] = value
    assert "step 2 is not finite: model.0.bias; it does not count, and the job stops at step 1" in refusal(
        state, capsys
    )


def test_so_is_a_running_statistic_and_a_metric(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    state = a_state(tmp_path, model)
    model[1].running_mean[0] = float("nan")
    said = refusal(state, capsys, loss=torch.tensor(float("nan")), accuracy=0.5)
    assert "loss, model.1.running_mean; it" in said


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta state")
@pytest.mark.parametrize("sparse", [torch.Tensor.to_sparse, torch.Tensor.to_sparse_csr])
def test_so_is_a_sparse_buffer(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], sparse: Callable[[torch.Tensor], torch.Tensor]
) -> None:
    """As long as it is finite it passes."""
    model = nn.Linear(2, 2)
    model.register_buffer("adjacency", sparse(torch.eye(2)))
    state = a_state(tmp_path, model)
    model.adjacency = sparse(torch.eye(2) / 0)
    assert "model.adjacency; it" in refusal(state, capsys)


def test_an_infinite_gradient_is_the_scaler_s_business(tmp_path: Path) -> None:
    """It leaves such a step out by itself, and the weights stay as they were."""
    model = nn.Linear(2, 2)
    state = a_state(tmp_path, model)
    model.weight.grad = torch.full((2, 2), float("inf"))
    state.commit(loss=1.0)
    assert state.step == 2


def test_many_are_counted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = nn.Sequential(*(nn.Linear(1, 1) for _ in range(4)))
    state = a_state(tmp_path, model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(float("nan"))
    assert "model.2.weight and 3 more; it" in refusal(state, capsys)


def test_what_is_finite_passes_and_without_the_guard_all_does(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    state = a_state(tmp_path / "guarded", model)
    state.commit(loss=0.5)
    assert state.step == 2
    unguarded = a_state(tmp_path / "unguarded", nn.Linear(2, 2), check_finite=False)
    unguarded.commit(loss=float("nan"))
    assert unguarded.step == 2


def test_the_newest_checkpoint_is_from_before(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = nn.Linear(2, 2)
    state = a_state(tmp_path, model)
    kept = model.weight.detach().clone()
    with torch.no_grad():
        model.weight.fill_(float("nan"))
    refusal(state, capsys)
    again = nn.Linear(2, 2)
    resumed = tr.State(model=again, checkpoint_dir=tmp_path)
    state.save()
    resumed.restore()
    assert resumed.step == 1
    assert torch.equal(again.weight, kept)
