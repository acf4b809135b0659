"""Readers at the agents' port: what they can read, and what they can do to the agent that serves them."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from typing import Any

import msgspec
import pytest
from structlog.testing import capture_logs

from agent.core.model import LinkState
from agent.core.records import Identity
from agent.links import log_server
from agent.links.dialler import Peer
from agent.links.frames import LOG_CHUNK_BYTES, FrameKind, LinkBroken, LinkConnection
from agent.links.handshake import Credential, handshake_as_dialler
from agent.links.log_reader import LogHost, LogReader, ReadDeclined
from agent.links.pool import LinkPool
from agent.links.queries import FindLogs, LiveRank, LiveRanks, LogEntry, LogsFound, ReadLog

A, B = Identity("a", "1"), Identity("b", "1")
SHARED = "what the agents of a job know"
HEARTBEAT_S = 2.0
"""A peer falls silent after three: not because a busy machine stops it for a moment."""
DEADLINE_S = 120.0
PLACES = 8
FIND = FindLogs(run="0a", group=3, node_id="a")
READ = ReadLog(run="0a", group=3, node_id="a", rank=1, offset=0)

Wait = Callable[[Callable[[], bool]], None]


class Disk:
    """Log files with one log, on a disk that can hang and fail."""

    def __init__(self) -> None:
        self.log = bytes(range(256)) * 300
        self.asked: list[FindLogs | ReadLog] = []
        self.error: Exception | None = None
        self.answers = threading.Event()
        self.answers.set()

    def find(self, find: FindLogs) -> LogsFound:
        self._turn(find)
        return LogsFound(directory="/logs", logs=(LogEntry(rank=1, size_bytes=len(self.log)),))

    def read(self, read: ReadLog, limit_bytes: int) -> bytes:
        self._turn(read)
        return self.log[read.offset : read.offset + limit_bytes]

    def _turn(self, request: FindLogs | ReadLog) -> None:
        self.asked.append(request)
        assert self.answers.wait(DEADLINE_S)
        if self.error is not None:
            raise self.error


PULSE = LiveRanks(
    group=3,
    ranks=(LiveRank(rank=2, step=17, state="training"), LiveRank(rank=3, step=16, state="phase")),
    is_alive=True,
    lease_left_s=3.5,
    etcd_s=None,
)


class Agent:
    """Links in this process."""

    def __init__(self, me: Identity, disk: Disk, peers: tuple[Peer, ...] = ()) -> None:
        self.states: list[LinkState] = []
        self.links = LinkPool(
            on_change=lambda _who, state, _why: self.states.append(state),
            on_clock=lambda *_: None,
            on_part=lambda _: None,
            log_files=disk,
            live_ranks=lambda: PULSE,
            is_loop_alive=lambda: True,
            heartbeat_s=HEARTBEAT_S,
        )
        self.links.hold(SHARED, me, peers)

    @property
    def readers(self) -> int:
        """How many it serves."""
        return sum("LogServer.serve" in str(_innermost(task)) for task in asyncio.all_tasks(self.links._loop))


def _innermost(task: asyncio.Task[Any]) -> str:
    """The coroutines that a task is in, the outermost first."""
    names, at = [], task.get_coro()
    while at is not None and hasattr(at, "cr_await"):
        names.append(at.__qualname__)
        at = at.cr_await
    return " ".join(names)


@pytest.fixture(autouse=True)
def _patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """A reader does not give up because the machine is busy."""
    monkeypatch.setattr("agent.links.log_reader._ANSWER_WITHIN_S", DEADLINE_S)


@pytest.fixture
def disk() -> Iterator[Disk]:
    disk = Disk()
    yield disk
    disk.answers.set()


@pytest.fixture
def agent(disk: Disk) -> Iterator[Agent]:
    agent = Agent(A, disk)
    yield agent
    agent.links.close()


@pytest.fixture
def neighbour(agent: Agent, wait_until: Wait) -> Iterator[Agent]:
    """Who would notice if the agent's heartbeats were late: it has a link to it."""
    neighbour = Agent(B, Disk(), (Peer(A, "127.0.0.1", agent.links.port),))
    wait_until(lambda: neighbour.states == [LinkState.UP])
    yield neighbour
    neighbour.links.close()


def _reader(agent: Agent, secret: str = SHARED) -> LogReader:
    return LogReader(LogHost("a", "127.0.0.1", agent.links.port), secret)


def _play(play: Coroutine[Any, Any, None]) -> None:
    """Run a reader's part, within bounds."""

    async def bounded() -> None:
        async with asyncio.timeout(DEADLINE_S):
            await play

    asyncio.run(bounded())


async def _connect(agent: Agent) -> LinkConnection:
    """Connect as a reader, to send frames afterwards that no reader sends."""
    connection = await LinkConnection.dial("127.0.0.1", agent.links.port)
    await handshake_as_dialler(connection, Credential(SHARED.encode(), B), A, is_reader=True)
    return connection


