"""What goes over a link: frames, and the proof that both ends know the job's secret.

    dialler                                accepting end
    HELLO      version, nonce     ->
                                  <-       CHALLENGE  nonce
    PROOF      mac, names         ->
                                  <-       WELCOME    mac, names
    PING       moment             ->
                                  <-       PONG       moment, wall time
    KEEP       mac, part          ->
                                  <-       KEPT
                                  <-       GOODBYE    mac

The names are the dialler's and that of the agent which is asked for, or which answers. A heartbeat's moment is on the
dialler's own clock, and comes back as it was. What is to be kept is a part of a snapshot (snapshot_parts.py).

A reader of logs (log_reader.py) is no agent, and proves that it knows the secret in another role:

    READER     mac, names         ->
                                  <-       WELCOME    mac, names
    FIND       which logs         ->
                                  <-       FOUND      they, or SORRY why not
    READ       which part of one  ->
                                  <-       PART       its bytes, or SORRY why not
                                  <-       LEAVING    before an answer: no more will be written
    LOOK                          ->
                                  <-       PULSE      how this node's ranks are (live_ranks.py)

Where the accepting end has a certificate, all this goes through TLS, from the first byte on. Which certificate it must
be is in the record that the dialler has its address from: it compares the fingerprint before it says anything. So
nobody else can be in between, and what proves the dialler is the secret, as ever.

A frame is a length (4 bytes), a kind (1 byte) and so many bytes of payload. Each kind has its sizes, and each moment
its kinds: anything else breaks the connection at the header.
"""

from __future__ import annotations

import asyncio
import hmac
import math
import secrets
import ssl
import struct
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from enum import IntEnum
from typing import Literal, TypeVar

import msgspec

from agent.core.model import Identity
from trainer_runtime.tls import READ_BYTES, TlsBroken, TlsChannel, dialling_pinned

_T = TypeVar("_T")

_VERSION = b"elastic-agent link 3"
_NONCE_BYTES = 32
_MAC_BYTES = 32
_NAMES_BYTES = 1024
_HEADER = struct.Struct("!IB")
_MOMENT = struct.Struct("!d")
_MOMENTS = struct.Struct("!dd")
_REQUEST_BYTES = 512
_REASON_BYTES = 1024
PART_BYTES = 1 << 15
"""How much of a log is sent at a time, and how much may be said of which there are."""
KEPT_BYTES = 1 << 20
"""How large one rank's part of a snapshot may be that is handed over."""
_KEPT_NAMES_BYTES = 1024
"""What is said of it."""
BUFFER_BYTES = 4096
"""How much a reader keeps unread, about."""

_encoder = msgspec.json.Encoder()
_decoder = msgspec.json.Decoder(tuple[Identity, Identity])


class FrameKind(IntEnum):
    """Kinds of frames."""

    HELLO = 1
    CHALLENGE = 2
    PROOF = 3
    WELCOME = 4
    PING = 5
    PONG = 6
    GOODBYE = 7
    READER = 8
    FIND = 9
    FOUND = 10
    READ = 11
    PART = 12
    SORRY = 13
    LEAVING = 14
    KEEP = 15
    KEPT = 16
    LOOK = 17
    PULSE = 18


_SIZES = {
    FrameKind.HELLO: range(len(_VERSION) + _NONCE_BYTES, len(_VERSION) + _NONCE_BYTES + 1),
    FrameKind.CHALLENGE: range(_NONCE_BYTES, _NONCE_BYTES + 1),
    FrameKind.PROOF: range(_MAC_BYTES, _MAC_BYTES + _NAMES_BYTES),
    FrameKind.WELCOME: range(_MAC_BYTES, _MAC_BYTES + _NAMES_BYTES),
    FrameKind.PING: range(_MOMENT.size, _MOMENT.size + 1),
    FrameKind.PONG: range(_MOMENTS.size, _MOMENTS.size + 1),
    FrameKind.GOODBYE: range(_MAC_BYTES, _MAC_BYTES + 1),
    FrameKind.READER: range(_MAC_BYTES, _MAC_BYTES + _NAMES_BYTES),
    FrameKind.FIND: range(_REQUEST_BYTES),
    FrameKind.FOUND: range(PART_BYTES + 1),
    FrameKind.READ: range(_REQUEST_BYTES),
    FrameKind.PART: range(PART_BYTES + 1),
    FrameKind.SORRY: range(_REASON_BYTES + 1),
    FrameKind.LEAVING: range(1),
    FrameKind.KEEP: range(_MAC_BYTES, _MAC_BYTES + _KEPT_NAMES_BYTES + KEPT_BYTES),
    FrameKind.KEPT: range(1),
    FrameKind.LOOK: range(1),
    FrameKind.PULSE: range(PART_BYTES + 1),
}

