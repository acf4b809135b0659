"""Guard against steps that end in NaN or infinity: the job stops before such a step counts, and reports where.

A restart would reach the same step again, so the rank exits with the code that forbids a restart. What was saved before
is finite. A person has to decide what to change before the job continues from there.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import NoReturn

import torch
from torch import nn

from trainer_runtime.checkpoint import refuse

_NAMED = 5


class FiniteGuard:
    """Checks the parameters and buffers of modules, and the metrics that are committed with a step.

    Gradients are not checked: a `GradScaler` meets infinite gradients now and then, and skips such a step itself.
    """

    def __init__(self, modules: Mapping[str, nn.Module]) -> None:
        self._modules = modules

    def check(self, step: int, metrics: Mapping[str, float | torch.Tensor]) -> None:
        """Exit if a value is not finite. Synchronizes once with each device.

        Raises:
            SystemExit: with `EXIT_NO_RESTART`; a line on stderr names the values.
        """
        named = [(name, _dense(_local(tensor))) for name, tensor in self._tensors(metrics)]
        names, tensors = [name for name, _ in named], [tensor for _, tensor in named]
        if not tensors:
            return
        if not (finite := _are_finite(tensors)).all():
            _stop(step, [name for name, is_finite in zip(names, finite.tolist(), strict=True) if not is_finite])

    def _tensors(self, metrics: Mapping[str, float | torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
        for name, value in metrics.items():
            yield name, value.detach() if isinstance(value, torch.Tensor) else torch.tensor(value, device="cpu")
        for name, module in self._modules.items():
            for at, tensor in (*module.named_parameters(name), *module.named_buffers(name)):
                if tensor.is_floating_point() or tensor.is_complex():
                    yield at, tensor.detach()


def _are_finite(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return one bool per tensor, on the CPU. Synchronizes once with each device."""
    found = torch.empty(len(tensors), dtype=torch.bool, device="cpu")
    for device in {tensor.device for tensor in tensors}:
        places = [place for place, tensor in enumerate(tensors) if tensor.device == device]
        found[places] = torch.stack([tensors[place].isfinite().all() for place in places]).cpu()
    return found


def _local(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's shard of a sharded tensor: each rank checks its own."""
    part: torch.Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return part


def _dense(tensor: torch.Tensor) -> torch.Tensor:
    """Return the values of a sparse tensor: on the CPU, nothing else of it can be checked."""
    if tensor.layout is torch.strided:
        return tensor
    return (tensor.coalesce() if tensor.is_sparse else tensor).values()


def _stop(step: int, wrong: list[str]) -> NoReturn:
    more = f" and {len(wrong) - _NAMED} more" if len(wrong) > _NAMED else ""
    raise refuse(
        f"step {step} is not finite: {', '.join(wrong[:_NAMED])}{more}; it does not count, and the job stops at step "
        f"{step - 1}. Find the cause with torch.autograd.set_detect_anomaly(True)"
    )
