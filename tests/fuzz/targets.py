"""What is fuzzed: everything that reads what others have written. Each target takes bytes, and returns or fails.

To fail is to raise anything but what the surface promises. `scripts/fuzz` looks for inputs that reach new lines, and
keeps them under `corpus/`; `test_corpus.py` gives each of them to its target again.
"""

from __future__ import annotations

import asyncio
import contextlib
import io
import os
import socket
import struct
import zlib
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import click
import uvicorn
from uvicorn.server import ServerState

from agent.cli import command_line as cli
from agent.cli.agent_config import read_node_config
from agent.core.model import Spec
from agent.core.records import Identity, Stored
from agent.core.view import ClusterView
from agent.errors import ElasticAgentError, RecordError
from agent.links.frames import BUFFER_BYTES, FrameKind, LinkBroken, LinkConnection, in_the_clear
from agent.links.handshake import Credential, LinkSession, handshake_as_listener
from agent.links.listener import Listener, _Caller
from agent.links.log_server import LogServer
from agent.links.queries import FindLogs, LiveRanks, LogsFound, ReadLog
from agent.observe.log import InternalErrors
from agent.operate.jobs import all_jobs
from agent.store import keys
from agent.store.api import KeyValue, Snapshot
from agent.store.keys import JobKeys
from agent.web.access import token_of
from agent.web.app import Site
from agent.web.hub import KnownJobState
from agent.web.metrics import Metrics
from agent.web.server import Bounded
from trainer_runtime.ps import frames as ps_frames
from trainer_runtime.ps import worker_session as ps_session
from trainer_runtime.ps.replica_receiver import receive_replica
from trainer_runtime.ps.rules import Sum
from trainer_runtime.ps.shard import Author
from trainer_runtime.ps.shard_host import ShardHost, ShardHostSettings
from trainer_runtime.ps.table import TableSpec
from trainer_runtime.ps.worker_progress import ASYNC
from trainer_runtime.shard_map import ShardPlace, ShardServer

JOB = JobKeys("job")
SECRET = "a secret of these tests"  # noqa: S105 - of nothing else
ME = Identity("node-a", "1")
LOOP = asyncio.new_event_loop()


def codec(data: bytes) -> None:
    """Lines `key=value` as the keys of a job: it is viewed whole, or the damaged record is named."""
    items = []
    for number, line in enumerate(data.split(b"\n"), 1):
        key, _, value = line.partition(b"=")
        items.append(KeyValue(JOB.prefix + key.decode("utf-8", "replace"), value, number, number, 0))
    snapshot = Snapshot.of(len(items), tuple(sorted(items, key=lambda item: item.key)))
    with contextlib.suppress(RecordError):
        keys.view_of(snapshot, JOB, is_whole=True)
    with contextlib.redirect_stderr(io.StringIO()):
        all_jobs(SimpleNamespace(read=lambda _ranges: snapshot))  # type: ignore[arg-type]


class _Nothing:
    """A node without logs."""

    def find(self, find: FindLogs) -> LogsFound:
        return LogsFound(directory=f"/logs/{find.node_id}", logs=())

    def read(self, read: ReadLog, limit_bytes: int) -> bytes:
        return b"x" * min(read.offset, limit_bytes)


class _Foreseen(InternalErrors):
    """No error is told as one that nobody foresaw."""

    def tell(self, error: Exception) -> None:
        raise error


def _live_ranks() -> LiveRanks:
    return LiveRanks(group=1, ranks=(), is_alive=True, lease_left_s=None, etcd_s=None)


class _Transport(asyncio.Transport):
    """Takes what is sent to nobody."""

    def __init__(self) -> None:
        super().__init__({"peername": ("10.0.0.9", 1), "sockname": ("10.0.0.1", 1)})
        self.sent = bytearray()
        self.is_closed = False

    def write(self, data: bytes | bytearray | memoryview) -> None:
        self.sent += data

    def close(self) -> None:
        self.is_closed = True

    def abort(self) -> None:
        self.is_closed = True

    def is_closing(self) -> bool:
        return self.is_closed

    def get_write_buffer_size(self) -> int:
        return 0

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        pass

    def pause_reading(self) -> None:
        pass

    def resume_reading(self) -> None:
        pass


