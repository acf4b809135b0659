"""The compared transports for requests of rows: the project's own, torch's RPC and gRPC.

With each of them, one thread of the server executes the requests on a `Table`, one at a time.
"""

from __future__ import annotations

import os
import socket
import time
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import grpc
import torch
import torch.distributed.rpc as torch_rpc

from trainer_runtime.ps.client import Client
from trainer_runtime.ps.frames import bytes_of
from trainer_runtime.ps.messages import Gradients
from trainer_runtime.ps.rules import SGD
from trainer_runtime.ps.server import ParameterServer
from trainer_runtime.ps.shard_connection import ShardCaller
from trainer_runtime.ps.shard_host import ShardHost, ShardHostSettings
from trainer_runtime.ps.table import Table, TableSpec
from trainer_runtime.ps.worker_progress import ASYNC
from trainer_runtime.shard_map import ShardPlace, ShardServer

HOST = "127.0.0.1"
_TIMEOUT_S = 60.0
_CHUNK = 1 << 16
_SECRET = b"bench"


def spec_of(dim: int) -> TableSpec:
    """Return the table that all transports serve."""
    return TableSpec("rows", dim, SGD(0.01))


def fill(table: Table, rows: int) -> None:
    """Create the rows of ids from 0 on."""
    for begin in range(0, rows, _CHUNK):
        ids = torch.arange(begin, min(begin + _CHUNK, rows))
        table.apply(ids, torch.randn(len(ids), table.spec.dim), 0)


class Peer(ABC):
    """A worker's end of a transport."""

    @abstractmethod
    def pull(self, ids: torch.Tensor) -> torch.Tensor:
        """Return the rows of ids."""

    @abstractmethod
    def push(self, ids: torch.Tensor, values: torch.Tensor) -> None:
        """Push gradients, and return when they are applied."""


class OurPeer(Peer):
    """The project's own client."""

    def __init__(self, port: int, dim: int, worker: int) -> None:
        self._client = Client([(HOST, port)], ShardCaller(worker, time.time_ns(), _SECRET), _TIMEOUT_S)
        self._client.open()
        self._table = self._client.declare(spec_of(dim))

    def pull(self, ids: torch.Tensor) -> torch.Tensor:
        return self._client.pull(self._table, ids)

    def push(self, ids: torch.Tensor, values: torch.Tensor) -> None:
        self._client.push([Gradients(self._table, ids, values)])


def serve_ours(port: int, dim: int, rows: int) -> object:
    """Return the object that must stay referenced."""
    me = ShardServer(0, 1)
    settings = ShardHostSettings(me, ((HOST, port),), _SECRET, ASYNC, lambda *_: None, lambda *_: None)
    shard_host = ShardHost(0, settings)
    shard_host.apply_place(1, ShardPlace(1, me))
    fill(shard_host.shard.tables[shard_host.shard.declare(spec_of(dim))], rows)
    return ParameterServer([shard_host], socket.create_server((HOST, port)), _SECRET, None)


_table: Table
"""The table of the process that serves torch's RPC, whose functions cannot reach it otherwise."""


def pull_here(ids: torch.Tensor) -> torch.Tensor:
    """Pull; torch's RPC runs it on the server."""
    return _table.pull(ids)


def push_here(ids: torch.Tensor, values: torch.Tensor) -> None:
    """Push; torch's RPC runs it on the server."""
    _table.apply(ids, values, int(time.time()))


