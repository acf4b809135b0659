"""Frames between workers and servers: a header with a checksum, then a raw body that is received into its final memory.

| bytes | field |
|---|---|
| 2 | `MAGIC` |
| 1 | kind |
| 1 | 0 |
| 4 | shard |
| 4 | table; in a push, the number of parts that follow; in the answer to a push, 0 or `LEFT_OUT` |
| 8 | sequence: in a push, its number; in an answer, the number that it reports |
| 8 | length of the body in bytes |
| 4 | CRC-32 of the fields above |

Numbers are little-endian. A connection begins with a handshake in which both ends prove that they know the job's secret
(`client_handshake`, `server_handshake`). Frames are neither signed nor encrypted unless the connection uses TLS.

A frame that violates the protocol ends the connection. A complete request of a worker that makes no sense is answered
with `REFUSED` and the reason.
"""

from __future__ import annotations

import hmac
import json
import os
import secrets
import select
import socket
import ssl
import struct
import threading
import zlib
from collections import deque
from contextlib import suppress
from dataclasses import dataclass
from enum import IntEnum
from itertools import islice
from typing import Any, Literal

import torch

from trainer_runtime.tls import TlsBroken, TlsChannel

MAGIC = 0x5053
MAX_BODY_BYTES = 1 << 31
MAX_JSON_BYTES = 1 << 20
"""Maximum length of a body that is JSON."""
_HEADER = struct.Struct("<HBBIIQQ")
_SUM = struct.Struct("<I")
_VERSION = b"elastic-agent servers 2"
_NONCE_BYTES = 32
_PROOF_BYTES = 32
_MAX_HELLO = 4096
_RECEIVE_BYTES = 1 << 18
_SEND_BYTES = 1 << 20
"""Number of bytes that are encrypted at a time."""
_MOST_PIECES = os.sysconf("SC_IOV_MAX")
"""Maximum number of buffers of one system call."""
_OPTIONS = (
    (socket.IPPROTO_TCP, socket.TCP_NODELAY, 1),
    # A machine that vanished is noticed after 10 s, whether this end waits for it or writes to it.
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
    (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 4),
    (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 2),
    (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3),
    (socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 10_000),
)


class MessageKind(IntEnum):
    """The kind of a frame."""

    DECLARE = 1
    """JSON of a table. Answered with the number of the table."""
    PULL = 2
    """Ids. Answered with their rows."""
    PUSH = 3
    """Gradients, see `messages`. Applied once, however often the push is sent."""
    INITIALIZE = 4
    """Parts as of a push: initial values of rows that do not exist yet."""
    REST = 5
    """The worker makes no steps for a while: other workers do not wait for it."""
    JOIN = 6
    """The worker makes steps again. Answered with the step after which it continues."""
    LEAVE = 7
    """The worker has made its last push."""
    LEASE = 8
    """JSON: a finished part of the data, and a request for another. Answered with its number + `PART`, or less."""
    COMMAND = 9
    """JSON: save all rows, or drop those that received no push for some time."""
    ROWS = 10
    """To a replica: rows with their optimizer state and times."""
    COMPLETE = 11
    """To a replica: JSON of the rest of the shard's state. The replica is complete after it."""
    CHANGE = 12
    """To a replica: a change of the shard."""
    DONE = 13
    """Answer; the body is what was requested."""
    REFUSED = 14
    """Answer; the body is the reason."""


ALL_DONE, ALL_HELD, PART = 0, 1, 2
"""Answers to `LEASE`: all parts are done; workers hold all other parts; offset that is added to a part's number."""
LEFT_OUT = 1
"""In the answer to a push: the common step was over when the push arrived, so the push does not count."""


class BrokenError(Exception):
    """The connection cannot continue; the message has the reason."""


class UntrustedError(BrokenError):
    """TLS with the other end failed, or a certificate was not accepted; the message has the reason."""


class MalformedError(BrokenError):
    """A complete message makes no sense; the message has the reason. The connection can continue."""


class RefusedError(Exception):
    """The other end understood the request and refused it; the message has the reason."""


def is_integer(value: object) -> bool:
    """Return whether a value from JSON is a signed 64-bit integer, which tensors can hold."""
    return type(value) is int and -(1 << 63) <= value < 1 << 63


@dataclass(frozen=True, slots=True)
class Header:
    """A frame without its body."""

    kind: MessageKind
    shard: int = 0
    table: int = 0
    sequence: int = 0
    length: int = 0

    def pack(self) -> bytes:
        """Return the header as it is sent."""
        head = _HEADER.pack(MAGIC, self.kind, 0, self.shard, self.table, self.sequence, self.length)
        return head + _SUM.pack(zlib.crc32(head))


HEADER_BYTES = _HEADER.size + _SUM.size


