"""Blocks: which part of a tensor each rank of a mesh holds, and what is cut from one for another."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.tensor.placement_types import Partial, Replicate, Shard, _StridedShard

from trainer_runtime.capture.blocks import are_disjoint, block, copy_overlap
from trainer_runtime.capture.local import LayoutError

if TYPE_CHECKING:
    from torch.distributed.tensor.placement_types import Placement

SHAPES = st.lists(st.integers(0, 7), min_size=1, max_size=3).map(tuple)
MESHES = st.lists(st.integers(1, 3), min_size=1, max_size=3).map(tuple)

Blocks = list[tuple[tuple[int, ...], tuple[int, ...]]]


def blocks(shape: tuple[int, ...], mesh: tuple[int, ...], placements: list[Placement]) -> Blocks:
    """Of all ranks of a mesh."""
    return [
        block(shape, mesh, coordinate, tuple(placements))
        for coordinate in itertools.product(*(range(size) for size in mesh))
    ]


@settings(deadline=None)
@given(SHAPES, MESHES, st.data())
def test_the_blocks_of_a_mesh_have_each_element_as_often_as_there_are_replicas(
    shape: tuple[int, ...], mesh: tuple[int, ...], data: st.DataObject
) -> None:
    kinds = st.one_of(st.just(Replicate()), st.integers(-len(shape), len(shape) - 1).map(Shard))
    placements = data.draw(st.lists(kinds, min_size=len(mesh), max_size=len(mesh)))
    count = torch.zeros(shape, dtype=torch.int64)
    for offsets, sizes in blocks(shape, mesh, placements):
        count[tuple(slice(at, at + size) for at, size in zip(offsets, sizes, strict=True))] += 1
    replicas = 1
    for size, placement in zip(mesh, placements, strict=True):
        replicas *= size if isinstance(placement, Replicate) else 1
    assert (count == replicas).all()


@settings(deadline=None)
@given(st.integers(0, 9), st.integers(1, 5))
def test_a_dimension_is_split_as_torch_does(rows: int, ranks: int) -> None:
    sizes = [len(part) for part in torch.arange(rows).chunk(ranks)] if rows else []
    assert [sizes for _, sizes in blocks((rows, 2), (ranks,), [Shard(0)])] == [
        (size, 2) for size in [*sizes, *[0] * (ranks - len(sizes))]
    ]


def test_of_two_splits_of_one_dimension_the_later_one_is_the_outer_one_if_torch_says_so() -> None:
    plain = blocks((8,), (2, 2), [Shard(0), Shard(0)])
    assert [at for at, _ in plain] == [(0,), (2,), (4,), (6,)]
    strided = blocks((8,), (2, 2), [_StridedShard(0, split_factor=2), Shard(0)])
    assert [at for at, _ in strided] == [(0,), (4,), (2,), (6,)]


@pytest.mark.parametrize(
    ("placements", "why"),
    [
        ([Partial(), Shard(0)], "partial"),
        ([_StridedShard(0, split_factor=3), Shard(0)], "strides"),
        ([_StridedShard(0, split_factor=2), Replicate()], "strides"),
    ],
)
def test_what_is_not_one_block_is_refused(placements: list[Placement], why: str) -> None:
    with pytest.raises(LayoutError, match=why):
        block((8, 8), (2, 2), (0, 0), tuple(placements))


@settings(deadline=None)
@given(SHAPES, st.data())
def test_what_two_blocks_have_in_common_is_copied_and_nothing_else(shape: tuple[int, ...], data: st.DataObject) -> None:
    whole = torch.arange(torch.Size(shape).numel()).reshape(shape)

    def draw() -> tuple[slice, ...]:
        ends = [sorted((data.draw(st.integers(0, size)), data.draw(st.integers(0, size)))) for size in shape]
        return tuple(slice(*end) for end in ends)

    to, of = draw(), draw()
    target = torch.full_like(whole[to], -1)
    copied = copy_overlap(target, [each.start for each in to], whole[of], [each.start for each in of])
    expected = torch.full_like(whole, -1)
    expected[of] = whole[of]
    assert torch.equal(target, expected[to])
    assert copied == (expected[to] >= 0).sum()


@settings(deadline=None)
@given(st.lists(st.tuples(st.tuples(*[st.integers(0, 4)] * 2), st.tuples(*[st.integers(0, 3)] * 2)), max_size=6))
def test_blocks_that_overlap_are_found(given_blocks: Blocks) -> None:
    count = torch.zeros(8, 8, dtype=torch.int64)
    for (row, column), (height, width) in given_blocks:
        count[row : row + height, column : column + width] += 1
    assert are_disjoint(given_blocks) == bool((count <= 1).all())


def test_a_number_is_one_block() -> None:
    assert block((), (2,), (1,), (Replicate(),)) == ((), ())
    assert copy_overlap(target := torch.zeros(()), (), torch.ones(()), ()) == 1
    assert target == 1
    assert are_disjoint([((), ())])
    assert not are_disjoint([((), ()), ((), ())])
