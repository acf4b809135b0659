"""Restoring from a snapshot that the nodes' agents hold in memory, on every rank.

Each rank asks its own agent which pieces its node holds. The common part is taken from there; nodes that lack it
receive it from the lowest rank that has it, once each. A rank's own part is usually there too; otherwise a node that
holds it posts it to the rank store. What a rank holds of sharded objects is in its part; ranks that need bytes of
parts which their node lacks fetch those bytes (`part_ranges.py`). A piece with a wrong checksum is treated as missing.
"""

from __future__ import annotations

import errno
import mmap
import os
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from trainer_runtime.checkpoint import CheckpointError, warn
from trainer_runtime.contents import SHARDED
from trainer_runtime.dist import do_on_all, is_main, local_rank, rank, sum_over_ranks
from trainer_runtime.dist import world_size as present_size
from trainer_runtime.flat import Flattener, unflatten
from trainer_runtime.hostcopy import HostCopier
from trainer_runtime.node_memory import NodeMemory
from trainer_runtime.part_ranges import fetch
from trainer_runtime.sharing import spread
from trainer_runtime.snapshot_sum import piece_sum

if TYPE_CHECKING:
    from trainer_runtime.agent_channel import AgentChannel
    from trainer_runtime.capture.gathering import Gathering
    from trainer_runtime.contents import Contents
    from trainer_runtime.rank_messages import RankMessages
    from trainer_runtime.record import ReplicaPiece

_CHUNK_BYTES = 4 << 20


@dataclass(slots=True)
class LocalPieces:
    """The pieces of the snapshot on this node whose checksums are correct."""

    common: memoryview | None = None
    parts: dict[int, memoryview] = field(default_factory=dict)
    world_size: int = 0
    """Size of the world that made the snapshot; 0: there is nothing here."""


def read_from_memory(channel: AgentChannel, messages: RankMessages, contents: Contents) -> dict[str, Any]:
    """Return the snapshot in the form of a checkpoint's content; a collective.

    Of the parts it has this rank's own, if there is one, and if the world size has changed that of rank 0; the other
    parts are empty. The states of modules are views of the agents' memory, which is freed when they are gone.

    Raises:
        ValueError: what was captured of sharded objects does not fit those of this State.
        OtherWorldError: it can only be loaded by as many ranks as have saved it.
        PeerError: rank 0 exits, as in the next case.
        SystemExit: on rank 0: no node has a piece that is needed; this was reported to the agent.
    """
    local = read_local_pieces(channel)
    has_common = local.common is not None
    sizes = sum_over_ranks(
        *(local.world_size if each == rank() and has_common else 0 for each in range(present_size()))
    )
    source = next((each for each, size in enumerate(sizes) if size), None)
    if source is None:
        _exit_unreadable(channel, "the common part")
    common = local.common if all(sizes) else _receive(local.common, source, is_wanted=not has_common)
    if common is None:
        raise AssertionError(f"rank {source} has sent nothing")
    contents.require_world(sizes[source], present_size())
    content = unflatten(common)
    content["objects"] = contents.copy_kept(content["objects"])
    parts = _find_parts(channel, messages, local.parts, sizes[source])
    content["ranks"] = [_part(parts.get(each)) for each in range(sizes[source])]
    if contents.shards is not None:
        gathering = contents.shards.gather()
        content[SHARDED] = _gather(channel, messages, gathering, local.parts, sizes[source])
    return content  # type: ignore[no-any-return] # a dictionary that Saver made


def read_local_pieces(channel: AgentChannel) -> LocalPieces:
    """Return the intact pieces of the snapshot to restore that this node's agent holds; the others are reported."""
    local = LocalPieces()
    restore_point = channel.ask_restore_point()
    step = restore_point.copy.step if restore_point.copy is not None else 0
    for piece in restore_point.memory:
        data = _map(piece, step)
        if data is None:
            what = "the common part" if piece.is_common else f"the part of rank {piece.rank}"
            warn(f"{what} of the snapshot in this node's memory is damaged")
            channel.report_damaged(piece)
            continue
        local.world_size = piece.world_size
        if piece.is_common:
            local.common = data
        else:
            local.parts[piece.rank] = data
    return local


def _map(piece: ReplicaPiece, step: int) -> memoryview | None:
    """Return the bytes of a piece; None if they are damaged."""
    with suppress(OSError, ValueError):
        _require_readable(piece)
        memory = mmap.mmap(piece.descriptor, piece.at + piece.bytes, access=mmap.ACCESS_COPY)
        data = memoryview(memory)[piece.at :]
        rank_ = None if piece.is_common else piece.rank
        if piece_sum(data, rank=rank_, step=step, world_size=piece.world_size) == piece.sum:
            return data
    return None


