"""Frames between workers and servers: a header with a checksum, then raw bytes that are received where they belong.

| bytes | field |
|---|---|
| 2 | `MAGIC` |
| 1 | kind |
| 1 | 0 |
| 4 | shard |
| 4 | table; of a push: how many parts follow; of its answer: 0, or `LEFT_OUT` |
| 8 | sequence: of a push, its number; of an answer, the number that it tells |
| 8 | bytes of the body |
| 4 | CRC-32 of all this |

Numbers are little-endian. A connection begins with a proof of both ends that they know the job's secret
(`introduce`, `admit`); what follows is neither signed nor encrypted, unless all of it goes through TLS.

Whatever breaks a rule ends the connection; what a worker has sent whole, and makes no sense, is refused in words.
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
MAX_BODY = 1 << 31
MAX_WORDS = 1 << 20
"""Of a body that is JSON."""
_HEADER = struct.Struct("<HBBIIQQ")
_SUM = struct.Struct("<I")
_VERSION = b"elastic-agent servers 2"
_NONCE_BYTES = 32
_PROOF_BYTES = 32
_MAX_HELLO = 4096
_RECEIVE_BYTES = 1 << 18
_SEND_BYTES = 1 << 20
"""Are encrypted at a time."""
_MOST_PIECES = os.sysconf("SC_IOV_MAX")
"""Of one system call."""
_OPTIONS = (
    (socket.IPPROTO_TCP, socket.TCP_NODELAY, 1),
    # A machine that vanished without a word is noticed after 10 s, whether one waits for it or writes to it.
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
    (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 4),
    (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 2),
    (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3),
    (socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 10_000),
)


class MessageKind(IntEnum):
    """What a frame is."""

    DECLARE = 1
    """JSON of a table: its number is answered."""
    PULL = 2
    """Ids: their rows are answered."""
    PUSH = 3
    """Parts, see `messages`: done once, whatever is sent again."""
    BEGIN = 4
    """Parts as of a push: what rows begin with that are not there yet."""
    REST = 5
    """The worker makes no steps for a while: nobody is to wait for it."""
    JOIN = 6
    """It makes steps again: after which one is answered."""
    LEAVE = 7
    """It has made its last push."""
    LEASE = 8
    """JSON: which part of the data is done, and that another is wanted. Answered: its number + `PART`, or less."""
    ORDER = 9
    """JSON: save all rows, or drop those that nobody has pushed to for so long."""
    ROWS = 10
    """To a replica: rows with all that belongs to them."""
    WHOLE = 11
    """To a replica: JSON of what else a shard has; now it has all."""
    CHANGE = 12
    """To a replica: what was done."""
    DONE = 13
    """The answer; its body is what was asked for."""
    REFUSED = 14
    """The answer: a sentence why not."""


ALL_DONE, ALL_HELD, PART = 0, 1, 2
"""Answers to `LEASE`: all parts are done, all others are held, and what is added to a part's number."""
LEFT_OUT = 1
"""In the answer to a push: the others' common step was over when it came, so it does not count."""


class BrokenError(Exception):
    """The connection cannot go on; in words."""


class UntrustedError(BrokenError):
    """The other end cannot be spoken to by TLS, or not by our certificates; in words."""


class MalformedError(BrokenError):
    """What has come whole makes no sense; in words. More can follow on the connection."""


class RefusedError(Exception):
    """The other end has understood, and will not; in words."""


def is_integer(told: object) -> bool:
    """Whether what JSON has told is one of 64 bits, as tensors and other languages have them."""
    return type(told) is int and -(1 << 63) <= told < 1 << 63


@dataclass(frozen=True, slots=True)
class Header:
    """All but the body."""

    kind: MessageKind
    shard: int = 0
    table: int = 0
    sequence: int = 0
    length: int = 0

    def pack(self) -> bytes:
        """As on the wire."""
        head = _HEADER.pack(MAGIC, self.kind, 0, self.shard, self.table, self.sequence, self.length)
        return head + _SUM.pack(zlib.crc32(head))


HEADER_BYTES = _HEADER.size + _SUM.size


def parse_header(data: bytes) -> Header:
    """Raises `BrokenError`."""
    head = data[: _HEADER.size]
    if _SUM.unpack_from(data, _HEADER.size)[0] != zlib.crc32(head):
        raise BrokenError("a damaged header")
    magic, kind, zero, shard, table, sequence, length = _HEADER.unpack(head)
    if magic != MAGIC or zero or kind not in MessageKind.__members__.values() or length > MAX_BODY:
        raise BrokenError("a header that no version of this sends")
    return Header(MessageKind(kind), shard, table, sequence, length)


