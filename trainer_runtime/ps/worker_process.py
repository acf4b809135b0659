"""What a script calls on a worker, from `init_worker` to `stop_worker`."""

from __future__ import annotations

import operator
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from torch import nn
from torch.optim import Optimizer

from trainer_runtime import contract
from trainer_runtime.ps import control_messages
from trainer_runtime.ps.client import Client
from trainer_runtime.ps.geo import GeoClient
from trainer_runtime.ps.leases import MAX_PARTS
from trainer_runtime.ps.optimizer import DistributedOptimizer
from trainer_runtime.ps.process import current, require
from trainer_runtime.ps.roles import client_context
from trainer_runtime.ps.rules import Rule
from trainer_runtime.ps.shard import RUN_ENDS
from trainer_runtime.ps.shard_connection import ShardCaller

_TIMEOUT_S = 600.0


def init_worker(timeout_s: float = _TIMEOUT_S) -> None:
    """Wait for all servers, and log every three seconds which of them are missing.

    Raises:
        NotReadyError: a server did not answer in time.
        RuntimeError: this process is a server.
    """
    state = require("worker")
    role = state.role
    caller = ShardCaller(role.index, time.time_ns(), role.secret, client_context(role))
    client = state.client = Client(role.servers, caller, timeout_s)
    channel = control_messages.descriptor()
    if channel is not None:
        control_messages.ControlMessages(channel, client.apply_map, client.fail).start()
    client.open()
    state.rows = GeoClient(client, state.mode.every, role.workers) if state.mode.every else client


def distributed_optimizer(rule: Optimizer | Rule, model: nn.Module, *, name: str = "dense") -> DistributedOptimizer:
    """Put the parameters and embeddings of a model on the servers. See `DistributedOptimizer`."""
    client = _client()
    return DistributedOptimizer(rule, model, current().rows or client, name)


def data_parts(parts: int, name: str | None = None) -> Iterator[int]:
    """Yield the numbers of the parts of the data that this worker trains, until all parts are done.

    Each part, from 0 to `parts` - 1, is given to one worker, and to another if that one is lost while it works on it. A
    part is done when the next one is requested. A worker that is started again skips passes that are over. Another run
    of the job by the agent starts with the first pass again.

    Args:
        parts: number of parts of the data; the same on all workers.
        name: name of this pass through the data; each pass needs another. By default calls are counted ("data.1" and so
            on), so all workers must make the same passes in the same order.

    Raises:
        NotReadyError: a server did not answer in time.
        RefusedError: a pass of this name has another number of parts.
        TypeError, ValueError: `parts` is no whole number from 0 to 2**24, or `name` is no string.
    """
    parts = _check_integer("parts", parts, MAX_PARTS)
    if not isinstance(name, str | None):
        raise TypeError(f"the name of a pass must be a string, not {name!r}")
    state, client = current(), _client()
    if name is None:
        state.passes += 1
        name = f"data.{state.passes}"
    return _lease_parts(client, f"{os.environ.get(contract.RUN_ID, '')}{RUN_ENDS}{name}", parts)


def _lease_parts(client: Client, name: str, parts: int) -> Iterator[int]:
    done = None
    while (part := client.lease(name, parts, done)) is not None:
        yield part
        done = part


@contextmanager
def resting() -> Iterator[None]:
    """Let the other workers make steps without this one, while it evaluates, saves or waits for something.

    Where workers wait for each other (`SYNC`, `bounded`), they would otherwise wait for this one too. Make no steps
    within the block; the next step continues where the others are.

    Raises:
        NotReadyError: a server did not answer in time.
    """
    client = _client()
    client.rest()
    try:
        yield
    finally:
        client.join()


def save(directory: str | Path) -> None:
    """Let all servers write their rows into a directory that they share. Call it on one worker.

    Raises:
        RefusedError: a server cannot write there; the message has the reason.
        NotReadyError: a server did not answer in time.
    """
    _exchange()
    Path(directory).mkdir(parents=True, exist_ok=True)
    _client().save(str(Path(directory).absolute()))


def shrink(unseen_s: int) -> int:
    """Drop the rows that received no push for so many seconds, and return their number.

    Raises:
        NotReadyError: a server did not answer in time.
        TypeError, ValueError: `unseen_s` is no whole number from 0 on.
    """
    unseen_s = _check_integer("unseen_s", unseen_s, 1 << 62)
    return _client().shrink(unseen_s)


def stop_worker() -> None:
    """Report to the servers that this worker has finished. Raises `NotReadyError`."""
    _exchange()
    _client().leave()


def _exchange() -> None:
    rows = current().rows
    if isinstance(rows, GeoClient):
        rows.exchange()


def _check_integer(name: str, value: int, most: int) -> int:
    try:
        number = operator.index(value)
    except TypeError:
        raise TypeError(f"{name} must be a whole number, not {value!r}") from None
    if not 0 <= number <= most:
        raise ValueError(f"{name} must be from 0 to {most}, not {value!r}")
    return number


def _client() -> Client:
    client = require("worker").client
    if client is None:
        raise RuntimeError("call ps.init_worker() first")
    return client