Role = Literal[b"dial", b"read", b"accept", b"goodbye", b"keep"]


class LinkBroken(Exception):  # noqa: N818 - says what became of the connection
    """A connection is of no use any more. The message is a short phrase for people."""


class ProofRefused(LinkBroken):
    """The other end does not know the secret."""


@dataclass(frozen=True)
class LinkTls:
    """How one agent's links are encrypted."""

    accepting: ssl.SSLContext | None
    """Of the listening end. None: it speaks in the clear."""
    fingerprint: str
    """Of the certificate that it shows; empty: none."""
    dialling: ssl.SSLContext
    """Of the ends by which it calls others."""
    demands_cert: bool = False
    """Agents that call it must show a certificate, too."""


def in_the_clear() -> LinkTls:
    """Of an agent without a certificate; it calls others by TLS all the same."""
    return LinkTls(None, "", dialling_pinned())


class OtherCertificate(LinkBroken):
    """Whoever answers is not the one that is called."""


class LinkConnection:
    """One TCP connection, in frames."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer
        self._tls: TlsChannel | None = None
        """None: what is sent goes over the wire as it is."""
        self._came = bytearray()
        """By TLS, and not received yet."""
        self._room_bytes = 0
        """What may lie here unsent when something is sent that nobody waits for."""

    @classmethod
    async def dial(
        cls, address: str, port: int, cert: str = "", context: ssl.SSLContext | None = None
    ) -> LinkConnection:
        """Connect. An address that is an IP is not looked up anywhere.

        Args:
            address: where.
            port: at which port.
            cert: fingerprint of the certificate that must be shown there; empty: nothing is encrypted.
            context: if it is; None: one that shows no certificate.

        Raises:
            OSError: nobody answers.
            OtherCert: whoever answers is somebody else.
            Broken: it does not speak TLS, or refuses our certificate.
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
        """Let the caller speak TLS. Raises `LinkBroken`: it does not."""
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
                finally:  # also why it ends here: the other end is told
                    self._writer.write(channel.give())
            self._came += channel.read()
        except TlsBroken as broken:
            raise LinkBroken(str(broken)) from None
        except OSError as error:
            raise LinkBroken(f"connection broken ({error.strerror or error})") from None
        self._tls = channel

    async def _read_some(self) -> bytes:
        came = await self._reader.read(READ_BYTES)
        if not came:
            raise LinkBroken("connection closed")
        return came

    async def _read_exactly(self, length: int) -> bytes:
        if self._tls is None:
            return await self._reader.readexactly(length)
        while len(self._came) < length:
            if self._tls.is_over:
                raise LinkBroken("connection closed")
            try:
                self._tls.take(await self._read_some())
                self._came += self._tls.read()
            except TlsBroken as broken:
                raise LinkBroken(str(broken)) from None
            if answer := self._tls.give():  # another key is agreed on, say
                self._writer.write(answer)
        read = bytes(self._came[:length])
        del self._came[:length]
        return read

    def _write(self, frame: bytes) -> None:
        try:
            self._writer.write(frame if self._tls is None else self._tls.write(frame))
        except TlsBroken as broken:
            raise LinkBroken(str(broken)) from None

    @property
    def caller(self) -> str:
        """Where the other end is."""
        return str(self._writer.get_extra_info("peername", ("unknown",))[0])

    def send(self, kind: FrameKind, payload: bytes = b"") -> None:
        """Send a frame, unless the other end leaves so much unread that it would have to be kept here.

        Behind a large one that is being delivered a few may wait.
        """
        if not self._writer.is_closing() and self._writer.transport.get_write_buffer_size() <= self._room_bytes:
            with suppress(LinkBroken):  # who receives hears of it
                self._write(_HEADER.pack(len(payload), kind) + payload)

    @property
    def unsent_bytes(self) -> int:
        """What lies here because the other end has not taken it."""
        return self._writer.transport.get_write_buffer_size()

    async def deliver(self, kind: FrameKind, payload: bytes) -> None:
        """Send a frame, and wait until the other end has taken it from us.

        Raises:
            Broken: it will not.
        """
        self._writer.transport.set_write_buffer_limits(0)
        self._room_bytes = _HEADER.size + len(payload)
        try:
            self._write(_HEADER.pack(len(payload), kind) + payload)
            self._room_bytes = max(self._room_bytes, self.unsent_bytes)  # encrypted it is a little more
            await self._writer.drain()
        except OSError as error:
            raise LinkBroken(f"connection broken ({error.strerror or error})") from None
        finally:
            self._room_bytes = 0

    async def receive(self, *kinds: FrameKind) -> tuple[FrameKind, bytes]:
        """Wait for a frame of one of these kinds.

        Raises:
            Broken: something else came, or nothing will come any more.
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
        """Close at once. What was sent is still delivered."""
        self._writer.transport.abort()


@dataclass(frozen=True)
class Credential:
    """What an agent proves: that it knows the secret, and who it is."""

    secret: bytes
    me: Identity


@dataclass(frozen=True)
class Handshake:
    """What the proofs on one connection are made from.

    A proof is over the very bytes that are sent with it, so that nothing unproven is parsed.
    """

    secret: bytes
    nonces: bytes
    """The dialler's, then the accepting end's."""

    def prove(self, role: Role, names: bytes) -> bytes:
        """Make the payload of a frame that says: I am in this role, on this connection, between these two."""
        return hmac.digest(self.secret, role + self.nonces + names, "sha256") + names

    def check(self, role: Role, payload: bytes) -> bytes:
        """Return the names in such a payload; raise `ProofRefused` if it was made without the secret."""
        names = payload[_MAC_BYTES:]
        if not hmac.compare_digest(self.prove(role, names), payload):
            raise ProofRefused("it does not know the job's secret")
        return names


@dataclass(frozen=True)
class LinkCaller:
    """Who called, and as what."""

    session: Handshake
    who: Identity
    is_reader: bool


async def introduce(
    connection: LinkConnection, mine: Credential, whom: Identity, *, is_reader: bool = False
) -> tuple[Handshake, Identity]:
    """The dialler's part of the handshake; returns who answered, which is not always the one asked for."""
    nonce = secrets.token_bytes(_NONCE_BYTES)
    connection.send(FrameKind.HELLO, _VERSION + nonce)
    _, challenge = await connection.receive(FrameKind.CHALLENGE)
    session = Handshake(mine.secret, nonce + challenge)
    names = _encoder.encode((mine.me, whom))
    if is_reader:
        connection.send(FrameKind.READER, session.prove(b"read", names))
    else:
        connection.send(FrameKind.PROOF, session.prove(b"dial", names))
    _, answer = await connection.receive(FrameKind.WELCOME)
    _, who = understood(_decoder.decode, session.check(b"accept", answer))
    return session, who


