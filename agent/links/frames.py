"""The frames of a link, and the connection that carries them.

    dialler                                accepting end
    HELLO         version, nonce      ->
                                      <-   CHALLENGE    nonce
    PROOF         mac, names          ->
                                      <-   WELCOME      mac, names
    PING          moment              ->
                                      <-   PONG         moment, wall time
    STORE_PART    mac, part           ->
                                      <-   PART_STORED
                                      <-   GOODBYE      mac

The names are the dialler's, and that of the agent that is called (in PROOF) or that answers (in WELCOME). WELCOME also
has the port at which large snapshot parts are taken (part_stream.py). The moment of a heartbeat is on the dialler's own
clock and is returned unchanged. STORE_PART carries a small part of a snapshot (snapshot_parts.py).

A reader (log_reader.py) is not an agent, and proves that it knows the secret in another role:

    READER_PROOF  mac, names          ->
                                      <-   WELCOME      mac, names
    FIND_LOGS     which logs          ->
                                      <-   LOGS_FOUND   the list, or ERROR
    READ_LOG      which part of one   ->
                                      <-   LOG_CHUNK    its bytes, or ERROR
                                      <-   LEAVING      before a reply: no more will be written to the logs
    GET_RANKS                         ->
                                      <-   LIVE_RANKS   the state of this node's ranks (queries.py), or ERROR

Where the accepting end has a certificate, all of this goes through TLS from the first byte. The record from which the
dialler has the address also has the fingerprint of the certificate, and the dialler compares it before it sends
anything. So there can be no man in the middle, and the dialler is authenticated by the secret.

A frame consists of a length (4 bytes), a kind (1 byte) and a payload of that length. Each kind has its permitted
sizes, and the receiver expects certain kinds at each moment: anything else breaks the connection at the header.
"""

from __future__ import annotations

import asyncio
import math
import ssl
import struct
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from enum import IntEnum
from typing import TypeVar

from trainer_runtime.snapshot_page import LINK_PART_BYTES
from trainer_runtime.tls import READ_BYTES, TlsBroken, TlsChannel, dialling_pinned

_T = TypeVar("_T")

VERSION = b"elastic-agent link 4"
NONCE_BYTES = 32
MAC_BYTES = 32
_NAMES_BYTES = 1024
_HEADER = struct.Struct("!IB")
_MOMENT = struct.Struct("!d")
_MOMENTS = struct.Struct("!dd")
_REQUEST_BYTES = 512
_REASON_BYTES = 1024
LOG_CHUNK_BYTES = 1 << 15
"""Maximum size of one chunk of a log, and of a list of logs."""
_PART_METADATA_BYTES = 1024
BUFFER_BYTES = 4096
"""Approximate limit of received bytes that are buffered before they are read."""


class FrameKind(IntEnum):
    """Kinds of frames."""

    HELLO = 1
    CHALLENGE = 2
    PROOF = 3
    WELCOME = 4
    PING = 5
    PONG = 6
    GOODBYE = 7
    READER_PROOF = 8
    FIND_LOGS = 9
    LOGS_FOUND = 10
    READ_LOG = 11
    LOG_CHUNK = 12
    ERROR = 13
    LEAVING = 14
    STORE_PART = 15
    PART_STORED = 16
    GET_RANKS = 17
    LIVE_RANKS = 18


