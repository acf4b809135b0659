"""A copy of a checkpoint's content in host memory, which later training steps do not change.

Storages are copied, not tensors: tensors that share memory (tied weights) share it in the copy, so nothing is copied or
written twice. In any case a file contains the whole storage of a view.
"""

from __future__ import annotations

import copy
from collections import OrderedDict
from typing import Any

import torch
from torch import nn

_IMMUTABLE = (int, float, str, bytes, bool, type(None), torch.dtype, torch.Size)


class HostCopier:
    """Copies values to host memory; values copied by one copier may share storages."""

    def __init__(self) -> None:
        self._storages: dict[int, torch.UntypedStorage] = {}

    def copy(self, value: Any) -> Any:  # noqa: ANN401 - anything that a state contains
        """Return a copy whose tensors are on the CPU."""
        if isinstance(value, torch.Tensor):
            return self._copy_tensor(value)
        if type(value) is OrderedDict:
            copied = OrderedDict((key, self.copy(part)) for key, part in value.items())
            copied.__dict__.update(value.__dict__)  # a module's state keeps the versions of its submodules there
            return copied
        if type(value) is dict:
            return {key: self.copy(part) for key, part in value.items()}
        if type(value) in {list, tuple}:
            return type(value)(self.copy(part) for part in value)
        return value if type(value) in _IMMUTABLE else copy.deepcopy(value)

    def _copy_tensor(self, tensor: torch.Tensor) -> torch.Tensor:
        host = self._share(tensor) if is_ordinary(tensor) else tensor.detach().clone().cpu()
        if isinstance(tensor, nn.Parameter):
            return nn.Parameter(host, requires_grad=tensor.requires_grad)
        return host.requires_grad_(tensor.requires_grad)

    def _share(self, tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        identity = storage._cdata  # noqa: SLF001 - a data pointer may belong to any device, or be null
        if identity not in self._storages:
            host = torch.empty(storage.nbytes(), dtype=torch.uint8, device="cpu").untyped_storage()
            self._storages[identity] = host.copy_(storage, non_blocking=False)
        place = tensor.storage_offset(), tensor.size(), tensor.stride()
        return torch.empty(0, dtype=tensor.dtype, device="cpu").set_(self._storages[identity], *place)


def is_ordinary(tensor: torch.Tensor) -> bool:
    """Return whether a tensor is a plain view of one storage."""
    return (
        type(tensor) in {torch.Tensor, nn.Parameter}
        and tensor.layout is torch.strided
        and not (tensor.is_quantized or tensor.is_conj() or tensor.is_neg())
    )
