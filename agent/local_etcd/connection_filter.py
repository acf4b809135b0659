"""Forwards connections from allowed IP addresses to servers that listen on loopback only.

An etcd run by a job has neither certificates nor passwords unless the operator provides a secret. All machines of such
a job know each other's addresses, so the addresses decide: a connection from any other address is closed before a byte
of it is read. This protects only as far as the network prevents machines from using each other's addresses, and it
admits all users of the allowed machines. With a secret, certificates are required in addition.
"""

from __future__ import annotations

import asyncio
import errno
import ipaddress
import threading
import time
from collections.abc import Callable, Coroutine, Iterable, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Self

from agent.endpoints import LOOPBACK
from agent.errors import ConfigError
from agent.observe.log import log

_BUFFER_BYTES = 1 << 16
_MAX_WARNINGS = 10
_RESOLVE_EVERY_S = 2.0


@dataclass(frozen=True)
class PortForward:
    """From a port at an address of this machine to a port on its loopback."""

    host: str
    port: int
    inner_port: int


class ConnectionFilter:
    """Forwards connections inside a `with` block, on a thread of its own.

    Args:
        forwards: the ports; the same addresses are allowed at all of them.
        resolve_allowed: returns the allowed IP addresses. Called again, on another thread, for a connection from
            another address, because a machine may have come back under its name with a new address.

    Raises:
        ConfigError: on entering, if one of the ports is taken.
    """

    def __init__(self, forwards: Sequence[PortForward], resolve_allowed: Callable[[], Iterable[str]]) -> None:
        self._forwards = forwards
        self._resolve_allowed = resolve_allowed
        self._allowed_ips: frozenset[str] = frozenset()
        self._resolve_again_at = 0.0
        self._resolving = asyncio.Lock()
        self._loop = asyncio.new_event_loop()
        self._servers: list[asyncio.Server] = []
        self._tasks: set[asyncio.Task[None]] = set()
        self._warned_of: set[str] = set()
        self._thread = threading.Thread(target=self._loop.run_forever, name="connection-filter", daemon=True)

    def __enter__(self) -> Self:
        """Start listening."""
        self._thread.start()
        try:
            asyncio.run_coroutine_threadsafe(self._open(), self._loop).result()
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Stop listening, and close all forwarded connections."""
        self._end()

    def _end(self) -> None:
        asyncio.run_coroutine_threadsafe(self._close(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    async def _open(self) -> None:
        for forward in self._forwards:
            self._servers.append(await self._listen(forward))

    async def _listen(self, forward: PortForward) -> asyncio.Server:
        def on_connection(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            task = self._begin(self._forward(forward.inner_port, reader, writer))
            task.add_done_callback(
                lambda _: writer.transport.abort()
            )  # also if the task was cancelled before it started

        try:
            return await asyncio.start_server(on_connection, forward.host, forward.port, limit=_BUFFER_BYTES)
        except OSError as error:
            at = f"cannot listen at {forward.host}:{forward.port} for the job's etcd"
            if error.errno == errno.EADDRINUSE:
                do = "choose another --ctrl_port, the same on all machines"
                raise ConfigError(f"{at}: the port is taken; {do}") from None
            why = error.strerror or "the address is not this machine's"
            raise ConfigError(f"{at}: {why}; name this machine in --ips by an address that it has itself") from None

    def _begin(self, work: Coroutine[None, None, None]) -> asyncio.Task[None]:
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _close(self) -> None:
        # asyncio loses, and leaves open, connections that are being accepted while the server is closed. Wait for them.
        while accepting := asyncio.all_tasks() - self._tasks - {asyncio.current_task()}:
            await asyncio.gather(*accepting, return_exceptions=True)
        for server in self._servers:
            server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await asyncio.sleep(0)  # aborted connections are closed in the next turn of the event loop

    async def _forward(self, port: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        peer = writer.get_extra_info("peername")
        if peer is None or not await self._is_allowed(_normalized(peer[0])):
            return
        try:
            inner_reader, inner_writer = await asyncio.open_connection(LOOPBACK, port, limit=_BUFFER_BYTES)
        except OSError:  # etcd does not run (yet)
            return
        try:
            await asyncio.gather(self._begin(_pump(reader, inner_writer)), self._begin(_pump(inner_reader, writer)))
        finally:
            inner_writer.transport.abort()

    async def _is_allowed(self, caller: str) -> bool:
        async with self._resolving:  # concurrent connections wait for the same lookup
            if caller not in self._allowed_ips and time.monotonic() >= self._resolve_again_at:
                found = await asyncio.to_thread(self._resolve_allowed)
                self._allowed_ips = frozenset(map(_normalized, found))
                self._resolve_again_at = time.monotonic() + _RESOLVE_EVERY_S
        if caller not in self._allowed_ips and caller not in self._warned_of and len(self._warned_of) < _MAX_WARNINGS:
            self._warned_of.add(caller)
            log.warning("refused a connection to the job's etcd from a machine that is not in --ips", caller=caller)
        return caller in self._allowed_ips


async def _pump(source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
    """Forward data of one direction, and then its end."""
    try:
        while data := await source.read(_BUFFER_BYTES):
            target.write(data)
            await target.drain()
        target.write_eof()
    except OSError:  # the other side has closed, or this one was aborted
        target.transport.abort()


def _normalized(ip: str) -> str:
    """Return one spelling per address: an IPv4 address may appear as an IPv4-mapped IPv6 one."""
    parsed = ipaddress.ip_address(ip.partition("%")[0])
    mapped = parsed.ipv4_mapped if isinstance(parsed, ipaddress.IPv6Address) else None
    return str(mapped or parsed)