class TorchPeer(Peer):
    """torch's RPC."""

    def __init__(self, port: int, _dim: int, worker: int, transports: list[str] | None) -> None:
        _join_torch(port, worker + 1, transports)

    def pull(self, ids: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = torch_rpc.rpc_sync("0", pull_here, args=(ids,))
        return found

    def push(self, ids: torch.Tensor, values: torch.Tensor) -> None:
        torch_rpc.rpc_sync("0", push_here, args=(ids, values))


def serve_torch(port: int, dim: int, rows: int, transports: list[str] | None) -> object:
    """Return the object that must stay referenced."""
    global _table  # noqa: PLW0603 - see there
    _table = Table(spec_of(dim))
    fill(_table, rows)
    _join_torch(port, 0, transports)
    return _table


def _join_torch(port: int, rank: int, transports: list[str] | None) -> None:
    os.environ["TP_SOCKET_IFNAME"] = "lo"
    options = torch_rpc.TensorPipeRpcBackendOptions(
        num_worker_threads=1,
        rpc_timeout=_TIMEOUT_S,
        init_method=f"tcp://{HOST}:{port}",
        _transports=transports,
        _channels=None if transports is None else ["basic"],
    )
    torch_rpc.init_rpc(str(rank), rank=rank, world_size=2, rpc_backend_options=options)


_OPTIONS = [("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1)]


class GrpcPeer(Peer):
    """gRPC's generic calls, whose messages are raw bytes."""

    def __init__(self, port: int, dim: int, _worker: int) -> None:
        self._dim = dim
        channel = grpc.insecure_channel(f"{HOST}:{port}", _OPTIONS)
        grpc.channel_ready_future(channel).result(_TIMEOUT_S)
        self._pull: Callable[..., bytes] = channel.unary_unary("/bench.Rows/Pull")
        self._push: Callable[..., bytes] = channel.unary_unary("/bench.Rows/Push")

    def pull(self, ids: torch.Tensor) -> torch.Tensor:
        answer = self._pull(bytes_of(ids).tobytes(), timeout=_TIMEOUT_S)
        return torch.frombuffer(answer, dtype=torch.float32).view(len(ids), self._dim)

    def push(self, ids: torch.Tensor, values: torch.Tensor) -> None:
        self._push(b"".join((bytes_of(ids), bytes_of(values))), timeout=_TIMEOUT_S)


def serve_grpc(port: int, dim: int, rows: int) -> object:
    """Return the object that must stay referenced."""
    table = Table(spec_of(dim))
    fill(table, rows)

    def pull(request: bytes, _context: grpc.ServicerContext) -> bytes:
        return bytes_of(table.pull(torch.frombuffer(request, dtype=torch.int64))).tobytes()

    def push(request: bytes, _context: grpc.ServicerContext) -> bytes:
        count = len(request) // (8 + 4 * dim)
        ids = torch.frombuffer(request, dtype=torch.int64, count=count)
        values = torch.frombuffer(request, dtype=torch.float32, offset=8 * count).view(count, dim)
        table.apply(ids, values, int(time.time()))
        return b""

    handlers = {"Pull": grpc.unary_unary_rpc_method_handler(pull), "Push": grpc.unary_unary_rpc_method_handler(push)}
    server = grpc.server(ThreadPoolExecutor(1), options=_OPTIONS)
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("bench.Rows", handlers),))
    server.add_insecure_port(f"{HOST}:{port}")
    server.start()
    return server


_TCP = ["uv"]
_FIRST: list[str] | None = None
"""torch's default: shared memory between processes of one machine."""

SERVE: dict[str, Callable[[int, int, int], object]] = {
    "ours": serve_ours,
    "torch-rpc": lambda port, dim, rows: serve_torch(port, dim, rows, _TCP),
    "torch-rpc-shm": lambda port, dim, rows: serve_torch(port, dim, rows, _FIRST),
    "grpc": serve_grpc,
}
PEERS: dict[str, Callable[[int, int, int], Peer]] = {
    "ours": OurPeer,
    "torch-rpc": lambda port, dim, worker: TorchPeer(port, dim, worker, _TCP),
    "torch-rpc-shm": lambda port, dim, worker: TorchPeer(port, dim, worker, _FIRST),
    "grpc": GrpcPeer,
}
# gRPC's messages are read-only, and torch warns about each of them.
warnings.filterwarnings("ignore", message="The given buffer is not writable")
