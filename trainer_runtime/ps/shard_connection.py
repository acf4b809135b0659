"""A worker's connection to one shard: opened anew when it breaks, and when the shard is elsewhere."""

from __future__ import annotations

import json
import logging
import math
import select
import ssl
import time
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass, replace

from trainer_runtime.ps.frames import (
    MAX_BODY,
    MAX_WORDS,
    BrokenError,
    FrameConnection,
    Header,
    MessageKind,
    RefusedError,
    UntrustedError,
    dial,
    introduce,
)
from trainer_runtime.ps.table import TableSpec

log = logging.getLogger(__name__)

_CONNECT_S = 2.0
_PROBE_EVERY_S = 10.0
_STALL_S = 600.0
"""At most, of a frame that has begun."""
_FRESH_S = 5.0
"""A line that breaks sooner after it was opened did so because of what it was asked."""
_IN_WORDS = frozenset({MessageKind.DECLARE, MessageKind.LEASE, MessageKind.ORDER})

Endpoint = tuple[str, int]


@dataclass(frozen=True)
class ShardCaller:
    """The process that asks, as the servers know it."""

    worker: int
    incarnation: int
    secret: bytes
    tls: ssl.SSLContext | None = None
    """By which servers are called. None: in the clear."""


@dataclass
class Request:
    """What one shard is asked."""

    header: Header
    body: Sequence[memoryview | bytes] = ()
    into: memoryview | None = None
    """Where the answer belongs; None: it has none."""

    @property
    def length(self) -> int:
        """Of the body, in bytes."""
        return sum(len(part) for part in self.body)

    def check(self) -> None:
        """Raises `ValueError`: no server reads so much at once."""
        most = MAX_WORDS if self.header.kind in _IN_WORDS else MAX_BODY
        if self.length > most:
            raise ValueError(
                f"{self.header.kind.name} of {self.length} bytes for one server, which takes at most {most} at once: "
                "ask for less at a time, or have more servers"
            )