class FrameConnection:
    """One end of a connection. One thread at a time sends, and one receives."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        for level, option, value in _OPTIONS:
            sock.setsockopt(level, option, value)
        self._header = bytearray(HEADER_BYTES)
        self._tls: TlsChannel | None = None
        """None: what is sent goes over the wire as it is."""
        self._turn = threading.Lock()
        """Of who has the channel: never while somebody waits for the other end."""

    def encrypt(self, channel: TlsChannel) -> None:
        """Speak TLS from now on. Raises `UntrustedError`, `BrokenError`."""
        try:
            is_done = channel.shake()
            self.say(channel.give())
            while not is_done:
                channel.take(self._receive_some())
                try:
                    is_done = channel.shake()
                finally:  # also why it ends here: the other end is told
                    self.say(channel.give())
        except TlsBroken as broken:
            raise UntrustedError(str(broken)) from None
        self._tls = channel

    def send(self, header: Header, *body: memoryview | bytes) -> None:
        """Send a frame; `header.length` is its body's. Raises `BrokenError`."""
        if self._tls is not None:
            for part in (header.pack(), *body):
                self.say(part)
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
            raise BrokenError(_words(error)) from None

    @property
    def has_more(self) -> bool:
        """Whether something has come already that was not received."""
        if self._tls is None:
            return False
        with self._turn:
            return self._tls.has_more

    def wait_readable(self, timeout_s: float) -> bool:
        """Whether there is something to receive, or the end, within so many seconds."""
        if self.has_more:
            return True
        poll = select.poll()
        poll.register(self.sock, select.POLLIN)
        return bool(poll.poll(1000 * timeout_s))

    def receive_header(self) -> Header:
        """Wait for a frame. Raises `BrokenError`."""
        self.fill(memoryview(self._header))
        return parse_header(bytes(self._header))

    def fill(self, place: memoryview) -> None:
        """Receive so many bytes. Raises `BrokenError`."""
        try:
            at = 0
            while at < len(place):
                with place[at:] as rest:
                    at += self._receive_into(rest)
        except OSError as error:
            raise BrokenError(_words(error)) from None

    def _receive_into(self, place: memoryview) -> int:
        if self._tls is None:
            received = self.sock.recv_into(place)
            if not received:
                raise BrokenError("connection closed")
            return received
        try:
            while True:
                with self._turn:
                    received = self._tls.read_into(place)
                if received:
                    return received
                if self._tls.is_over:
                    raise BrokenError("connection closed")
                came = self._receive_some()
                with self._turn:
                    self._tls.take(came)
        except TlsBroken as broken:  # perhaps our certificate is refused: TLS 1.3 says so after the handshake
            raise UntrustedError(str(broken)) from None

    def _receive_some(self) -> bytes:
        try:
            came = self.sock.recv(_RECEIVE_BYTES)
        except OSError as error:
            raise BrokenError(_words(error)) from None
        if not came:
            raise BrokenError("connection closed")
        return came

    def receive_body(self, length: int) -> memoryview:
        """Receive a body that is raw. Raises `BrokenError`."""
        try:  # not zeroed: pages that nobody has written to take no memory, whatever the header says
            body = bytes_of(torch.empty(length, dtype=torch.uint8))
        except RuntimeError:
            raise BrokenError(f"no memory for {length} bytes") from None
        self.fill(body)
        return body

    def receive_words(self, length: int) -> bytes:
        """Receive a body that people or JSON can read. Raises `BrokenError`."""
        if length > MAX_WORDS:
            raise BrokenError(f"{length} bytes where at most {MAX_WORDS} make sense")
        return self.receive_bytes(length)

    def say(self, data: bytes | memoryview) -> None:
        """Send what is no frame: a part of the handshake. Raises `BrokenError`."""
        try:
            if self._tls is None:
                self.sock.sendall(data)
                return
            with memoryview(data) as whole, whole.cast("B") as rest:
                for begin in range(0, len(rest), _SEND_BYTES):
                    with self._turn:
                        sealed = self._tls.write(rest[begin : begin + _SEND_BYTES])
                    self.sock.sendall(sealed)
        except TlsBroken as broken:
            raise BrokenError(str(broken)) from None
        except OSError as error:
            raise BrokenError(_words(error)) from None

    def receive_bytes(self, length: int) -> bytes:
        """Receive so many bytes, which are few. Raises `BrokenError`."""
        data = bytearray(length)
        self.fill(memoryview(data))
        return bytes(data)

    def hang_up(self) -> None:
        """Let the other end know, and whoever waits here. From any thread."""
        with suppress(OSError):  # it is closed already
            self.sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Hang up, and let go of the socket: nobody may use it any more."""
        self.hang_up()
        self.sock.close()


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """The memory of a contiguous tensor on the CPU."""
    # numpy's arrays are buffers, whatever its types say before Python 3.12
    return memoryview(tensor.numpy()).cast("B") if tensor.numel() else memoryview(b"")  # type: ignore[arg-type]


def dial(endpoint: tuple[str, int], timeout_s: float, context: ssl.SSLContext | None) -> FrameConnection:
    """Connect.

    Args:
        endpoint: host and port.
        timeout_s: of the connection, and of whatever is sent and received until somebody says otherwise.
        context: of TLS: the certificate there must name this host. None: in the clear.

    Raises:
        OSError: nobody answers.
        UntrustedError, BrokenError: who answers is not to be spoken to.
    """
    connection = FrameConnection(socket.create_connection(endpoint, timeout=timeout_s))
    if context is not None:
        try:
            connection.encrypt(TlsChannel(context, host=endpoint[0]))
        except BaseException:
            connection.close()
            raise
    return connection


# The handshake. Neither end proves anything over words that the other one chose: each proof is over both nonces, its
# own end's name and words that are sent with it, and the caller's, who wants something, comes first. So a stranger gets
# nothing but a nonce, and a proof of one end or connection is none of another.
# Prior art: `multiprocessing.connection`, whose listener challenges first; RFC 4279 (TLS-PSK), whose proofs are over
# the whole exchange.
#
# | caller | server |
# |---|---|
# | `_VERSION`, nonce | |
# | | nonce |
# | bytes of the hello (4), proof, hello | |
# | | proof |


def introduce(connection: FrameConnection, secret: bytes, hello: dict[str, Any]) -> None:
    """The dialling end's part: say who this is. Raises `BrokenError`."""
    words = json.dumps(hello).encode()
    mine = secrets.token_bytes(_NONCE_BYTES)
    connection.say(_VERSION + mine)
    nonces = mine + connection.receive_bytes(_NONCE_BYTES)
    connection.say(len(words).to_bytes(4, "little") + _prove(secret, b"caller", nonces, words) + words)
    if not hmac.compare_digest(_prove(secret, b"server", nonces, words), connection.receive_bytes(_PROOF_BYTES)):
        raise BrokenError("it does not know this job's secret")


