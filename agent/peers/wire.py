"""What goes over a link: frames, and the proof that both ends know the job's secret.

    dialler                                accepting end
    HELLO      version, nonce     ->
                                  <-       CHALLENGE  nonce
    PROOF      mac, names         ->
                                  <-       WELCOME    mac, names
    PING                          ->
                                  <-       PONG
                                  <-       GOODBYE    mac

The names are the dialler's and that of the agent which is asked for, or which answers. A frame is a length (2 bytes), a
kind (1 byte) and so many bytes of payload. Each kind has its sizes, and each moment its kinds: anything else breaks the
connection at the header.
"""

from __future__ import annotations

import asyncio
import hmac
import secrets
import struct
from dataclasses import dataclass
from enum import IntEnum
from typing import Literal

import msgspec

from agent.core.model import Identity

_VERSION = b"elastic-agent link 1"
_NONCE_BYTES = 32
_MAC_BYTES = 32
_NAMES_BYTES = 1024
_HEADER = struct.Struct("!HB")
BUFFER_BYTES = 4096
"""How much a reader keeps unread, about."""

_encoder = msgspec.json.Encoder()
_decoder = msgspec.json.Decoder(tuple[Identity, Identity])


class Kind(IntEnum):
    """Kinds of frames."""

    HELLO = 1
    CHALLENGE = 2
    PROOF = 3
    WELCOME = 4
    PING = 5
    PONG = 6
    GOODBYE = 7


_SIZES = {
    Kind.HELLO: range(len(_VERSION) + _NONCE_BYTES, len(_VERSION) + _NONCE_BYTES + 1),
    Kind.CHALLENGE: range(_NONCE_BYTES, _NONCE_BYTES + 1),
    Kind.PROOF: range(_MAC_BYTES, _MAC_BYTES + _NAMES_BYTES),
    Kind.WELCOME: range(_MAC_BYTES, _MAC_BYTES + _NAMES_BYTES),
    Kind.PING: range(1),
    Kind.PONG: range(1),
    Kind.GOODBYE: range(_MAC_BYTES, _MAC_BYTES + 1),
}


class Broken(Exception):  # noqa: N818 - says what became of the connection
    """A connection is of no use any more. The message is a short phrase for people."""


class Unproven(Broken):
    """The other end does not know the secret."""


class Connection:
    """One TCP connection, in frames."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    @classmethod
    async def dial(cls, address: str, port: int) -> Connection:
        """Connect. An address that is an IP is not looked up anywhere."""
        return cls(*await asyncio.open_connection(address, port, limit=BUFFER_BYTES))

    @property
    def caller(self) -> str:
        """Where the other end is."""
        return str(self._writer.get_extra_info("peername", ("unknown",))[0])

    def send(self, kind: Kind, payload: bytes = b"") -> None:
        """Send a frame, unless the other end leaves so much unread that it would have to be kept here."""
        if not self._writer.is_closing() and not self._writer.transport.get_write_buffer_size():
            self._writer.write(_HEADER.pack(len(payload), kind) + payload)

    async def receive(self, *kinds: Kind) -> tuple[Kind, bytes]:
        """Wait for a frame of one of these kinds.

        Raises:
            Broken: something else came, or nothing will come any more.
        """
        try:
            length, number = _HEADER.unpack(await self._reader.readexactly(_HEADER.size))
            kind = next((kind for kind in kinds if kind == number), None)
            if kind is None or length not in _SIZES[kind]:
                raise Broken("something else speaks at its port")
            return kind, await self._reader.readexactly(length)
        except asyncio.IncompleteReadError:
            raise Broken("connection closed") from None
        except ConnectionResetError:
            raise Broken("connection reset") from None
        except OSError as error:
            raise Broken(f"connection broken ({error.strerror or error})") from None

    def drop(self) -> None:
        """Close at once. What was sent is still delivered."""
        self._writer.transport.abort()


@dataclass(frozen=True)
class Credential:
    """What an agent proves: that it knows the secret, and who it is."""

    secret: bytes
    me: Identity


@dataclass(frozen=True)
class Session:
    """What the proofs on one connection are made from.

    A proof is over the very bytes that are sent with it, so that nothing unproven is parsed.
    """

    secret: bytes
    nonces: bytes
    """The dialler's, then the accepting end's."""

    def prove(self, role: Literal[b"dial", b"accept", b"goodbye"], names: bytes) -> bytes:
        """Make the payload of a frame that says: I am in this role, on this connection, between these two."""
        return hmac.digest(self.secret, role + self.nonces + names, "sha256") + names

    def check(self, role: Literal[b"dial", b"accept", b"goodbye"], payload: bytes) -> bytes:
        """Return the names in such a payload; raise `Unproven` if it was made without the secret."""
        names = payload[_MAC_BYTES:]
        if not hmac.compare_digest(self.prove(role, names), payload):
            raise Unproven("it does not know the job's secret")
        return names


async def introduce(connection: Connection, mine: Credential, whom: Identity) -> tuple[Session, Identity]:
    """The dialler's part of the handshake; returns who answered, which is not always the one asked for."""
    nonce = secrets.token_bytes(_NONCE_BYTES)
    connection.send(Kind.HELLO, _VERSION + nonce)
    _, challenge = await connection.receive(Kind.CHALLENGE)
    session = Session(mine.secret, nonce + challenge)
    connection.send(Kind.PROOF, session.prove(b"dial", _encoder.encode((mine.me, whom))))
    _, answer = await connection.receive(Kind.WELCOME)
    _, who = _parse(session.check(b"accept", answer))
    return session, who


async def admit(connection: Connection, mine: Credential) -> tuple[Session, Identity]:
    """The accepting end's part of the handshake; returns who called.

    Raises:
        Broken: the caller did not prove itself, or wants somebody else and has been told who is here.
    """
    _, hello = await connection.receive(Kind.HELLO)
    if not hello.startswith(_VERSION):
        raise Broken("it speaks another version")
    nonce = secrets.token_bytes(_NONCE_BYTES)
    connection.send(Kind.CHALLENGE, nonce)
    session = Session(mine.secret, hello[len(_VERSION) :] + nonce)
    _, proof = await connection.receive(Kind.PROOF)
    who, whom = _parse(session.check(b"dial", proof))
    if who == mine.me:
        raise Broken("these are my own words")
    connection.send(Kind.WELCOME, session.prove(b"accept", _encoder.encode((who, mine.me))))
    if whom != mine.me:
        raise Broken("it wants somebody else")
    return session, who


def _parse(names: bytes) -> tuple[Identity, Identity]:
    try:
        return _decoder.decode(names)
    except msgspec.DecodeError:
        raise Broken("it speaks another version") from None
