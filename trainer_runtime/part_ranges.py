"""Fetching what a rank needs of other ranks' parts of a snapshot, in ranges of bytes.

After a change of the number of ranks, each rank needs some rows of many parts. A node that holds a part sends its
description to the ranks that lack something. These compute from it which bytes they need, and ask for those only.
What they do not need stays unread in a memory that takes no pages, so that a part is read as if it were whole.

All functions are collectives, unless noted otherwise.
"""

from __future__ import annotations

import json
import mmap
import struct
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from trainer_runtime.capture.gathering import placed_tensors
from trainer_runtime.contents import SHARDED
from trainer_runtime.dist import backend_device, do_on_all, rank, sum_over_ranks, world_size
from trainer_runtime.flat import ends_of, unflatten
from trainer_runtime.node_memory import NodeMemory
from trainer_runtime.sharing import BROADCAST_CHUNK_BYTES, spread

if TYPE_CHECKING:
    from collections.abc import Mapping

    from trainer_runtime.capture.gathering import Captured, Gathering, TensorPath
    from trainer_runtime.rank_messages import RankMessages

Range = tuple[int, int]
"""Begin and end, in bytes."""

_HEAD = struct.Struct("<QQQ")


class SparsePart:
    """A part of which only some bytes are here.

    Args:
        described: what `describe` returned on the rank that holds the part.
    """

    def __init__(self, described: memoryview) -> None:
        size, begin, values_at = _HEAD.unpack_from(described)
        self._memory = mmap.mmap(-1, size)
        self._memory[:begin] = described[_HEAD.size : _HEAD.size + begin]
        self._memory[values_at:] = described[_HEAD.size + begin :]
        self._bytes = torch.frombuffer(self._memory, dtype=torch.uint8)
        self._part: dict[str, Any] = unflatten(self._memory)

    @property
    def captured(self) -> Captured:
        """What the rank held of sharded objects; what was not fetched is zero.

        Raises:
            ValueError: it held nothing.
        """
        if SHARDED not in self._part:
            raise ValueError("the snapshot in memory is of a model that was not sharded, and this State's is")
        captured: Captured = self._part[SHARDED]
        return captured

    def needed(self, gathering: Gathering, planned: set[tuple[TensorPath, tuple[int, ...]]]) -> list[Range]:
        """Return what is to be fetched, in order and without overlaps; not a collective.

        Args:
            gathering: what is missing.
            planned: path and offsets of the blocks that other parts provide; those of this part are added.
        """
        found = []
        for path, (shape, offsets), tensor in placed_tensors(self.captured):
            if (path, offsets) in planned:  # several ranks held the same
                continue
            planned.add((path, offsets))
            first, rows = gathering.needed_rows(path, shape, offsets, tuple(tensor.shape))
            if rows:
                wanted = tensor.narrow(0, first, rows) if tensor.dim() else tensor
                begin = wanted.data_ptr() - self._bytes.data_ptr()
                found.append((begin, begin + _span(wanted)))
        return _merged(found)

    def fill(self, ranges: list[Range], data: torch.Tensor) -> None:
        """Put fetched bytes in their places; not a collective."""
        at = 0
        for begin, end in ranges:
            self._bytes[begin:end] = data[at : at + end - begin]
            at += end - begin


def describe(part: memoryview) -> bytes:
    """Return what a part has besides its tensors' bytes; not a collective."""
    begin, values_at = ends_of(part)
    return b"".join((_HEAD.pack(len(part), begin, values_at), part[:begin], part[values_at:]))


def fetch(
    messages: RankMessages, gathering: Gathering, local: Mapping[int, memoryview], holders: Mapping[int, int]
) -> int:
    """Fetch what this rank lacks of these parts, and add it; return the bytes that were fetched for all ranks.

    Args:
        messages: connection to the rank store.
        gathering: collects what this rank needs.
        local: the parts on this node, by rank.
        holders: by rank of each part that some rank may need, the rank that sends it; equal on all ranks.

    Raises:
        ValueError: a part does not fit the State's objects.
    """
    parts: dict[int, SparsePart] = {}
    for each, holder in holders.items():
        own = NodeMemory(memoryview(bytearray(describe(local[each])))) if holder == rank() else None
        is_wanted = not gathering.is_complete and each not in local
        described = spread(own, holder, is_wanted=is_wanted)
        if is_wanted and described is not None:
            parts[each] = SparsePart(memoryview(described.data))
            described.close()
    wanted: dict[int, list[Range]] = {}
    planned: set[tuple[TensorPath, tuple[int, ...]]] = set()
    do_on_all(lambda: wanted.update({each: part.needed(gathering, planned) for each, part in parts.items()}))
    for each, ranges in wanted.items():
        if ranges:
            messages.post(_name(each, rank()), json.dumps(ranges).encode())
    # Of each part, by each rank.
    sizes = sum_over_ranks(
        *(
            sum(end - begin for begin, end in wanted.get(each, ())) if of == rank() else 0
            for each in holders
            for of in range(world_size())
        )
    )
    asked = [(each, of) for each in holders for of in range(world_size())]
    for (each, of), size in zip(asked, sizes, strict=True):  # in the same order on all ranks, so none waits in a circle
        if size and holders[each] == rank():
            _send(messages, local[each], each, of)
        elif size and of == rank():
            parts[each].fill(wanted[each], _receive(size, holders[each]))

    def add() -> None:
        for part in parts.values():
            gathering.add(part.captured)

    do_on_all(add)
    return sum(sizes)


def _send(messages: RankMessages, part: memoryview, number: int, to: int) -> None:
    """Send what a rank has asked for; not a collective.

    Raises:
        ValueError: it asked for bytes outside of the part.
    """
    ranges = json.loads(messages.take(_name(number, to)))
    if not all(0 <= begin < end <= len(part) for begin, end in ranges):
        raise ValueError(f"rank {to} asked for {ranges} of a part of {len(part)} bytes")
    whole = torch.frombuffer(part, dtype=torch.uint8)
    data = torch.cat([whole[begin:end] for begin, end in ranges])
    for chunk in torch.split(data, BROADCAST_CHUNK_BYTES):
        dist.send(chunk.to(backend_device()), to)


def _receive(size: int, source: int) -> torch.Tensor:
    data = torch.empty(size, dtype=torch.uint8)
    for chunk in torch.split(data, BROADCAST_CHUNK_BYTES):
        wire = torch.empty(len(chunk), dtype=torch.uint8, device=backend_device())
        dist.recv(wire, source)
        chunk.copy_(wire)
    return data


def _span(tensor: torch.Tensor) -> int:
    """Return the bytes from the first element of a tensor to its last."""
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return (last + 1) * tensor.element_size() if tensor.numel() else 0


def _merged(ranges: list[Range]) -> list[Range]:
    merged: list[Range] = []
    for begin, end in sorted(each for each in ranges if each[0] < each[1]):
        if merged and begin <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(end, merged[-1][1])
        else:
            merged.append((begin, end))
    return merged


def _name(part: int, by: int) -> str:
    return f"snapshot/ranges/{part}/{by}"
