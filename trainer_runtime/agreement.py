"""Whether all ranks train alike: the same learning rates, and the same parameters after a step.

A process that sets up alone may compute something from its rank or the world size that the others computed otherwise:
the function of a schedule, for instance. Each rank then follows its own learning rate, and no error says so. So the
ranks compare what they have at the first commit of each group.
"""

from __future__ import annotations

import zlib
from typing import TYPE_CHECKING

import torch

from trainer_runtime.dist import sum_over_ranks, world_size

if TYPE_CHECKING:
    from collections.abc import Iterable

    from torch import Tensor, nn
    from torch.optim import Optimizer

_MASK = (1 << 24) - 1
"""Digests are of 24 bits, so that the sum of their squares over 2**15 ranks fits into 64 bits."""
_SAMPLED = 64
"""Number of elements of each parameter that are compared: whatever trains otherwise changes all of them."""


def are_same_on_all_ranks(*numbers: int) -> list[bool]:
    """Return for each number, from 0 to 2**24 - 1, whether it is the same on all ranks. A collective."""
    world = world_size()
    found = sum_over_ranks(*numbers, *(number * number for number in numbers))
    sums, squares = found[: len(numbers)], found[len(numbers) :]
    return [world * square == total * total for total, square in zip(sums, squares, strict=True)]


def digest_of_learning_rates(optimizers: Iterable[Optimizer]) -> int:
    """Return a digest of the learning rates of all parameter groups, in their order."""
    rates = [float(group["lr"]) for optimizer in optimizers for group in optimizer.param_groups if "lr" in group]
    return zlib.crc32(repr(rates).encode()) & _MASK


def digest_of_parameters(modules: Iterable[nn.Module]) -> int:
    """Return a digest of some elements of each trained parameter, in their order."""
    digest = 0
    for module in modules:
        for parameter in module.parameters():
            if parameter.requires_grad:
                digest = zlib.crc32(_sample(parameter.detach()), digest)
    return digest & _MASK


def _sample(tensor: Tensor) -> bytes:
    flat = tensor.reshape(-1)
    some = flat[:: max(1, flat.numel() // _SAMPLED)].contiguous()
    return bytes(some.view(torch.uint8).cpu().numpy())
