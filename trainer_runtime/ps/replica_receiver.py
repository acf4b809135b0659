"""A copy of a shard, as the server has it that keeps it: the other end of `replica_sender.py`."""

from __future__ import annotations

from collections.abc import Callable

import torch

from trainer_runtime.ps.frames import BrokenError, FrameConnection, Header, MessageKind, bytes_of, is_integer, read_json
from trainer_runtime.ps.index import NOBODY
from trainer_runtime.ps.leases import MAX_PARTS
from trainer_runtime.ps.messages import parse_push
from trainer_runtime.ps.persistence import take_said
from trainer_runtime.ps.replica_sender import LENGTH
from trainer_runtime.ps.shard import Author, Shard, ShardChange
from trainer_runtime.ps.shard_host import ShardHost
from trainer_runtime.ps.table import Table, TablePart, spec_of


def keep_copy(hosted: ShardHost, connection: FrameConnection, of_map: int, era: int) -> None:
    """Be the copy that a shard's primary wants to have. Raises `BrokenError`."""
    with hosted.lock:
        if of_map < max(hosted.map, hosted.source_map) or hosted.is_primary:
            raise BrokenError(f"shard {hosted.number} is elsewhere by a newer map")
        if hosted.source is not None:
            hosted.source.close()
        hosted.source, hosted.source_map, hosted.era = connection, of_map, 0
        hosted.shard = Shard(hosted.shard.pace.mode)
    connection.send(Header(MessageKind.DONE, hosted.number))
    while True:
        header = connection.receive_header()
        do = _told(hosted.shard, connection, header)
        with hosted.lock:
            if hosted.source is not connection:
                raise BrokenError("it is another's copy now")
            try:
                do()
            except ValueError as error:
                raise BrokenError(str(error)) from None
            if header.kind is MessageKind.WHOLE:
                hosted.era = era
        connection.send(Header(MessageKind.DONE, hosted.number))


def _told(shard: Shard, connection: FrameConnection, header: Header) -> Callable[[], object]:
    """Receive what a primary tells; return what is to be done."""
    match header.kind:
        case MessageKind.ROWS:
            part = receive_rows(connection, header, shard)
            return lambda: shard.tables[header.table].put(part)
        case MessageKind.CHANGE:
            change = take_change(connection.receive_body(header.length), header, shard)
            return lambda: shard.apply(change)
        case _:
            pass
    match header.kind, read_json(connection.receive_words(header.length)):
        case MessageKind.DECLARE, dict(told):
            return lambda: shard.declare(spec_of(told))
        case MessageKind.WHOLE, dict(told):
            return lambda: take_said(shard, told)
        case MessageKind.ORDER, {"shrink_before_s": int(before_s)} if is_integer(before_s):
            return lambda: shard.shrink(before_s)
        case MessageKind.LEASE, {"pass": str(name), "parts": int(parts), "done": int(done)} if 0 <= parts <= MAX_PARTS:
            return lambda: shard.pass_of(name, parts).finish(done, worker=-1)
        case _:
            raise BrokenError(f"{header.kind.name} that no primary tells")


def take_change(data: bytearray | memoryview, header: Header, shard: Shard) -> ShardChange:
    """What `ReplicaLine.send` has sent. Raises `BrokenError`."""
    if len(data) < LENGTH.size:
        raise BrokenError("a change that ends in its head")
    (length,) = LENGTH.unpack_from(data)
    begin = LENGTH.size + length
    match read_json(bytes(data[LENGTH.size : begin])):
        case {"steps": list(told), "now_s": int(now_s), "begins": bool(begins)} if is_integer(now_s):
            steps = tuple(_step(each) for each in told)
        case _:
            raise BrokenError("a change that says nothing")
    push = parse_push(data[begin:], header.table, lambda table: _table(shard, table).spec.dim)
    return ShardChange(steps, push.parts, now_s, begins)


def _step(told: object) -> tuple[Author, int]:
    match told:
        case [int(worker), int(incarnation), int(step)]:
            return Author(worker, incarnation), step
        case _:
            raise BrokenError("a step of nobody")


def receive_rows(connection: FrameConnection, header: Header, shard: Shard) -> TablePart:
    """What `ROWS` brings. Raises `BrokenError`."""
    table = _table(shard, header.table)
    width = table.spec.dim + table.spec.rule.memory(table.spec.dim)
    count, odd = divmod(header.length, 16 + 4 * width)
    if odd:
        raise BrokenError("a part of a row")
    part = TablePart(
        torch.empty(count, dtype=torch.int64),
        torch.empty(count, width, dtype=torch.float32),
        torch.empty(count, dtype=torch.int64),
    )
    for array in part:
        connection.fill(bytes_of(array))
    ids = part.ids.sort().values
    if count and (int(ids[0]) == NOBODY or bool((ids[1:] == ids[:-1]).any())):
        raise BrokenError("rows of nobody, or of one id twice")
    return part


def _table(shard: Shard, number: int) -> Table:
    if number >= len(shard.tables):
        raise BrokenError(f"no table {number}")
    return shard.tables[number]
