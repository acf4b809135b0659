"""The worker's client: a connection to each shard, and requests that go to all shards at once.

A broken connection is opened again, and unanswered requests are sent again: a pull changes nothing, and a push counts
once however often it is sent. So a server that is restarted costs a wait, on its shards only. A request that breaks
the connection again and again soon after it was opened is given up.

An answer may take long, as a common step waits for other workers. While the client waits, it probes the server at
intervals on another connection: the server proves by a handshake that it runs, which a stopped process or a lost
machine cannot do.
"""

from __future__ import annotations

import json
import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from trainer_runtime.ps.frames import (
    ALL_DONE,
    ALL_HELD,
    LEFT_OUT,
    PART,
    BrokenError,
    Header,
    MessageKind,
    RefusedError,
    bytes_of,
)
from trainer_runtime.ps.hashing import SLOTS, slots_of
from trainer_runtime.ps.messages import Gradients, Push
from trainer_runtime.ps.shard_connection import Endpoint, Request, ShardCaller, ShardConnection, wait_ready
from trainer_runtime.ps.table import TableSpec
from trainer_runtime.shard_map import ShardMap

log = logging.getLogger(__name__)

_REPORT_EVERY_S = 3.0
_RETRY_S = 0.05
_MAX_BREAKS = 8
"""Maximum number of consecutive breaks, each soon after the connection was opened, until a request is given up."""
_MAX_RETRY_S = 1.0

_ROW_OPTIONS: dict[str, Any] = {"device": "cpu", "dtype": torch.float32}
"""Independent of the defaults that the script sets for its model."""


class NotReadyError(Exception):
    """A server did not answer in time."""