def parse_header(data: bytes) -> Header:
    """Parse a header. Raises `BrokenError` if it is damaged or invalid."""
    head = data[: _HEADER.size]
    if _SUM.unpack_from(data, _HEADER.size)[0] != zlib.crc32(head):
        raise BrokenError("damaged header")
    magic, kind, zero, shard, table, sequence, length = _HEADER.unpack(head)
    if magic != MAGIC or zero or kind not in MessageKind.__members__.values() or length > MAX_BODY_BYTES:
        raise BrokenError("invalid header")
    return Header(MessageKind(kind), shard, table, sequence, length)


class FrameConnection:
    """One end of a connection. At most one thread sends and one thread receives at the same time."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        for level, option, value in _OPTIONS:
            sock.setsockopt(level, option, value)
        self._header = bytearray(HEADER_BYTES)
        self._tls: TlsChannel | None = None
        """None: the connection is not encrypted."""
        self._tls_lock = threading.Lock()
        """Guards the TLS channel. It is never held while a thread waits for the other end."""

    def encrypt(self, channel: TlsChannel) -> None:
        """Start TLS. Raises `UntrustedError`, `BrokenError`."""
        try:
            is_done = channel.shake()
            self.send_raw(channel.give())
            while not is_done:
                channel.take(self._receive_some())
                try:
                    is_done = channel.shake()
                finally:  # after an error too: the other end receives the TLS alert with the reason
                    self.send_raw(channel.give())
        except TlsBroken as broken:
            raise UntrustedError(str(broken)) from None
        self._tls = channel

    def send(self, header: Header, *body: memoryview | bytes) -> None:
        """Send a frame; `header.length` must be the length of the body. Raises `BrokenError`."""
        if self._tls is not None:
            for part in (header.pack(), *body):
                self.send_raw(part)
            return
        rest = deque((memoryview(header.pack()), *(memoryview(part).cast("B") for part in body if len(part))))
        try:
            while rest:
                sent = self.sock.sendmsg(islice(rest, _MOST_PIECES))
                while rest and sent >= len(rest[0]):
                    sent -= len(rest.popleft())
                if sent:
                    rest[0] = rest[0][sent:]
        except OSError as error:
            raise BrokenError(_reason(error)) from None

    @property
    def has_buffered_data(self) -> bool:
        """Whether decrypted data is waiting that was not received yet."""
        if self._tls is None:
            return False
        with self._tls_lock:
            return self._tls.has_more

    def wait_readable(self, timeout_s: float) -> bool:
        """Return whether data, or the end of the connection, arrived within the timeout."""
        if self.has_buffered_data:
            return True
        poll = select.poll()
        poll.register(self.sock, select.POLLIN)
        return bool(poll.poll(1000 * timeout_s))

    def receive_header(self) -> Header:
        """Wait for a frame and return its header. Raises `BrokenError`."""
        self.receive_into(memoryview(self._header))
        return parse_header(bytes(self._header))

    def receive_into(self, buffer: memoryview) -> None:
        """Fill a buffer. Raises `BrokenError`."""
        try:
            at = 0
            while at < len(buffer):
                with buffer[at:] as rest:
                    at += self._receive_some_into(rest)
        except OSError as error:
            raise BrokenError(_reason(error)) from None

    def _receive_some_into(self, buffer: memoryview) -> int:
        if self._tls is None:
            received = self.sock.recv_into(buffer)
            if not received:
                raise BrokenError("connection closed")
            return received
        try:
            while True:
                with self._tls_lock:
                    received = self._tls.read_into(buffer)
                if received:
                    return received
                if self._tls.is_over:
                    raise BrokenError("connection closed")
                data = self._receive_some()
                with self._tls_lock:
                    self._tls.take(data)
        except TlsBroken as broken:  # in TLS 1.3 a refused certificate is reported after the handshake
            raise UntrustedError(str(broken)) from None

    def _receive_some(self) -> bytes:
        try:
            data = self.sock.recv(_RECEIVE_BYTES)
        except OSError as error:
            raise BrokenError(_reason(error)) from None
        if not data:
            raise BrokenError("connection closed")
        return data

    def receive_body(self, length: int) -> memoryview:
        """Receive a raw body. Raises `BrokenError`."""
        try:  # not zeroed: pages that were not written take no memory, whatever length the header has
            body = bytes_of(torch.empty(length, dtype=torch.uint8))
        except RuntimeError:
            raise BrokenError(f"no memory for {length} bytes") from None
        self.receive_into(body)
        return body

    def receive_text(self, length: int) -> bytes:
        """Receive a body that is text or JSON. Raises `BrokenError`."""
        if length > MAX_JSON_BYTES:
            raise BrokenError(f"wanted at most {MAX_JSON_BYTES} bytes of JSON or text, got {length}")
        return self.receive_bytes(length)

    def send_raw(self, data: bytes | memoryview) -> None:
        """Send bytes that are not a frame, for the handshake. Raises `BrokenError`."""
        try:
            if self._tls is None:
                self.sock.sendall(data)
                return
            with memoryview(data) as whole, whole.cast("B") as rest:
                for begin in range(0, len(rest), _SEND_BYTES):
                    with self._tls_lock:
                        sealed = self._tls.write(rest[begin : begin + _SEND_BYTES])
                    self.sock.sendall(sealed)
        except TlsBroken as broken:
            raise BrokenError(str(broken)) from None
        except OSError as error:
            raise BrokenError(_reason(error)) from None

    def receive_bytes(self, length: int) -> bytes:
        """Receive a small number of bytes. Raises `BrokenError`."""
        data = bytearray(length)
        self.receive_into(memoryview(data))
        return bytes(data)

    def shut_down(self) -> None:
        """Shut the socket down, which wakes threads that wait for it at both ends. Callable from any thread."""
        with suppress(OSError):  # already closed
            self.sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Shut down and close the socket. No thread may use it afterwards."""
        self.shut_down()
        self.sock.close()


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """Return the memory of a contiguous tensor on the CPU."""
    array: Any = tensor.numpy()  # a buffer, although its type declares that only from Python 3.12 on
    return memoryview(array).cast("B") if tensor.numel() else memoryview(b"")