class ShardConnection:
    """The connection to one shard, which may be lost and opened again."""

    def __init__(self, shard: int, endpoint: Endpoint, caller: ShardCaller, timeout_s: float) -> None:
        self.shard = shard
        self.endpoint = endpoint
        self._caller = caller
        self._stall_s = min(max(timeout_s, _CONNECT_S), _STALL_S)
        # not all workers at once
        self.probe_every_s = min(_PROBE_EVERY_S, self._stall_s) * (1 + caller.worker % 16 / 16)
        self._connection: FrameConnection | None = None
        self._tables: list[bytes] = []
        self.begin = 0
        """The step after which this worker begins there."""
        self.why = ""
        """It broke last."""
        self.trouble = ""
        """Why the server that answers is not spoken to; empty: it is, or does not answer."""
        self.was_fresh = False
        """It broke soon after it was opened: because of what was asked, maybe."""
        self._opened_at = -math.inf
        self.rests = False
        """Nobody there is to wait for this worker, also when the line is opened again."""

    @property
    def address(self) -> str:
        """Where it leads, in words."""
        return f"{self.endpoint[0]}:{self.endpoint[1]}"

    @property
    def is_open(self) -> bool:
        """As far as is known."""
        return self._connection is not None

    def try_open(self) -> bool:
        """Whether it is open now. Raises `RefusedError`."""
        if self._connection is not None:
            return True
        endpoint = self.endpoint
        self.trouble = ""
        try:
            self._connection = dial(endpoint, _CONNECT_S, self._caller.tls)
        except UntrustedError as broken:
            self.trouble = str(broken)
            return False
        except (BrokenError, OSError):
            return False
        if self.endpoint != endpoint:  # who moved it meanwhile may not have seen this connection
            self.close()
            return False
        try:
            self._begin(self._connection)
        except (BrokenError, OSError) as broken:
            self.trouble = str(broken) if isinstance(broken, UntrustedError) else ""
            log.debug("shard %d at %s:%d: %s", self.shard, *endpoint, broken)
            self.close()
            return False
        except BaseException:
            self.close()
            raise
        self._opened_at = time.monotonic()
        return True

    def _begin(self, connection: FrameConnection) -> None:
        hello = {"worker": self._caller.worker, "incarnation": self._caller.incarnation, "shard": self.shard}
        introduce(connection, self._caller.secret, {**hello, "rests": self.rests})
        connection.sock.settimeout(self._stall_s)
        self.begin = self._answer(connection, None).sequence
        for number, words in enumerate(self._tables):
            self._declare(connection, number, words)

    def declare(self, spec: TableSpec) -> None:
        """Let it have this table, now and whenever the line is opened. Raises `BrokenError`, `RefusedError`."""
        words = json.dumps(spec.to_json()).encode()
        self._tables.append(words)
        if self._connection is not None:
            self._declare(self._connection, len(self._tables) - 1, words)

    def _declare(self, connection: FrameConnection, number: int, words: bytes) -> None:
        connection.send(Header(MessageKind.DECLARE, self.shard, length=len(words)), words)
        answered = self._answer(connection, None).sequence
        if answered != number:
            raise RefusedError(
                f"shard {self.shard} knows this worker's table {number} as its {answered}: scripts differ"
            )

    def send(self, request: Request) -> None:
        """Raises `BrokenError`."""
        if self._connection is None:
            raise BrokenError("not open")
        header = replace(request.header, shard=self.shard, length=request.length)
        self._connection.send(header, *request.body)

    def receive(self, request: Request) -> Header:
        """Raises `BrokenError`, `RefusedError`."""
        if self._connection is None:
            raise BrokenError("not open")
        return self._answer(self._connection, request.into)

    @property
    def has_more(self) -> bool:
        """Whether something has come already: its descriptor does not tell."""
        return self._connection is not None and self._connection.has_more

    @property
    def descriptor(self) -> int | None:
        """Of the socket; None: it is not open."""
        return None if self._connection is None else self._connection.sock.fileno()

    def close_if_dead(self) -> None:
        """It has not answered for a while."""
        try:
            self.check_alive()
        except BrokenError as why:
            self.break_off(str(why))

    def break_off(self, why: str) -> None:
        """It has broken. `why` stays that of the first time that this is said."""
        if self._connection is not None:
            self.why, self.was_fresh = why, time.monotonic() < self._opened_at + _FRESH_S
            self.close()

    def close(self) -> None:
        """Until it is opened again."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def move(self, endpoint: Endpoint) -> None:
        """The shard is there from now on. From any thread: who waits for an answer hears that none comes."""
        if endpoint != self.endpoint:
            self.endpoint = endpoint
            connection = self._connection
            if connection is not None:
                connection.hang_up()

    def _answer(self, connection: FrameConnection, into: memoryview | None) -> Header:
        while not connection.wait_readable(self.probe_every_s):
            self.check_alive()
        header = connection.receive_header()
        if header.kind is MessageKind.REFUSED:
            raise RefusedError(connection.receive_words(header.length).decode("utf-8", "replace"))
        wanted = 0 if into is None else len(into)
        if header.kind is not MessageKind.DONE or header.length != wanted:
            raise BrokenError(f"{header.length} bytes were answered where {wanted} were asked for")
        if into is not None:
            connection.fill(into)
        return header

    def check_alive(self) -> None:
        """Its server does not answer yet. Raises `BrokenError`: it answers nobody."""
        if not (self._probe() or self._probe()):  # one that many ask may have turned away the first
            raise BrokenError("its server does not answer")

    def _probe(self) -> bool:
        try:
            with closing(dial(self.endpoint, min(_PROBE_EVERY_S, self._stall_s), self._caller.tls)) as connection:
                introduce(connection, self._caller.secret, {"probe": True})
        except (BrokenError, OSError):
            return False
        return True


def ready(lines: Sequence[ShardConnection]) -> Sequence[ShardConnection]:
    """Wait until one of them answers, or has broken; return all of which that is so."""
    while not (broken := [line for line in lines if line.descriptor is None]):
        if found_here := [line for line in lines if line.has_more]:
            return found_here
        by_descriptor = {line.descriptor: line for line in lines if line.descriptor is not None}
        poll = select.poll()
        for descriptor in by_descriptor:
            poll.register(descriptor, select.POLLIN)
        if found := poll.poll(1000 * lines[0].probe_every_s):
            return [by_descriptor[descriptor] for descriptor, _ in found]
        for line in lines:
            line.close_if_dead()
    return broken
