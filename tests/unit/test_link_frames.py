"""The frames and proofs of a link, and a dialling end that did not run for a while."""

from __future__ import annotations

import asyncio
import math
import socket
import time
from collections.abc import Awaitable, Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agent.core.model import LinkState
from agent.core.records import Identity
from agent.links import dialler as link_
from agent.links.dialler import Link, LinkCallbacks, Peer
from agent.links.frames import VERSION, FrameKind, LinkBroken, LinkConnection, ping, pong, read_pong
from agent.links.handshake import (
    Credential,
    LinkCaller,
    LinkSession,
    ProofRefused,
    Role,
    handshake_as_dialler,
    handshake_as_listener,
)

A, B, C = Identity("a", "1"), Identity("b", "1"), Identity("c", "1")
KEY = b"what the agents of a job know"
HELLO = b"\x00\x00\x00\x34\x01" + VERSION + b"n" * 32
CHALLENGE = b"\x00\x00\x00\x20\x02" + b"n" * 32


async def _pair() -> tuple[LinkConnection, LinkConnection]:
    one, other = socket.socketpair()
    return (
        LinkConnection(*await asyncio.open_connection(sock=one)),
        LinkConnection(*await asyncio.open_connection(sock=other)),
    )


def _meet(
    dialler: Credential, whom: Identity, accepter: Credential, *, is_reader: bool = False
) -> tuple[object, object]:
    """Return the outcome of the handshake at both ends."""

    async def both() -> tuple[object, object]:
        here, there = await _pair()

        async def then_drop(part: Awaitable[object], end: LinkConnection) -> object:
            try:
                return await part
            except LinkBroken as broken:
                end.drop()
                return broken

        dialled, admitted = await asyncio.gather(
            then_drop(handshake_as_dialler(here, dialler, whom, is_reader=is_reader), here),
            then_drop(handshake_as_listener(there, accepter), there),
        )
        here.drop()
        there.drop()
        return dialled, admitted

    return asyncio.run(both())


def _hear(words: bytes, part: Callable[[LinkConnection], Awaitable[object]]) -> object:
    """Send these bytes to one end of the handshake and close the connection; return what it raised."""

    async def play() -> object:
        mine, yours = socket.socketpair()
        with mine:
            mine.sendall(words)
            mine.shutdown(socket.SHUT_WR)
            connection = LinkConnection(*await asyncio.open_connection(sock=yours))
            try:
                return await part(connection)
            except LinkBroken as broken:
                return broken
            finally:
                connection.drop()
                await asyncio.sleep(0)  # asyncio closes the socket a turn later

    return asyncio.run(play())


def test_both_ends_of_a_handshake_know_the_identity_of_the_other() -> None:
    dialled, called = _meet(Credential(KEY, A), B, Credential(KEY, B))
    assert isinstance(dialled, tuple)
    session, answered, part_port = dialled
    assert (answered, part_port) == (B, 0)
    assert called == LinkCaller(session, A, is_reader=False)


def test_a_reader_is_admitted_by_any_incarnation_of_its_node() -> None:
    dialled, called = _meet(Credential(KEY, A), Identity("b", ""), Credential(KEY, B), is_reader=True)
    assert isinstance(dialled, tuple)
    assert called == LinkCaller(dialled[0], A, is_reader=True)
    dialled, refused = _meet(Credential(KEY, A), Identity("b", ""), Credential(KEY, C), is_reader=True)
    assert isinstance(refused, LinkBroken)


def test_a_readers_proof_is_no_members() -> None:
    """Not even if the kind of its frame is changed on the way, nor the other way round."""

    async def play(said: FrameKind, role: Role) -> None:
        here, there = await _pair()
        here.send(FrameKind.HELLO, VERSION + b"n" * 32)

        async def pretend() -> None:
            _, challenge = await here.receive(FrameKind.CHALLENGE)
            names = b'[{"node_id":"a","incarnation":"1"},{"node_id":"b","incarnation":"1"}]'
            here.send(said, LinkSession(KEY, b"n" * 32 + challenge).prove(role, names))

        with pytest.raises(ProofRefused):
            await asyncio.gather(handshake_as_listener(there, Credential(KEY, B)), pretend())
        here.drop()
        there.drop()

    asyncio.run(play(FrameKind.PROOF, b"read"))
    asyncio.run(play(FrameKind.READER_PROOF, b"dial"))


def test_a_caller_of_another_node_learns_which_node_answers_and_is_refused() -> None:
    dialled, admitted = _meet(Credential(KEY, A), B, Credential(KEY, C))
    assert isinstance(dialled, tuple)
    assert dialled[1] == C
    assert isinstance(admitted, LinkBroken)


def test_without_the_secret_neither_end_goes_on() -> None:
    dialled, admitted = _meet(Credential(b"a guess", A), B, Credential(KEY, B))
    assert isinstance(admitted, ProofRefused)
    assert str(dialled) == "connection closed"


