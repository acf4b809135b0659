"""A server process: sockets and threads around the shards that decide.

One thread a connection, one request at a time on each. A connection is a worker's, or that of the primary of a shard
whose copy is here. A shard changes under its lock; who must wait for other workers waits there, and is woken by what
they send.
"""

from __future__ import annotations

import logging
import socket
import threading
import time
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from trainer_runtime.ps.hosted import Hosted
from trainer_runtime.ps.index import NOBODY
from trainer_runtime.ps.keeping import Owns, save, take_said
from trainer_runtime.ps.leases import MAX_PARTS
from trainer_runtime.ps.messages import Push, parse_push
from trainer_runtime.ps.replica import receive_rows, take_change
from trainer_runtime.ps.shard import Author, Change, Shard
from trainer_runtime.ps.table import spec_of
from trainer_runtime.ps.wire import (
    ALL_HELD,
    LEFT_OUT,
    MAX_BODY,
    BrokenError,
    Connection,
    Header,
    Kind,
    RefusedError,
    SenselessError,
    admit,
    bytes_of,
    is_integer,
    read_json,
)

log = logging.getLogger(__name__)

_HANDSHAKE_S = 5.0
_STRANGERS = 64
_FULL_S = 1.0
"""At most, until it is tried again whether there is room for another connection."""


class Server:
    """Serves its shards at a socket that listens, until `close`.

    Args:
        hosted: all shards of the job, by their numbers.
        listener: where it listens.
        secret: what the job's processes know.
        workers: after so many have left in order, `wait` returns. None: it does not.
        only_from: IP addresses from which alone anybody is let in. None: from all.
    """

    def __init__(
        self,
        hosted: Sequence[Hosted],
        listener: socket.socket,
        secret: bytes,
        workers: int | None,
        only_from: Collection[str] | None = None,
    ) -> None:
        self._hosted = hosted
        self._listener = listener
        self._secret = secret
        self._only_from = only_from
        self._refused: set[str] = set()
        self._workers = workers
        self._changed = threading.Condition()
        self._strangers: dict[Connection, None] = {}
        """Who has not proved anything yet, in the order in which they came."""
        self._left: set[int] = set()
        self._is_closed = False
        self._thread = threading.Thread(target=self._accept, name="ps-accept", daemon=True)
        self._thread.start()

    def wait(self) -> None:
        """Return when all workers have left."""
        with self._changed:
            self._changed.wait_for(lambda: self._is_closed or len(self._left) == self._workers)

    def close(self) -> None:
        """Let everybody go."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
            strangers = [*self._strangers]
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for connection in strangers:
            connection.close()
        for hosted in self._hosted:
            hosted.close()
        self._thread.join()

    def _accept(self) -> None:
        while not self._is_closed:
            try:
                self._let_in(*self._listener.accept())
            except (OSError, RuntimeError) as error:  # it was closed; or there is no descriptor, no memory, no thread
                with self._changed:
                    if not self._is_closed:
                        log.warning("nobody can be let in for a while: %s", error)
                        self._changed.wait(_FULL_S)  # who goes makes room

    def _let_in(self, sock: socket.socket, address: tuple[Any, ...]) -> None:
        if not self._lets_in(address[0]):
            sock.close()
            return
        connection = Connection(sock)
        with self._changed:
            if len(self._strangers) >= _STRANGERS:
                next(iter(self._strangers)).close()
            self._strangers[connection] = None
        try:
            threading.Thread(target=self._serve, args=(connection,), name="ps-caller", daemon=True).start()
        except BaseException:
            self._end(connection)
            raise

    def _end(self, connection: Connection) -> None:
        connection.close()
        with self._changed:
            self._strangers.pop(connection, None)
            self._changed.notify_all()

    def _lets_in(self, address: str) -> bool:
        if self._only_from is None or address in self._only_from:
            return True
        if address not in self._refused and len(self._refused) < _STRANGERS:
            self._refused.add(address)
            log.warning(
                "%s is refused: only the job's listed machines are let in, %s, as long as no secret is set",
                address,
                ", ".join(sorted(self._only_from)),
            )
        return False

    def _serve(self, connection: Connection) -> None:
        try:
            connection.sock.settimeout(_HANDSHAKE_S)
            hello = admit(connection, self._secret)
            connection.sock.settimeout(None)
            with self._changed:
                self._strangers.pop(connection, None)
            match hello:
                case {"shard": int(number), "worker": int(worker), "incarnation": int(incarnation)} if (
                    0 <= number < len(self._hosted)
                ):
                    rests = hello.get("rests") is True
                    _Guest(self, self._hosted[number], connection, Author(worker, incarnation), rests=rests).serve()
                case {"shard": int(number), "primary": [int(), int()], "map": int(of_map), "era": int(era)} if (
                    0 <= number < len(self._hosted)
                ):
                    _keep_copy(self._hosted[number], connection, of_map, era)
                case {"probe": True}:
                    pass  # the handshake was the answer
                case _:
                    raise BrokenError("a hello for somebody else")  # noqa: TRY301 - as any other that breaks a rule
        except (BrokenError, OSError) as broken:
            log.debug("a connection has ended: %s", broken)
        finally:
            self._end(connection)

    def note_left(self, worker: int) -> None:
        """A worker has done its part, and was told that this is known."""
        with self._changed:
            self._left.add(worker)
            self._changed.notify_all()


class _Guest:
    """A worker's connection."""

    def __init__(self, server: Server, hosted: Hosted, connection: Connection, author: Author, *, rests: bool) -> None:
        self._server = server
        self._hosted = hosted
        self._connection = connection
        self._author = author
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
        self._connection.send(Header(Kind.DONE, hosted.number, sequence=begin))

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
        except (RefusedError, SenselessError) as refused:
            self._refuse(refused)
            return
        late = header.kind is Kind.PUSH and self._shard.is_left_out(self._author, header.sequence)
        answer = Header(Kind.DONE, number, table=LEFT_OUT if late else 0, sequence=sequence, length=len(body))
        self._connection.send(answer, body)
        if header.kind is Kind.LEAVE:  # not before it is answered: the last one's leave ends this server
            self._server.note_left(self._author.worker)

    def _refuse(self, why: Exception) -> None:
        words = str(why).encode(errors="backslashreplace")
        self._connection.send(Header(Kind.REFUSED, self._hosted.number, length=len(words)), words)

    def _handle(self, header: Header) -> tuple[int, memoryview | bytes]:  # noqa: PLR0911 - one a kind
        hosted = self._hosted
        match header.kind:
            case Kind.PULL:
                return 0, self._pull(header)
            case Kind.PUSH:
                return self._push(header), b""
            case Kind.BEGIN:
                shard, push = self._shard, self._read_push(header)
                with hosted.lock:
                    hosted.wait_primary()
                    self._check_same(shard)
                    hosted.do([Change((), push.parts, _now_s(), begins=True)])
                return 0, b""
            case Kind.DECLARE:
                return self._declare(self._connection.receive_words(header.length)), b""
            case Kind.LEASE:
                return self._lease(self._connection.receive_words(header.length)), b""
            case Kind.ORDER:
                return self._obey(self._connection.receive_words(header.length)), b""
            case Kind.REST | Kind.LEAVE:
                leaves = header.kind is Kind.LEAVE
                with hosted.lock:
                    hosted.wait_primary()
                    self._check_newest()
                    hosted.do((self._shard.leave if leaves else self._shard.rest)(self._author.worker, _now_s()))
                    hosted.lock.notify_all()
                return 0, b""
            case Kind.JOIN:
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
                self._hosted.tell_copy(Kind.DECLARE, words)
                return number
        except ValueError as error:
            raise RefusedError(str(error)) from None

    def _obey(self, words: bytes) -> int:
        hosted = self._hosted
        match read_json(words):
            case {"save": str(directory), "shards": int(shards)}:
                try:
                    save(self._shard, hosted.lock, Path(directory), Owns(hosted.number, shards))
                except (OSError, ValueError) as error:  # a path that is none is a ValueError
                    why = error.strerror if isinstance(error, OSError) else str(error)
                    raise RefusedError(f"shard {hosted.number} cannot be saved in {directory}: {why}") from None
                return 0
            case {"shrink_before_s": int(before_s)} if is_integer(before_s):
                with hosted.lock:
                    hosted.wait_primary()
                    dropped = _shrink(self._shard, before_s)
                    hosted.tell_copy(Kind.ORDER, words)
                    return dropped
            case _:
                raise SenselessError("an order that nobody gives")

    def _lease(self, words: bytes) -> int:
        match read_json(words):
            case {"pass": str(name), "parts": int(parts), "done": int() | None as done, "waits": bool(waits)} if (
                0 <= parts <= MAX_PARTS
            ):
                pass
            case _:
                raise SenselessError("a wish for no part of the data")
        hosted, worker = self._hosted, self._author.worker
        with hosted.lock:
            hosted.wait_primary()
            self._check_newest()
            if waits:  # it rested, but may have come back since on another connection
                hosted.do(self._shard.rest(worker, _now_s()))
            try:
                self._shard.pass_of(name, parts)  # else a copy would be told what makes no sense, and be lost with it
                if done is not None:
                    hosted.tell_copy(Kind.LEASE, words)
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


