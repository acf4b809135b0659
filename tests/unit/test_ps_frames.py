"""Messages: memory is used only as data arrives, and invalid tables, rows and changes are refused."""

from __future__ import annotations

import json
import os
import resource
import socket
import ssl
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from authority import Authority

from trainer_runtime import tls
from trainer_runtime.ps.arena import Arena
from trainer_runtime.ps.frames import (
    MAX_BODY_BYTES,
    BrokenError,
    FrameConnection,
    Header,
    MessageKind,
    bytes_of,
    client_handshake,
    server_handshake,
)
from trainer_runtime.ps.leases import Leases
from trainer_runtime.ps.persistence import restore_state
from trainer_runtime.ps.replica_receiver import parse_change, receive_rows
from trainer_runtime.ps.rules import Adam, Sum
from trainer_runtime.ps.shard import Shard
from trainer_runtime.ps.table import TableSpec, spec_of
from trainer_runtime.ps.worker_progress import ASYNC
from trainer_runtime.tls import TlsChannel


@pytest.fixture
def ends() -> Iterator[tuple[FrameConnection, FrameConnection]]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        here = FrameConnection(socket.create_connection(listener.getsockname()))
        there = FrameConnection(listener.accept()[0])
    yield here, there
    here.close()
    there.close()


@pytest.fixture
def sealed(ends: tuple[FrameConnection, FrameConnection], tmp_path: Path) -> tuple[FrameConnection, FrameConnection]:
    """The same connection with TLS."""
    files = Authority(tmp_path).files("both", "127.0.0.1")
    here, there = ends
    called = TlsChannel(tls.accepting(files, callers=ssl.CERT_REQUIRED), is_called=True)
    other = Other(lambda: there.encrypt(called))
    here.encrypt(TlsChannel(tls.dialling(files, names_host=True), host="127.0.0.1"))
    assert other.result() is None
    return here, there


SECRET = b"what the processes know"
VERSION = b"elastic-agent servers 2"


class Other(threading.Thread):
    """Runs the other end's part of a handshake on a thread of its own."""

    def __init__(self, part: Callable[[], object]) -> None:
        super().__init__()
        self._part = part
        self._result: object = None
        self.start()

    def run(self) -> None:
        try:
            self._result = self._part()
        except BrokenError as broken:
            self._result = broken

    def result(self) -> object:
        self.join(60.0)
        return self._result


def test_both_ends_prove_that_they_know_the_secret(ends: tuple[FrameConnection, FrameConnection]) -> None:
    here, there = ends
    other = Other(lambda: server_handshake(there, SECRET))
    client_handshake(here, SECRET, {"worker": 3})
    assert other.result() == {"worker": 3}


def test_a_caller_without_the_secret_receives_only_a_nonce(
    ends: tuple[FrameConnection, FrameConnection],
) -> None:
    """The server signs nothing that such a caller sends."""
    here, there = ends
    other = Other(lambda: server_handshake(there, SECRET))
    hello = b'{"worker": 0}'
    here.send_raw(VERSION + b"n" * 32)
    here.receive_bytes(32)
    here.send_raw(len(hello).to_bytes(4, "little") + b"p" * 32 + hello)
    assert str(other.result()) == "the caller does not know this job's secret"
    there.close()
    with pytest.raises(BrokenError):
        here.receive_bytes(1)


@pytest.mark.parametrize("is_reflected", [False, True], ids=["made up", "the caller's own"])
def test_a_server_must_prove_itself_too(ends: tuple[FrameConnection, FrameConnection], *, is_reflected: bool) -> None:
    here, there = ends
    other = Other(lambda: client_handshake(here, SECRET, {}))
    there.receive_bytes(len(VERSION) + 32)
    there.send_raw(b"n" * 32)
    proof = there.receive_bytes(4 + 32 + 2)[4:36]
    there.send_raw(proof if is_reflected else b"p" * 32)
    assert str(other.result()) == "it does not know this job's secret"