_SIZES = {
    FrameKind.HELLO: range(len(VERSION) + NONCE_BYTES, len(VERSION) + NONCE_BYTES + 1),
    FrameKind.CHALLENGE: range(NONCE_BYTES, NONCE_BYTES + 1),
    FrameKind.PROOF: range(MAC_BYTES, MAC_BYTES + _NAMES_BYTES),
    FrameKind.WELCOME: range(MAC_BYTES, MAC_BYTES + _NAMES_BYTES),
    FrameKind.PING: range(_MOMENT.size, _MOMENT.size + 1),
    FrameKind.PONG: range(_MOMENTS.size, _MOMENTS.size + 1),
    FrameKind.GOODBYE: range(MAC_BYTES, MAC_BYTES + 1),
    FrameKind.READER_PROOF: range(MAC_BYTES, MAC_BYTES + _NAMES_BYTES),
    FrameKind.FIND_LOGS: range(_REQUEST_BYTES),
    FrameKind.LOGS_FOUND: range(LOG_CHUNK_BYTES + 1),
    FrameKind.READ_LOG: range(_REQUEST_BYTES),
    FrameKind.LOG_CHUNK: range(LOG_CHUNK_BYTES + 1),
    FrameKind.ERROR: range(_REASON_BYTES + 1),
    FrameKind.LEAVING: range(1),
    FrameKind.STORE_PART: range(MAC_BYTES, MAC_BYTES + _PART_METADATA_BYTES + LINK_PART_BYTES),
    FrameKind.PART_STORED: range(1),
    FrameKind.GET_RANKS: range(1),
    FrameKind.LIVE_RANKS: range(LOG_CHUNK_BYTES + 1),
}
"""Permitted sizes of the payload of each kind, in bytes."""


class LinkBroken(Exception):  # noqa: N818 - says what became of the connection
    """A connection can no longer be used. The message is a short phrase for people."""


class OtherCertificate(LinkBroken):
    """The process that answers does not show the expected certificate."""


@dataclass(frozen=True)
class LinkTls:
    """TLS settings of one agent's links."""

    accepting: ssl.SSLContext | None
    """Context of the listening end. None: it does not encrypt."""
    fingerprint: str
    """Fingerprint of the certificate that the listening end shows; empty: none."""
    dialling: ssl.SSLContext
    """Context for dialling other agents."""
    demands_cert: bool = False
    """Whether agents that call must show a certificate too."""


def in_the_clear() -> LinkTls:
    """Return the settings of an agent without a certificate. It still dials others by TLS."""
    return LinkTls(None, "", dialling_pinned())


