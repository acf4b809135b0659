"""A guard against steps that end in NaN or infinity: the job stops there, and says where, before the step counts.

A restart would only come to the same step again, so the rank ends with the code that asks for none. What was saved
before is finite; where it is to go on from, and with what changed, is for people to say.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import NoReturn

import torch
from torch import nn

from trainer_runtime import contract

_NAMED = 5


class FiniteGuard:
    """Looks at the weights and running statistics of modules, and at what is committed with a step.

    Not at gradients: a `GradScaler` meets infinite ones now and then, and leaves such a step out by itself.
    """

    def __init__(self, modules: Mapping[str, nn.Module]) -> None:
        self._modules = modules

    def check(self, step: int, metrics: Mapping[str, float | torch.Tensor]) -> None:
        """End this rank if something is not finite; waits once for each device.

        Raises:
            SystemExit: with `EXIT_NO_RESTART`; the line that says where is on standard error.
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
    """A bool for each, on the CPU. Each device is waited for once."""
    found = torch.empty(len(tensors), dtype=torch.bool, device="cpu")
    for device in {tensor.device for tensor in tensors}:
        places = [place for place, tensor in enumerate(tensors) if tensor.device == device]
        found[places] = torch.stack([tensors[place].isfinite().all() for place in places]).cpu()
    return found


def _local(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's shard, of what is sharded: each rank looks at its own."""
    part: torch.Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return part


def _dense(tensor: torch.Tensor) -> torch.Tensor:
    """The values of what is sparse: nothing else of it can be looked at on the CPU."""
    if tensor.layout is torch.strided:
        return tensor
    return (tensor.coalesce() if tensor.is_sparse else tensor).values()


def _stop(step: int, wrong: list[str]) -> NoReturn:
    more = f" and {len(wrong) - _NAMED} more" if len(wrong) > _NAMED else ""
    sys.stderr.write(
        f"trainer_runtime: step {step} is not finite: {', '.join(wrong[:_NAMED])}{more}; it does not count, and the "
        f"job stops at step {step - 1}. Find the cause with torch.autograd.set_detect_anomaly(True)\n"
    )
    raise SystemExit(contract.EXIT_NO_RESTART)