def test_a_proof_is_not_valid_on_another_connection(ends: tuple[FrameConnection, FrameConnection]) -> None:
    """An attacker has recorded the handshake of a caller, and sends it again."""
    here, there = ends
    recorded: list[bytes] = []
    with (
        patch.object(here, "send_raw", side_effect=recorded.append),
        patch.object(here, "receive_bytes", return_value=b"n" * 32),
        pytest.raises(BrokenError),
    ):
        client_handshake(here, SECRET, {})
    other = Other(lambda: server_handshake(there, SECRET))
    for each in recorded:
        here.send_raw(each)
    assert str(other.result()) == "the caller does not know this job's secret"


@pytest.mark.parametrize(
    ("sent", "why"),
    [
        (b"elastic-agent servers 1" + b"n" * 32, "it speaks another version"),
        (VERSION + b"n" * 32 + b"\xff" * 4, "the hello is too long"),
    ],
)
def test_an_invalid_handshake_is_refused(ends: tuple[FrameConnection, FrameConnection], sent: bytes, why: str) -> None:
    here, there = ends
    here.send_raw(sent)
    with pytest.raises(BrokenError, match=why):
        server_handshake(there, SECRET)


def test_a_body_that_does_not_arrive_takes_no_memory(
    ends: tuple[FrameConnection, FrameConnection],
) -> None:
    here, there = ends
    here.sock.sendall(b"only this")
    here.close()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(BrokenError, match="closed"):
        there.receive_body(MAX_BODY_BYTES)
    after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert 1024 * (after - before) < MAX_BODY_BYTES / 16, "ru_maxrss is in KiB"