@contextlib.contextmanager
def _connection(data: bytes) -> Iterator[LinkConnection]:
    """Somebody has said this, and hung up."""
    reader = asyncio.StreamReader(BUFFER_BYTES, LOOP)
    reader.feed_data(data)
    reader.feed_eof()
    protocol = asyncio.StreamReaderProtocol(reader, loop=LOOP)
    connection = LinkConnection(reader, asyncio.StreamWriter(_Transport(), protocol, reader, LOOP))
    try:
        yield connection
    finally:
        connection.drop()


def _ended(coroutine: Any) -> None:  # noqa: ANN401 - any
    with contextlib.suppress(LinkBroken):
        LOOP.run_until_complete(asyncio.wait_for(coroutine, 5.0))


def stranger(data: bytes) -> None:
    """Who does not know the secret is not let in, whatever he says."""

    async def call() -> None:
        with _connection(data) as connection:
            await handshake_as_listener(connection, Credential(SECRET.encode(), ME))
        raise AssertionError("a stranger was let in")

    _ended(call())


def reader(data: bytes) -> None:
    """One who knows it asks for logs and pulses: he is answered, or sent away."""
    log_server = LogServer(_Nothing(), _live_ranks, _Foreseen("fuzzing"))
    with _connection(data) as connection:
        _ended(log_server.serve(connection))


def peer(data: bytes) -> None:
    """A neighbour sends heartbeats and parts: they are answered and kept, or it is sent away."""

    async def attend() -> None:
        with socket.socket() as listener:
            async with asyncio.TaskGroup() as tasks:
                accepting = Listener(
                    listener,
                    tasks,
                    LogServer(_Nothing(), _live_ranks, _Foreseen("fuzzing")),
                    is_loop_alive=lambda: True,
                    wall_clock=lambda: 0.0,
                    on_part=lambda _part: None,
                    tls=in_the_clear(),
                )
                session = LinkSession(SECRET.encode(), b"nonces")
                signed = data
                if data[:1] == b"K":  # its proof is right: what does it hand over?
                    said = session.prove(b"keep", data[1:])
                    signed = len(said).to_bytes(4, "big") + bytes([FrameKind.STORE_PART]) + said
                with contextlib.suppress(LinkBroken), _connection(signed) as connection:
                    await accepting._serve(_Caller(connection), session, Identity("node-b", "1"))

    _ended(attend())


def _protocol() -> Bounded:
    """A connection to a page of its own: what one input has done is over for the next."""
    spec = Spec(run="r1", np_min=1, np_max=2, secret=SECRET, changed_by="", changed_at=0.0)
    known = KnownJobState("job", ClusterView(revision=1, is_whole=True, spec=Stored(spec, 1, 1)), ())
    pace = SimpleNamespace(new_steps=0)
    hub: Any = SimpleNamespace(
        known=known, keys=JOB, last_node=None, node=None, live_ranks=None, step_rate=pace, subscribers=99, store=None
    )
    metrics = Metrics("job")
    metrics.show(hub)
    app = Site(hub, metrics, None).app()
    config = uvicorn.Config(app, http=Bounded, ws="none", lifespan="off", log_config=None, access_log=False)
    return Bounded(config, ServerState(), {}, LOOP)


