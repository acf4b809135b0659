"""Serves the queries of readers: the logs on this node, and the current state of its ranks.

A reader names a log by run, group, node and rank, never by a path, and requests one chunk after the other: nothing is
read or buffered before it is requested. Files are read on separate threads, because a file server that is gone blocks a
read for ever and heartbeats must continue. A blocked thread keeps counting towards the limit of such threads.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Any, TypeVar

import msgspec

from agent.links.frames import LOG_CHUNK_BYTES, FrameKind, LinkBroken, LinkConnection, decode_or_break
from agent.links.queries import FindLogs, LiveRanks, LogFiles, LogsFound, ReadLog
from agent.observe.log import InternalErrors

_MAX_READERS = 8
_MAX_WATCHERS = 64  # one per open web page
_IDLE_S = 60.0  # a reader that was idle for longer connects again
_CLOSE_WITHIN_S = 1.0
_DISK_WITHIN_S = 4.0  # less than a reader waits, so that it receives the reason
_DISK_HANGS = b"its disk does not answer"

_T = TypeVar("_T")

_find_logs = msgspec.json.Decoder(FindLogs)
_read_log = msgspec.json.Decoder(ReadLog)


class LogServer:
    """Serves all readers of this agent.

    Args:
        log_files: the logs that readers may read.
        live_ranks: returns the state of this node's ranks. Called on the links' thread, so it may not block.
        mishaps: logs unexpected errors.
    """

    def __init__(self, log_files: LogFiles, live_ranks: Callable[[], LiveRanks], mishaps: InternalErrors) -> None:
        self._log_files = log_files
        self._live_ranks = live_ranks
        self._mishaps = mishaps
        self._readers: set[asyncio.Task[Any]] = set()
        self._watchers: set[asyncio.Task[Any]] = set()
        """Readers that have only requested the state of ranks."""
        self._busy_threads = 0
        self._is_leaving = False

    async def serve(self, reader: LinkConnection) -> None:
        """Answer one reader until it leaves, or its task is cancelled.

        Raises:
            LinkBroken: the reader has left.
            TimeoutError: the reader sends no request, or does not take a reply.
        """
        task = asyncio.current_task()
        assert task is not None  # noqa: S101 - this is a coroutine
        self._watchers.add(task)
        try:
            while True:
                async with asyncio.timeout(_IDLE_S):
                    kind, request = await reader.receive(FrameKind.FIND_LOGS, FrameKind.READ_LOG, FrameKind.GET_RANKS)
                if kind is not FrameKind.GET_RANKS:
                    self._watchers.discard(task)
                    self._readers.add(task)
                if len(self._readers) > _MAX_READERS or len(self._watchers) > _MAX_WATCHERS:
                    await _deliver(reader, FrameKind.ERROR, b"it has as many readers as it can serve")
                    return
                reply = await self._reply_to(kind, request)
                if self._is_leaving:
                    reader.send(FrameKind.LEAVING)
                await _deliver(reader, *reply)
        finally:
            self._readers.discard(task)
            self._watchers.discard(task)

    async def close(self) -> None:
        """Announce the end with each reply, and wait a short time until readers have read everything."""
        self._is_leaving = True
        if self._readers:
            await asyncio.wait(self._readers, timeout=_CLOSE_WITHIN_S)
        self.disconnect_all()

    def disconnect_all(self) -> None:
        """Disconnect all readers; they may connect again."""
        for task in self._readers | self._watchers:
            task.cancel()

    async def _reply_to(self, kind: FrameKind, request: bytes) -> tuple[FrameKind, bytes]:
        try:
            if kind is FrameKind.GET_RANKS:
                return FrameKind.LIVE_RANKS, msgspec.json.encode(self._live_ranks())
            work = self._work(kind, request)
            if self._busy_threads >= _MAX_READERS:
                return FrameKind.ERROR, _DISK_HANGS
            async with asyncio.timeout(_DISK_WITHIN_S):
                return await self._on_thread(work)
        except LinkBroken:
            raise
        except TimeoutError:
            return FrameKind.ERROR, _DISK_HANGS
        except OSError as error:
            return FrameKind.ERROR, str(error.strerror or error).encode()[:200]
        except Exception as error:  # noqa: BLE001 - a log that cannot be read must not end the agent
            self._mishaps.report(error)
            return FrameKind.ERROR, b"internal error; see its agent's log"

    def _work(self, kind: FrameKind, request: bytes) -> Callable[[], tuple[FrameKind, bytes]]:
        if kind is FrameKind.READ_LOG:
            read = decode_or_break(_read_log.decode, request)
            return lambda: (FrameKind.LOG_CHUNK, self._log_files.read(read, LOG_CHUNK_BYTES))
        find = decode_or_break(_find_logs.decode, request)
        return lambda: _list_reply(self._log_files.find(find))

    async def _on_thread(self, work: Callable[[], _T]) -> _T:
        loop = asyncio.get_running_loop()
        result: asyncio.Future[_T] = loop.create_future()

        def end(outcome: _T | Exception) -> None:
            self._busy_threads -= 1
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
            except Exception as error:  # noqa: BLE001 - raised in the waiting coroutine
                outcome = error
            try:
                loop.call_soon_threadsafe(end, outcome)
            except RuntimeError:  # the event loop has closed meanwhile
                return

        threading.Thread(target=run, name="log reader", daemon=True).start()  # raises if there are too many threads
        self._busy_threads += 1
        return await result


def _list_reply(found: LogsFound) -> tuple[FrameKind, bytes]:
    encoded = msgspec.json.encode(found)
    return (
        (FrameKind.LOGS_FOUND, encoded)
        if len(encoded) <= LOG_CHUNK_BYTES
        else (FrameKind.ERROR, b"it has more logs than can be listed")
    )


async def _deliver(reader: LinkConnection, kind: FrameKind, payload: bytes) -> None:
    async with asyncio.timeout(_IDLE_S):
        await reader.deliver(kind, payload)
