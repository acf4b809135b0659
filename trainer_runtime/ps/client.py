"""A worker's side: one line to each shard, and requests that go to all of them at once.

A line that breaks is opened again, and what was not answered is asked again: pulls change nothing, and a push counts
once however often it is sent. So a server that comes back costs a wait, on its shard only. What breaks a line again and
again as soon as it is asked is asked no more.

An answer may take long, as a step that is common waits for other workers. Who waits for one asks on a connection of its
own every so often whether the server is alive: it proves that by a handshake, which a process that is stopped, or a
machine that is gone, does not.
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
from trainer_runtime.ps.shard_connection import Endpoint, Request, ShardCaller, ShardConnection, ready
from trainer_runtime.ps.table import TableSpec
from trainer_runtime.shard_map import ShardMap

log = logging.getLogger(__name__)

_TELL_EVERY_S = 3.0
_TRY_EVERY_S = 0.05
_MOST_BREAKS = 8
"""In a row, each soon after the line was opened, of what servers will not hear."""
_LONGEST_PAUSE_S = 1.0

_HERE: dict[str, Any] = {"device": "cpu", "dtype": torch.float32}
"""Whatever the script has made the default for its model."""


class NotReadyError(Exception):
    """Servers could not be reached in time."""


class Client:
    """All shards, as one worker reaches them. For one thread.

    Args:
        endpoints: host and port of each shard's server, in the order of the shards.
        caller: who asks.
        timeout_s: how long a server is waited for that is not there, or is there and does not run. One that runs is
            waited for as long as it takes: it may wait for other workers.
    """

    def __init__(self, endpoints: Sequence[Endpoint], caller: ShardCaller, timeout_s: float) -> None:
        self._lines = [ShardConnection(shard, endpoint, caller, timeout_s) for shard, endpoint in enumerate(endpoints)]
        self._endpoints = tuple(endpoints)
        self._timeout_s = timeout_s
        self._owner = torch.arange(SLOTS, device="cpu") * len(endpoints) // SLOTS
        self._specs: list[TableSpec] = []
        self._failure: Exception | None = None
        self._has_left = False
        self.step = 0
        """The last that was pushed."""
        self.present: Callable[[], Sequence[Gradients]] = lambda: ()
        """The model's own parameters as they are here: what a server begins with that has lost all."""
        self.left_out = 0
        """Steps that came when the others' were over, on some shard at least: what they had found there is lost."""

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
        self._check_here()
        for number, known in enumerate(self._specs):
            if known.name == spec.name and known.is_same(spec):
                return number  # tables may be shared
        self._specs.append(spec)
        for line in self._lines:
            try:
                line.declare(spec)
            except BrokenError:
                line.close()
                self._wait_open([line])
            except BaseException:
                line.close()
                raise
        return len(self._specs) - 1

    def pull(self, table: int, ids: torch.Tensor) -> torch.Tensor:
        """The rows of ids, (ids, dim). Raises `NotReadyError`."""
        dim = self._specs[table].dim
        parts = self._split(ids)
        rows = [torch.empty(len(part), dim, **_HERE) for _, part in parts]
        header = Header(MessageKind.PULL, table=table)
        self._ask(
            [
                Request(header, (bytes_of(part),), bytes_of(out)) if len(part) else None
                for (_, part), out in zip(parts, rows, strict=True)
            ]
        )
        if len(parts) == 1:
            return rows[0]
        together = torch.empty(len(ids), dim, **_HERE)
        for (places, _), out in zip(parts, rows, strict=True):
            together[places] = out
        return together

    def push(self, gradients: Sequence[Gradients], weight: float = 1.0) -> None:
        """Send what a step has found: of each table ids that grow. Returns when this worker may go on.

        Raises:
            NotReadyError: a server was away for too long.
            ValueError: the weight is none, or it is too much at once.
        """
        weight = float(weight)
        if not 0 <= weight < math.inf:
            raise ValueError(f"the weight of a step must be a number from 0 on, not {weight}")
        self.step += 1
        parts = self._parts(gradients)
        requests = []
        for shard in range(len(self._lines)):
            push = Push(self.step, weight, tuple(part[shard] for part in parts))
            requests.append(Request(Header(MessageKind.PUSH, table=len(parts), sequence=self.step), push.body()))
        done = self._ask(requests)
        if any(header.table == LEFT_OUT for header in done if header is not None):
            self._note_left_out(self.step)
        self.step = max(self.step, *(header.sequence for header in done if header is not None))

    def _note_left_out(self, step: int) -> None:
        self.left_out += 1
        if self.left_out == 1:
            log.warning("step %d came too late: the others had gone on without this worker, it does not count", step)

    def begin(self, values: Sequence[Gradients]) -> None:
        """Let rows that are not there yet begin with these values. Raises `NotReadyError`."""
        self._ask(self._begin_requests(values))

    def _begin_requests(self, values: Sequence[Gradients]) -> list[Request]:
        parts = self._parts(values)
        header = Header(MessageKind.BEGIN, table=len(parts))
        pushes = [Push(0, 0.0, tuple(part[shard] for part in parts)) for shard in range(len(self._lines))]
        return [Request(header, push.body()) for push in pushes]

    def rest(self) -> None:
        """Let nobody wait for this worker's steps for a while. Raises `NotReadyError`."""
        self._let_rest(rests=True)
        self._ask([Request(Header(MessageKind.REST))] * len(self._lines))

    def join(self) -> None:
        """Make steps again, from where the others are. Raises `NotReadyError`."""
        self._let_rest(rests=False)
        answers = self._ask([Request(Header(MessageKind.JOIN))] * len(self._lines))
        self.step = max(self.step, *(header.sequence for header in answers if header is not None))

    def _let_rest(self, *, rests: bool) -> None:
        for line in self._lines:
            line.rests = rests

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
        answer = self._ask([Request(Header(MessageKind.LEASE), (words,)), *nothing])[0]
        return answer.sequence if answer is not None else ALL_DONE

    def save(self, directory: str) -> None:
        """Let each server write its rows there. Raises `RefusedError`, `NotReadyError`."""
        self._order({"save": directory, "shards": len(self._lines)})

    def shrink(self, unseen_s: int) -> int:
        """Drop the rows that nobody has pushed to for so many seconds; return how many. Raises `NotReadyError`."""
        before_s = int(time.time()) - unseen_s
        return sum(header.sequence for header in self._order({"shrink_before_s": before_s}) if header is not None)

    def _order(self, order: dict[str, Any]) -> list[Header | None]:
        return self._ask([Request(Header(MessageKind.ORDER), (json.dumps(order).encode(),))] * len(self._lines))

    def leave(self) -> None:
        """Tell the servers that this worker has done its part, and hang up. Raises `NotReadyError`."""
        self._let_rest(rests=True)  # if a line breaks now, nobody need wait for this worker
        self._ask([Request(Header(MessageKind.LEAVE))] * len(self._lines))
        self._has_left = True
        if self.left_out > 1:
            log.warning("%d steps of this worker came too late, and did not count", self.left_out)
        self.close()

    def close(self) -> None:
        """Hang up."""
        for line in self._lines:
            line.close()

    def _parts(self, gradients: Sequence[Gradients]) -> list[list[Gradients]]:
        return [
            [
                replace(each, ids=ids, values=(each.values if len(self._lines) == 1 else each.values[places]).float())
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

    def _ask(self, requests: Sequence[Request | None]) -> list[Header | None]:
        """Ask all at once; whom nothing is asked is None.

        Raises:
            RefusedError: one has refused; all have answered.
        """
        self._check_here()
        waiting = {line: request for line, request in zip(self._lines, requests, strict=True) if request is not None}
        for request in waiting.values():
            request.check()
        answers: dict[int, Header] = {}
        try:
            refused = self._exchange(waiting, answers)
        except BaseException:
            for line in self._lines:  # what they answer later must not be taken for the answer to something else
                line.close()
            raise
        if refused is not None:
            raise refused
        return [answers.get(shard) for shard in range(len(self._lines))]

    def _exchange(self, waiting: dict[ShardConnection, Request], answers: dict[int, Header]) -> RefusedError | None:
        """Have all answers; return the first that is a refusal. Raises `NotReadyError`."""
        refused, breaks = None, 0
        give_up_at = time.monotonic() + self._timeout_s
        self._send(waiting, list(waiting))
        while waiting:
            broken = []
            for line in ready(list(waiting)):
                try:
                    answers[line.shard] = line.receive(waiting[line])
                    del waiting[line]
                except BrokenError as why:
                    line.break_off(str(why))
                    broken.append(line)
                except RefusedError as why:
                    refused = refused or why
                    del waiting[line]
            if broken:
                if all(line.was_fresh for line in broken):
                    breaks += 1
                    self._check_goes_on(broken, waiting, breaks, give_up_at)
                    time.sleep(min(_LONGEST_PAUSE_S, _TRY_EVERY_S * 2**breaks))
                else:
                    breaks, give_up_at = 0, time.monotonic() + self._timeout_s
                # Not once the others have answered: their answers may wait for what other workers wait for here.
                self._wait_open(broken, give_up_at)
                self._send(waiting, broken)
        return refused

    def _check_goes_on(
        self,
        broken: Sequence[ShardConnection],
        requests: Mapping[ShardConnection, Request],
        breaks: int,
        give_up_at: float,
    ) -> None:
        """Raises `NotReadyError`: it makes no sense to ask them again."""
        if breaks >= _MOST_BREAKS or time.monotonic() >= give_up_at:
            kinds = ", ".join(f"{requests[line].header.kind.name} at {line.address}: {line.why}" for line in broken)
            raise NotReadyError(f"servers were asked {breaks} times in a row, and ended the connection: {kinds}")

    def _check_here(self) -> None:
        if self._has_left:
            raise RuntimeError("this worker has left the servers (stop_worker), and nothing can be asked of them now")

    def _reopen(self, line: ShardConnection) -> bool:
        """Whether it is open now. A server that has lost all begins with the parameters as they are here."""
        if line.is_open:
            return True
        values = self.present() if line.try_open() else ()
        try:
            if values:
                request = self._begin_requests(values)[line.shard]
                line.send(request)
                line.receive(request)
        except BrokenError:
            line.close()
        return line.is_open

    def _send(self, requests: Mapping[ShardConnection, Request], lines: Sequence[ShardConnection]) -> None:
        for line in lines:
            try:
                line.send(requests[line])
            except BrokenError as why:
                line.break_off(str(why))

    def _wait_open(self, lines: Sequence[ShardConnection], give_up_at: float | None = None) -> None:
        now = time.monotonic()
        give_up_at = now + self._timeout_s if give_up_at is None else give_up_at
        tell_at = now + (0 if self.step == 0 else _TRY_EVERY_S)
        while closed := [line for line in lines if not self._reopen(line)]:
            if self._failure is not None:
                raise self._failure
            now = time.monotonic()
            names = ", ".join(f"{line.address}{line.trouble and f' ({line.trouble})'}" for line in closed)
            if now >= give_up_at:
                raise NotReadyError(f"servers did not answer within {self._timeout_s:g} s: {names}")
            if now >= tell_at:
                tell_at = now + _TELL_EVERY_S
                log.warning("ps not ready: [%s]", names)
            time.sleep(_TRY_EVERY_S)
