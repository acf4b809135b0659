"""The stream on which an agent sends large parts of snapshots to another agent, beside the links.

The part of a sharded model may be as large as the node's memory, and a heartbeat must not wait behind it. So it goes
over a TCP connection of its own, which the agent that has it opens to a port of the other one (the handshake of the
link tells the number). The connection is encrypted by the certificate that the other agent's record names. Threads
serve it, which copy between the socket and the snapshot's memory, or the file that the receiver keeps copies in.

Messages are framed by their size (4 bytes, big-endian). In this order:
| from | message |
|---|---|
| caller | `VERSION`, then a nonce |
| called | a nonce |
| caller | proof of the caller's and the called agent's identity, see `handshake` |
| called | proof of the same |

Then for each part:
| from | message |
|---|---|
| caller | `PartHeader` |
| called | empty: it has room for the part; else `OUTDATED` or why it has none, and the caller closes |
| caller | the part's bytes, without framing; if the rank replaces the snapshot meanwhile, the caller closes |
| caller | `WHOLE`; or `TORN`: the rank replaced the snapshot while its last bytes were sent |
| called | empty, after `WHOLE`: it holds the part |
"""

from __future__ import annotations

import os
import secrets
import socket
import struct
from typing import TYPE_CHECKING

import msgspec

from agent.core.bounds import Count, WorldSize
from agent.core.records import Identity
from agent.core.saved_states import StateId
from agent.links.frames import NONCE_BYTES, LinkBroken, decode_or_break
from agent.links.handshake import Credential, LinkSession

if TYPE_CHECKING:
    from collections.abc import Callable

VERSION = b"elastic-agent part stream 1"
STALL_S = 10.0
"""How long either end waits until the other takes or sends something."""
WHOLE, TORN = b"whole", b"torn"
OUTDATED = b"outdated"
"""Answer to the header of a part of an older group."""
_LENGTH = struct.Struct("!I")
_MESSAGE_BYTES = 4096
_CHUNK_BYTES = 4 << 20

_encoder = msgspec.json.Encoder()
_decoder = msgspec.json.Decoder(tuple[Identity, Identity])


class PartHeader(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Describes the part of a snapshot that only one rank has."""

    copy: StateId
    world_size: WorldSize
    rank: Count
    checksum: int
    """Checksum of the bytes, computed by the rank; see `trainer_runtime.snapshot_page`."""
    size_bytes: Count


_header_decoder = msgspec.json.Decoder(PartHeader)


def encode_header(header: PartHeader) -> bytes:
    """Return the message."""
    return _encoder.encode(header)


def decode_header(message: bytes) -> PartHeader:
    """Return the header in a message. Raises `LinkBroken` if it is malformed."""
    header = decode_or_break(_header_decoder.decode, message)
    if not 0 <= header.rank < header.world_size or not header.size_bytes:
        raise LinkBroken("it sent an impossible snapshot part")
    return header


def handshake_as_caller(connection: socket.socket, credential: Credential, called: Identity) -> None:
    """Prove who calls, and check that this agent answers.

    Raises:
        LinkBroken: the other end did not prove itself.
        OSError: the connection broke.
    """
    nonce = secrets.token_bytes(NONCE_BYTES)
    send_message(connection, VERSION + nonce)
    session = LinkSession(credential.secret, nonce + receive_message(connection))
    names = _encoder.encode((credential.identity, called))
    send_message(connection, session.prove(b"send parts", names))
    if session.check(b"take parts", receive_message(connection)) != names:
        raise LinkBroken("another agent answers there")


def handshake_as_called(connection: socket.socket, credential: Credential) -> Identity:
    """Check who calls; return its identity.

    Raises:
        LinkBroken: the caller did not prove itself, or calls another agent.
        OSError: the connection broke.
    """
    hello = receive_message(connection)
    if not hello.startswith(VERSION) or len(hello) != len(VERSION) + NONCE_BYTES:
        raise LinkBroken("it speaks another version")
    nonce = secrets.token_bytes(NONCE_BYTES)
    send_message(connection, nonce)
    session = LinkSession(credential.secret, hello[len(VERSION) :] + nonce)
    names = session.check(b"send parts", receive_message(connection))
    caller, called = decode_or_break(_decoder.decode, names)
    if called != credential.identity:
        raise LinkBroken("it wants another agent")
    send_message(connection, session.prove(b"take parts", names))
    return caller


def send_message(connection: socket.socket, message: bytes) -> None:
    """Send a message. Raises `OSError`."""
    connection.sendall(_LENGTH.pack(len(message)) + message)


def receive_message(connection: socket.socket) -> bytes:
    """Wait for a message. Raises `OSError`, and `LinkBroken` if it is too long or the connection was closed."""
    (length,) = _LENGTH.unpack(_receive_exactly(connection, _LENGTH.size))
    if length > _MESSAGE_BYTES:
        raise LinkBroken("something else speaks at its port")
    return _receive_exactly(connection, length)


def send_bytes(connection: socket.socket, memory: int, at: int, size_bytes: int, is_wanted: Callable[[], bool]) -> None:
    """Send bytes of a memory. Raises `LinkBroken` if they are not there or no longer wanted, and `OSError`.

    They are read into a buffer and not mapped: the script may shorten the memory at any time.
    """
    buffer, end = bytearray(min(size_bytes, _CHUNK_BYTES)), at + size_bytes
    while at < end:
        if not is_wanted():
            raise LinkBroken("no longer wanted")
        read = os.preadv(memory, [memoryview(buffer)[: end - at]], at)
        if not read:
            raise LinkBroken("the rank has shortened its memory")
        connection.sendall(memoryview(buffer)[:read])
        at += read


def receive_into(connection: socket.socket, space: int, size_bytes: int) -> None:
    """Write so many bytes to the beginning of a file. Raises `LinkBroken` if the connection was closed, and `OSError`.

    They are not written to a mapping of it: on a disk that fails, that would kill this process.
    """
    buffer, at = memoryview(bytearray(min(size_bytes, _CHUNK_BYTES))), 0
    while at < size_bytes:
        piece = buffer[: size_bytes - at]
        receive_bytes(connection, piece)
        while piece:
            written = os.pwrite(space, piece, at)
            piece, at = piece[written:], at + written


def receive_bytes(connection: socket.socket, place: memoryview) -> None:
    """Fill `place`. Raises `LinkBroken` if the connection was closed, and `OSError`."""
    at = 0
    while at < len(place):
        received = connection.recv_into(place[at : at + _CHUNK_BYTES])
        if not received:
            raise LinkBroken("connection closed")
        at += received


def _receive_exactly(connection: socket.socket, length: int) -> bytes:
    data = bytearray(length)
    receive_bytes(connection, memoryview(data))
    return bytes(data)