def test_a_reader_gets_a_log_part_by_part(agent: Agent, disk: Disk) -> None:
    async def play() -> None:
        reader = _reader(agent)
        found = await reader.find(FIND)
        assert found == LogsFound(directory="/logs", logs=(LogEntry(rank=1, size_bytes=len(disk.log)),))
        got = b""
        while part := await reader.read(msgspec.structs.replace(READ, offset=len(got))):
            assert len(part) <= LOG_CHUNK_BYTES
            got += part
        assert got == disk.log
        assert not reader.is_leaving
        reader.close()

    _play(play())


def test_a_reader_learns_how_the_ranks_are_although_the_disk_hangs(agent: Agent, disk: Disk) -> None:
    disk.answers.clear()

    async def play() -> None:
        reader = _reader(agent)
        assert await reader.live_ranks() == PULSE
        reader.close()

    _play(play())


def test_a_reader_that_sends_invalid_text_is_disconnected(agent: Agent) -> None:
    async def play() -> None:
        connection = await _connect(agent)
        connection.send(FrameKind.FIND_LOGS, b'{"run":"ab","group":1,"node_id":"\x80"}')
        with pytest.raises(LinkBroken):
            await connection.receive(FrameKind.LOGS_FOUND, FrameKind.ERROR)
        connection.drop()

    _play(play())


def test_a_reader_of_another_node_learns_which_node_answers(agent: Agent) -> None:
    async def play() -> None:
        with pytest.raises(LinkBroken, match="another agent answers there: a"):
            await LogReader(LogHost("c", "127.0.0.1", agent.links.port), SHARED).find(FIND)

    _play(play())


def test_a_reader_without_the_secret_is_refused_and_reported(agent: Agent, disk: Disk) -> None:
    async def play() -> None:
        with pytest.raises(LinkBroken):
            await _reader(agent, "a guess").find(FIND)

    with capture_logs() as lines:
        _play(play())
    assert disk.asked == []
    assert [line["event"] for line in lines] == ["a caller at the agents' port does not know this job's secret"]


def test_a_reader_whose_connection_broke_calls_again(agent: Agent) -> None:
    async def play() -> None:
        reader = _reader(agent)
        await reader.find(FIND)
        assert reader._connection is not None
        reader._connection.drop()
        assert await reader.read(READ)
        reader.close()

    _play(play())


def test_what_cannot_be_read_is_declined_and_the_reader_stays(agent: Agent, disk: Disk) -> None:
    async def play() -> None:
        reader = _reader(agent)
        disk.error = PermissionError(13, "Permission denied")
        with pytest.raises(ReadDeclined, match="Permission denied"):
            await reader.read(READ)
        disk.error = None
        connection = reader._connection
        assert await reader.read(READ)
        assert reader._connection is connection
        reader.close()

    _play(play())


def test_an_unexpected_error_is_reported_and_does_not_disturb_the_agent(
    agent: Agent, disk: Disk, neighbour: Agent
) -> None:
    async def play() -> None:
        reader = _reader(agent)
        disk.error = ZeroDivisionError()
        with pytest.raises(ReadDeclined, match="internal error"):
            await reader.read(READ)
        disk.error = None
        assert await reader.read(READ)
        reader.close()

    with capture_logs() as lines:
        _play(play())
    assert [line["event"] for line in lines] == ["internal error; continuing"]
    assert neighbour.states == [LinkState.UP]


@pytest.mark.parametrize(
    "words",
    [
        b"\x00\x00\xff\xff\x09" + b"x" * 65535,
        b"\x00\x00\x00\x00\x63",
        b"\x00\x00\x00\x08\x05" + b"n" * 8,
        b"\x00\x00\x00\x02\x09{}",
        b"\x00\x00\x00\x04\x0b\xff\xff\xff\xff",
    ],
    ids=["oversize", "unknown", "ping", "empty", "garbage"],
)
def test_a_reader_with_another_protocol_is_disconnected(
    agent: Agent, disk: Disk, neighbour: Agent, words: bytes
) -> None:
    async def play() -> None:
        connection = await _connect(agent)
        connection._writer.write(words)
        with pytest.raises(LinkBroken):
            await connection.receive(FrameKind.LOGS_FOUND, FrameKind.LOG_CHUNK, FrameKind.ERROR)
        connection.drop()

    _play(play())
    assert disk.asked == []
    assert neighbour.states == [LinkState.UP]


@pytest.mark.parametrize(
    "change",
    [
        {"run": "../../etc"},
        {"run": "0a\n"},
        {"run": ""},
        {"node_id": "../b"},
        {"node_id": "a/../b"},
        {"node_id": "a\0"},
        {"group": -1},
        {"rank": -1},
        {"offset": -1},
        {"offset": 2**63},
        {"path": "/etc/passwd"},
    ],
    ids=str,
)
def test_a_log_has_numbers_and_names_and_no_path(agent: Agent, disk: Disk, change: dict[str, object]) -> None:
    async def play() -> None:
        connection = await _connect(agent)
        connection.send(FrameKind.READ_LOG, msgspec.json.encode({**msgspec.to_builtins(READ), **change}))
        with pytest.raises(LinkBroken):
            await connection.receive(FrameKind.LOG_CHUNK, FrameKind.ERROR)
        connection.drop()

    _play(play())
    assert disk.asked == []


