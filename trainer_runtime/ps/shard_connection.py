"""A worker's connection to one shard. It is opened again when it breaks or when the shard moves to another server."""

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
    MAX_BODY_BYTES,
    MAX_JSON_BYTES,
    BrokenError,
    FrameConnection,
    Header,
    MessageKind,
    RefusedError,
    UntrustedError,
    client_handshake,
    dial,
)
from trainer_runtime.ps.table import TableSpec

log = logging.getLogger(__name__)

_CONNECT_S = 2.0
_PROBE_EVERY_S = 10.0
_STALL_S = 600.0
"""Maximum time for a frame that has begun."""
_EARLY_S = 5.0
"""A connection that breaks sooner than this after it was opened may have been closed because of the request."""
_JSON_KINDS = frozenset({MessageKind.DECLARE, MessageKind.LEASE, MessageKind.COMMAND})

Endpoint = tuple[str, int]


@dataclass(frozen=True)
class ShardCaller:
    """The worker process that makes requests, as the servers identify it."""

    worker: int
    incarnation: int
    secret: bytes
    tls: ssl.SSLContext | None = None
    """TLS context for connections to servers. None: connections are not encrypted."""


@dataclass
class Request:
    """A request to one shard."""

    header: Header
    body: Sequence[memoryview | bytes] = ()
    into: memoryview | None = None
    """Buffer for the body of the answer; None: the answer has no body."""

    @property
    def length(self) -> int:
        """Length of the body in bytes."""
        return sum(len(part) for part in self.body)

    def check(self) -> None:
        """Raise `ValueError` if the body is longer than a server accepts."""
        most = MAX_JSON_BYTES if self.header.kind in _JSON_KINDS else MAX_BODY_BYTES
        if self.length > most:
            raise ValueError(
                f"{self.header.kind.name} of {self.length} bytes for one server, which accepts at most {most} at once: "
                "request less at a time, or use more servers"
            )