def http(data: bytes) -> None:
    """Any bytes at the page's port; TOKEN in them becomes the right one. No answer is a fault of ours."""

    async def ask() -> None:
        protocol, transport = _protocol(), _Transport()
        protocol.connection_made(transport)
        if data:  # asyncio never hands over nothing: that is an end of file
            protocol.data_received(data.replace(b"TOKEN", token_of(SECRET).encode()))
        while protocol.tasks:
            done, _ = await asyncio.wait(protocol.tasks, timeout=0.05)
            if not done:
                protocol.connection_lost(None)
        assert b"HTTP/1.1 500" not in transport.sent, bytes(transport.sent)

    changed = SimpleNamespace(old=SimpleNamespace(np="1"), new=SimpleNamespace(np="2"))
    with patch("agent.web.app.change_spec", return_value=changed):
        _ended(ask())


def command_line(data: bytes) -> None:
    """Arguments, one a line: they make a configuration, or are refused in one line."""
    arguments = data.decode("utf-8", "replace").replace("\0", "").split("\n")
    with (
        patch("agent.node_facts.resolve", return_value=("10.0.0.1",)),
        patch("socket.getaddrinfo", side_effect=socket.gaierror(-2, "not known")),
        patch.dict(os.environ),
        contextlib.suppress(click.ClickException, click.exceptions.Exit, ElasticAgentError),
        contextlib.redirect_stdout(io.StringIO()),
    ):
        command, rest = cli.find_command(arguments)
        with command.make_context(command.name, rest) as context:
            if command is cli.run:
                read_node_config(context.params, (), {})


class _Said:
    """A socket at which somebody has said this, and hung up; nobody reads what is answered."""

    def __init__(self, data: bytes) -> None:
        self._data = memoryview(data)

    def recv_into(self, place: memoryview) -> int:
        said = self._data[: len(place)]
        place[: len(said)] = said
        self._data = self._data[len(said) :]
        return len(said)

    def sendall(self, _data: bytes) -> None:
        pass

    def sendmsg(self, pieces: list[memoryview]) -> int:
        return sum(map(len, pieces))

    def setsockopt(self, *_: int) -> None:
        pass

    def shutdown(self, _how: int) -> None:
        pass

    def close(self) -> None:
        pass


_FRAME = struct.Struct("<BBBH")
"""Kind, table, step, bytes of the body."""


def framed(data: bytes) -> bytes:
    """Headers as they go over the wire, from shorter ones whose every byte can be changed."""
    said, at = b"", 0
    while at + _FRAME.size <= len(data):
        kind, table, step, length = _FRAME.unpack_from(data, at)
        at += _FRAME.size
        head = struct.pack("<HBBIIQQ", ps_frames.MAGIC, kind, 0, 0, table, step, length)
        said += head + zlib.crc32(head).to_bytes(4, "little") + data[at : at + length]
        at += length
    return said


def ps(data: bytes) -> None:
    """Input of a parameter server: from a stranger (S, R), a worker (W), or the primary whose replica it has (P)."""
    kind, rest = data[:1], data[1:]
    nowhere: Any = _Said(framed(rest) if kind in b"WP" else rest)
    connection = ps_frames.FrameConnection(nowhere)
    settings = ShardHostSettings(ShardServer(0, 1), (), b"", ASYNC, lambda *_: None, lambda *_: None)
    shard_host = ShardHost(0, settings)
    with contextlib.suppress(ps_frames.BrokenError), patch.object(ps_session, "save"):
        match kind:
            case b"W":
                shard_host.apply_place(1, ShardPlace(1, ShardServer(0, 1)))
                shard_host.shard.declare(TableSpec("known", 2, Sum()))
                ps_session.WorkerSession(
                    shard_host, connection, Author(0, 1), lambda _worker: None, rests=False
                ).serve()
            case b"P":
                shard_host.shard.declare(TableSpec("known", 2, Sum()))
                receive_replica(shard_host, connection, 1, 1)
            case b"R":
                while True:
                    connection.receive_header()
            case _:
                ps_frames.server_handshake(connection, SECRET.encode())
                raise AssertionError("a stranger was let in")


TARGETS: dict[str, Callable[[bytes], None]] = {
    "codec": codec,
    "stranger": stranger,
    "reader": reader,
    "peer": peer,
    "http": http,
    "command-line": command_line,
    "ps": ps,
}
