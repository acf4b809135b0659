"""How the primary of a shard creates a replica on another server, and keeps it equal.

It uses a connection of its own, which begins with the usual handshake. It sends the tables (`DECLARE`), the rows
(`ROWS`) and, once all rows are there, the rest of the shard's state (`COMPLETE`). From then on it sends each change
(`CHANGE`), in order. The replica answers each change before the worker is answered.

Rows are copied while workers continue. Rows that changed meanwhile are copied again, and the shard stops only for the
last few of them (as live migration moves virtual machines; Clark et al., "Live migration of virtual machines", 2005).
"""

from __future__ import annotations

import json
import ssl
import struct
import threading
from typing import Any

from trainer_runtime.ps.frames import BrokenError, Header, MessageKind, bytes_of, client_handshake, dial
from trainer_runtime.ps.messages import Push
from trainer_runtime.ps.persistence import ShardSnapshot, capture, state_of
from trainer_runtime.ps.shard import Shard, ShardChange
from trainer_runtime.ps.shard_connection import Endpoint
from trainer_runtime.ps.table import TablePart

ANSWER_WITHIN_S = 2.0
"""A replica that does not answer within this time is given up, since workers wait for it."""
_CONNECT_S = 2.0
_CHUNK_BYTES = 1 << 24
"""Maximum size of a message with rows, so that even a slow replica answers in time."""
_FEW_ROWS = 1 << 12
_ROUNDS = 8
LENGTH = struct.Struct("<I")
"""Length of the JSON at the head of a change."""


class ReplicaSender:
    """The primary's end. Its methods raise `BrokenError` if the replica does not answer as expected."""

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
            client_handshake(self._connection, secret, hello)
            self._wait_answer()
        except BaseException:
            self._connection.close()
            raise

    def copy(self, shard: Shard, lock: threading.Condition) -> None:
        """Send the whole shard. Returns with the lock held; from then on each change must be sent."""
        snapshot: ShardSnapshot | None = None
        for _ in range(_ROUNDS):
            with lock:
                snapshot = _capture_since(shard, snapshot)
            self._send_rows(snapshot)
            if snapshot.rows <= _FEW_ROWS:
                break
        lock.acquire()
        try:
            self._send_rows(_capture_since(shard, snapshot))
            self._request(MessageKind.COMPLETE, json.dumps(state_of(shard)).encode())
        except BaseException:
            lock.release()
            raise

    def send(self, change: ShardChange) -> None:
        """Send a change; `wait` must follow."""
        head = {"steps": [[*author, step] for author, step in change.steps], "now_s": change.now_s}
        payload = json.dumps({**head, "begins": change.initializes}).encode()
        payload += b" " * (-(len(payload) + LENGTH.size) % 8)
        push = Push(0, 0.0, change.parts)
        body = [LENGTH.pack(len(payload)) + payload, *push.body()]
        length = sum(map(len, body))
        self._connection.send(Header(MessageKind.CHANGE, self._number, table=len(change.parts), length=length), *body)

    def wait(self) -> None:
        """Wait until the replica has applied the change."""
        self._wait_answer()

    def send_message(self, kind: MessageKind, payload: bytes) -> None:
        """Send any other change of the shard's state, and wait for the answer."""
        self._request(kind, payload)

    def close(self) -> None:
        """Close the connection."""
        self._connection.close()

    def _send_rows(self, snapshot: ShardSnapshot) -> None:
        for number, record in enumerate(snapshot.state["tables"]):
            self._request(MessageKind.DECLARE, json.dumps(record).encode())
            part = TablePart(*snapshot.arrays[3 * number : 3 * number + 3])
            at_once = max(1, _CHUNK_BYTES // (16 + 4 * part.rows.shape[1]))
            for begin in range(0, len(part.ids), at_once):
                pieces = [array[begin : begin + at_once] for array in part]
                self._request(MessageKind.ROWS, *map(bytes_of, pieces), table=number)

    def _request(self, kind: MessageKind, *body: memoryview | bytes, table: int = 0) -> None:
        length = sum(map(len, body))
        self._connection.send(Header(kind, self._number, table=table, length=length), *body)
        self._wait_answer()

    def _wait_answer(self) -> None:
        header = self._connection.receive_header()
        if header.kind is not MessageKind.DONE or header.length:
            raise BrokenError("the replica refused a message")


def _capture_since(shard: Shard, snapshot: ShardSnapshot | None) -> ShardSnapshot:
    """Return what has changed since a snapshot, or everything if there is none.

    Raises `BrokenError` if rows were dropped since: the copy must start again.
    """
    newer = capture(shard, snapshot.versions if snapshot else {})
    if snapshot is not None and newer.drops != snapshot.drops:
        raise BrokenError("rows were dropped meanwhile, the copy starts again")
    return newer
