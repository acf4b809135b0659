"""A worker's side: one line to each shard, and requests that go to all of them at once.

A line that breaks is opened again, and what was not answered is asked again: pulls change nothing, and a push counts
once however often it is sent. So a server that comes back costs a wait, on its shard only.
"""

from __future__ import annotations

import json
import logging
import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from trainer_runtime.ps.hashing import SLOTS, slots_of
from trainer_runtime.ps.messages import Gradients, Push
from trainer_runtime.ps.table import TableSpec
from trainer_runtime.ps.wire import (
    ALL_DONE,
    ALL_HELD,
    PART,
    BrokenError,
    Connection,
    Header,
    Kind,
    RefusedError,
    bytes_of,
    introduce,
)
from trainer_runtime.shard_map import ShardMap

log = logging.getLogger(__name__)

_TELL_EVERY_S = 3.0
_TRY_EVERY_S = 0.05
_CONNECT_S = 2.0

Endpoint = tuple[str, int]


class NotReadyError(Exception):
    """Servers could not be reached in time."""


@dataclass(frozen=True)
class Caller:
    """The process that asks, as the servers know it."""

    worker: int
    incarnation: int
    secret: bytes


@dataclass
class _Request:
    """What one shard is asked."""

    header: Header
    body: Sequence[memoryview | bytes] = ()
    into: memoryview | None = None
    """Where the answer belongs; None: it has none."""