class LinkConnection:
    """One TCP connection that carries frames."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer
        self._tls: TlsChannel | None = None
        """None: nothing is encrypted."""
        self._decrypted = bytearray()
        """Received by TLS, not consumed yet."""
        self._allowed_unsent_bytes = 0
        """`send` drops its frame while more than this is unsent."""

    @classmethod
    async def dial(
        cls, address: str, port: int, cert: str = "", context: ssl.SSLContext | None = None
    ) -> LinkConnection:
        """Connect. An IP address causes no name lookup.

        Args:
            address: an IP address or a name.
            port: the port.
            cert: fingerprint of the certificate that the other end must show; empty: nothing is encrypted.
            context: for TLS; None: one that shows no certificate.

        Raises:
            OSError: no process answers.
            OtherCertificate: the other end shows another certificate.
            LinkBroken: the other end does not speak TLS, or rejects our certificate.
        """
        connection = cls(*await asyncio.open_connection(address, port, limit=BUFFER_BYTES))
        if cert:
            try:
                await connection._encrypt(TlsChannel(context or dialling_pinned()))
            except BaseException:
                connection.drop()
                raise
            if connection.shown_cert != cert:
                connection.drop()
                raise OtherCertificate("it shows another certificate than its record in etcd names")
        return connection

    async def accept(self, context: ssl.SSLContext) -> None:
        """Do the accepting end's part of the TLS handshake. Raises `LinkBroken` if the caller does not speak TLS."""
        await self._encrypt(TlsChannel(context, is_called=True))

    @property
    def shown_cert(self) -> str:
        """Fingerprint of the certificate that the other end has shown; empty: none."""
        return self._tls.fingerprint() if self._tls is not None else ""

    async def _encrypt(self, channel: TlsChannel) -> None:
        try:
            is_done = channel.shake()
            self._writer.write(channel.give())
            while not is_done:
                channel.take(await self._read_some())
                try:
                    is_done = channel.shake()
                finally:  # also after a failure: the other end receives the reason
                    self._writer.write(channel.give())
            self._decrypted += channel.read()
        except TlsBroken as broken:
            raise LinkBroken(str(broken)) from None
        except OSError as error:
            raise LinkBroken(f"connection broken ({error.strerror or error})") from None
        self._tls = channel

    async def _read_some(self) -> bytes:
        received = await self._reader.read(READ_BYTES)
        if not received:
            raise LinkBroken("connection closed")
        return received

    async def _read_exactly(self, length: int) -> bytes:
        if self._tls is None:
            return await self._reader.readexactly(length)
        while len(self._decrypted) < length:
            if self._tls.is_over:
                raise LinkBroken("connection closed")
            try:
                self._tls.take(await self._read_some())
                self._decrypted += self._tls.read()
            except TlsBroken as broken:
                raise LinkBroken(str(broken)) from None
            if answer := self._tls.give():  # for example a key update
                self._writer.write(answer)
        data = bytes(self._decrypted[:length])
        del self._decrypted[:length]
        return data

    def _write(self, frame: bytes) -> None:
        try:
            self._writer.write(frame if self._tls is None else self._tls.write(frame))
        except TlsBroken as broken:
            raise LinkBroken(str(broken)) from None

    @property
    def caller(self) -> str:
        """Address of the other end."""
        return str(self._writer.get_extra_info("peername", ("unknown",))[0])

    def send(self, kind: FrameKind, payload: bytes = b"") -> None:
        """Send a frame, or drop it if the other end leaves so much unread that the frame would have to be buffered.

        While `deliver` sends a large frame, a few small ones may be buffered behind it.
        """
        if not self._writer.is_closing() and self.unsent_bytes <= self._allowed_unsent_bytes:
            with suppress(LinkBroken):  # the next `receive` raises the same error
                self._write(_HEADER.pack(len(payload), kind) + payload)

    @property
    def unsent_bytes(self) -> int:
        """Bytes that are buffered here because the other end has not taken them."""
        return self._writer.transport.get_write_buffer_size()

    async def deliver(self, kind: FrameKind, payload: bytes) -> None:
        """Send a frame, and wait until all of it has left this process.

        Raises:
            LinkBroken: the connection broke first.
        """
        self._writer.transport.set_write_buffer_limits(0)
        self._allowed_unsent_bytes = _HEADER.size + len(payload)
        try:
            self._write(_HEADER.pack(len(payload), kind) + payload)
            self._allowed_unsent_bytes = max(self._allowed_unsent_bytes, self.unsent_bytes)  # TLS adds a little
            await self._writer.drain()
        except OSError as error:
            raise LinkBroken(f"connection broken ({error.strerror or error})") from None
        finally:
            self._allowed_unsent_bytes = 0

    async def receive(self, *kinds: FrameKind) -> tuple[FrameKind, bytes]:
        """Wait for a frame of one of these kinds.

        Raises:
            LinkBroken: something else was received, or the connection broke.
        """
        try:
            length, number = _HEADER.unpack(await self._read_exactly(_HEADER.size))
            kind = next((kind for kind in kinds if kind == number), None)
            if kind is None or length not in _SIZES[kind]:
                raise LinkBroken("something else speaks at its port")
            return kind, await self._read_exactly(length)
        except asyncio.IncompleteReadError:
            raise LinkBroken("connection closed") from None
        except ConnectionResetError:
            raise LinkBroken("connection reset") from None
        except OSError as error:
            raise LinkBroken(f"connection broken ({error.strerror or error})") from None

    def drop(self) -> None:
        """Close at once. What has left this process is still delivered."""
        self._writer.transport.abort()


def ping(moment: float) -> bytes:
    """Return the payload of a heartbeat that is sent at this moment of our own clock."""
    return _MOMENT.pack(moment)


def pong(ping: bytes, wall: float) -> bytes:
    """Return the payload of the answer to a heartbeat."""
    return ping + _MOMENT.pack(wall)


def read_pong(payload: bytes, now: float) -> tuple[float, float]:
    """Return when the heartbeat was sent, and the wall time of the answer. Raises `LinkBroken` if they are invalid."""
    asked, wall = _MOMENTS.unpack(payload)
    if not asked <= now or not math.isfinite(asked) or not math.isfinite(wall):
        raise LinkBroken("its answer matches no heartbeat")
    return asked, wall


def decode_or_break(decode: Callable[[bytes], _T], payload: bytes) -> _T:
    """Decode a payload. Raises `LinkBroken` if it is malformed."""
    try:
        return decode(payload)
    except ValueError:  # msgspec's error, or that of invalid UTF-8
        raise LinkBroken("it speaks another version") from None
