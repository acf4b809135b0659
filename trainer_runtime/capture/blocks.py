"""The block of a tensor that one rank holds, as offsets and sizes, and copying from the blocks of others.

A sharded tensor is a `DTensor`: along each dimension of its mesh it is either replicated or split along one dimension
of the tensor. Each split is that of `torch.chunk`, so the blocks of all ranks tile the tensor by construction. What
torch actually keeps on this rank is compared with the computed block; a tensor for which they differ is refused.

FSDP2 on top of tensor parallelism splits one dimension twice, first by the later dimension of the mesh. torch describes
this as a strided placement, and its own `compute_local_shape_and_global_offset` gives the offset of another block in
that case (torch 2.13). It is still one block if the splits nest completely, and is computed here in that order.
"""

from __future__ import annotations

from functools import lru_cache
from math import prod
from typing import TYPE_CHECKING

from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Partial, Placement, Replicate, Shard

from trainer_runtime.capture.local import LayoutError, local_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    import torch

Place = tuple[tuple[int, ...], tuple[int, ...]]
"""Shape of the whole tensor, and offsets of the block in it, both in elements."""


def place_of(tensor: torch.Tensor) -> Place:
    """Return where the local part of a tensor belongs in the whole; of an unsharded one, that it is the whole.

    Raises:
        LayoutError: the local part is not one block, or is not the block that the placements describe.
    """
    if not isinstance(tensor, DTensor):
        return tuple(tensor.shape), (0,) * tensor.dim()
    shape = tuple(tensor.shape)
    coordinate = tensor.device_mesh.get_coordinate()
    local = tuple(local_of(tensor).shape)
    if coordinate is None:
        raise LayoutError("this rank is not in its mesh")
    offsets, sizes = block(shape, tuple(tensor.device_mesh.shape), tuple(coordinate), tuple(tensor.placements))
    if sizes != local:
        raise LayoutError(f"its placements {tensor.placements} give this rank a block of {sizes}, it has {local}")
    return shape, offsets


def replica_of(tensor: torch.Tensor, rank: int, world_size: int) -> tuple[int, int]:
    """Return which of the equal copies of its block this rank holds, and how many there are.

    Of a sharded tensor these are the copies in its mesh, of any other one those of all ranks.
    """
    if not isinstance(tensor, DTensor):
        return rank, world_size
    index, replicas = 0, 1
    coordinate = tensor.device_mesh.get_coordinate() or ()
    for place, size, placement in zip(coordinate, tensor.device_mesh.shape, tensor.placements, strict=True):
        if isinstance(placement, Replicate):
            index, replicas = index * size + place, replicas * size
    return index, replicas


@lru_cache(maxsize=1 << 16)  # for each tensor at each snapshot
def block(
    shape: tuple[int, ...], mesh: tuple[int, ...], coordinate: tuple[int, ...], placements: tuple[Placement, ...]
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return offsets and sizes of the block at a coordinate of the mesh.

    Args:
        shape: shape of the whole tensor.
        mesh: sizes of the mesh's dimensions.
        coordinate: place of a rank in the mesh.
        placements: for each dimension of the mesh.

    Raises:
        LayoutError: a placement is partial, unknown, or strided so that ranks hold more than one block.
    """
    offsets, sizes = [0] * len(shape), [*shape]
    for dim in range(len(shape)):
        for index in _splits(dim, len(shape), mesh, placements):
            step = -(-sizes[dim] // mesh[index])  # as torch.chunk
            begin = min(coordinate[index] * step, sizes[dim])
            offsets[dim] += begin
            sizes[dim] = min(step, sizes[dim] - begin)
    return tuple(offsets), tuple(sizes)


def _splits(dim: int, dims: int, mesh: Sequence[int], placements: Sequence[Placement]) -> list[int]:
    """Return the dimensions of the mesh that split this dimension of the tensor, in the order of their splits."""
    found = []
    for index, placement in enumerate(placements):
        if isinstance(placement, Partial):
            raise LayoutError("it is partial: its values are sums that were not reduced yet")
        if isinstance(placement, Replicate):
            continue
        if not hasattr(placement, "dim"):
            raise LayoutError(f"its placement {placement} is of an unknown kind")
        if placement.dim % dims == dim:
            found.append(index)
    factors = [getattr(placements[index], "split_factor", 1) for index in found]
    if all(factor == 1 for factor in factors) and all(type(placements[index]) is Shard for index in found):
        return found
    nested = [prod(mesh[later] for later in found[place + 1 :]) for place in range(len(found))]
    if factors != nested:
        raise LayoutError(f"its placements {tuple(placements)} split one dimension into strides, not into blocks")
    return found[::-1]


def copy_overlap(target: torch.Tensor, target_at: Sequence[int], source: torch.Tensor, source_at: Sequence[int]) -> int:
    """Copy what two blocks of one tensor have in common.

    Args:
        target: block to write to.
        target_at: its offsets in the whole tensor.
        source: block to read.
        source_at: its offsets in the whole tensor.

    Returns:
        Number of elements that were copied.
    """
    if not target.dim():
        target.copy_(source)
        return 1
    for dim, (to, at) in enumerate(zip(target_at, source_at, strict=True)):
        begin = max(to, at)
        length = min(to + target.shape[dim], at + source.shape[dim]) - begin
        if length <= 0:
            return 0
        target, source = target.narrow(dim, begin - to, length), source.narrow(dim, begin - at, length)
    target.copy_(source)
    return target.numel()


def are_disjoint(blocks: Iterable[tuple[Sequence[int], Sequence[int]]]) -> bool:
    """Return whether no two blocks, each of offsets and sizes, have an element in common.

    Blocks of one tensor are products of intervals, so those that overlap do so in the first dimension, too: only
    neighbours in its order are compared, and all of those that reach into each other.
    """
    ordered = sorted((tuple(at), tuple(sizes)) for at, sizes in blocks if prod(sizes))
    if ordered and not ordered[0][0]:
        return len(ordered) == 1
    open_blocks: list[tuple[tuple[int, ...], tuple[int, ...]]] = []
    for at, sizes in ordered:
        open_blocks = [each for each in open_blocks if each[0][0] + each[1][0] > at[0]]
        if any(_overlap(each, (at, sizes)) for each in open_blocks):
            return False
        open_blocks.append((at, sizes))
    return True


def _overlap(one: tuple[Sequence[int], Sequence[int]], other: tuple[Sequence[int], Sequence[int]]) -> bool:
    return all(
        begin < to + length and to < begin + size
        for begin, size, to, length in zip(one[0], one[1], other[0], other[1], strict=True)
    )