class _Line:
    """The connection to one shard, which may be lost and opened again."""

    def __init__(self, shard: int, endpoint: Endpoint, caller: Caller) -> None:
        self.shard = shard
        self.endpoint = endpoint
        self._caller = caller
        self._connection: Connection | None = None
        self._tables: list[bytes] = []
        self.begin = 0
        """The step after which this worker begins there."""

    def try_open(self) -> bool:
        """Whether it is open now."""
        if self._connection is not None:
            return True
        try:
            connection = Connection(socket.create_connection(self.endpoint, timeout=_CONNECT_S))
        except OSError:
            return False
        try:
            hello = {"worker": self._caller.worker, "incarnation": self._caller.incarnation, "shard": self.shard}
            introduce(connection, self._caller.secret, hello)
            connection.sock.settimeout(None)
            self.begin = connection.receive_header().sequence
            for number, words in enumerate(self._tables):
                self._declare(connection, number, words)
        except (BrokenError, OSError) as broken:
            log.debug("shard %d at %s:%d: %s", self.shard, *self.endpoint, broken)
            connection.close()
            return False
        self._connection = connection
        return True

    def declare(self, spec: TableSpec) -> None:
        """Let it have this table, now and whenever the line is opened. Raises `BrokenError`, `RefusedError`."""
        words = json.dumps(spec.to_json()).encode()
        self._tables.append(words)
        if self._connection is not None:
            self._declare(self._connection, len(self._tables) - 1, words)

    def _declare(self, connection: Connection, number: int, words: bytes) -> None:
        connection.send(Header(Kind.DECLARE, self.shard, length=len(words)), words)
        answered = _answer(connection, None).sequence
        if answered != number:
            raise RefusedError(
                f"shard {self.shard} knows this worker's table {number} as its {answered}: scripts differ"
            )

    def send(self, request: _Request) -> None:
        """Raises `BrokenError`."""
        if self._connection is None:
            raise BrokenError("not open")
        length = sum(len(part) for part in request.body)
        header = replace(request.header, shard=self.shard, length=length)
        self._connection.send(header, *request.body)

    def receive(self, request: _Request) -> Header:
        """Raises `BrokenError`, `RefusedError`."""
        if self._connection is None:
            raise BrokenError("not open")
        return _answer(self._connection, request.into)

    def close(self) -> None:
        """Until it is opened again."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def move(self, endpoint: Endpoint) -> None:
        """The shard is there from now on. From any thread: who waits for an answer hears that none comes."""
        if endpoint != self.endpoint:
            self.endpoint = endpoint
            connection = self._connection
            if connection is not None:
                connection.hang_up()


def _answer(connection: Connection, into: memoryview | None) -> Header:
    header = connection.receive_header()
    if header.kind is Kind.REFUSED:
        raise RefusedError(connection.receive_words(header.length).decode("utf-8", "replace"))
    wanted = 0 if into is None else len(into)
    if header.kind is not Kind.DONE or header.length != wanted:
        raise BrokenError(f"{header.length} bytes were answered where {wanted} were asked for")
    if into is not None:
        connection.fill(into)
    return header


class Client:
    """All shards, as one worker reaches them. For one thread.

    Args:
        endpoints: host and port of each shard's server, in the order of the shards.
        caller: who asks.
        timeout_s: how long one that does not answer is waited for.
    """

    def __init__(self, endpoints: Sequence[Endpoint], caller: Caller, timeout_s: float) -> None:
        self._lines = [_Line(shard, endpoint, caller) for shard, endpoint in enumerate(endpoints)]
        self._endpoints = tuple(endpoints)
        self._timeout_s = timeout_s
        self._owner = torch.arange(SLOTS) * len(endpoints) // SLOTS
        self._specs: list[TableSpec] = []
        self._failure: Exception | None = None
        self.step = 0
        """The last that was pushed."""

    def take_map(self, told: ShardMap) -> None:
        """Ask each shard where it is from now on. From any thread."""
        for line, place in zip(self._lines, told.places, strict=True):
            line.move(self._endpoints[place.primary.server])

    def fail(self, error: Exception) -> None:
        """A map could not be followed: whoever waits for a shard hears that. From any thread."""
        self._failure = error

    def open(self) -> None:
        """Wait for all servers. Raises `NotReadyError`."""
        self._wait_open(self._lines)
        self.step = max(self.step, *(line.begin for line in self._lines))

    def declare(self, spec: TableSpec) -> int:
        """The number of a table; all workers declare the same ones in the same order.

        Raises:
            RefusedError: another worker's is another.
            NotReadyError: a server was away for too long.
        """
        self._specs.append(spec)
        for line in self._lines:
            try:
                line.declare(spec)
            except BrokenError:
                line.close()
                self._wait_open([line])
        return len(self._specs) - 1

    def pull(self, table: int, ids: torch.Tensor) -> torch.Tensor:
        """The rows of ids, (ids, dim). Raises `NotReadyError`."""
        dim = self._specs[table].dim
        parts = self._split(ids)
        rows = [torch.empty(len(part), dim) for _, part in parts]
        header = Header(Kind.PULL, table=table)
        self._ask(
            [
                _Request(header, (bytes_of(part),), bytes_of(out)) if len(part) else None
                for (_, part), out in zip(parts, rows, strict=True)
            ]
        )
        if len(parts) == 1:
            return rows[0]
        together = torch.empty(len(ids), dim)
        for (places, _), out in zip(parts, rows, strict=True):
            together[places] = out
        return together

    def push(self, gradients: Sequence[Gradients], weight: float = 1.0) -> None:
        """Send what a step has found: of each table ids that grow. Returns when this worker may go on.

        Raises:
            NotReadyError: a server was away for too long.
        """
        self.step += 1
        parts = self._parts(gradients)
        requests = []
        for shard in range(len(self._lines)):
            push = Push(self.step, weight, tuple(part[shard] for part in parts))
            requests.append(_Request(Header(Kind.PUSH, table=len(parts), sequence=self.step), push.body()))
        done = self._ask(requests)
        self.step = max(self.step, *(header.sequence for header in done if header is not None))

    def begin(self, values: Sequence[Gradients]) -> None:
        """Let rows that are not there yet begin with these values. Raises `NotReadyError`."""
        parts = self._parts(values)
        self._ask(
            [
                _Request(
                    Header(Kind.BEGIN, table=len(parts)), Push(0, 0.0, tuple(part[shard] for part in parts)).body()
                )
                for shard in range(len(self._lines))
            ]
        )

    def rest(self) -> None:
        """Let nobody wait for this worker's steps for a while. Raises `NotReadyError`."""
        self._ask([_Request(Header(Kind.REST))] * len(self._lines))

    def join(self) -> None:
        """Make steps again, from where the others are. Raises `NotReadyError`."""
        answers = self._ask([_Request(Header(Kind.JOIN))] * len(self._lines))
        self.step = max(self.step, *(header.sequence for header in answers if header is not None))

    def lease(self, name: str, parts: int, done: int | None) -> int | None:
        """The next part of a pass through the data, after one that is done; None: all is done. Raises `NotReadyError`.

        Who must wait for what others hold rests.
        """
        answer = self._lease(name, parts, done, waits=False)
        if answer == ALL_HELD:
            self.rest()
            while answer == ALL_HELD:
                answer = self._lease(name, parts, None, waits=True)
            self.join()
        return None if answer == ALL_DONE else answer - PART

    def _lease(self, name: str, parts: int, done: int | None, *, waits: bool) -> int:
        words = json.dumps({"pass": name, "parts": parts, "done": done, "waits": waits}).encode()
        nothing = [None] * (len(self._lines) - 1)
        answer = self._ask([_Request(Header(Kind.LEASE), (words,)), *nothing])[0]
        return answer.sequence if answer is not None else ALL_DONE

    def save(self, directory: str) -> None:
        """Let each server write its rows there. Raises `RefusedError`, `NotReadyError`."""
        self._order({"save": directory, "shards": len(self._lines)})

    def shrink(self, unseen_s: int) -> int:
        """Drop the rows that nobody has pushed to for so many seconds; return how many. Raises `NotReadyError`."""
        before_s = int(time.time()) - unseen_s
        return sum(header.sequence for header in self._order({"shrink_before_s": before_s}) if header is not None)

    def _order(self, order: dict[str, Any]) -> list[Header | None]:
        return self._ask([_Request(Header(Kind.ORDER), (json.dumps(order).encode(),))] * len(self._lines))

    def leave(self) -> None:
        """Tell the servers that this worker has done its part, and hang up. Raises `NotReadyError`."""
        self._ask([_Request(Header(Kind.LEAVE))] * len(self._lines))
        self.close()

    def close(self) -> None:
        """Hang up."""
        for line in self._lines:
            line.close()

    def _parts(self, gradients: Sequence[Gradients]) -> list[list[Gradients]]:
        return [
            [
                replace(each, ids=ids, values=each.values if len(self._lines) == 1 else each.values[places])
                for places, ids in self._split(each.ids)
            ]
            for each in gradients
        ]

    def _split(self, ids: torch.Tensor) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """For each shard which of the ids are its, by their places and themselves."""
        if len(self._lines) == 1:
            return [(torch.empty(0), ids)]
        owner = self._owner[slots_of(ids)]
        places = [(owner == shard).nonzero().squeeze(1) for shard in range(len(self._lines))]
        return [(place, ids[place]) for place in places]

    def _ask(self, requests: Sequence[_Request | None]) -> list[Header | None]:
        """Ask all at once; whom nothing is asked is None."""
        asked = [(line, request) for line, request in zip(self._lines, requests, strict=True) if request is not None]
        broken = []
        for line, request in asked:
            try:
                line.send(request)
            except BrokenError:
                line.close()
        answers: dict[int, Header] = {}
        for line, request in asked:
            try:
                answers[line.shard] = line.receive(request)
            except BrokenError:
                line.close()
                broken.append((line, request))
        give_up_at = time.monotonic() + self._timeout_s
        while broken:
            self._wait_open([line for line, _ in broken], give_up_at)
            still = []
            for line, request in broken:
                try:
                    line.send(request)
                    answers[line.shard] = line.receive(request)
                except BrokenError:
                    line.close()
                    still.append((line, request))
            broken = still
        return [answers.get(shard) for shard in range(len(self._lines))]

    def _wait_open(self, lines: Sequence[_Line], give_up_at: float | None = None) -> None:
        now = time.monotonic()
        give_up_at = now + self._timeout_s if give_up_at is None else give_up_at
        tell_at = now + (0 if self.step == 0 else _TRY_EVERY_S)
        while closed := [line for line in lines if not line.try_open()]:
            if self._failure is not None:
                raise self._failure
            now = time.monotonic()
            names = ", ".join(f"{line.endpoint[0]}:{line.endpoint[1]}" for line in closed)
            if now >= give_up_at:
                raise NotReadyError(f"servers did not answer within {self._timeout_s:g} s: {names}")
            if now >= tell_at:
                tell_at = now + _TELL_EVERY_S
                log.warning("ps not ready: [%s]", names)
            time.sleep(_TRY_EVERY_S)
