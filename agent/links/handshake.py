"""The handshake of a link: both ends prove that they know the job's secret, and name themselves.

A proof is an HMAC over the role, both nonces and both names. It is computed over the very bytes that are sent with it,
so no unproven byte is parsed. The frames are described in frames.py.
"""

from __future__ import annotations

import hmac
import secrets
from dataclasses import dataclass
from typing import Literal

import msgspec

from agent.core.bounds import Port
from agent.core.records import Identity
from agent.links.frames import MAC_BYTES, NONCE_BYTES, VERSION, FrameKind, LinkBroken, LinkConnection, decode_or_break

_encoder = msgspec.json.Encoder()
_decoder = msgspec.json.Decoder(tuple[Identity, Identity])
_welcome_decoder = msgspec.json.Decoder(tuple[Identity, Identity, Port])

Role = Literal[b"dial", b"read", b"accept", b"goodbye", b"keep", b"send parts", b"take parts"]


class ProofRefused(LinkBroken):
    """The other end does not know the secret."""


@dataclass(frozen=True)
class Credential:
    """What an agent proves: that it knows the secret, and its identity."""

    secret: bytes
    identity: Identity


@dataclass(frozen=True)
class LinkSession:
    """The values from which the proofs on one connection are made."""

    secret: bytes
    nonces: bytes
    """The dialler's, then the accepting end's."""

    def prove(self, role: Role, content: bytes) -> bytes:
        """Return the payload of a frame that proves its content in this role on this connection."""
        return hmac.digest(self.secret, role + self.nonces + content, "sha256") + content

    def check(self, role: Role, payload: bytes) -> bytes:
        """Return the content of such a payload. Raises `ProofRefused` if it was made without the secret."""
        content = payload[MAC_BYTES:]
        if not hmac.compare_digest(self.prove(role, content), payload):
            raise ProofRefused("it does not know the job's secret")
        return content


@dataclass(frozen=True)
class LinkCaller:
    """An authenticated caller."""

    session: LinkSession
    identity: Identity
    is_reader: bool


async def handshake_as_dialler(
    connection: LinkConnection, credential: Credential, called: Identity, *, is_reader: bool = False
) -> tuple[LinkSession, Identity, int]:
    """Do the dialler's part of the handshake.

    Returns:
        The session, the identity of the agent that answered, which may differ from the one that was called, and the
        port at which it takes large snapshot parts (0: it takes none).

    Raises:
        LinkBroken: the other end did not prove itself.
    """
    nonce = secrets.token_bytes(NONCE_BYTES)
    connection.send(FrameKind.HELLO, VERSION + nonce)
    _, challenge = await connection.receive(FrameKind.CHALLENGE)
    session = LinkSession(credential.secret, nonce + challenge)
    names = _encoder.encode((credential.identity, called))
    if is_reader:
        connection.send(FrameKind.READER_PROOF, session.prove(b"read", names))
    else:
        connection.send(FrameKind.PROOF, session.prove(b"dial", names))
    _, answer = await connection.receive(FrameKind.WELCOME)
    _, answering, part_port = decode_or_break(_welcome_decoder.decode, session.check(b"accept", answer))
    return session, answering, part_port


async def handshake_as_listener(connection: LinkConnection, credential: Credential, part_port: int = 0) -> LinkCaller:
    """Do the accepting end's part of the handshake.

    An agent must call exactly this incarnation. A reader calls a node: any incarnation of its agent has the logs.

    Args:
        connection: the connection.
        credential: proves the identity of this agent.
        part_port: port at which this agent takes large snapshot parts; 0: it takes none.

    Raises:
        LinkBroken: the caller did not prove itself, or it calls another agent and was sent this agent's identity.
    """
    _, hello = await connection.receive(FrameKind.HELLO)
    if not hello.startswith(VERSION):
        raise LinkBroken("it speaks another version")
    nonce = secrets.token_bytes(NONCE_BYTES)
    connection.send(FrameKind.CHALLENGE, nonce)
    session = LinkSession(credential.secret, hello[len(VERSION) :] + nonce)
    kind, proof = await connection.receive(FrameKind.PROOF, FrameKind.READER_PROOF)
    is_reader = kind is FrameKind.READER_PROOF
    caller, called = decode_or_break(_decoder.decode, session.check(b"read" if is_reader else b"dial", proof))
    own = credential.identity
    if caller == own:
        raise LinkBroken("it sent this agent's own frames back")
    connection.send(FrameKind.WELCOME, session.prove(b"accept", _encoder.encode((caller, own, part_port))))
    if called.node_id != own.node_id or (called != own and not is_reader):
        raise LinkBroken("it wants another agent")
    return LinkCaller(session, caller, is_reader)
