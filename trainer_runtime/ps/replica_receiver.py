"""The receiving end of a replica; the sending end is `replica_sender.py`."""

from __future__ import annotations

from collections.abc import Callable

import torch

from trainer_runtime.ps.frames import BrokenError, FrameConnection, Header, MessageKind, bytes_of, is_integer, read_json
from trainer_runtime.ps.index import NO_ID
from trainer_runtime.ps.leases import MAX_PARTS
from trainer_runtime.ps.messages import parse_push
from trainer_runtime.ps.persistence import restore_state
from trainer_runtime.ps.replica_sender import LENGTH
from trainer_runtime.ps.shard import Author, Shard, ShardChange
from trainer_runtime.ps.shard_host import ShardHost
from trainer_runtime.ps.table import Table, TablePart, spec_of


def receive_replica(shard_host: ShardHost, connection: FrameConnection, of_map: int, era: int) -> None:
    """Receive and apply the state and the changes that the primary of a shard sends. Raises `BrokenError`."""
    with shard_host.lock:
        if of_map < max(shard_host.map_number, shard_host.primary_map) or shard_host.is_primary:
            raise BrokenError(f"shard {shard_host.number} has another place in a newer map")
        if shard_host.primary_connection is not None:
            shard_host.primary_connection.close()
        shard_host.primary_connection, shard_host.primary_map, shard_host.era = connection, of_map, 0
        shard_host.shard = Shard(shard_host.shard.progress.mode)
    connection.send(Header(MessageKind.DONE, shard_host.number))
    while True:
        header = connection.receive_header()
        apply = _receive_message(shard_host.shard, connection, header)
        with shard_host.lock:
            if shard_host.primary_connection is not connection:
                raise BrokenError("another primary sends this replica now")
            try:
                apply()
            except ValueError as error:
                raise BrokenError(str(error)) from None
            if header.kind is MessageKind.COMPLETE:
                shard_host.era = era
        connection.send(Header(MessageKind.DONE, shard_host.number))


def _receive_message(shard: Shard, connection: FrameConnection, header: Header) -> Callable[[], object]:
    """Receive a message of the primary; return the function that applies it."""
    match header.kind:
        case MessageKind.ROWS:
            part = receive_rows(connection, header, shard)
            return lambda: shard.tables[header.table].put(part)
        case MessageKind.CHANGE:
            change = parse_change(connection.receive_body(header.length), header, shard)
            return lambda: shard.apply(change)
        case _:
            pass
    match header.kind, read_json(connection.receive_text(header.length)):
        case MessageKind.DECLARE, dict(record):
            return lambda: shard.declare(spec_of(record))
        case MessageKind.COMPLETE, dict(record):
            return lambda: restore_state(shard, record)
        case MessageKind.COMMAND, {"shrink_before_s": int(before_s)} if is_integer(before_s):
            return lambda: shard.shrink(before_s)
        case MessageKind.LEASE, {"pass": str(name), "parts": int(parts), "done": int(done)} if 0 <= parts <= MAX_PARTS:
            return lambda: shard.pass_of(name, parts).finish(done, worker=-1)
        case _:
            raise BrokenError(f"wanted a message of a primary, got {header.kind.name}")


def parse_change(data: bytearray | memoryview, header: Header, shard: Shard) -> ShardChange:
    """Parse what `ReplicaSender.send` has sent. Raises `BrokenError`."""
    if len(data) < LENGTH.size:
        raise BrokenError("the head of a change is truncated")
    (length,) = LENGTH.unpack_from(data)
    begin = LENGTH.size + length
    match read_json(bytes(data[LENGTH.size : begin])):
        case {"steps": list(records), "now_s": int(now_s), "begins": bool(begins)} if is_integer(now_s):
            steps = tuple(_step(each) for each in records)
        case _:
            raise BrokenError("invalid head of a change")
    push = parse_push(data[begin:], header.table, lambda table: _table(shard, table).spec.dim)
    return ShardChange(steps, push.parts, now_s, begins)


def _step(record: object) -> tuple[Author, int]:
    match record:
        case [int(worker), int(incarnation), int(step)]:
            return Author(worker, incarnation), step
        case _:
            raise BrokenError("invalid step in a change")


def receive_rows(connection: FrameConnection, header: Header, shard: Shard) -> TablePart:
    """Receive the body of `ROWS`. Raises `BrokenError`."""
    table = _table(shard, header.table)
    width = table.spec.dim + table.spec.rule.memory(table.spec.dim)
    count, odd = divmod(header.length, 16 + 4 * width)
    if odd:
        raise BrokenError(f"wanted whole rows, got {header.length} bytes")
    part = TablePart(
        torch.empty(count, dtype=torch.int64),
        torch.empty(count, width, dtype=torch.float32),
        torch.empty(count, dtype=torch.int64),
    )
    for array in part:
        connection.receive_into(bytes_of(array))
    ids = part.ids.sort().values
    if count and (int(ids[0]) == NO_ID or bool((ids[1:] == ids[:-1]).any())):
        raise BrokenError("a row has an invalid id, or an id occurs twice")
    return part


def _table(shard: Shard, number: int) -> Table:
    if number >= len(shard.tables):
        raise BrokenError(f"unknown table {number}")
    return shard.tables[number]
