"""Check whether a state consists of the tensors of the last snapshot, at the same places in memory.

If so, the target of each tensor is known and only bytes have to be copied. An optimizer may have replaced its state, a
script a parameter's `data`, and shapes may change in place. All of this shows in a tensor's data pointer, provided that
its memory is kept alive, and in its shape, strides and dtype.

torch has a check of the latter for compiled code, which checks a thousand tensors in the time that Python takes for
fifty. It is not a public API: where it does not behave as needed here, a Python implementation gives the same answer.
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
except ImportError:  # pragma: no cover - of a future or an older torch
    TensorGuards = None  # type: ignore[assignment,misc]


class SameTensors:
    """Recognizes ordinary tensors.

    Args:
        tensors: tensors to recognize. The caller keeps their storages alive, so that no other gets their addresses.
    """

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self._addresses = _addresses(tensors)
        self._guards = _guard(tensors)
        self._kinds = None if self._guards is not None else [*map(_kind, tensors)]

    def are(self, tensors: Sequence[torch.Tensor]) -> bool:
        """Return whether these are the same tensors, in the same order; their number must be the same."""
        if self._guards is None:
            is_alike = [*map(_kind, tensors)] == self._kinds
        else:
            with torch.enable_grad():  # otherwise the check ignores `requires_grad`
                is_alike = self._guards.check(*tensors)
        return is_alike and _addresses(tensors) == self._addresses


def _addresses(tensors: Sequence[torch.Tensor]) -> list[int]:
    return [tensor.data_ptr() for tensor in tensors]


def _kind(tensor: torch.Tensor) -> tuple[Any, ...] | None:
    if not is_ordinary(tensor):
        return None
    return type(tensor), tensor.dtype, tensor.device, tensor.shape, tensor.stride(), tensor.requires_grad


def _guard(tensors: Sequence[torch.Tensor]) -> TensorGuards | None:
    """Return torch's own check; None if it is missing or rejects these tensors, as with one that occurs twice."""
    if not tensors or not _is_understood():
        return None
    guards = _make(tensors)
    with torch.enable_grad():
        return guards if guards.check(*tensors) else None


@cache
def _is_understood() -> bool:
    """Return whether torch's check exists and distinguishes everything that it must."""
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