def test_a_member_cannot_read_over_its_link(agent: Agent, disk: Disk) -> None:
    async def play() -> None:
        connection = await LinkConnection.dial("127.0.0.1", agent.links.port)
        await handshake_as_dialler(connection, Credential(SHARED.encode(), B), A)
        connection.send(FrameKind.READ_LOG, msgspec.json.encode(READ))
        with pytest.raises(LinkBroken):
            await connection.receive(FrameKind.LOG_CHUNK, FrameKind.ERROR)
        connection.drop()

    _play(play())
    assert disk.asked == []


def test_a_disk_that_hangs_stops_no_heartbeat_and_takes_few_threads(
    agent: Agent, disk: Disk, neighbour: Agent, wait_until: Wait, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(log_server, "_DISK_WITHIN_S", 5 * HEARTBEAT_S)
    disk.answers.clear()
    wait_until(lambda: _threads() == 0)  # those of other tests

    async def play() -> None:
        waiting = [await _connect(agent) for _ in range(PLACES)]
        for connection in waiting:
            connection.send(FrameKind.READ_LOG, msgspec.json.encode(READ))
        await asyncio.to_thread(wait_until, lambda: len(disk.asked) == PLACES)
        await _expect_declined(agent, "as many readers as it can serve")
        for connection in waiting:
            assert await connection.receive(FrameKind.LOG_CHUNK, FrameKind.ERROR) == (
                FrameKind.ERROR,
                b"its disk does not answer",
            )
            connection.drop()
        await asyncio.to_thread(wait_until, lambda: agent.readers == 0)
        await _expect_declined(agent, "its disk does not answer")
        assert len(disk.asked) == PLACES
        assert _threads() == PLACES
        assert neighbour.states == [LinkState.UP]
        disk.answers.set()
        await asyncio.to_thread(wait_until, lambda: _threads() == 0)
        reader = _reader(agent)
        assert await reader.read(READ)
        reader.close()

    _play(play())


async def _expect_declined(agent: Agent, why: str) -> None:
    reader = _reader(agent)
    with pytest.raises(ReadDeclined, match=why):
        await reader.read(READ)
    reader.close()


def _threads() -> int:
    """How many read for readers."""
    return sum(thread.name == "log reader" for thread in threading.enumerate())


def test_a_reader_that_asks_and_never_reads_is_not_read_for(
    agent: Agent, disk: Disk, neighbour: Agent, wait_until: Wait
) -> None:
    disk.log = b"x" * (64 << 20)

    async def play() -> None:
        connection = await _connect(agent)
        connection._writer.transport.pause_reading()  # type: ignore[attr-defined]
        for number in range(2000):
            request = msgspec.structs.replace(READ, offset=number * LOG_CHUNK_BYTES)
            words = msgspec.json.encode(request)
            connection._writer.write(b"\x00\x00\x00%c\x0b" % len(words) + words)
        before, asked = -1, 0
        while before < asked or not asked:  # until nothing more is read
            await asyncio.sleep(1.0)  # no condition shows that nothing more will be read
            before, asked = asked, len(disk.asked)
        assert asked < 1000, "the kernel's buffers hold a few MiB; beyond them nothing is read"
        reader = _reader(agent)
        assert await reader.read(READ)
        reader.close()
        connection.drop()

    _play(play())
    assert neighbour.states == [LinkState.UP]
    wait_until(lambda: agent.readers == 0)


def test_a_reader_reads_to_the_end_before_an_agent_leaves(
    agent: Agent, disk: Disk, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last output matters most; the agent waits until it has been read, and not longer than necessary."""
    monkeypatch.setattr("agent.links.log_server._CLOSE_WITHIN_S", 60.0)

    async def play() -> None:
        reader = _reader(agent)
        await reader.read(READ)
        disk.log += b"last words"
        closing = asyncio.create_task(asyncio.to_thread(agent.links.close))
        end = len(disk.log) - len(b"last words")
        while not reader.is_leaving:
            await reader.read(msgspec.structs.replace(READ, offset=end))
        assert await reader.read(msgspec.structs.replace(READ, offset=end)) == b"last words"
        assert not closing.done()
        reader.close()
        hung_up_at = time.monotonic()
        await closing
        assert time.monotonic() - hung_up_at < 30.0

    _play(play())


def test_an_agent_that_leaves_does_not_wait_for_a_reader_that_stays(agent: Agent, neighbour: Agent) -> None:
    async def play() -> None:
        reader = _reader(agent)
        await reader.read(READ)
        began_at = time.monotonic()
        await asyncio.to_thread(agent.links.close)
        assert time.monotonic() - began_at < 20.0
        with pytest.raises(LinkBroken):
            await reader.read(READ)

    _play(play())
    assert neighbour.states == [LinkState.UP], "it received a goodbye"
