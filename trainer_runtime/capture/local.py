"""The part of a sharded tensor that this rank holds. Does not import torch.distributed.tensor, which takes a while."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, cast

from torch import nn

if TYPE_CHECKING:
    from typing import TypeGuard

    import torch


class LayoutError(ValueError):
    """A sharded tensor is laid out in a way that cannot be described; the message says how."""


def is_sharded(value: object) -> bool:
    """Return whether this is a tensor of which each rank has a part."""
    tensor = sys.modules.get("torch.distributed.tensor")  # not imported: nothing can be sharded
    return tensor is not None and isinstance(value, tensor.DTensor)


def has_shards(thing: object) -> TypeGuard[nn.Module]:
    """Return whether this is a module with parameters that are sharded, or are at the moment gathered by FSDP2."""
    fsdp = sys.modules.get("torch.distributed.fsdp")  # not imported: no module can be of it
    return isinstance(thing, nn.Module) and (
        any(map(is_sharded, thing.parameters()))
        or any(isinstance(each, getattr(fsdp, "FSDPModule", ())) for each in thing.modules())
    )


def local_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's part of a tensor, not copied and outside of autograd; of an unsharded one, the tensor."""
    return cast("torch.Tensor", tensor._local_tensor) if is_sharded(tensor) else tensor  # type: ignore[attr-defined]  # noqa: SLF001 - `to_local` enters autograd