def _keep_copy(hosted: Hosted, connection: Connection, of_map: int, era: int) -> None:
    """Be the copy that a shard's primary wants to have. Raises `BrokenError`."""
    with hosted.lock:
        if of_map < max(hosted.map, hosted.source_map) or hosted.is_primary:
            raise BrokenError(f"shard {hosted.number} is elsewhere by a newer map")
        if hosted.source is not None:
            hosted.source.close()
        hosted.source, hosted.source_map, hosted.era = connection, of_map, 0
        hosted.shard = Shard(hosted.shard.pace.mode)
    connection.send(Header(Kind.DONE, hosted.number))
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
            if header.kind is Kind.WHOLE:
                hosted.era = era
        connection.send(Header(Kind.DONE, hosted.number))


def _told(shard: Shard, connection: Connection, header: Header) -> Callable[[], object]:
    """Receive what a primary tells; return what is to be done."""
    match header.kind:
        case Kind.ROWS:
            part = receive_rows(connection, header, shard)
            return lambda: shard.tables[header.table].put(part)
        case Kind.CHANGE:
            change = take_change(connection.receive_body(header.length), header, shard)
            return lambda: shard.apply(change)
        case _:
            pass
    match header.kind, read_json(connection.receive_words(header.length)):
        case Kind.DECLARE, dict(told):
            return lambda: shard.declare(spec_of(told))
        case Kind.WHOLE, dict(told):
            return lambda: take_said(shard, told)
        case Kind.ORDER, {"shrink_before_s": int(before_s)} if is_integer(before_s):
            return lambda: _shrink(shard, before_s)
        case Kind.LEASE, {"pass": str(name), "parts": int(parts), "done": int(done)} if 0 <= parts <= MAX_PARTS:
            return lambda: shard.pass_of(name, parts).finish(done, worker=-1)
        case _:
            raise BrokenError(f"{header.kind.name} that no primary tells")


def _shrink(shard: Shard, before_s: int) -> int:
    return sum(table.shrink(before_s) for table in shard.tables)


def _now_s() -> int:
    return int(time.time())
