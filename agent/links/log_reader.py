"""Reads logs and the state of ranks on other nodes: the client of log_server.py."""

from __future__ import annotations

import asyncio
import os
import secrets
from dataclasses import dataclass

import msgspec

from agent.core.model import Node
from agent.core.records import Identity
from agent.links.frames import FrameKind, LinkBroken, LinkConnection, decode_or_break
from agent.links.handshake import Credential, handshake_as_dialler
from agent.links.queries import FindLogs, LiveRanks, LogsFound, ReadLog

_ANSWER_WITHIN_S = 5.0
_logs_found = msgspec.json.Decoder(LogsFound)
_live_ranks = msgspec.json.Decoder(LiveRanks)


class ReadDeclined(Exception):  # noqa: N818 - says what is the case, not that a bug was hit
    """The agent answered that it does not have the requested log, or cannot read it. The message says why."""


@dataclass(frozen=True)
class LogHost:
    """An agent from which logs can be read."""

    node_id: str
    address: str
    """An IP address or a name."""
    port: int
    cert: str = ""
    """Fingerprint of the certificate that the agent shows; empty: nothing is encrypted."""

    @classmethod
    def of(cls, node: Node) -> LogHost:
        """Return the agent that has this record."""
        return cls(node.node_id, node.address, node.link, node.link_cert)


class LogReader:
    """Sends queries to one agent, one at a time. Dials at the first query, and again if the connection has broken.

    Args:
        host: the agent.
        secret: the job's secret.
    """

    def __init__(self, host: LogHost, secret: str) -> None:
        self.host = host
        self.is_leaving = False
        """Whether the agent is about to end: its workers have ended, so the logs are complete."""
        self._credential = Credential(secret.encode(), Identity("reader", secrets.token_hex(6)))
        self._connection: LinkConnection | None = None
        self._lock = asyncio.Lock()

    @property
    def is_open(self) -> bool:
        """Whether a connection is open."""
        return self._connection is not None

    async def find(self, find: FindLogs) -> LogsFound:
        """List the logs of one node in one group. Raises `LinkBroken` or `ReadDeclined`."""
        return decode_or_break(
            _logs_found.decode, await self._ask(FrameKind.FIND_LOGS, msgspec.json.encode(find), FrameKind.LOGS_FOUND)
        )

    async def read(self, read: ReadLog) -> bytes:
        """Read a part of a log; empty: the log ends there. Raises `LinkBroken` or `ReadDeclined`."""
        return await self._ask(FrameKind.READ_LOG, msgspec.json.encode(read), FrameKind.LOG_CHUNK)

    async def live_ranks(self) -> LiveRanks:
        """Read the current state of the node's ranks. Raises `LinkBroken` or `ReadDeclined`."""
        return decode_or_break(_live_ranks.decode, await self._ask(FrameKind.GET_RANKS, b"", FrameKind.LIVE_RANKS))

    def close(self) -> None:
        """Close the connection."""
        if self._connection is not None:
            self._connection.drop()
            self._connection = None

    async def _ask(self, kind: FrameKind, request: bytes, wanted: FrameKind) -> bytes:
        async with self._lock:
            if self._connection is not None:
                try:
                    return await self._ask_once(self._connection, kind, request, wanted)
                except LinkBroken:
                    self.close()  # perhaps only because it was idle for too long
            try:
                async with asyncio.timeout(_ANSWER_WITHIN_S):
                    self._connection = await self._dial()
            except TimeoutError:
                raise LinkBroken(f"no answer within {_ANSWER_WITHIN_S:g} s") from None
            try:
                return await self._ask_once(self._connection, kind, request, wanted)
            except LinkBroken:
                self.close()
                raise

    async def _ask_once(self, connection: LinkConnection, kind: FrameKind, request: bytes, wanted: FrameKind) -> bytes:
        try:
            async with asyncio.timeout(_ANSWER_WITHIN_S):
                connection.send(kind, request)
                while True:
                    reply, payload = await connection.receive(wanted, FrameKind.ERROR, FrameKind.LEAVING)
                    if reply is not FrameKind.LEAVING:
                        break
                    self.is_leaving = True
        except TimeoutError:
            raise LinkBroken(f"no answer within {_ANSWER_WITHIN_S:g} s") from None
        if reply is FrameKind.ERROR:
            raise ReadDeclined(payload.decode(errors="replace"))
        return payload

    async def _dial(self) -> LinkConnection:
        try:
            connection = await LinkConnection.dial(self.host.address, self.host.port, self.host.cert)
        except OSError as error:
            # asyncio puts the IP address into `strerror`, while the user knows the agent by its node.
            raise LinkBroken(os.strerror(error.errno) if error.errno else str(error)) from None
        try:
            _, answering, _ = await handshake_as_dialler(
                connection, self._credential, Identity(self.host.node_id, ""), is_reader=True
            )
        except BaseException:
            connection.drop()
            raise
        if answering.node_id != self.host.node_id:
            connection.drop()
            raise LinkBroken(f"another agent answers there: {answering.node_id}")
        return connection
