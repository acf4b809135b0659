"""How a shard's primary gives another server a copy, and keeps it equal.

On a connection of its own, which begins as any other: tables (`DECLARE`), rows (`ROWS`), and once all are there what
else a shard has (`WHOLE`). From then on each change (`CHANGE`), in order, each answered before the worker is.

Rows are copied while workers go on: what has changed meanwhile is copied again, and only the rest of that with the
shard at a stop (as virtual machines are moved; Clark et al., "Live migration of virtual machines", 2005).
"""

from __future__ import annotations

import json
import ssl
import struct
import threading
from typing import Any

from trainer_runtime.ps.frames import BrokenError, Header, MessageKind, bytes_of, dial, introduce
from trainer_runtime.ps.messages import Push
from trainer_runtime.ps.persistence import AppliedPushes, said_of, take
from trainer_runtime.ps.shard import Shard, ShardChange
from trainer_runtime.ps.shard_connection import Endpoint
from trainer_runtime.ps.table import TablePart

ANSWER_WITHIN_S = 2.0
"""A replica that does not answer for so long is given up: workers wait for it."""
_CONNECT_S = 2.0
_CHUNK_BYTES = 1 << 24
"""Are answered in time, however slowly they are taken."""
_FEW_ROWS = 1 << 12
_ROUNDS = 8
LENGTH = struct.Struct("<I")
"""Of the words at the head of a change."""


class ReplicaSender:
    """The primary's end. Raises `BrokenError` wherever the replica does not do its part."""

    def __init__(
        self,
        number: int,
        endpoint: Endpoint,
        secret: bytes,
        hello: dict[str, Any],
        tls: ssl.SSLContext | None = None,
    ) -> None:
        self._number = number
        try:
            self._connection = dial(endpoint, _CONNECT_S, tls)
        except OSError as error:
            raise BrokenError(error.strerror or str(error)) from None
        try:
            self._connection.sock.settimeout(ANSWER_WITHIN_S)
            introduce(self._connection, secret, hello)
            self._answered()
        except BaseException:
            self._connection.close()
            raise

    def copy(self, shard: Shard, lock: threading.Condition) -> None:
        """Give it all; return with the lock held, from when on each change must be told."""
        taken: AppliedPushes | None = None
        for _ in range(_ROUNDS):
            with lock:
                taken = _later(shard, taken)
            self._give(taken)
            if taken.rows <= _FEW_ROWS:
                break
        lock.acquire()
        try:
            self._give(_later(shard, taken))
            self._ask(MessageKind.WHOLE, json.dumps(said_of(shard)).encode())
        except BaseException:
            lock.release()
            raise

    def send(self, change: ShardChange) -> None:
        """Tell it a change; `wait` must follow."""
        head = {"steps": [[*author, step] for author, step in change.steps], "now_s": change.now_s}
        words = json.dumps({**head, "begins": change.begins}).encode()
        words += b" " * (-(len(words) + LENGTH.size) % 8)
        push = Push(0, 0.0, change.parts)
        body = [LENGTH.pack(len(words)) + words, *push.body()]
        length = sum(map(len, body))
        self._connection.send(Header(MessageKind.CHANGE, self._number, table=len(change.parts), length=length), *body)

    def wait(self) -> None:
        """Return when it has done that."""
        self._answered()

    def tell(self, kind: MessageKind, words: bytes) -> None:
        """Tell it what else changes a shard."""
        self._ask(kind, words)

    def close(self) -> None:
        """Hang up."""
        self._connection.close()

    def _give(self, taken: AppliedPushes) -> None:
        for number, told in enumerate(taken.said["tables"]):
            self._ask(MessageKind.DECLARE, json.dumps(told).encode())
            part = TablePart(*taken.arrays[3 * number : 3 * number + 3])
            at_once = max(1, _CHUNK_BYTES // (16 + 4 * part.rows.shape[1]))
            for begin in range(0, len(part.ids), at_once):
                pieces = [array[begin : begin + at_once] for array in part]
                self._ask(MessageKind.ROWS, *map(bytes_of, pieces), table=number)

    def _ask(self, kind: MessageKind, *body: memoryview | bytes, table: int = 0) -> None:
        length = sum(map(len, body))
        self._connection.send(Header(kind, self._number, table=table, length=length), *body)
        self._answered()

    def _answered(self) -> None:
        header = self._connection.receive_header()
        if header.kind is not MessageKind.DONE or header.length:
            raise BrokenError("it refused")


def _later(shard: Shard, taken: AppliedPushes | None) -> AppliedPushes:
    """What has changed since. Raises `BrokenError`."""
    later = take(shard, taken.versions if taken else {})
    if taken is not None and later.drops != taken.drops:
        raise BrokenError("rows were dropped meanwhile: the copy begins anew")
    return later
