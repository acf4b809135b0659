"""Large snapshot parts between two agents: real sockets, TLS and threads."""

from __future__ import annotations

import os
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace

import msgspec
import pytest
from structlog.testing import capture_logs
from waiting import comes_true, wait_for

from agent.core.records import Identity
from agent.core.saved_states import StateId
from agent.links import part_sender, part_stream
from agent.links.frames import LinkBroken, in_the_clear
from agent.links.handshake import Credential
from agent.links.part_receiver import NoRoomError, OutdatedPartError, PartReceiver
from agent.links.part_sender import LargePart, PartAddress, PartSender
from agent.links.part_stream import PartHeader, handshake_as_caller
from agent.runtime.agent_certificates import link_tls

A, B = Identity("a", "i"), Identity("b", "i")
SECRET = b"the job's secret"
BOUND_S = 30.0
TLS = link_tls(None)
SIZE = (9 << 20) + 5
"""Some pieces and a rest; the part does not begin at a page."""


class Holder:
    """The other agent's snapshots."""

    def __init__(self) -> None:
        self.refusal = ""
        self.open: set[int] = set()
        self.parts: list[tuple[PartHeader, bytes]] = []
        self.given_back = 0

    def make_room(self, header: PartHeader) -> int:
        if self.refusal:
            raise OutdatedPartError if self.refusal == "outdated" else NoRoomError(self.refusal)
        memory = os.memfd_create("test", os.MFD_CLOEXEC)
        os.ftruncate(memory, header.size_bytes)
        return memory

    def store_large(self, header: PartHeader, descriptor: int) -> None:
        self.parts.append((header, os.pread(descriptor, header.size_bytes, 0)))
        os.close(descriptor)

    def give_back(self, descriptor: int) -> None:
        self.given_back += 1
        os.close(descriptor)


class Ends:
    """Agent a, which sends, and agent b, which takes."""

    def __init__(self) -> None:
        self.holder = Holder()
        self.receiver = PartReceiver(lambda: self.holder, TLS)
        self.receiver.answer_as(Credential(SECRET, B))
        self.address: PartAddress | None = PartAddress(
            Credential(SECRET, A), "127.0.0.1", self.receiver.port, TLS.fingerprint
        )
        self.sender = PartSender(lambda _: self.address, link_tls(None))
        self.ended: list[tuple[int, bool]] = []
        self.took_s: list[float] = []

    def send(self, step: int, data: bytes, is_intact: Callable[[], bool] = lambda: True, rank: int = 1) -> None:
        memory = os.memfd_create("test", os.MFD_CLOEXEC)
        os.pwrite(memory, data, 4097)

        began = time.monotonic()

        def on_end(is_held: bool) -> None:  # noqa: FBT001
            self.ended.append((step, is_held))
            self.took_s.append(time.monotonic() - began)

        header = PartHeader(
            copy=StateId(run="r", group=2, step=step), world_size=2, rank=rank, checksum=7, size_bytes=len(data)
        )
        self.sender.send(LargePart(header, B, memory, 4097, is_intact, on_end))

    def wait(self, *ended: tuple[int, bool]) -> None:
        wait_for(lambda: self.ended == [*ended], f"{ended}, not {self.ended}", BOUND_S)


@pytest.fixture
def ends(monkeypatch: pytest.MonkeyPatch) -> Iterator[Ends]:
    monkeypatch.setattr(part_sender, "_GIVE_UP_S", 2.0)
    made = Ends()
    yield made
    made.sender.close()
    made.receiver.close()


def test_parts_arrive_as_they_are_one_after_another_on_one_connection(ends: Ends) -> None:
    first, second = os.urandom(SIZE), os.urandom(SIZE)
    ends.send(5, first)
    ends.wait((5, True))
    ends.send(6, second)
    ends.wait((5, True), (6, True))
    assert [(header.copy.step, header.rank, data) for header, data in ends.holder.parts] == [
        (5, 1, first),
        (6, 1, second),
    ]
    assert len(ends.receiver._connections) == 1


def test_a_part_that_was_replaced_while_it_was_sent_is_not_kept(ends: Ends) -> None:
    asked: list[None] = []

    def is_intact() -> bool:
        asked.append(None)
        return len(asked) <= 2 + 1  # before each of the pieces, not after the last

    ends.send(5, os.urandom(SIZE), is_intact)
    ends.wait((5, False))
    wait_for(lambda: ends.holder.given_back == 1, "the memory is given back", BOUND_S)
    ends.send(6, os.urandom(SIZE))
    ends.wait((5, False), (6, True))
    assert [header.copy.step for header, _ in ends.holder.parts] == [6]


