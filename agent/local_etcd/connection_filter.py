"""A gate before servers that listen on loopback only: it lets in connections from the machines that were named.

An etcd that agents bring has neither certificates nor passwords unless its user hands out a secret. What all machines
of such a job do know is each other's addresses, so these are the key: whoever calls from another address is hung up on
before a byte of his is read. That holds as far as the network keeps machines from using each other's addresses, and for
all users of these machines alike; a secret is asked for in addition.
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

from agent.errors import ConfigError
from agent.observe.log import log

_BUFFER_BYTES = 1 << 16
_COMPLAINTS = 10
_ASK_EVERY_S = 2.0


@dataclass(frozen=True)
class AllowedAddresses:
    """From an address of this machine to a port of its loopback."""

    host: str
    port: int
    inner_port: int


class ConnectionFilter:
    """Passes connections on inside a `with` block, on a thread of its own.

    Args:
        passages: all of them have the same guests.
        guests: their IP addresses now. Asked again, on another thread, when somebody else calls: a machine may have
            come back under its name with another address.

    Raises:
        ConfigError: on entering, if one of the ports is taken.
    """

    def __init__(self, passages: Sequence[AllowedAddresses], guests: Callable[[], Iterable[str]]) -> None:
        self._passages = passages
        self._ask_guests = guests
        self._guests: frozenset[str] = frozenset()
        self._ask_again_at = 0.0
        self._asking = asyncio.Lock()
        self._loop = asyncio.new_event_loop()
        self._servers: list[asyncio.Server] = []
        self._tasks: set[asyncio.Task[None]] = set()
        self._complained_of: set[str] = set()
        self._thread = threading.Thread(target=self._loop.run_forever, name="gate", daemon=True)

    def __enter__(self) -> Self:
        """Open it."""
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
        """Close it, and all connections through it."""
        self._end()

    def _end(self) -> None:
        asyncio.run_coroutine_threadsafe(self._close(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    async def _open(self) -> None:
        for passage in self._passages:
            self._servers.append(await self._listen(passage))

    async def _listen(self, passage: AllowedAddresses) -> asyncio.Server:
        def on_call(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            task = self._begin(self._pass_on(passage.inner_port, reader, writer))
            task.add_done_callback(lambda _: writer.transport.abort())  # also of one that had not begun

        try:
            return await asyncio.start_server(on_call, passage.host, passage.port, limit=_BUFFER_BYTES)
        except OSError as error:
            at = f"cannot listen at {passage.host}:{passage.port} for the job's etcd"
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
        # asyncio forgets, and leaves open, whom it accepts just before its server is closed: these calls come first.
        while accepting := asyncio.all_tasks() - self._tasks - {asyncio.current_task()}:
            await asyncio.gather(*accepting, return_exceptions=True)
        for server in self._servers:
            server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await asyncio.sleep(0)  # what was hung up on is closed in the loop's next turn

    async def _pass_on(self, port: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        peer = writer.get_extra_info("peername")
        if peer is None or not await self._is_guest(_plain(peer[0])):
            return
        try:
            inner_reader, inner_writer = await asyncio.open_connection("127.0.0.1", port, limit=_BUFFER_BYTES)
        except OSError:  # etcd does not run, or not yet
            return
        try:
            await asyncio.gather(self._begin(_pump(reader, inner_writer)), self._begin(_pump(inner_reader, writer)))
        finally:
            inner_writer.transport.abort()

    async def _is_guest(self, caller: str) -> bool:
        async with self._asking:  # who calls while somebody asks waits for the answer, too
            if caller not in self._guests and time.monotonic() >= self._ask_again_at:
                found = await asyncio.to_thread(self._ask_guests)
                self._guests = frozenset(map(_plain, found))
                self._ask_again_at = time.monotonic() + _ASK_EVERY_S
        if caller not in self._guests and caller not in self._complained_of and len(self._complained_of) < _COMPLAINTS:
            self._complained_of.add(caller)
            log.warning("a machine that is not in --ips called at the job's etcd, and was not let in", caller=caller)
        return caller in self._guests


async def _pump(source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
    """Pass on what comes from one side, and then its end."""
    try:
        while data := await source.read(_BUFFER_BYTES):
            target.write(data)
            await target.drain()
        target.write_eof()
    except OSError:  # the other side has gone, or this one was cut
        target.transport.abort()


def _plain(ip: str) -> str:
    """One spelling for one address: an IPv4 address may come as an IPv6 one."""
    parsed = ipaddress.ip_address(ip.partition("%")[0])
    mapped = parsed.ipv4_mapped if isinstance(parsed, ipaddress.IPv6Address) else None
    return str(mapped or parsed)