@pytest.mark.parametrize("is_reflected", [False, True], ids=["made up", "the dialler's own"])
def test_a_listener_that_lets_everybody_in_has_to_prove_itself_all_the_same(*, is_reflected: bool) -> None:
    async def pretend(end: LinkConnection) -> None:
        await end.receive(FrameKind.HELLO)
        end.send(FrameKind.CHALLENGE, b"n" * 32)
        _, proof = await end.receive(FrameKind.PROOF)
        end.send(FrameKind.WELCOME, proof if is_reflected else b"m" * 32 + proof[32:])

    async def play() -> None:
        here, there = await _pair()
        with pytest.raises(ProofRefused):
            await asyncio.gather(handshake_as_dialler(here, Credential(KEY, A), B), pretend(there))
        here.drop()
        there.drop()

    asyncio.run(play())


@settings(deadline=None)
@given(words=st.binary(max_size=300), start=st.sampled_from([b"", HELLO, HELLO + b"\x00\x00\x00\x80\x03"]))
def test_no_words_of_a_stranger_do_more_than_break_his_connection(words: bytes, start: bytes) -> None:
    assert isinstance(_hear(start + words, lambda end: handshake_as_listener(end, Credential(KEY, B))), LinkBroken)


@settings(deadline=None)
@given(words=st.binary(max_size=300), start=st.sampled_from([b"", CHALLENGE, CHALLENGE + b"\x00\x00\x00\x80\x04"]))
def test_no_words_of_a_listener_do_more_than_break_the_connection_to_it(words: bytes, start: bytes) -> None:
    assert isinstance(_hear(start + words, lambda end: handshake_as_dialler(end, Credential(KEY, A), B)), LinkBroken)


@pytest.mark.parametrize(
    ("session", "role", "names"),
    [
        (LinkSession(KEY, b"n" * 64), b"accept", b"names"),
        (LinkSession(KEY, b"n" * 64), b"goodbye", b"names"),
        (LinkSession(KEY, b"n" * 64), b"read", b"names"),
        (LinkSession(KEY, b"m" * 64), b"dial", b"names"),
        (LinkSession(b"a guess", b"n" * 64), b"dial", b"names"),
        (LinkSession(KEY, b"n" * 64), b"dial", b"other"),
    ],
    ids=["accept", "goodbye", "read", "other nonces", "other secret", "other names"],
)
def test_a_proof_holds_for_one_role_one_connection_and_these_names(
    session: LinkSession, role: Role, names: bytes
) -> None:
    proof = LinkSession(KEY, b"n" * 64).prove(b"dial", b"names")
    assert LinkSession(KEY, b"n" * 64).check(b"dial", proof) == b"names"
    with pytest.raises(ProofRefused):
        session.check(role, proof[:32] + names)


@pytest.mark.parametrize("kind", list(FrameKind))
def test_a_frame_that_is_too_long_is_refused_at_its_header(kind: FrameKind) -> None:
    header = b"\xff\xff\xff\xff" + bytes([kind])
    assert str(_hear(header, lambda end: end.receive(kind))) == "something else speaks at its port"


def test_a_heartbeat_carries_the_time_of_the_question_and_of_the_answer() -> None:
    assert read_pong(pong(ping(5.0), 1e9), now=6.0) == (5.0, 1e9)


@pytest.mark.parametrize(
    ("asked", "wall"), [(7.0, 1e9), (math.nan, 1e9), (-math.inf, 1e9), (5.0, math.nan), (5.0, math.inf)]
)
def test_an_answer_to_what_was_not_asked_breaks_the_connection(asked: float, wall: float) -> None:
    with pytest.raises(LinkBroken):
        read_pong(pong(ping(asked), wall), now=6.0)


@pytest.fixture
def told() -> list[tuple[LinkState, str]]:
    return []


@pytest.fixture
def link(told: list[tuple[LinkState, str]]) -> Link:
    """A link that was open until now."""
    peer = Peer(B, "127.0.0.1", 1)
    hooks = LinkCallbacks(lambda _, state, why: told.append((state, why)), lambda *_: None, time.time)
    return Link(peer, Credential(KEY, A), {B}, hooks, heartbeat_s=1.0)


def test_two_refusals_are_enough(
    link: Link, told: list[tuple[LinkState, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    dialled: list[float] = []

    async def refuse(*_: object) -> None:
        dialled.append(time.monotonic())
        raise ConnectionRefusedError

    monkeypatch.setattr(LinkConnection, "dial", refuse)
    monkeypatch.setattr(link_, "_REOPEN_S", 60.0)
    assert asyncio.run(link._open_again("connection closed")) is None
    assert told == [(LinkState.LOST, "connection closed, then refused")]
    assert len(dialled) == 2
    assert dialled[1] - dialled[0] >= 0.05


@pytest.mark.parametrize("stopped_s", [0.31, 0.5])
def test_a_peer_is_not_lost_because_this_process_did_not_run(
    link: Link, told: list[tuple[LinkState, str]], monkeypatch: pytest.MonkeyPatch, stopped_s: float
) -> None:
    attempts = 0

    async def dial() -> str:
        nonlocal attempts
        attempts += 1
        if attempts == 1:
            time.sleep(stopped_s)  # noqa: ASYNC251 - nothing of this process runs meanwhile
            monkeypatch.setattr(link_, "_LAST_ATTEMPT_S", 60.0)
            await asyncio.sleep(10.0)
        return "opened"

    monkeypatch.setattr(link, "_dial", dial)
    assert asyncio.run(link._open_again("connection closed")) == "opened"
    assert told == []