def admit(connection: FrameConnection, secret: bytes) -> dict[str, Any]:
    """The accepting end's part: who calls. Raises `BrokenError`: it has not proved that it knows the secret."""
    if connection.receive_bytes(len(_VERSION)) != _VERSION:
        raise BrokenError("it speaks another version")
    theirs, mine = connection.receive_bytes(_NONCE_BYTES), secrets.token_bytes(_NONCE_BYTES)
    connection.say(mine)
    length = int.from_bytes(connection.receive_bytes(4), "little")
    if length > _MAX_HELLO:
        raise BrokenError("a hello that is too long")
    proof, words = connection.receive_bytes(_PROOF_BYTES), connection.receive_bytes(length)
    if not hmac.compare_digest(_prove(secret, b"caller", theirs + mine, words), proof):
        raise BrokenError("the caller does not know this job's secret")
    hello = read_json(words)
    if not isinstance(hello, dict):
        raise BrokenError("a hello that says nothing")
    connection.say(_prove(secret, b"server", theirs + mine, words))
    return hello


def read_json(words: bytes) -> Any:  # noqa: ANN401 - any
    """Raises `MalformedError`."""
    try:
        return json.loads(words)
    except (ValueError, RecursionError):
        raise MalformedError("what should be JSON is none") from None


def _prove(secret: bytes, end: Literal[b"caller", b"server"], nonces: bytes, words: bytes) -> bytes:
    """All but the words has a fixed length: what is proved can be read in one way only."""
    return hmac.digest(secret, _VERSION + end + nonces + words, "sha256")


def _words(error: OSError) -> str:
    return error.strerror or str(error) or type(error).__name__
