"""Sharing bytes of one rank with others: once in the memory of each node.

On each node one rank receives them, into memory that the other ranks there map. Where this is impossible, as for
another user, a rank receives a copy of its own.
"""

from __future__ import annotations

import mmap
import os
from concurrent.futures import ThreadPoolExecutor, wait
from typing import TYPE_CHECKING, NamedTuple, NoReturn, TypeVar

import torch
import torch.distributed as dist

from trainer_runtime import contract
from trainer_runtime.checkpoint import warn
from trainer_runtime.dist import PeerError, backend_device, broadcast_numbers, is_main, rank, sum_over_ranks, world_size
from trainer_runtime.node_memory import NodeMemory, allocate, node_key, open_of

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

BROADCAST_CHUNK_BYTES = 64 << 20
"""Chunk size of broadcasts; bounds the device memory that sharing a checkpoint takes under NCCL."""

_STILL_READING_EVERY_S = 1.0

_NOTHING, _PAYLOAD, _IN_MEMORY, _ERROR, _EXIT, _READING = range(6)

Read = TypeVar("Read")


class Shared(NamedTuple):
    """What rank 0 shares with all ranks."""

    number: int
    payload: NodeMemory | None
    is_in_memory: bool = False
    """No bytes are shared: the state is a snapshot in memory, which the ranks read from their nodes."""


def share_from_main(read: Callable[[], Shared]) -> Shared:
    """Run `read` on rank 0 and return its result, a number and raw bytes or None, on every rank. A collective.

    The bytes are once in the memory of each node.

    Raw bytes, not pickled objects: nothing that arrives is executed. An error on rank 0 is announced before it is
    raised, so that no rank waits for bytes that will not come.

    Raises:
        PeerError: `read` failed on rank 0 (which raises the original error).
        SystemExit: on all ranks, with the code that `read` raised on rank 0.
    """
    if world_size() == 1:
        return read()
    number, payload, is_in_memory = 0, None, False
    error: Exception | SystemExit | None = None
    status = _NOTHING
    if is_main():
        try:
            number, payload, is_in_memory = _while_others_wait(read)
            status = _IN_MEMORY if is_in_memory else _NOTHING if payload is None else _PAYLOAD
        except SystemExit as caught:
            error, status, number = caught, _EXIT, caught.code if isinstance(caught.code, int) else 1
        except Exception as caught:  # noqa: BLE001 - the other ranks must be informed of any error
            error, status = caught, _ERROR
    status, number = _wait_for_result(status, number)
    if error is not None:
        raise error
    if status == _EXIT:
        _exit_like_main(number)
    if status == _ERROR:
        raise PeerError("rank 0 could not read the checkpoint; its own output says why")
    if status in {_NOTHING, _IN_MEMORY}:
        return Shared(number, None, status == _IN_MEMORY)
    return Shared(number, spread(payload, 0, is_wanted=True))


def _while_others_wait(read: Callable[[], Read]) -> Read:
    """On rank 0: run `read` on a thread, and tell the other ranks meanwhile that it has not finished.

    Reading may take longer than a collective's timeout: the only node with the checkpoint may be away for hours.
    """
    with ThreadPoolExecutor(max_workers=1) as pool:
        reading = pool.submit(read)
        while not wait([reading], timeout=_STILL_READING_EVERY_S).done:
            broadcast_numbers(_READING, 0)
        return reading.result()


def _wait_for_result(*own: int) -> list[int]:
    """Return what rank 0 broadcasts once it has finished reading."""
    while (result := broadcast_numbers(*own))[0] == _READING:
        continue
    return result


def _exit_like_main(code: int) -> NoReturn:
    """Exit as rank 0 did."""
    if code != contract.EXIT_RESTART:
        # The line has the form of an exception's, so that the agent takes this rank's exit for a consequence.
        warn(f"{PeerError.__module__}.{PeerError.__name__}: rank 0 left with exit code {code}; its own output says why")
    raise SystemExit(code)


def spread(own: NodeMemory | None, source: int, *, is_wanted: bool) -> NodeMemory | None:
    """Return the bytes of the rank `source` on the ranks that want them; None on the others. A collective.

    Args:
        own: on `source`, the bytes; ignored on the other ranks. There must be some.
        source: a rank.
        is_wanted: whether this rank wants them.
    """
    me, world = rank(), world_size()
    if world == 1:
        return own if is_wanted else None
    size, *found = sum_over_ranks(
        0 if own is None or me != source else len(own.data),
        *_of_this_rank(node_key()),
        *_of_this_rank(int(is_wanted and me != source)),
    )
    holder = _holder(me, source, found[:world], found[world:]) if is_wanted else None
    memory = own if me == source else allocate(size) if holder == me else None
    places = sum_over_ranks(*_of_this_rank(0 if memory is None else memory.number), *_of_this_rank(os.getpid()))
    if holder not in {None, me}:
        memory = open_of(places[world + holder], places[holder], size)
    receives = is_wanted and me != source and (memory is None or holder == me)
    if receives and memory is None:
        memory = NodeMemory(mmap.mmap(-1, size))
    (receivers,) = sum_over_ranks(receives)
    if receivers:
        _broadcast(memory.data if memory is not None and (receives or me == source) else None, size, source)
        sum_over_ranks(0)  # until then others may not have received what this rank reads
    return memory if is_wanted else None


def _holder(me: int, source: int, nodes: Sequence[int], wanting: Sequence[int]) -> int:
    """Return the rank whose memory this rank uses."""
    if nodes[me] == nodes[source]:
        return source
    return next(each for each, node in enumerate(nodes) if node == nodes[me] and wanting[each])


def _broadcast(data: mmap.mmap | memoryview | None, size: int, source: int) -> None:
    """Take part in a broadcast; a rank without data discards what it receives."""
    device = backend_device()
    scratch = torch.empty(min(size, BROADCAST_CHUNK_BYTES) if data is None else 0, dtype=torch.uint8, device=device)
    whole = None if data is None else torch.frombuffer(data, dtype=torch.uint8)
    for at in range(0, size, BROADCAST_CHUNK_BYTES):
        length = min(BROADCAST_CHUNK_BYTES, size - at)
        chunk = scratch[:length] if whole is None else whole[at : at + length]
        wire = chunk.to(device)
        dist.broadcast(wire, src=source)
        if wire.data_ptr() != chunk.data_ptr():
            chunk.copy_(wire)


def _of_this_rank(number: int) -> list[int]:
    """Return this number at this rank's place, and zeros at those of the other ranks."""
    return [number if each == rank() else 0 for each in range(world_size())]
