"""A worker's connection to one shard on the server: one request at a time, answered when it is done."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import torch

from trainer_runtime.ps.frames import (
    ALL_HELD,
    LEFT_OUT,
    MAX_BODY_BYTES,
    BrokenError,
    FrameConnection,
    Header,
    MalformedError,
    MessageKind,
    RefusedError,
    bytes_of,
    is_integer,
    read_json,
)
from trainer_runtime.ps.index import NO_ID
from trainer_runtime.ps.leases import MAX_PARTS
from trainer_runtime.ps.messages import Push, parse_push
from trainer_runtime.ps.persistence import Ownership, save
from trainer_runtime.ps.shard import Author, Shard, ShardChange
from trainer_runtime.ps.shard_host import ShardHost
from trainer_runtime.ps.table import spec_of


class WorkerSession:
    """One worker at one shard.

    Args:
        shard_host: the shard.
        connection: connection of the worker.
        author: the worker's process.
        on_left: called with the worker after it has left and was answered.
        rests: whether the worker makes no steps for now.
    """

    def __init__(
        self,
        shard_host: ShardHost,
        connection: FrameConnection,
        author: Author,
        on_left: Callable[[int], None],
        *,
        rests: bool,
    ) -> None:
        self._shard_host = shard_host
        self._connection = connection
        self._author = author
        self._on_left = on_left
        self._rests = rests

    @property
    def _shard(self) -> Shard:
        return self._shard_host.shard

    def serve(self) -> None:
        """Serve the connection until it breaks. Raises `BrokenError`."""
        try:
            self._join()
            while True:
                self._answer()
        except RefusedError as refused:
            self._refuse(refused)
        finally:
            with self._shard_host.lock, suppress(BrokenError):
                self._shard_host.leave(self._author.worker, self._connection)

    def _join(self) -> None:
        shard_host, worker = self._shard_host, self._author.worker
        with shard_host.lock:
            shard_host.wait_primary()
            if worker in shard_host.connections and shard_host.incarnations[worker] > self._author.incarnation:
                raise RefusedError(
                    f"worker {worker} has another process, which was started later: either this one was replaced, or "
                    "two processes have the same number (PADDLE_TRAINER_ID)"
                )
            earlier = shard_host.connections.pop(worker, None)
            if earlier is not None:
                earlier.close()  # a worker has one process with one connection
            shard_host.connections[worker], shard_host.incarnations[worker] = self._connection, self._author.incarnation
            begin = self._shard.join(self._author)
            if self._rests:
                shard_host.apply_changes(self._shard.rest(worker, _now_s()))
            shard_host.lock.notify_all()
        self._connection.send(Header(MessageKind.DONE, shard_host.number, sequence=begin))

    def _check_current(self) -> None:
        """Raise `BrokenError` if the worker has a newer connection, or none is wanted here. Needs the lock."""
        if self._shard_host.connections.get(self._author.worker) is not self._connection:
            raise BrokenError("replaced by another connection")

    def _answer(self) -> None:
        header = self._connection.receive_header()
        number = self._shard_host.number
        if header.shard != number:
            raise BrokenError(f"wanted a request for shard {number}, got one for shard {header.shard}")
        try:
            sequence, body = self._handle(header)
        except (RefusedError, MalformedError) as refused:
            self._refuse(refused)
            return
        late = header.kind is MessageKind.PUSH and self._shard.is_left_out(self._author, header.sequence)
        answer = Header(MessageKind.DONE, number, table=LEFT_OUT if late else 0, sequence=sequence, length=len(body))
        self._connection.send(answer, body)
        if header.kind is MessageKind.LEAVE:  # only after the answer: the server stops when the last worker has left
            self._on_left(self._author.worker)

    def _refuse(self, why: Exception) -> None:
        payload = str(why).encode(errors="backslashreplace")
        self._connection.send(Header(MessageKind.REFUSED, self._shard_host.number, length=len(payload)), payload)

    def _handle(self, header: Header) -> tuple[int, memoryview | bytes]:  # noqa: PLR0911 - one for each kind
        shard_host = self._shard_host
        match header.kind:
            case MessageKind.PULL:
                return 0, self._pull(header)
            case MessageKind.PUSH:
                return self._push(header), b""
            case MessageKind.INITIALIZE:
                shard, push = self._shard, self._read_push(header)
                with shard_host.lock:
                    shard_host.wait_primary()
                    self._check_shard(shard)
                    shard_host.apply_changes([ShardChange((), push.parts, _now_s(), initializes=True)])
                return 0, b""
            case MessageKind.DECLARE:
                return self._declare(self._connection.receive_text(header.length)), b""
            case MessageKind.LEASE:
                return self._lease(self._connection.receive_text(header.length)), b""
            case MessageKind.COMMAND:
                return self._run_command(self._connection.receive_text(header.length)), b""
            case MessageKind.REST | MessageKind.LEAVE:
                leaves = header.kind is MessageKind.LEAVE
                with shard_host.lock:
                    shard_host.wait_primary()
                    self._check_current()
                    shard_host.apply_changes(
                        (self._shard.leave if leaves else self._shard.rest)(self._author.worker, _now_s())
                    )
                    shard_host.lock.notify_all()
                return 0, b""
            case MessageKind.JOIN:
                with shard_host.lock:
                    self._check_current()
                    return self._shard.join(self._author), b""
            case _:
                raise BrokenError(f"wanted a request of a worker, got {header.kind.name}")

    def _declare(self, payload: bytes) -> int:
        try:
            spec = spec_of(read_json(payload))
            with self._shard_host.lock:
                self._shard_host.wait_primary()
                number = self._shard.declare(spec)
                self._shard_host.send_to_replica(MessageKind.DECLARE, payload)
                return number
        except ValueError as error:
            raise RefusedError(str(error)) from None

    def _run_command(self, payload: bytes) -> int:
        shard_host = self._shard_host
        match read_json(payload):
            case {"save": str(directory), "shards": int(shards)}:
                try:
                    save(self._shard, shard_host.lock, Path(directory), Ownership(shard_host.number, shards))
                except (OSError, ValueError) as error:  # an invalid path is a ValueError
                    why = error.strerror if isinstance(error, OSError) else str(error)
                    raise RefusedError(f"shard {shard_host.number} cannot be saved in {directory}: {why}") from None
                return 0
            case {"shrink_before_s": int(before_s)} if is_integer(before_s):
                with shard_host.lock:
                    shard_host.wait_primary()
                    dropped = self._shard.shrink(before_s)
                    shard_host.send_to_replica(MessageKind.COMMAND, payload)
                    return dropped
            case _:
                raise MalformedError("unknown command")

    def _lease(self, payload: bytes) -> int:
        match read_json(payload):
            case {"pass": str(name), "parts": int(parts), "done": int() | None as done, "waits": bool(waits)} if (
                0 <= parts <= MAX_PARTS
            ):
                pass
            case _:
                raise MalformedError("invalid request for a part of the data")
        shard_host, worker = self._shard_host, self._author.worker
        with shard_host.lock:
            shard_host.wait_primary()
            self._check_current()
            if waits:  # the worker rested, but may have joined again since on another connection
                shard_host.apply_changes(self._shard.rest(worker, _now_s()))
            try:
                self._shard.pass_of(name, parts)  # checked first: the replica would break on an invalid request
                if done is not None:
                    shard_host.send_to_replica(MessageKind.LEASE, payload)
                answer = self._shard.lease(name, parts, done, worker)
            except ValueError as error:
                raise RefusedError(str(error)) from None
            shard_host.lock.notify_all()
            while waits and answer == ALL_HELD and shard_host.connections.get(worker) is self._connection:
                shard_host.wait_change()
                answer = self._shard.lease(name, parts, None, worker)
        return answer

    def _pull(self, header: Header) -> memoryview:
        rows, odd = divmod(header.length, 8)
        if odd:
            raise BrokenError(f"wanted ids of 8 bytes, got {header.length} bytes")
        ids = torch.empty(rows, dtype=torch.int64)
        self._connection.receive_into(bytes_of(ids))
        if bool((ids == NO_ID).any()):
            raise RefusedError(f"{NO_ID} is not a valid id")
        with self._shard_host.lock:
            self._shard_host.wait_primary()
            if 4 * rows * self._dim_of(header.table) > MAX_BODY_BYTES:
                raise RefusedError(f"{rows} rows of table {header.table} are too many at once")
            return bytes_of(self._shard.tables[header.table].pull(ids))

    def _read_push(self, header: Header) -> Push:
        return parse_push(self._connection.receive_body(header.length), header.table, self._dim_of)

    def _check_shard(self, shard: Shard) -> None:
        """Raise `BrokenError` if the request was read for a shard that has been replaced by a new one meanwhile."""
        if self._shard is not shard:
            raise BrokenError(f"shard {self._shard_host.number} was loaded again")

    def _dim_of(self, table: int) -> int:
        if table >= len(self._shard.tables):
            raise BrokenError(f"unknown table {table}")
        return self._shard.tables[table].spec.dim

    def _push(self, header: Header) -> int:
        shard, push = self._shard, self._read_push(header)
        shard_host, worker = self._shard_host, self._author.worker
        with shard_host.lock:
            shard_host.wait_primary()
            self._check_shard(shard)
            self._check_current()
            shard_host.apply_changes(shard.push(self._author, push, _now_s()))
            shard_host.lock.notify_all()
            while not self._shard.is_answered(push.step) and shard_host.connections.get(worker) is self._connection:
                shard_host.wait_change()
            shard_host.wait_primary()
            self._check_current()
            return max(push.step, self._shard.progress.done)


def _now_s() -> int:
    return int(time.time())
