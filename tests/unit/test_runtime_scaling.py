"""Learning rates after a resize: the same schedule at another height."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, lr_scheduler
from torch.optim.swa_utils import SWALR

import trainer_runtime as tr
from trainer_runtime.scaling import require_growing_batch, rescale

if TYPE_CHECKING:
    from collections.abc import Callable

SCHEDULES: dict[str, Callable[[SGD], Any]] = {
    "lambda": lambda opt: lr_scheduler.LambdaLR(opt, lambda step: 1 / (1 + step)),
    "multiplicative": lambda opt: lr_scheduler.MultiplicativeLR(opt, lambda _: 0.9),
    "steps": lambda opt: lr_scheduler.StepLR(opt, 3),
    "exponential": lambda opt: lr_scheduler.ExponentialLR(opt, 0.9),
    "warm-up": lambda opt: lr_scheduler.LinearLR(opt, total_iters=8),
    "polynomial": lambda opt: lr_scheduler.PolynomialLR(opt, 10),
    "cosine": lambda opt: lr_scheduler.CosineAnnealingLR(opt, 10, eta_min=0.01),
    "warm restarts": lambda opt: lr_scheduler.CosineAnnealingWarmRestarts(opt, 4, eta_min=0.01),
    "one cycle": lambda opt: lr_scheduler.OneCycleLR(opt, 0.5, total_steps=12),
    "cyclic": lambda opt: lr_scheduler.CyclicLR(opt, 0.1, 0.5, step_size_up=3),
    "averaging": lambda opt: SWALR(opt, swa_lr=0.02, anneal_epochs=5),
    "warm-up, then cosine": lambda opt: lr_scheduler.SequentialLR(
        opt, [lr_scheduler.LinearLR(opt, total_iters=6), lr_scheduler.CosineAnnealingLR(opt, 6)], milestones=[6]
    ),
    "chained": lambda opt: lr_scheduler.ChainedScheduler(
        [lr_scheduler.LinearLR(opt, total_iters=6), lr_scheduler.ExponentialLR(opt, 0.9)]
    ),
}


def rates(schedule: Callable[[SGD], Any], *, rescaled_at: int | None = None, factor: float = 1.5) -> list[list[float]]:
    """Return the learning rates of two groups over 12 steps."""
    first, second = nn.Parameter(torch.ones(1)), nn.Parameter(torch.ones(1))
    opt = SGD([{"params": [first]}, {"params": [second], "lr": 0.2}], lr=0.1, momentum=0.9)
    scheduler = schedule(opt)
    seen = []
    for step in range(11):
        if step == rescaled_at:
            rescale([opt], [scheduler], factor)
        seen.append([float(group["lr"]) for group in opt.param_groups])
        assert scheduler.get_last_lr() == pytest.approx(seen[-1]), "what a log shows is what is used"
        opt.step()
        scheduler.step()
    return seen


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("at", [0, 4])
def test_every_later_rate_is_that_much_higher(name: str, at: int) -> None:
    """Whatever the schedule: its shape stays, floors and peaks included."""
    plain, scaled = rates(SCHEDULES[name]), rates(SCHEDULES[name], rescaled_at=at)
    assert scaled[:at] == plain[:at]
    for before, after in zip(plain[at:], scaled[at:], strict=True):
        assert after == pytest.approx([1.5 * rate for rate in before])


def test_the_floor_of_a_plateau_schedule_moves_along() -> None:
    opt = SGD([nn.Parameter(torch.ones(1))], lr=0.1)
    scheduler = lr_scheduler.ReduceLROnPlateau(opt, patience=0, factor=0.1, min_lr=0.05)
    rescale([opt], [scheduler], 2.0)
    for _ in range(3):
        scheduler.step(1.0)
    assert opt.param_groups[0]["lr"] == pytest.approx(0.1)


def test_a_rate_in_a_tensor_is_scaled_once_for_all_groups() -> None:
    """Groups share the tensor that the optimizer was given."""
    opt = SGD([{"params": [nn.Parameter(torch.ones(1))]} for _ in range(2)], lr=torch.tensor(0.1))
    rescale([opt], [], 3.0)
    assert [float(group["lr"]) for group in opt.param_groups] == pytest.approx([0.3, 0.3])


def test_a_schedule_that_is_given_alone_and_inside_another_is_scaled_once() -> None:
    opt = SGD([nn.Parameter(torch.ones(1))], lr=0.1)
    inner = lr_scheduler.StepLR(opt, 3)
    rescale([opt], [inner, lr_scheduler.ChainedScheduler([inner])], 2.0)
    assert inner.base_lrs == pytest.approx([0.2])


@pytest.mark.parametrize("factor", [0.0, -1.0, float("nan")])
def test_a_factor_is_above_zero(factor: float) -> None:
    with pytest.raises(ValueError, match="wanted a factor above 0"):
        rescale([], [], factor)


def test_scaling_and_a_constant_global_batch_exclude_each_other() -> None:
    """Either alone is fine, and so is a loader of another kind, which nobody can know."""
    constant, growing = tr.DataLoader([1, 2], global_batch=2), tr.DataLoader([1, 2], batch_size=1)
    with pytest.raises(ValueError, match=r"lr_scaling='linear' and DataLoader\(global_batch=2\) cannot be combined"):
        require_growing_batch(constant, "linear")
    require_growing_batch(constant, None)
    require_growing_batch(growing, "sqrt")
    require_growing_batch(object(), "sqrt")