def dial(endpoint: tuple[str, int], timeout_s: float, context: ssl.SSLContext | None) -> FrameConnection:
    """Connect to an endpoint.

    Args:
        endpoint: host and port.
        timeout_s: timeout of the connection attempt, and of sends and receives until another timeout is set.
        context: TLS context; the server's certificate must name the host. None: the connection is not encrypted.

    Raises:
        OSError: the endpoint does not answer.
        UntrustedError, BrokenError: the TLS handshake failed.
    """
    connection = FrameConnection(socket.create_connection(endpoint, timeout=timeout_s))
    if context is not None:
        try:
            connection.encrypt(TlsChannel(context, host=endpoint[0]))
        except BaseException:
            connection.close()
            raise
    return connection


# The handshake. Neither end signs only text that the other end chose: each proof covers both nonces, the name of its
# own end and the hello. The caller proves first, so a stranger receives only a nonce. A proof is not valid for the
# other end or on another connection.
# Prior art: `multiprocessing.connection`, whose listener challenges first; RFC 4279 (TLS-PSK), whose proofs cover the
# whole exchange.
#
# | caller | server |
# |---|---|
# | `_VERSION`, nonce | |
# | | nonce |
# | bytes of the hello (4), proof, hello | |
# | | proof |


def client_handshake(connection: FrameConnection, secret: bytes, hello: dict[str, Any]) -> None:
    """Prove to a server that this process knows the secret, and send the hello. Raises `BrokenError`."""
    payload = json.dumps(hello).encode()
    own_nonce = secrets.token_bytes(_NONCE_BYTES)
    connection.send_raw(_VERSION + own_nonce)
    nonces = own_nonce + connection.receive_bytes(_NONCE_BYTES)
    connection.send_raw(len(payload).to_bytes(4, "little") + _prove(secret, b"caller", nonces, payload) + payload)
    if not hmac.compare_digest(_prove(secret, b"server", nonces, payload), connection.receive_bytes(_PROOF_BYTES)):
        raise BrokenError("it does not know this job's secret")


def server_handshake(connection: FrameConnection, secret: bytes) -> dict[str, Any]:
    """Verify that a caller knows the secret, and return its hello. Raises `BrokenError` if it does not."""
    if connection.receive_bytes(len(_VERSION)) != _VERSION:
        raise BrokenError("it speaks another version")
    peer_nonce, own_nonce = connection.receive_bytes(_NONCE_BYTES), secrets.token_bytes(_NONCE_BYTES)
    connection.send_raw(own_nonce)
    length = int.from_bytes(connection.receive_bytes(4), "little")
    if length > _MAX_HELLO:
        raise BrokenError("the hello is too long")
    proof, payload = connection.receive_bytes(_PROOF_BYTES), connection.receive_bytes(length)
    if not hmac.compare_digest(_prove(secret, b"caller", peer_nonce + own_nonce, payload), proof):
        raise BrokenError("the caller does not know this job's secret")
    hello = read_json(payload)
    if not isinstance(hello, dict):
        raise BrokenError("the hello is no JSON object")
    connection.send_raw(_prove(secret, b"server", peer_nonce + own_nonce, payload))
    return hello


def read_json(payload: bytes) -> Any:  # noqa: ANN401 - any
    """Parse JSON. Raises `MalformedError`."""
    try:
        return json.loads(payload)
    except (ValueError, RecursionError):
        raise MalformedError("invalid JSON") from None


def _prove(secret: bytes, end: Literal[b"caller", b"server"], nonces: bytes, payload: bytes) -> bytes:
    """Return the proof. All fields but the payload have a fixed length, so the signed bytes have one reading only."""
    return hmac.digest(secret, _VERSION + end + nonces + payload, "sha256")


def _reason(error: OSError) -> str:
    return error.strerror or str(error) or type(error).__name__