def test_a_part_that_is_not_wanted_any_more_is_not_sent_to_the_end(ends: Ends) -> None:
    ends.send(5, os.urandom(SIZE), lambda: False)
    ends.wait((5, False))
    wait_for(lambda: ends.holder.given_back == 1, "the memory is given back", BOUND_S)
    assert ends.holder.parts == []


def test_an_agent_without_room_says_so_and_is_asked_again_for_the_next_part(ends: Ends) -> None:
    ends.holder.refusal = "it has 3 MiB of free memory, and a copy takes 9"
    with capture_logs() as logs:
        ends.send(5, os.urandom(SIZE))
        ends.wait((5, False))
        ends.send(6, os.urandom(SIZE))
        ends.wait((5, False), (6, False))
        ends.holder.refusal = ""
        ends.sender.wake()
        ends.send(7, os.urandom(SIZE))
        ends.wait((5, False), (6, False), (7, True))
    assert [each["event"].partition(". If")[0] for each in logs] == [
        (
            "node b holds no copies of this node's snapshots: it has 3 MiB of free memory, and a copy takes 9 "
            f"(127.0.0.1:{ends.receiver.port})"
        ),
        "node b holds copies of this node's snapshots again",
    ]
    assert ends.took_s[0] >= 2.0, "the first is tried for a while"
    assert ends.took_s[1] < 1.0, "the next one not at all"


def test_an_agent_that_does_not_answer_costs_one_wait(ends: Ends) -> None:
    """As behind a firewall that drops packets."""
    assert ends.address is not None
    with socket.create_server(("127.0.0.1", 0)) as silent, capture_logs() as logs:
        ends.address = replace(ends.address, port=silent.getsockname()[1])
        for step in range(5, 15):
            ends.send(step, os.urandom(SIZE), rank=step % 2)
            wait_for(lambda: len(ends.ended) == len(ends.took_s) and ends.sender.retry_at, "it is given up", BOUND_S)
        wait_for(lambda: len(ends.ended) == 10, "all are given up", BOUND_S)
    assert not any(is_held for _, is_held in ends.ended)
    assert len([took_s for took_s in ends.took_s if took_s > 1.0]) <= 2, "the first one of each rank"
    assert len(logs) == 1
    began = time.monotonic()
    ends.sender.close()
    assert time.monotonic() - began < 2.0


def test_a_part_of_an_older_group_is_given_up_without_a_word(ends: Ends) -> None:
    ends.holder.refusal = "outdated"
    with capture_logs() as logs:
        ends.send(5, os.urandom(SIZE))
        ends.wait((5, False))
    assert logs == []
    assert ends.took_s[0] < 1.0


def test_once_the_ranks_have_ended_nobody_is_waited_for(ends: Ends) -> None:
    ends.address = None
    with capture_logs() as logs:
        ends.send(5, os.urandom(SIZE))
        ends.sender.end_group(2)
        ends.wait((5, False))
    assert logs == []
    assert ends.took_s[0] < 1.5


def test_a_script_may_shorten_its_memory_at_any_time(ends: Ends) -> None:
    memory: list[int] = []

    def shorten() -> bool:
        os.ftruncate(memory[0], 4096)
        return True

    send = ends.sender.send

    def send_and_note(part: LargePart) -> None:
        memory.append(part.descriptor)
        send(part)

    ends.sender.send = send_and_note  # type: ignore[method-assign]
    with capture_logs() as logs:
        ends.send(5, os.urandom(SIZE), shorten)
        ends.wait((5, False))
    assert "the rank has shortened its memory" in logs[0]["event"]


def test_a_link_that_opens_in_time_is_used_at_once(ends: Ends) -> None:
    address, ends.address = ends.address, None
    ends.send(5, os.urandom(SIZE))
    assert not comes_true(lambda: bool(ends.ended), 0.3)
    ends.address = address
    ends.sender.wake()
    ends.wait((5, True))


def test_the_other_agent_may_start_again(ends: Ends) -> None:
    ends.send(5, os.urandom(SIZE))
    ends.wait((5, True))
    ends.receiver.answer_as(Credential(SECRET, msgspec.structs.replace(B, incarnation="j")))
    ends.send(6, os.urandom(SIZE))
    ends.wait((5, True), (6, False))
    assert [header.copy.step for header, _ in ends.holder.parts] == [5], "the new one is another agent"


@pytest.mark.parametrize("is_receiver", [False, True])
def test_an_end_that_is_gone_in_the_middle_of_a_part_is_noticed(
    ends: Ends, monkeypatch: pytest.MonkeyPatch, *, is_receiver: bool
) -> None:
    is_underway = threading.Event()

    def is_intact() -> bool:
        is_underway.set()
        return True

    monkeypatch.setattr(part_stream, "_CHUNK_BYTES", 4096)
    ends.send(5, bytes(200 << 20), is_intact)
    assert is_underway.wait(BOUND_S)
    (ends.receiver if is_receiver else ends.sender).close()
    ends.wait((5, False))
    wait_for(lambda: ends.holder.given_back == 1, "the memory is given back", BOUND_S)


