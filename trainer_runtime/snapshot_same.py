"""Telling whether the tensors of a state are those of the last snapshot, lying in memory as they did then.

If they are, where each goes is known and nothing but bytes has to be copied. An optimizer may have replaced what it
keeps, a script a parameter's `data`; shapes change in place. All of it shows in where a tensor's data is, if that
memory is held meanwhile, and in how the tensor lies there.

torch has a check of the latter for compiled code, which looks at a thousand tensors in the time that Python takes for
fifty. It is nobody's promise: where it does not do what is needed here, there is a plain way to the same answer.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from trainer_runtime.hostcopy import is_ordinary

if TYPE_CHECKING:
    from collections.abc import Sequence

try:
    from torch._C._dynamo.guards import TensorGuards
except ImportError:  # pragma: no cover - of a torch to come, or one before
    TensorGuards = None  # type: ignore[assignment,misc]


class SameTensors:
    """Knows ordinary tensors again.

    Args:
        tensors: who makes this holds their storages, so that nothing else gets their addresses.
    """

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self._addresses = _addresses(tensors)
        self._guards = _guard(tensors)
        self._kinds = None if self._guards is not None else [*map(_kind, tensors)]

    def are(self, tensors: Sequence[torch.Tensor]) -> bool:
        """Tell whether these are they, in this order; there are as many."""
        if self._guards is None:
            is_alike = [*map(_kind, tensors)] == self._kinds
        else:
            with torch.enable_grad():  # else it takes no notice of who requires gradients
                is_alike = self._guards.check(*tensors)
        return is_alike and _addresses(tensors) == self._addresses


def _addresses(tensors: Sequence[torch.Tensor]) -> list[int]:
    return [tensor.data_ptr() for tensor in tensors]


def _kind(tensor: torch.Tensor) -> tuple[Any, ...] | None:
    if not is_ordinary(tensor):
        return None
    return type(tensor), tensor.dtype, tensor.device, tensor.shape, tensor.stride(), tensor.requires_grad


def _guard(tensors: Sequence[torch.Tensor]) -> TensorGuards | None:
    """Return torch's own check; None: there is none, or it says no to these too, as to one that is there twice."""
    if not tensors or not _is_understood():
        return None
    guards = _make(tensors)
    with torch.enable_grad():
        return guards if guards.check(*tensors) else None


@cache
def _is_understood() -> bool:
    """Tell whether torch's check is there, and tells apart what it has to."""
    one = torch.tensor([[1j, 2], [3, 4]], device="cpu")
    others = (
        one.t(),
        one.view(4),
        one.conj(),
        one.to(torch.complex128),
        one.view(torch.float64),
        one.clone().requires_grad_(),
        one.to_sparse(),
        nn.Parameter(one, requires_grad=False),
    )
    try:
        guards = _make([one])
        with torch.enable_grad():
            return guards.check(one.clone()) and not any(map(guards.check, others))
    except (TypeError, ValueError, RuntimeError):
        return False


def _make(tensors: Sequence[torch.Tensor]) -> TensorGuards:
    sizes: list[Any] = [[*tensor.shape] for tensor in tensors]
    strides: list[Any] = [[*tensor.stride()] for tensor in tensors]
    with torch.enable_grad():
        return TensorGuards(*tensors, dynamic_dims_sizes=sizes, dynamic_dims_strides=strides)
