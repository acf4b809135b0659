"""Learning rates for a global batch that grows and shrinks with the world size.

By default this is not needed: with `DataLoader(global_batch=...)` a step takes the same samples in every world. With
`DataLoader(batch_size=...)` a step takes `batch_size` samples per rank, and a resize multiplies the learning rate.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, Literal, cast

from trainer_runtime.data import DataLoader

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from torch.optim import Optimizer
    from torch.optim.lr_scheduler import LRScheduler

LrScaling = Literal["linear", "sqrt"]
"""Proportional to the world size, or to its square root."""

_RATES_OF_GROUP = ("lr", "initial_lr", "max_lr", "min_lr", "swa_lr")  # the last three belong to OneCycleLR and SWALR
_RATES_OF_SCHEDULER = ("base_lrs", "max_lrs", "min_lrs", "eta_min", "_last_lr")


def rescale(optimizers: Iterable[Optimizer], schedulers: Iterable[LRScheduler], factor: float) -> None:
    """Multiply the learning rates, both the present ones and all that the schedulers compute from now on.

    The schedules keep their shape: every later rate is `factor` times what it would have been.

    Args:
        optimizers: the optimizers, each once.
        schedulers: the schedulers of these optimizers; those inside a SequentialLR or ChainedScheduler are included.
        factor: new rate divided by old rate.

    Raises:
        ValueError: `factor` is not above 0.
    """
    if not factor > 0:
        raise ValueError(f"wanted a factor above 0, got {factor}")
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            _multiply(group, _RATES_OF_GROUP, factor)
    every = {id(scheduler): scheduler for given in schedulers for scheduler in _with_inner(given)}
    for scheduler in every.values():
        _multiply(vars(scheduler), _RATES_OF_SCHEDULER, factor)


def require_lr_scaling(lr_scaling: str) -> LrScaling:
    """Return `lr_scaling`; ValueError if it is not a rule by which learning rates are scaled."""
    if lr_scaling not in {"linear", "sqrt"}:
        raise ValueError(f"wanted lr_scaling of 'linear', 'sqrt' or None, got {lr_scaling!r}")
    return cast("LrScaling", lr_scaling)


def factor_of(lr_scaling: LrScaling, old_world: int, new_world: int) -> float:
    """Return the factor by which learning rates change with the world size."""
    ratio = new_world / old_world
    return ratio if lr_scaling == "linear" else math.sqrt(ratio)


def require_growing_batch(loader: object, lr_scaling: str | None) -> None:
    """Reject learning-rate scaling if the loader's global batch does not change with the world size.

    Raises:
        ValueError: `lr_scaling` is set, and the loader has a `global_batch`.
    """
    if lr_scaling is not None and isinstance(loader, DataLoader) and loader.batch_size is None:
        raise ValueError(
            f"lr_scaling={lr_scaling!r} and DataLoader(global_batch={loader.global_batch}) cannot be combined: the "
            "global batch stays the same in every world, so the learning rate must too; leave out lr_scaling, or make "
            "the loader with batch_size=... (samples of a step for each rank)"
        )


def _with_inner(scheduler: Any) -> Iterator[Any]:  # noqa: ANN401 - `_schedulers` is in no type
    yield scheduler
    for inner in getattr(scheduler, "_schedulers", ()):
        yield from _with_inner(inner)


def _multiply(holder: dict[str, Any], names: tuple[str, ...], factor: float) -> None:
    for name in names:
        if name in holder:
            holder[name] = _scaled(holder[name], factor)


def _scaled(rate: Any, factor: float) -> Any:  # noqa: ANN401 - a number, a tensor, or a list of these
    return [_scaled(part, factor) for part in rate] if isinstance(rate, list) else rate * factor
