"""A worker's connection to one shard, as the server has it: one request at a time, answered when it is done."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import torch

from trainer_runtime.ps.frames import (
    ALL_HELD,
    LEFT_OUT,
    MAX_BODY,
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
from trainer_runtime.ps.index import NOBODY
from trainer_runtime.ps.leases import MAX_PARTS
from trainer_runtime.ps.messages import Push, parse_push
from trainer_runtime.ps.persistence import Ownership, save
from trainer_runtime.ps.shard import Author, Shard, ShardChange
from trainer_runtime.ps.shard_host import ShardHost
from trainer_runtime.ps.table import spec_of


class WorkerSession:
    """One worker at one shard.

    Args:
        hosted: the shard.
        connection: the worker's.
        author: who that is.
        on_left: called once it has done its part, and was told that this is known.
        rests: it makes no steps for now.
    """

    def __init__(
        self,
        hosted: ShardHost,
        connection: FrameConnection,
        author: Author,
        on_left: Callable[[int], None],
        *,
        rests: bool,
    ) -> None:
        self._hosted = hosted
        self._connection = connection
        self._author = author
        self._on_left = on_left
        self._rests = rests

    @property
    def _shard(self) -> Shard:
        return self._hosted.shard

    def serve(self) -> None:
        """Until it breaks. Raises `BrokenError`."""
        try:
            self._join()
            while True:
                self._answer()
        except RefusedError as refused:
            self._refuse(refused)
        finally:
            with self._hosted.lock, suppress(BrokenError):
                self._hosted.leave(self._author.worker, self._connection)

    def _join(self) -> None:
        hosted, worker = self._hosted, self._author.worker
        with hosted.lock:
            hosted.wait_primary()
            if worker in hosted.here and hosted.incarnations[worker] > self._author.incarnation:
                raise RefusedError(
                    f"worker {worker} has another process, which has begun later: this one is not needed any more, or "
                    "two were given one number (PADDLE_TRAINER_ID)"
                )
            earlier = hosted.here.pop(worker, None)
            if earlier is not None:
                earlier.close()  # a worker has one process with one connection: that was another
            hosted.here[worker], hosted.incarnations[worker] = self._connection, self._author.incarnation
            begin = self._shard.join(self._author)
            if self._rests:
                hosted.do(self._shard.rest(worker, _now_s()))
            hosted.lock.notify_all()
        self._connection.send(Header(MessageKind.DONE, hosted.number, sequence=begin))

    def _check_newest(self) -> None:
        """With the lock. Raises `BrokenError`: this worker has another connection now, or none is wanted here."""
        if self._hosted.here.get(self._author.worker) is not self._connection:
            raise BrokenError("replaced by another")

    def _answer(self) -> None:
        header = self._connection.receive_header()
        number = self._hosted.number
        if header.shard != number:
            raise BrokenError(f"shard {header.shard} is asked for where {number} is")
        try:
            sequence, body = self._handle(header)
        except (RefusedError, MalformedError) as refused:
            self._refuse(refused)
            return
        late = header.kind is MessageKind.PUSH and self._shard.is_left_out(self._author, header.sequence)
        answer = Header(MessageKind.DONE, number, table=LEFT_OUT if late else 0, sequence=sequence, length=len(body))
        self._connection.send(answer, body)
        if header.kind is MessageKind.LEAVE:  # not before it is answered: the last one's leave ends this server
            self._on_left(self._author.worker)

    def _refuse(self, why: Exception) -> None:
        words = str(why).encode(errors="backslashreplace")
        self._connection.send(Header(MessageKind.REFUSED, self._hosted.number, length=len(words)), words)

    def _handle(self, header: Header) -> tuple[int, memoryview | bytes]:  # noqa: PLR0911 - one a kind
        hosted = self._hosted
        match header.kind:
            case MessageKind.PULL:
                return 0, self._pull(header)
            case MessageKind.PUSH:
                return self._push(header), b""
            case MessageKind.BEGIN:
                shard, push = self._shard, self._read_push(header)
                with hosted.lock:
                    hosted.wait_primary()
                    self._check_same(shard)
                    hosted.do([ShardChange((), push.parts, _now_s(), begins=True)])
                return 0, b""
            case MessageKind.DECLARE:
                return self._declare(self._connection.receive_words(header.length)), b""
            case MessageKind.LEASE:
                return self._lease(self._connection.receive_words(header.length)), b""
            case MessageKind.ORDER:
                return self._obey(self._connection.receive_words(header.length)), b""
            case MessageKind.REST | MessageKind.LEAVE:
                leaves = header.kind is MessageKind.LEAVE
                with hosted.lock:
                    hosted.wait_primary()
                    self._check_newest()
                    hosted.do((self._shard.leave if leaves else self._shard.rest)(self._author.worker, _now_s()))
                    hosted.lock.notify_all()
                return 0, b""
            case MessageKind.JOIN:
                with hosted.lock:
                    self._check_newest()
                    return self._shard.join(self._author), b""
            case _:
                raise BrokenError(f"{header.kind.name} is no worker's")

    def _declare(self, words: bytes) -> int:
        try:
            spec = spec_of(read_json(words))
            with self._hosted.lock:
                self._hosted.wait_primary()
                number = self._shard.declare(spec)
                self._hosted.tell_copy(MessageKind.DECLARE, words)
                return number
        except ValueError as error:
            raise RefusedError(str(error)) from None

    def _obey(self, words: bytes) -> int:
        hosted = self._hosted
        match read_json(words):
            case {"save": str(directory), "shards": int(shards)}:
                try:
                    save(self._shard, hosted.lock, Path(directory), Ownership(hosted.number, shards))
                except (OSError, ValueError) as error:  # a path that is none is a ValueError
                    why = error.strerror if isinstance(error, OSError) else str(error)
                    raise RefusedError(f"shard {hosted.number} cannot be saved in {directory}: {why}") from None
                return 0
            case {"shrink_before_s": int(before_s)} if is_integer(before_s):
                with hosted.lock:
                    hosted.wait_primary()
                    dropped = self._shard.shrink(before_s)
                    hosted.tell_copy(MessageKind.ORDER, words)
                    return dropped
            case _:
                raise MalformedError("an order that nobody gives")

    def _lease(self, words: bytes) -> int:
        match read_json(words):
            case {"pass": str(name), "parts": int(parts), "done": int() | None as done, "waits": bool(waits)} if (
                0 <= parts <= MAX_PARTS
            ):
                pass
            case _:
                raise MalformedError("a wish for no part of the data")
        hosted, worker = self._hosted, self._author.worker
        with hosted.lock:
            hosted.wait_primary()
            self._check_newest()
            if waits:  # it rested, but may have come back since on another connection
                hosted.do(self._shard.rest(worker, _now_s()))
            try:
                self._shard.pass_of(name, parts)  # else a copy would be told what makes no sense, and be lost with it
                if done is not None:
                    hosted.tell_copy(MessageKind.LEASE, words)
                answer = self._shard.lease(name, parts, done, worker)
            except ValueError as error:
                raise RefusedError(str(error)) from None
            hosted.lock.notify_all()
            while waits and answer == ALL_HELD and hosted.here.get(worker) is self._connection:
                hosted.wait_change()
                answer = self._shard.lease(name, parts, None, worker)
        return answer

    def _pull(self, header: Header) -> memoryview:
        rows, odd = divmod(header.length, 8)
        if odd:
            raise BrokenError("a part of an id")
        ids = torch.empty(rows, dtype=torch.int64)
        self._connection.fill(bytes_of(ids))
        if bool((ids == NOBODY).any()):
            raise RefusedError(f"{NOBODY} is no id")
        with self._hosted.lock:
            self._hosted.wait_primary()
            if 4 * rows * self._dim_of(header.table) > MAX_BODY:
                raise RefusedError(f"{rows} rows of table {header.table} are too many at once")
            return bytes_of(self._shard.tables[header.table].pull(ids))

    def _read_push(self, header: Header) -> Push:
        return parse_push(self._connection.receive_body(header.length), header.table, self._dim_of)

    def _check_same(self, shard: Shard) -> None:
        """What was read for one shard is nothing to the one that has begun anew meanwhile. Raises `BrokenError`."""
        if self._shard is not shard:
            raise BrokenError(f"shard {self._hosted.number} has begun anew")

    def _dim_of(self, table: int) -> int:
        if table >= len(self._shard.tables):
            raise BrokenError(f"no table {table}")
        return self._shard.tables[table].spec.dim

    def _push(self, header: Header) -> int:
        shard, push = self._shard, self._read_push(header)
        hosted, worker = self._hosted, self._author.worker
        with hosted.lock:
            hosted.wait_primary()
            self._check_same(shard)
            self._check_newest()
            hosted.do(shard.push(self._author, push, _now_s()))
            hosted.lock.notify_all()
            while not self._shard.is_answered(push.step) and hosted.here.get(worker) is self._connection:
                hosted.wait_change()
            hosted.wait_primary()
            self._check_newest()
            return max(push.step, self._shard.pace.done)


def _now_s() -> int:
    return int(time.time())
