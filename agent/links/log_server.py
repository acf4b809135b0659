"""Lets readers see the logs that lie on this node, and how its ranks are: the accepting end of their connections.

A reader names a log by run, group, node and rank, never by a path, and asks for one part after the other: what it has
not asked for is neither read nor kept. Files are read on threads of their own, since a file server that is gone blocks
a read for ever, and heartbeats must go on. A thread that is blocked so keeps its place among the few that there may be.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Annotated, Any, Protocol, TypeVar

import msgspec

from agent.links.frames import PART_BYTES, FrameKind, LinkBroken, LinkConnection, understood
from agent.links.live_ranks import LiveRanks
from agent.observe.log import InternalErrors

_READERS = 8
_WATCHERS = 64  # one for each web page that somebody looks at
_IDLE_S = 60.0  # a reader whose user looks at another window calls again
_FAREWELL_S = 1.0
_DISK_S = 4.0  # a reader waits longer, and so hears why
_NO_DISK = b"its disk does not answer"

_T = TypeVar("_T")

_Run = Annotated[str, msgspec.Meta(pattern=r"^[0-9a-f]{1,64}\Z")]
_NodeId = Annotated[str, msgspec.Meta(pattern=r"^[A-Za-z0-9._-]{1,128}\Z")]
_Number = Annotated[int, msgspec.Meta(ge=0, le=2**62)]


class FindLogs(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Which logs there are."""

    run: _Run
    group: _Number
    node_id: _NodeId
    """Whose output it was. Nodes may share a directory."""


class ReadLog(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A part of one log."""

    run: _Run
    group: _Number
    node_id: _NodeId
    rank: _Number
    offset: _Number


class LogEntry(msgspec.Struct, frozen=True, kw_only=True):
    """One rank's."""

    rank: int
    size_bytes: int


class LogsFound(msgspec.Struct, frozen=True, kw_only=True):
    """Which logs there are of one node in one group."""

    directory: str
    """Where they lie, or would lie. For people."""
    logs: tuple[LogEntry, ...]
    """By rank."""


_find = msgspec.json.Decoder(FindLogs)
_read = msgspec.json.Decoder(ReadLog)


class LogFiles(Protocol):
    """Logs on disk. Whoever asks it may have to wait for ever."""

    def find(self, find: FindLogs) -> LogsFound:
        """Look for the logs of one node in one group. Raises `OSError`."""
        ...

    def read(self, read: ReadLog, limit_bytes: int) -> bytes:
        """Read a part of one log; nothing, if it ends there. Raises `OSError`."""
        ...


class LogServer:
    """Where readers are served.

    Args:
        archive: what they may see.
        pulse: how this node's ranks are. Called on the links' thread, so it may not block.
        mishaps: where errors that nobody foresaw are told.
    """

    def __init__(self, archive: LogFiles, pulse: Callable[[], LiveRanks], mishaps: InternalErrors) -> None:
        self._archive = archive
        self._pulse = pulse
        self._mishaps = mishaps
        self._readers: set[asyncio.Task[Any]] = set()
        self._watchers: set[asyncio.Task[Any]] = set()
        """Those that have only ever looked how the ranks are."""
        self._at_work = 0
        """Threads that read."""
        self._is_leaving = False

    async def serve(self, reader: LinkConnection) -> None:
        """Answer one reader until it leaves, or its task is cancelled.

        Raises:
            Broken: it has left.
            TimeoutError: it asks for nothing, or takes nothing.
        """
        me = asyncio.current_task()
        assert me is not None  # noqa: S101 - this is a coroutine
        self._watchers.add(me)
        try:
            while True:
                async with asyncio.timeout(_IDLE_S):
                    kind, request = await reader.receive(FrameKind.FIND, FrameKind.READ, FrameKind.LOOK)
                if kind is not FrameKind.LOOK:
                    self._watchers.discard(me)
                    self._readers.add(me)
                if len(self._readers) > _READERS or len(self._watchers) > _WATCHERS:
                    await _deliver(reader, FrameKind.SORRY, b"it has as many readers as it can serve")
                    return
                answer = await self._answer(kind, request)
                if self._is_leaving:
                    reader.send(FrameKind.LEAVING)
                await _deliver(reader, *answer)
        finally:
            self._readers.discard(me)
            self._watchers.discard(me)

    async def close(self) -> None:
        """Say with each answer that no more will be written, and wait, but not for long, until readers have it all."""
        self._is_leaving = True
        if self._readers:
            await asyncio.wait(self._readers, timeout=_FAREWELL_S)
        self.dismiss()

    def dismiss(self) -> None:
        """Send all readers away; they may call again."""
        for task in self._readers | self._watchers:
            task.cancel()

    async def _answer(self, kind: FrameKind, request: bytes) -> tuple[FrameKind, bytes]:
        try:
            if kind is FrameKind.LOOK:
                return FrameKind.PULSE, msgspec.json.encode(self._pulse())
            work = self._work(kind, request)
            if self._at_work >= _READERS:
                return FrameKind.SORRY, _NO_DISK
            async with asyncio.timeout(_DISK_S):
                return await self._on_thread(work)
        except LinkBroken:
            raise
        except TimeoutError:
            return FrameKind.SORRY, _NO_DISK
        except OSError as error:
            return FrameKind.SORRY, str(error.strerror or error).encode()[:200]
        except Exception as error:  # noqa: BLE001 - a log that cannot be shown is no reason to end an agent
            self._mishaps.report(error)
            return FrameKind.SORRY, b"internal error; its agent's log says more"

    def _work(self, kind: FrameKind, request: bytes) -> Callable[[], tuple[FrameKind, bytes]]:
        if kind is FrameKind.READ:
            read = understood(_read.decode, request)
            return lambda: (FrameKind.PART, self._archive.read(read, PART_BYTES))
        find = understood(_find.decode, request)
        return lambda: _told(self._archive.find(find))

    async def _on_thread(self, work: Callable[[], _T]) -> _T:
        loop = asyncio.get_running_loop()
        result: asyncio.Future[_T] = loop.create_future()

        def end(outcome: _T | Exception) -> None:
            self._at_work -= 1
            if result.cancelled():
                return
            if isinstance(outcome, Exception):
                result.set_exception(outcome)
            else:
                result.set_result(outcome)

        def run() -> None:
            outcome: _T | Exception
            try:
                outcome = work()
            except Exception as error:  # noqa: BLE001 - handed to who waits
                outcome = error
            try:
                loop.call_soon_threadsafe(end, outcome)
            except RuntimeError:  # the agent has left meanwhile
                return

        threading.Thread(target=run, name="log reader", daemon=True).start()  # there may be too many
        self._at_work += 1
        return await result


def _told(found: LogsFound) -> tuple[FrameKind, bytes]:
    told = msgspec.json.encode(found)
    return (
        (FrameKind.FOUND, told)
        if len(told) <= PART_BYTES
        else (FrameKind.SORRY, b"it has more logs than can be listed")
    )


async def _deliver(reader: LinkConnection, kind: FrameKind, payload: bytes) -> None:
    async with asyncio.timeout(_IDLE_S):
        await reader.deliver(kind, payload)