class Client:
    """One worker's connections to all shards. For one thread.

    Args:
        endpoints: host and port of each shard's server, in the order of the shards.
        caller: the identity of this worker.
        timeout_s: how long the client waits for a server that is absent or stopped. It waits without a limit for a
            server that runs, which may be waiting for other workers.
    """

    def __init__(self, endpoints: Sequence[Endpoint], caller: ShardCaller, timeout_s: float) -> None:
        self._connections = [
            ShardConnection(shard, endpoint, caller, timeout_s) for shard, endpoint in enumerate(endpoints)
        ]
        self._endpoints = tuple(endpoints)
        self._timeout_s = timeout_s
        self._owner = torch.arange(SLOTS, device="cpu") * len(endpoints) // SLOTS
        self._specs: list[TableSpec] = []
        self._failure: Exception | None = None
        self._has_left = False
        self.step = 0
        """Number of the last push."""
        self.local_values: Callable[[], Sequence[Gradients]] = lambda: ()
        """Returns the model's parameters of this worker, with which a server that has lost its rows is initialized."""
        self.left_out = 0
        """Number of steps that were late on at least one shard, whose gradients do not count there."""

    def apply_map(self, shard_map: ShardMap) -> None:
        """Use the servers of a new map. Callable from any thread."""
        for connection, place in zip(self._connections, shard_map.places, strict=True):
            connection.move_to(self._endpoints[place.primary.server])

    def fail(self, error: Exception) -> None:
        """Let requests that wait for a shard raise this error, with which a map could not be applied. Thread-safe."""
        self._failure = error

    def open(self) -> None:
        """Wait for all servers. Raises `NotReadyError`."""
        self._wait_open(self._connections)
        self.step = max(self.step, *(connection.start_step for connection in self._connections))

    def declare(self, spec: TableSpec) -> int:
        """Declare a table and return its number. All workers declare the same tables in the same order.

        Raises:
            RefusedError: another worker has declared the table differently.
            NotReadyError: a server did not answer in time.
        """
        self._check_open()
        for number, known in enumerate(self._specs):
            if known.name == spec.name and known.is_same(spec):
                return number  # tables may be shared
        self._specs.append(spec)
        for connection in self._connections:
            try:
                connection.declare(spec)
            except BrokenError:
                connection.close()
                self._wait_open([connection])
            except BaseException:
                connection.close()
                raise
        return len(self._specs) - 1

    def pull(self, table: int, ids: torch.Tensor) -> torch.Tensor:
        """Return the rows of ids, (ids, dim). Raises `NotReadyError`."""
        dim = self._specs[table].dim
        parts = self._split(ids)
        rows = [torch.empty(len(part), dim, **_ROW_OPTIONS) for _, part in parts]
        header = Header(MessageKind.PULL, table=table)
        self._request_all(
            [
                Request(header, (bytes_of(part),), bytes_of(out)) if len(part) else None
                for (_, part), out in zip(parts, rows, strict=True)
            ]
        )
        if len(parts) == 1:
            return rows[0]
        together = torch.empty(len(ids), dim, **_ROW_OPTIONS)
        for (places, _), out in zip(parts, rows, strict=True):
            together[places] = out
        return together

    def push(self, gradients: Sequence[Gradients], weight: float = 1.0) -> None:
        """Send the gradients of a step; the ids of each table must be sorted. Returns when this worker may continue.

        Raises:
            NotReadyError: a server did not answer in time.
            ValueError: the weight is invalid, or the push is too large.
        """
        weight = float(weight)
        if not 0 <= weight < math.inf:
            raise ValueError(f"the weight of a step must be a number from 0 on, not {weight}")
        self.step += 1
        parts = self._split_by_shard(gradients)
        requests = []
        for shard in range(len(self._connections)):
            push = Push(self.step, weight, tuple(part[shard] for part in parts))
            requests.append(Request(Header(MessageKind.PUSH, table=len(parts), sequence=self.step), push.body()))
        done = self._request_all(requests)
        if any(header.table == LEFT_OUT for header in done if header is not None):
            self._count_left_out(self.step)
        self.step = max(self.step, *(header.sequence for header in done if header is not None))

    def _count_left_out(self, step: int) -> None:
        self.left_out += 1
        if self.left_out == 1:
            log.warning("step %d came too late and does not count: the other workers continued without this one", step)

    def initialize(self, values: Sequence[Gradients]) -> None:
        """Set the initial values of rows that do not exist yet. Raises `NotReadyError`."""
        self._request_all(self._initialize_requests(values))

    def _initialize_requests(self, values: Sequence[Gradients]) -> list[Request]:
        parts = self._split_by_shard(values)
        header = Header(MessageKind.INITIALIZE, table=len(parts))
        pushes = [Push(0, 0.0, tuple(part[shard] for part in parts)) for shard in range(len(self._connections))]
        return [Request(header, push.body()) for push in pushes]

    def rest(self) -> None:
        """Let no worker wait for the steps of this one until `join`. Raises `NotReadyError`."""
        self._set_resting(rests=True)
        self._request_all([Request(Header(MessageKind.REST))] * len(self._connections))

    def join(self) -> None:
        """Make steps again, from where the other workers are. Raises `NotReadyError`."""
        self._set_resting(rests=False)
        answers = self._request_all([Request(Header(MessageKind.JOIN))] * len(self._connections))
        self.step = max(self.step, *(header.sequence for header in answers if header is not None))

    def _set_resting(self, *, rests: bool) -> None:
        for connection in self._connections:
            connection.is_resting = rests

    def lease(self, name: str, parts: int, done: int | None) -> int | None:
        """Return the next part of a pass through the data, or None when all parts are done. Raises `NotReadyError`.

        `done` is the part that this worker has finished. It rests and waits while others hold all remaining parts.
        """
        answer = self._request_lease(name, parts, done, waits=False)
        if answer == ALL_HELD:
            self.rest()
            while answer == ALL_HELD:
                answer = self._request_lease(name, parts, None, waits=True)
            self.join()
        return None if answer == ALL_DONE else answer - PART

    def _request_lease(self, name: str, parts: int, done: int | None, *, waits: bool) -> int:
        payload = json.dumps({"pass": name, "parts": parts, "done": done, "waits": waits}).encode()
        nothing = [None] * (len(self._connections) - 1)
        answer = self._request_all([Request(Header(MessageKind.LEASE), (payload,)), *nothing])[0]
        return answer.sequence if answer is not None else ALL_DONE

    def save(self, directory: str) -> None:
        """Let each server write its rows into a directory. Raises `RefusedError`, `NotReadyError`."""
        self._command({"save": directory, "shards": len(self._connections)})

    def shrink(self, unseen_s: int) -> int:
        """Drop the rows that received no push for so many seconds, and return their number. Raises `NotReadyError`."""
        before_s = int(time.time()) - unseen_s
        return sum(header.sequence for header in self._command({"shrink_before_s": before_s}) if header is not None)

    def _command(self, command: dict[str, Any]) -> list[Header | None]:
        return self._request_all(
            [Request(Header(MessageKind.COMMAND), (json.dumps(command).encode(),))] * len(self._connections)
        )

    def leave(self) -> None:
        """Report to the servers that this worker has finished, and close the connections. Raises `NotReadyError`."""
        self._set_resting(rests=True)  # if a connection breaks now, no worker needs to wait for this one
        self._request_all([Request(Header(MessageKind.LEAVE))] * len(self._connections))
        self._has_left = True
        if self.left_out > 1:
            log.warning("%d steps of this worker came too late and did not count", self.left_out)
        self.close()

    def close(self) -> None:
        """Close the connections."""
        for connection in self._connections:
            connection.close()

    def _split_by_shard(self, gradients: Sequence[Gradients]) -> list[list[Gradients]]:
        return [
            [
                replace(
                    each, ids=ids, values=(each.values if len(self._connections) == 1 else each.values[places]).float()
                )
                for places, ids in self._split(each.ids)
            ]
            for each in gradients
        ]

    def _split(self, ids: torch.Tensor) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Return, for each shard, the positions of its ids and the ids."""
        if len(self._connections) == 1:
            return [(torch.empty(0), ids)]
        owner = self._owner[slots_of(ids)]
        places = [(owner == shard).nonzero().squeeze(1) for shard in range(len(self._connections))]
        return [(place, ids[place]) for place in places]

    def _request_all(self, requests: Sequence[Request | None]) -> list[Header | None]:
        """Send one request to each shard and return the answers, in order; None stands for no request and no answer.

        Raises:
            RefusedError: a server has refused; all servers have answered.
        """
        self._check_open()
        waiting = {
            connection: request
            for connection, request in zip(self._connections, requests, strict=True)
            if request is not None
        }
        for request in waiting.values():
            request.check()
        answers: dict[int, Header] = {}
        try:
            refused = self._exchange(waiting, answers)
        except BaseException:
            for connection in self._connections:  # a late answer must not be taken for that to another request
                connection.close()
            raise
        if refused is not None:
            raise refused
        return [answers.get(shard) for shard in range(len(self._connections))]

    def _exchange(self, waiting: dict[ShardConnection, Request], answers: dict[int, Header]) -> RefusedError | None:
        """Wait for all answers; return the first refusal. Raises `NotReadyError`."""
        refused, breaks = None, 0
        give_up_at = time.monotonic() + self._timeout_s
        self._send(waiting, list(waiting))
        while waiting:
            broken = []
            for connection in wait_ready(list(waiting)):
                try:
                    answers[connection.shard] = connection.receive(waiting[connection])
                    del waiting[connection]
                except BrokenError as why:
                    connection.mark_broken(str(why))
                    broken.append(connection)
                except RefusedError as why:
                    refused = refused or why
                    del waiting[connection]
            if broken:
                if all(connection.broke_early for connection in broken):
                    breaks += 1
                    self._check_retry(broken, waiting, breaks, give_up_at)
                    time.sleep(min(_MAX_RETRY_S, _RETRY_S * 2**breaks))
                else:
                    breaks, give_up_at = 0, time.monotonic() + self._timeout_s
                # Do not wait for the other answers first: these may wait for workers that wait for this shard's push.
                self._wait_open(broken, give_up_at)
                self._send(waiting, broken)
        return refused

    def _check_retry(
        self,
        broken: Sequence[ShardConnection],
        requests: Mapping[ShardConnection, Request],
        breaks: int,
        give_up_at: float,
    ) -> None:
        """Raise `NotReadyError` if the request must not be sent again."""
        if breaks >= _MAX_BREAKS or time.monotonic() >= give_up_at:
            kinds = ", ".join(
                f"{requests[connection].header.kind.name} at {connection.address}: {connection.break_reason}"
                for connection in broken
            )
            raise NotReadyError(f"servers closed the connection after a request {breaks} times in a row: {kinds}")

    def _check_open(self) -> None:
        if self._has_left:
            raise RuntimeError("this worker has left the servers (stop_worker) and can send no more requests")

    def _reopen(self, connection: ShardConnection) -> bool:
        """Open a connection and return whether it is open. Initializes a server without rows with the local values."""
        if connection.is_open:
            return True
        values = self.local_values() if connection.try_open() else ()
        try:
            if values:
                request = self._initialize_requests(values)[connection.shard]
                connection.send(request)
                connection.receive(request)
        except BrokenError:
            connection.close()
        return connection.is_open

    def _send(self, requests: Mapping[ShardConnection, Request], connections: Sequence[ShardConnection]) -> None:
        for connection in connections:
            try:
                connection.send(requests[connection])
            except BrokenError as why:
                connection.mark_broken(str(why))

    def _wait_open(self, connections: Sequence[ShardConnection], give_up_at: float | None = None) -> None:
        now = time.monotonic()
        give_up_at = now + self._timeout_s if give_up_at is None else give_up_at
        report_at = now + (0 if self.step == 0 else _RETRY_S)
        while closed := [connection for connection in connections if not self._reopen(connection)]:
            if self._failure is not None:
                raise self._failure
            now = time.monotonic()
            names = ", ".join(
                f"{connection.address}{connection.tls_error and f' ({connection.tls_error})'}" for connection in closed
            )
            if now >= give_up_at:
                raise NotReadyError(f"servers did not answer within {self._timeout_s:g} s: {names}")
            if now >= report_at:
                report_at = now + _REPORT_EVERY_S
                log.warning("ps not ready: [%s]", names)
            time.sleep(_RETRY_S)