def _require_readable(piece: ReplicaPiece) -> None:
    """Read a piece in a file on disk. Raises `OSError` if that fails, where a mapping would kill the process."""
    if str(Path(f"/proc/self/fd/{piece.descriptor}").readlink()).startswith("/memfd:"):
        return
    buffer, end, at = bytearray(min(piece.bytes, _CHUNK_BYTES)), piece.at + piece.bytes, piece.at
    while at < end:
        read = os.preadv(piece.descriptor, [memoryview(buffer)[: end - at]], at)
        if not read:
            raise OSError(errno.EIO, "the file is too short")
        at += read


def _receive(piece: memoryview | None, source: int, *, is_wanted: bool) -> memoryview | None:
    """Return this rank's piece, or if it wants it that of rank `source`. A collective."""
    received = spread(None if piece is None else NodeMemory(piece), source, is_wanted=is_wanted)
    if received is None:
        return piece
    received.close()
    return memoryview(received.data)


def _find_parts(
    channel: AgentChannel, messages: RankMessages, local: dict[int, memoryview], old_world_size: int
) -> dict[int, memoryview]:
    """Return the parts that this rank needs, from its own node or from another."""
    needed = {each for each in (rank(), 0 if old_world_size != present_size() else rank()) if each < old_world_size}
    is_node_sender = local_rank() == 0
    counts = sum_over_ranks(
        *(each in needed and each not in local for each in range(old_world_size)),
        *(is_node_sender and each in local for each in range(old_world_size)),
    )
    missing = [each for each in range(old_world_size) if counts[each]]
    lost = [each for each in missing if not counts[old_world_size + each]]
    if lost:
        _exit_unreadable(channel, f"the part of rank {lost[0]}")
    for each in missing if is_node_sender else ():
        if each in local:
            messages.post(_name(each), bytes(Flattener().flatten(_part(local[each])).to_bytes()))
    return {
        each: local[each] if each in local else memoryview(bytearray(messages.read(_name(each)))) for each in needed
    }


def _part(data: memoryview | None) -> dict[str, Any]:
    """Return a copy of a rank's part, without what it holds of sharded objects."""
    part: dict[str, Any] = {} if data is None else unflatten(data)
    part.pop(SHARDED, None)
    copied: dict[str, Any] = HostCopier().copy(part)
    return copied


def _gather(
    channel: AgentChannel,
    messages: RankMessages,
    gathering: Gathering,
    local: dict[int, memoryview],
    old_world_size: int,
) -> dict[str, Any]:
    """Return what this rank holds of sharded objects from now on; a collective.

    If the world size is unchanged, this is usually what the rank of this number held. Otherwise the parts of this node
    are gone through, and what is still missing is fetched from those of other nodes.

    Raises:
        ValueError, PeerError: they do not fit the objects.
        SystemExit: as `read_from_memory`.
    """
    if old_world_size == present_size():
        do_on_all(partial(_add, gathering, local.get(rank())))
    do_on_all(partial(_add_all, gathering, local))
    (incomplete,) = sum_over_ranks(not gathering.is_complete)
    if incomplete:
        holders = _holders(channel, gathering, local, old_world_size)
        fetched = fetch(messages, gathering, local, holders)
        if is_main():
            warn(f"{fetched} bytes of sharded tensors came from other nodes' memory")
    result: dict[str, Any] = {}
    do_on_all(lambda: result.update(gathering.result()))
    return result


def _holders(
    channel: AgentChannel, gathering: Gathering, local: dict[int, memoryview], old_world_size: int
) -> dict[int, int]:
    """Return, of each part that some rank may need, the lowest rank that has it; a collective."""
    size, world = old_world_size, present_size()
    wanting = sum_over_ranks(*(not gathering.is_complete and each not in local for each in range(size)))
    needed = [each for each in range(size) if wanting[each]]
    having = sum_over_ranks(*(has == rank() and each in local for each in needed for has in range(world)))
    holders = {}
    for place, each in enumerate(needed):
        ranks = [has for has in range(world) if having[place * world + has]]
        if not ranks:
            _exit_unreadable(channel, f"the part of rank {each}")
        holders[each] = ranks[0]
    return holders


def _add_all(gathering: Gathering, local: dict[int, memoryview]) -> None:
    for each in sorted(local):
        if not gathering.is_complete:
            _add(gathering, local[each])


def _add(gathering: Gathering, data: memoryview | None) -> None:
    if data is None:
        return
    part = unflatten(data)
    if SHARDED not in part:
        raise ValueError("the snapshot in memory is of a model that was not sharded, and this State's is")
    gathering.add(part[SHARDED])


def _exit_unreadable(channel: AgentChannel, what: str) -> NoReturn:
    reason = f"the snapshot in memory: no node has {what}"

    def report() -> None:
        if is_main():
            channel.report_unreadable(reason)  # before the other ranks learn of it and exit
            raise CheckpointError(reason)

    try:
        do_on_all(report)
    except CheckpointError as error:
        warn(f"cannot read {reason}")
        raise SystemExit(1) from error
    raise AssertionError("rank 0 has left")


def _name(rank_: int) -> str:
    return f"snapshot/part/{rank_}"