@pytest.mark.parametrize("length", [0, 1, 4096, 10_000_001])
def test_a_body_of_any_length_arrives_complete(ends: tuple[FrameConnection, FrameConnection], length: int) -> None:
    here, there = ends
    body = bytes(range(256)) * (length // 256) + bytes(length % 256)
    sender = threading.Thread(target=here.send, args=(Header(MessageKind.PUSH, length=length), body))
    sender.start()
    assert there.receive_header().length == length
    assert there.receive_body(length) == body
    sender.join(60.0)


def test_a_body_may_be_of_more_pieces_than_a_system_call_takes(ends: tuple[FrameConnection, FrameConnection]) -> None:
    here, there = ends
    pieces = [number.to_bytes(2, "little") for number in range(3 * os.sysconf("SC_IOV_MAX"))]
    here.send(Header(MessageKind.PUSH, length=2 * len(pieces)), *pieces)
    assert there.receive_body(there.receive_header().length) == b"".join(pieces)


@pytest.mark.parametrize("length", [0, 1, 16384, 10_000_001])
def test_tls_bodies_arrive_complete_in_both_directions(
    sealed: tuple[FrameConnection, FrameConnection], length: int
) -> None:
    body = bytes(range(256)) * (length // 256) + bytes(length % 256)
    senders = [
        threading.Thread(target=end.send, args=(Header(MessageKind.PUSH, length=length), body)) for end in sealed
    ]
    received: list[object] = []
    receivers = [
        threading.Thread(target=lambda end=end: received.append(end.receive_body(end.receive_header().length)))
        for end in sealed
    ]
    for thread in (*senders, *receivers):
        thread.start()
    for thread in (*senders, *receivers):
        thread.join(60.0)
    assert received == [body, body]


def test_buffered_tls_data_is_found_with_an_empty_socket(
    sealed: tuple[FrameConnection, FrameConnection],
) -> None:
    here, there = sealed
    here.send_raw(b"".join(Header(MessageKind.DONE, sequence=number).pack() for number in range(3)))
    assert [there.receive_header().sequence for _ in range(2)] == [0, 1]
    assert there.has_buffered_data
    assert there.wait_readable(0.0)
    assert there.receive_header().sequence == 2
    assert not there.has_buffered_data
    assert not there.wait_readable(0.0)
    here.close()
    with pytest.raises(BrokenError, match="connection closed"):
        there.receive_header()


SPEC = TableSpec("t", 2, Sum())


@pytest.mark.parametrize(
    "changed",
    [
        {"name": ["t"]},
        {"name": "\ud800"},
        {"dim": 1.5},
        {"dim": True},
        {"dim": 0},
        {"seed": 1 << 63},
        {"scale": "1"},
        {"initial": []},
        {"admit_after": 0},
        {"max_rows": -1},
        {"max_rows": 1e300},
        {"rule": None},
        {"rule": {"kind": []}},
        {"rule": {"kind": "sum", "lr": 10**400}},
        {"rule": {"kind": "sum", "lr": "fast"}},
        {"more": 1},
    ],
    ids=str,
)
def test_an_invalid_table_is_refused(changed: dict[str, object]) -> None:
    assert spec_of(SPEC.to_json()) == SPEC
    with pytest.raises(ValueError, match=r"."):
        spec_of({**SPEC.to_json(), **changed})


def test_a_wide_table_takes_no_more_at_once_than_a_narrow_one() -> None:
    dim = 1 << 16
    slabs = Arena(dim + Adam(1.0).memory(dim))
    slabs.reserve(1)
    slabs.write(torch.tensor([0]), torch.ones(1, dim))
    assert slabs.read(torch.tensor([0]), dim).sum() == dim


@pytest.mark.parametrize(
    "state",
    [
        {},
        {"applied": 1, "done": 0, "passes": {}},
        {"applied": [[0, 1]], "done": 0, "passes": {}},
        {"applied": [[[], 1, 2]], "done": 0, "passes": {}},
        {"applied": [[0, 1, "2"]], "done": 0, "passes": {}},
        {"applied": [], "done": None, "passes": {}},
        {"applied": [], "done": 0, "passes": []},
        {"applied": [], "done": 0, "passes": {"p": [3, [[]]]}},
        {"applied": [], "done": 0, "passes": {"p": ["3", [1]]}},
    ],
    ids=str,
)
def test_an_invalid_state_changes_nothing(state: dict[str, object]) -> None:
    shard = Shard(ASYNC)
    with pytest.raises(ValueError, match=r"."):
        restore_state(shard, state)
    assert (shard.applied, shard.passes, shard.progress.done) == ({}, {}, 0)


@pytest.mark.parametrize(
    "head",
    [
        None,
        [],
        {"steps": 1, "now_s": 1, "begins": False},
        {"steps": [[0, 1, {}]], "now_s": 1, "begins": False},
        {"steps": [[0, 1]], "now_s": 1, "begins": False},
        {"steps": [], "now_s": 1e400, "begins": False},
        {"steps": [], "now_s": 1 << 63, "begins": False},
        {"steps": [], "now_s": 1, "begins": 1},
    ],
    ids=str,
)
def test_an_invalid_change_breaks_the_connection(head: object) -> None:
    payload = json.dumps(head).encode()
    with pytest.raises(BrokenError):
        parse_change(bytearray(len(payload).to_bytes(4, "little") + payload), Header(MessageKind.CHANGE), Shard(ASYNC))


@pytest.mark.parametrize("ids", [[1, 1], [-(1 << 63), 1]])
def test_rows_with_invalid_or_repeated_ids_break_the_connection(
    ends: tuple[FrameConnection, FrameConnection], ids: list[int]
) -> None:
    here, there = ends
    shard = Shard(ASYNC)
    shard.declare(SPEC)
    pieces = [bytes_of(torch.tensor(ids)), bytes_of(torch.zeros(2, 2)), bytes_of(torch.zeros(2, dtype=torch.int64))]
    here.send(Header(MessageKind.ROWS, length=48), *pieces)
    with pytest.raises(BrokenError, match="invalid id"):
        receive_rows(there, there.receive_header(), shard)


def test_a_new_primary_accepts_finished_parts_from_any_worker() -> None:
    """Holders of parts are not replicated: a new primary accepts a finished part from any worker."""
    follows = Leases(3)
    follows.finish(1, 4)
    assert follows.done == {1}
    assert follows.take(5) == 0
    follows.finish(0, 6)
    assert follows.done == {1}, "another worker holds the part and will finish it"
    follows.finish(-1, 4)
    follows.finish(3, 4)
    assert follows.done == {1}