def test_of_a_rank_only_the_newest_part_waits_to_be_sent(ends: Ends) -> None:
    ends.address, address = None, ends.address
    for step in (5, 6, 7):
        ends.send(step, os.urandom(8))
        if step == 5:
            wait_for(lambda: ends.sender._lanes[1].pending is None, "the thread has taken the first one", BOUND_S)
    ends.wait((6, False))
    ends.address = address
    ends.sender.wake()
    ends.wait((6, False), (5, True), (7, True))


def test_a_sender_that_is_closed_ends_what_it_was_given(ends: Ends) -> None:
    ends.address = None
    ends.send(5, os.urandom(8))
    ends.send(6, os.urandom(8), rank=0)
    ends.sender.close()
    ends.send(7, os.urandom(8))
    assert sorted(ends.ended) == [(5, False), (6, False), (7, False)]


def call(ends: Ends) -> ssl.SSLSocket:
    """Connect as an agent does."""
    return TLS.dialling.wrap_socket(socket.create_connection(("127.0.0.1", ends.receiver.port), BOUND_S))


def test_a_caller_without_the_secret_gets_nothing(ends: Ends) -> None:
    with call(ends) as connection, pytest.raises((LinkBroken, OSError)):
        handshake_as_caller(connection, Credential(b"another secret", A), B)
    assert ends.holder.parts == []


@pytest.mark.parametrize("words", [b"GET / HTTP/1.0\r\n\r\n", b"", b"\xff" * 5000])
@pytest.mark.parametrize("is_encrypted", [False, True])
def test_a_stranger_is_dropped_and_disturbs_nobody(ends: Ends, words: bytes, *, is_encrypted: bool) -> None:
    plain = socket.create_connection(("127.0.0.1", ends.receiver.port), BOUND_S)
    with TLS.dialling.wrap_socket(plain) if is_encrypted else plain as connection, suppress(ConnectionError):
        connection.sendall(words)
        connection.settimeout(BOUND_S)
        while connection.recv(1000):
            continue
    ends.send(5, os.urandom(SIZE))
    ends.wait((5, True))


def test_an_impostor_without_the_secret_is_not_sent_anything(ends: Ends) -> None:
    ends.receiver.answer_as(Credential(b"another secret", B))
    with capture_logs() as logs:
        ends.send(5, os.urandom(SIZE))
        ends.wait((5, False))
    assert "node b holds no copies" in logs[0]["event"]


def test_a_receiver_with_another_certificate_is_not_sent_anything(ends: Ends) -> None:
    assert ends.address is not None
    ends.address = replace(ends.address, cert="0" * 64)
    with capture_logs() as logs:
        ends.send(5, os.urandom(SIZE))
        ends.wait((5, False))
    assert "it shows another certificate than its record in etcd names" in logs[0]["event"]


def test_an_agent_without_a_certificate_takes_no_parts(ends: Ends) -> None:
    receiver = PartReceiver(lambda: ends.holder, in_the_clear())
    receiver.answer_as(Credential(SECRET, B))
    with socket.create_connection(("127.0.0.1", receiver.port), BOUND_S) as plain:
        assert plain.recv(1) == b""
    receiver.close()


def test_a_caller_has_two_seconds_to_prove_itself_however_busy_it_is(ends: Ends) -> None:
    with socket.create_connection(("127.0.0.1", ends.receiver.port), BOUND_S) as plain:
        plain.settimeout(0.2)
        began = time.monotonic()
        with suppress(ConnectionError):
            for byte in b"\x16\x03\x01\x40\x00" + bytes(200):  # of a TLS handshake
                plain.sendall(bytes([byte]))
                with suppress(TimeoutError):
                    if not plain.recv(1):
                        break
        assert time.monotonic() - began < 10.0


def test_callers_that_prove_nothing_do_not_keep_others_out(ends: Ends) -> None:
    silent = [socket.create_connection(("127.0.0.1", ends.receiver.port), BOUND_S) for _ in range(40)]
    ends.send(5, os.urandom(SIZE))
    ends.wait((5, True))
    for each in silent:
        assert each.recv(1) == b"", "it is dropped in the end"
        each.close()


def test_a_receiver_that_closes_ends_its_threads(ends: Ends) -> None:
    ends.send(5, os.urandom(SIZE))
    ends.wait((5, True))
    ends.receiver.close()
    wait_for(
        lambda: not [each for each in threading.enumerate() if each.name in {"parts-accept", "parts-receive"}],
        "the end of its threads",
        BOUND_S,
    )