async def admit(connection: LinkConnection, mine: Credential) -> LinkCaller:
    """The accepting end's part of the handshake.

    A reader asks for a node, whichever incarnation of its agent it is that has its logs.

    Raises:
        Broken: the caller did not prove itself, or wants somebody else and has been told who is here.
    """
    _, hello = await connection.receive(FrameKind.HELLO)
    if not hello.startswith(_VERSION):
        raise LinkBroken("it speaks another version")
    nonce = secrets.token_bytes(_NONCE_BYTES)
    connection.send(FrameKind.CHALLENGE, nonce)
    session = Handshake(mine.secret, hello[len(_VERSION) :] + nonce)
    kind, proof = await connection.receive(FrameKind.PROOF, FrameKind.READER)
    is_reader = kind is FrameKind.READER
    who, whom = understood(_decoder.decode, session.check(b"read" if is_reader else b"dial", proof))
    if who == mine.me:
        raise LinkBroken("these are my own words")
    connection.send(FrameKind.WELCOME, session.prove(b"accept", _encoder.encode((who, mine.me))))
    if whom.node_id != mine.me.node_id or (whom != mine.me and not is_reader):
        raise LinkBroken("it wants somebody else")
    return LinkCaller(session, who, is_reader)


def ping(moment: float) -> bytes:
    """The payload of a heartbeat that is sent at this moment of our own clock."""
    return _MOMENT.pack(moment)


def pong(ping: bytes, wall: float) -> bytes:
    """The payload of its answer."""
    return ping + _MOMENT.pack(wall)


def read_pong(payload: bytes, now: float) -> tuple[float, float]:
    """When we asked, and the wall time that was answered. Raises `LinkBroken` if that cannot be."""
    asked, wall = _MOMENTS.unpack(payload)
    if not asked <= now or not math.isfinite(asked) or not math.isfinite(wall):
        raise LinkBroken("it answers what was not asked")
    return asked, wall


def understood(decode: Callable[[bytes], _T], said: bytes) -> _T:
    """What somebody has said, decoded. Raises `LinkBroken` if it cannot be."""
    try:
        return decode(said)
    except ValueError:  # msgspec's own error, or that of text which is none
        raise LinkBroken("it speaks another version") from None
