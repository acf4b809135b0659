"""A reader of logs, and of how ranks are, on other nodes: the dialling end of what `log_server.py` serves."""

from __future__ import annotations

import asyncio
import os
import secrets
from dataclasses import dataclass

import msgspec

from agent.core.model import Identity
from agent.links.frames import Credential, FrameKind, LinkBroken, LinkConnection, introduce, understood
from agent.links.live_ranks import LiveRanks
from agent.links.log_server import FindLogs, LogsFound, ReadLog

_PATIENCE_S = 5.0
_found = msgspec.json.Decoder(LogsFound)
_pulse = msgspec.json.Decoder(LiveRanks)


class ReadDeclined(Exception):  # noqa: N818 - says what is the case, not that a bug was hit
    """The agent answers, and has not got what was asked for, or cannot read it. The message says why."""


@dataclass(frozen=True)
class LogHost:
    """An agent that logs can be read from."""

    node_id: str
    address: str
    """An IP address or a name."""
    port: int
    cert: str = ""
    """Fingerprint of the certificate that it shows there; empty: nothing is encrypted."""


class LogReader:
    """Reads from one agent, one thing at a time. Dials when it is asked, and again if the connection has broken.

    Args:
        shelf: the agent.
        secret: the job's.
    """

    def __init__(self, shelf: LogHost, secret: str) -> None:
        self.shelf = shelf
        self.is_leaving = False
        """Its workers are gone: what is read from now on is all that there will be. Soon nobody answers."""
        self._mine = Credential(secret.encode(), Identity("reader", secrets.token_hex(6)))
        self._connection: LinkConnection | None = None
        self._turn = asyncio.Lock()

    @property
    def is_open(self) -> bool:
        """Whether there is a connection."""
        return self._connection is not None

    async def find(self, find: FindLogs) -> LogsFound:
        """Ask for the logs of one node in one group. Raises `LinkBroken` or `ReadDeclined`."""
        return understood(_found.decode, await self._ask(FrameKind.FIND, msgspec.json.encode(find), FrameKind.FOUND))

    async def read(self, read: ReadLog) -> bytes:
        """Ask for a part of a log; empty: it ends there. Raises `LinkBroken` or `ReadDeclined`."""
        return await self._ask(FrameKind.READ, msgspec.json.encode(read), FrameKind.PART)

    async def look(self) -> LiveRanks:
        """Ask how the node's ranks are. Raises `LinkBroken` or `ReadDeclined`."""
        return understood(_pulse.decode, await self._ask(FrameKind.LOOK, b"", FrameKind.PULSE))

    def close(self) -> None:
        """Hang up."""
        if self._connection is not None:
            self._connection.drop()
            self._connection = None

    async def _ask(self, kind: FrameKind, request: bytes, wanted: FrameKind) -> bytes:
        async with self._turn:
            if self._connection is not None:
                try:
                    return await self._ask_once(self._connection, kind, request, wanted)
                except LinkBroken:
                    self.close()  # perhaps only because nothing was asked for so long
            try:
                async with asyncio.timeout(_PATIENCE_S):
                    self._connection = await self._dial()
            except TimeoutError:
                raise LinkBroken(f"no answer within {_PATIENCE_S:g} s") from None
            try:
                return await self._ask_once(self._connection, kind, request, wanted)
            except LinkBroken:
                self.close()
                raise

    async def _ask_once(self, connection: LinkConnection, kind: FrameKind, request: bytes, wanted: FrameKind) -> bytes:
        try:
            async with asyncio.timeout(_PATIENCE_S):
                connection.send(kind, request)
                while True:
                    said, payload = await connection.receive(wanted, FrameKind.SORRY, FrameKind.LEAVING)
                    if said is not FrameKind.LEAVING:
                        break
                    self.is_leaving = True
        except TimeoutError:
            raise LinkBroken(f"no answer within {_PATIENCE_S:g} s") from None
        if said is FrameKind.SORRY:
            raise ReadDeclined(payload.decode(errors="replace"))
        return payload

    async def _dial(self) -> LinkConnection:
        try:
            connection = await LinkConnection.dial(self.shelf.address, self.shelf.port, self.shelf.cert)
        except OSError as error:
            # asyncio puts the address into `strerror`, where who reads it has another one in mind: the node.
            raise LinkBroken(os.strerror(error.errno) if error.errno else str(error)) from None
        try:
            _, who = await introduce(connection, self._mine, Identity(self.shelf.node_id, ""), is_reader=True)
        except BaseException:
            connection.drop()
            raise
        if who.node_id != self.shelf.node_id:
            connection.drop()
            raise LinkBroken(f"another agent answers there: {who.node_id}")
        return connection