class ShardConnection:
    """The connection to one shard, which can be lost and opened again."""

    def __init__(self, shard: int, endpoint: Endpoint, caller: ShardCaller, timeout_s: float) -> None:
        self.shard = shard
        self.endpoint = endpoint
        self._caller = caller
        self._stall_s = min(max(timeout_s, _CONNECT_S), _STALL_S)
        # spread by worker, so that workers do not probe at the same time
        self.probe_every_s = min(_PROBE_EVERY_S, self._stall_s) * (1 + caller.worker % 16 / 16)
        self._connection: FrameConnection | None = None
        self._tables: list[bytes] = []
        self.start_step = 0
        """The step after which this worker continues on this shard."""
        self.break_reason = ""
        """Why the connection broke last."""
        self.tls_error = ""
        """Why TLS with the server failed; empty if it did not fail, or if the server does not answer."""
        self.broke_early = False
        """Whether the connection broke soon after it was opened, perhaps because of the request."""
        self._opened_at = -math.inf
        self.is_resting = False
        """Whether other workers need not wait for this one, also after the connection is opened again."""

    @property
    def address(self) -> str:
        """The address of the server, as host:port."""
        return f"{self.endpoint[0]}:{self.endpoint[1]}"

    @property
    def is_open(self) -> bool:
        """Whether the connection is open, as far as this end knows."""
        return self._connection is not None

    def try_open(self) -> bool:
        """Open the connection if it is closed, and return whether it is open. Raises `RefusedError`."""
        if self._connection is not None:
            return True
        endpoint = self.endpoint
        self.tls_error = ""
        try:
            self._connection = dial(endpoint, _CONNECT_S, self._caller.tls)
        except UntrustedError as broken:
            self.tls_error = str(broken)
            return False
        except (BrokenError, OSError):
            return False
        if self.endpoint != endpoint:  # `move_to` was called meanwhile and may not have seen this connection
            self.close()
            return False
        try:
            self._handshake(self._connection)
        except (BrokenError, OSError) as broken:
            self.tls_error = str(broken) if isinstance(broken, UntrustedError) else ""
            log.debug("shard %d at %s:%d: %s", self.shard, *endpoint, broken)
            self.close()
            return False
        except BaseException:
            self.close()
            raise
        self._opened_at = time.monotonic()
        return True

    def _handshake(self, connection: FrameConnection) -> None:
        hello = {"worker": self._caller.worker, "incarnation": self._caller.incarnation, "shard": self.shard}
        client_handshake(connection, self._caller.secret, {**hello, "rests": self.is_resting})
        connection.sock.settimeout(self._stall_s)
        self.start_step = self._receive_answer(connection, None).sequence
        for number, payload in enumerate(self._tables):
            self._declare(connection, number, payload)

    def declare(self, spec: TableSpec) -> None:
        """Declare a table, now and whenever the connection is opened. Raises `BrokenError`, `RefusedError`."""
        payload = json.dumps(spec.to_json()).encode()
        self._tables.append(payload)
        if self._connection is not None:
            self._declare(self._connection, len(self._tables) - 1, payload)

    def _declare(self, connection: FrameConnection, number: int, payload: bytes) -> None:
        connection.send(Header(MessageKind.DECLARE, self.shard, length=len(payload)), payload)
        answered = self._receive_answer(connection, None).sequence
        if answered != number:
            raise RefusedError(
                f"wanted number {number} for a table, got {answered} from shard {self.shard}: "
                "run the same script on all workers"
            )

    def send(self, request: Request) -> None:
        """Send a request. Raises `BrokenError`."""
        if self._connection is None:
            raise BrokenError("not open")
        header = replace(request.header, shard=self.shard, length=request.length)
        self._connection.send(header, *request.body)

    def receive(self, request: Request) -> Header:
        """Wait for the answer to a request. Raises `BrokenError`, `RefusedError`."""
        if self._connection is None:
            raise BrokenError("not open")
        return self._receive_answer(self._connection, request.into)

    @property
    def has_buffered_data(self) -> bool:
        """Whether data has arrived that polling the descriptor does not show."""
        return self._connection is not None and self._connection.has_buffered_data

    @property
    def descriptor(self) -> int | None:
        """File descriptor of the socket; None: the connection is closed."""
        return None if self._connection is None else self._connection.sock.fileno()

    def close_if_dead(self) -> None:
        """Close the connection if its server does not answer a probe."""
        try:
            self.check_alive()
        except BrokenError as why:
            self.mark_broken(str(why))

    def mark_broken(self, why: str) -> None:
        """Close a broken connection. Repeated calls keep the reason of the first one."""
        if self._connection is not None:
            self.break_reason, self.broke_early = why, time.monotonic() < self._opened_at + _EARLY_S
            self.close()

    def close(self) -> None:
        """Close the connection; it can be opened again."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def move_to(self, endpoint: Endpoint) -> None:
        """Use another server for this shard from now on, and wake a thread that waits for an answer. For any thread."""
        if endpoint != self.endpoint:
            self.endpoint = endpoint
            connection = self._connection
            if connection is not None:
                connection.shut_down()

    def _receive_answer(self, connection: FrameConnection, into: memoryview | None) -> Header:
        while not connection.wait_readable(self.probe_every_s):
            self.check_alive()
        header = connection.receive_header()
        if header.kind is MessageKind.REFUSED:
            raise RefusedError(connection.receive_text(header.length).decode("utf-8", "replace"))
        wanted = 0 if into is None else len(into)
        if header.kind is not MessageKind.DONE or header.length != wanted:
            raise BrokenError(f"wanted an answer of {wanted} bytes, got {header.length}")
        if into is not None:
            connection.receive_into(into)
        return header

    def check_alive(self) -> None:
        """Probe the server, which has not answered yet. Raises `BrokenError` if it does not answer the probes."""
        if not (self._probe() or self._probe()):  # a busy server may have dropped the first one
            raise BrokenError("its server does not answer")

    def _probe(self) -> bool:
        try:
            with closing(dial(self.endpoint, min(_PROBE_EVERY_S, self._stall_s), self._caller.tls)) as connection:
                client_handshake(connection, self._caller.secret, {"probe": True})
        except (BrokenError, OSError):
            return False
        return True


def wait_ready(connections: Sequence[ShardConnection]) -> Sequence[ShardConnection]:
    """Wait until at least one connection has an answer or has broken, and return all of these."""
    while not (broken := [connection for connection in connections if connection.descriptor is None]):
        if buffered := [connection for connection in connections if connection.has_buffered_data]:
            return buffered
        by_descriptor = {
            connection.descriptor: connection for connection in connections if connection.descriptor is not None
        }
        poll = select.poll()
        for descriptor in by_descriptor:
            poll.register(descriptor, select.POLLIN)
        if found := poll.poll(1000 * connections[0].probe_every_s):
            return [by_descriptor[descriptor] for descriptor, _ in found]
        for connection in connections:
            connection.close_if_dead()
    return broken
