"""Links between agents: peers that are up, silent or lost, and what a caller without the secret can do."""

from __future__ import annotations

import asyncio
import gc
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import suppress
from itertools import groupby
from pathlib import Path
from typing import Any, Protocol

import pytest
from authority import Authority
from structlog.testing import capture_logs
from waiting import freeze

from agent.core.model import LinkState
from agent.core.records import Identity
from agent.core.saved_states import StateId
from agent.links import dialler
from agent.links.dialler import Peer
from agent.links.frames import LINK_PART_BYTES, FrameKind, LinkTls, in_the_clear
from agent.links.handshake import Credential
from agent.links.listener import Listener
from agent.links.log_server import LogServer
from agent.links.pool import LinkPool
from agent.links.queries import FindLogs, LiveRanks, LogsFound, ReadLog
from agent.links.snapshot_parts import SnapshotPart
from agent.observe.log import InternalErrors
from agent.ports import hold_port
from agent.runtime.agent_certificates import link_tls

UP, SILENT, LOST = LinkState.UP, LinkState.SILENT, LinkState.LOST
HEARTBEAT_S = 2.0
"""A peer is silent after three. Long enough that a busy machine does not make a live peer silent."""
QUICK_S = 0.2
"""Time between heartbeats of an agent whose peers are not up, or may become silent."""
SHARED = "what the agents of a job know"
DEADLINE_S = 60.0
CLEAR = in_the_clear()
TLS = link_tls(None)
"""Shared by all agents of this process; they differ in their identities."""

Wait = Callable[[Callable[[], bool]], None]

PROGRAM = """
import json, subprocess, sys
from agent.runtime.agent_certificates import link_tls
from agent.core.records import Identity
from agent.links.dialler import Peer
from agent.links.pool import LinkPool

def tell(*words):
    print(json.dumps(words), flush=True)

me, secret, heartbeat_s, has_child = json.loads(sys.argv[1])
tls = link_tls(None)
links = LinkPool(
    on_change=lambda who, state, why: tell(who.node_id, state.value),
    on_clock=lambda *_: None,
    on_part=lambda _: None,
    log_files=None,
    live_ranks=None,
    is_loop_alive=lambda: True,
    heartbeat_s=heartbeat_s,
    tls=tls,
)
links.hold(secret, Identity(*me), ())
# Every descriptor that can be inherited is: what a worker's start must not depend on.
child = subprocess.Popen(["sleep", "1000"], close_fds=False, stdout=2) if has_child else None
tell(links.port, child.pid if child else 0, tls.fingerprint)
for line in sys.stdin:
    peers = tuple(Peer(Identity(*who), "127.0.0.1", *where) for who, *where in json.loads(line))
    links.hold(secret, Identity(*me), peers)
links.close()
tell("left")
"""


def no_live_ranks() -> LiveRanks:
    """For a node whose ranks no reader requests."""
    raise AssertionError


class NoLogs:
    """An agent without logs."""

    def find(self, _: FindLogs) -> LogsFound:
        return LogsFound(directory="", logs=())

    def read(self, read: ReadLog, _limit_bytes: int) -> bytes:
        raise FileNotFoundError(read)


class Agent:
    """The links of one agent in this process, and their reports."""

    def __init__(
        self,
        node_id: str,
        incarnation: str = "1",
        shared: str = SHARED,
        heartbeat_s: float = HEARTBEAT_S,
        tls: LinkTls = TLS,
    ) -> None:
        self.tls = tls
        self.me = Identity(node_id, incarnation)
        self.shared = shared
        self.is_loop_alive = True
        self.told: list[tuple[Identity, LinkState, str]] = []
        self.ahead_s = 0.0
        self.clocks: list[tuple[Identity, float, float]] = []
        self.parts: list[SnapshotPart] = []
        """What it was given to keep."""
        self.links = LinkPool(
            on_change=self._tell,
            on_clock=lambda *compared: self.clocks.append(compared),
            on_part=self.parts.append,
            log_files=NoLogs(),
            live_ranks=no_live_ranks,
            is_loop_alive=lambda: self.is_loop_alive,
            heartbeat_s=heartbeat_s,
            wall_clock=lambda: time.time() + self.ahead_s,
            tls=self.tls,
        )

    def peer(self, port: int | None = None) -> Peer:
        return Peer(self.me, "127.0.0.1", port or self.links.port, self.tls.fingerprint)

    def hold(self, *peers: Peer) -> None:
        self.links.hold(self.shared, self.me, peers)

    def states(self, who: Identity) -> list[LinkState]:
        """Each change of the peer's state; repeated reports are dropped."""
        return [state for state, _ in groupby(self.reported_states(who))]

    def reported_states(self, who: Identity) -> list[LinkState]:
        return [state for told, state, _ in list(self.told) if told == who]

    def _tell(self, who: Identity, state: LinkState, why: str) -> None:
        self.told.append((who, state, why))


class Program:
    """Links in a process of its own, which can be killed and stopped."""

    def __init__(self, node_id: str, *, has_child: bool = False) -> None:
        self.me = Identity(node_id, "1")
        order = json.dumps([[node_id, "1"], SHARED, HEARTBEAT_S, has_child])
        self.process = subprocess.Popen(
            [sys.executable, "-c", PROGRAM, order], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self.port, self.child, self.cert = self.read()

    def peer(self) -> Peer:
        return Peer(self.me, "127.0.0.1", self.port, self.cert)

    def read(self) -> list[Any]:
        assert self.process.stdout is not None
        return list(json.loads(self.process.stdout.readline()))

    def hold(self, *peers: Peer) -> None:
        assert self.process.stdin is not None
        told = [[[peer.identity.node_id, peer.identity.incarnation], peer.port, peer.cert] for peer in peers]
        self.process.stdin.write(json.dumps(told) + "\n")
        self.process.stdin.flush()

    def leave(self) -> list[object]:
        """End in order; return what it reported from then on."""
        rest, _ = self.process.communicate(timeout=DEADLINE_S)
        return [json.loads(line) for line in rest.splitlines()]

    def end(self) -> None:
        self.process.kill()
        self.process.communicate()
        if self.child:
            os.kill(self.child, signal.SIGKILL)


class Proxy:
    """What lies between two agents. It counts, records, delays, cuts, and refuses."""

    def __init__(self, target: int) -> None:
        self.target = target
        self.accepted = 0
        self.delays_s = (0.0, 0.0)
        """Bytes sent by the dialling ends, and bytes of the answers."""
        self.said = b""
        """By the dialling ends."""
        self.open: list[socket.socket] = []
        self.swallowing: set[socket.socket] = set()
        self.held = hold_port("127.0.0.1")  # else another program could have it while calls are refused
        self.port: int = self.held.getsockname()[1]
        self.listener = socket.create_server(self.held.getsockname())
        self.start()

    def start(self) -> None:
        self.acceptor = threading.Thread(target=self._accept, args=(self.listener,), daemon=True)
        self.acceptor.start()

    def cut(self) -> None:
        """Close all connections; new ones are accepted."""
        for sock in tuple(self.open):  # not those that are opened because of that
            with suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)

    def swallow(self) -> None:
        """Drop all data on the open connections without closing them."""
        self.swallowing |= {*self.open}

    def refuse(self) -> None:
        """Refuse new connections, and cut the old ones."""
        with suppress(OSError):  # refused already
            self.listener.shutdown(socket.SHUT_RDWR)
        self.acceptor.join()  # also cuts a connection that is being accepted
        self.listener.close()
        self.cut()

    def accept_again(self) -> None:
        self.listener = socket.create_server(self.held.getsockname())
        self.start()

    def inject(self, data: bytes) -> None:
        """Send bytes to the dialling end, as if they came from the other end."""
        self.open[0].sendall(data)

    def _accept(self, listener: socket.socket) -> None:
        with suppress(OSError):
            while True:
                here, _ = listener.accept()
                try:
                    there = socket.create_connection(("127.0.0.1", self.target))
                except ConnectionRefusedError:
                    here.close()
                    continue
                self.open += [here, there]
                self.accepted += 1
                threading.Thread(target=self._pump, args=(here, there, self._record), daemon=True).start()
                threading.Thread(target=self._pump, args=(there, here, self._delay), daemon=True).start()

    def _record(self, data: bytes) -> None:
        self.said += data
        time.sleep(self.delays_s[0])

    def _delay(self, _: bytes) -> None:
        time.sleep(self.delays_s[1])

    def _pump(self, source: socket.socket, sink: socket.socket, look: Callable[[bytes], None]) -> None:
        with suppress(OSError):
            while data := source.recv(4096):
                look(data)
                if source not in self.swallowing:
                    sink.sendall(data)
        with suppress(OSError):
            sink.shutdown(socket.SHUT_RDWR)


class MakeAgent(Protocol):
    def __call__(
        self,
        node_id: str,
        incarnation: str = "1",
        shared: str = SHARED,
        heartbeat_s: float = HEARTBEAT_S,
        tls: LinkTls | None = None,
    ) -> Agent: ...


class MakeProgram(Protocol):
    def __call__(self, node_id: str, *, has_child: bool = False) -> Program: ...


@pytest.fixture(autouse=True)
def _patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who answers late on a busy machine is not lost for that."""
    monkeypatch.setattr(dialler, "_REOPEN_S", DEADLINE_S)


@pytest.fixture
def how() -> LinkTls:
    """How links are encrypted."""
    return TLS


in_clear_text = pytest.mark.parametrize("how", [CLEAR], ids=["clear"])
"""For tests that inspect the bytes on the wire, or send their own."""


@pytest.fixture
def make_agent(how: LinkTls) -> Iterator[MakeAgent]:
    made: list[Agent] = []

    def make(
        node_id: str,
        incarnation: str = "1",
        shared: str = SHARED,
        heartbeat_s: float = HEARTBEAT_S,
        tls: LinkTls | None = None,
    ) -> Agent:
        made.append(Agent(node_id, incarnation, shared, heartbeat_s, tls or how))
        return made[-1]

    yield make
    for agent in made:
        agent.links.close()


@pytest.fixture
def make_program() -> Iterator[MakeProgram]:
    made: list[Program] = []

    def make(node_id: str, *, has_child: bool = False) -> Program:
        made.append(Program(node_id, has_child=has_child))
        return made[-1]

    yield make
    for program in made:
        program.end()


@pytest.fixture
def make_proxy() -> Iterator[Callable[[int], Proxy]]:
    made: list[Proxy] = []

    def make(target: int) -> Proxy:
        made.append(Proxy(target))
        return made[-1]

    yield make
    for proxy in made:
        proxy.refuse()
        for sock in (*proxy.open, proxy.held):
            sock.close()


@pytest.fixture
def a(make_agent: MakeAgent) -> Agent:
    return make_agent("a")


@pytest.fixture
def quick_a(make_agent: MakeAgent) -> Agent:
    return make_agent("a", heartbeat_s=QUICK_S)


@pytest.fixture
def b(make_agent: MakeAgent) -> Agent:
    agent = make_agent("b")
    agent.hold()
    return agent


MakeProxy = Callable[[int], Proxy]


def pass_three_heartbeats(agent: Agent, *peers: Peer, wait_until: Wait) -> None:
    """Wait until a peer that does not exist is silent, for three heartbeats: other changes are reported by then."""
    ghost = Identity(f"ghost-{len(agent.told)}", "1")
    with hold_port("127.0.0.1") as refusing:
        agent.hold(*peers, Peer(ghost, *refusing.getsockname()))
        wait_until(lambda: agent.states(ghost) == [SILENT])
    agent.hold(*peers)


# Up, silent, lost


def test_two_agents_that_hold_each_other_are_up_both_ways(a: Agent, b: Agent, wait_until: Wait) -> None:
    a.hold(b.peer())
    b.hold(a.peer())
    wait_until(lambda: a.states(b.me) == [UP] and b.states(a.me) == [UP])


def test_a_peer_is_reached_over_ipv6_too(a: Agent, b: Agent, wait_until: Wait) -> None:
    if not socket.has_dualstack_ipv6():
        pytest.skip("this machine has no IPv6")
    a.hold(Peer(b.me, "::1", b.links.port, TLS.fingerprint))
    wait_until(lambda: a.states(b.me) == [UP])


@pytest.mark.parametrize("has_child", [False, True], ids=["alone", "with a child that lives on"])
def test_a_killed_agent_is_lost_at_once(
    a: Agent, make_program: MakeProgram, wait_until: Wait, *, has_child: bool
) -> None:
    victim = make_program("victim", has_child=has_child)
    a.hold(victim.peer())
    wait_until(lambda: a.states(victim.me) == [UP])
    victim.process.kill()
    wait_until(lambda: a.states(victim.me) == [UP, LOST])  # long before it would be silent
    assert a.told[-1][2] in {"connection closed, then refused", "connection reset, then refused"}
    if has_child:
        os.kill(victim.child, 0)  # it did live on


def test_a_stopped_agent_is_silent_and_up_again_when_it_goes_on(
    a: Agent, make_program: MakeProgram, wait_until: Wait
) -> None:
    victim = make_program("victim")
    a.hold(victim.peer())
    wait_until(lambda: a.states(victim.me) == [UP])
    freeze(victim.process.pid)
    wait_until(lambda: a.states(victim.me) == [UP, SILENT])
    pass_three_heartbeats(a, victim.peer(), wait_until=wait_until)
    victim.process.send_signal(signal.SIGCONT)
    wait_until(lambda: len(a.states(victim.me)) > 2)
    assert a.states(victim.me) == [UP, SILENT, UP]


def test_an_agent_blames_nobody_for_its_own_pause(b: Agent, make_program: MakeProgram, wait_until: Wait) -> None:
    sleeper = make_program("sleeper")
    sleeper.hold(b.peer())
    assert list(sleeper.read()) == ["b", "up"]
    b.hold(sleeper.peer())
    wait_until(lambda: b.states(sleeper.me) == [UP])
    freeze(sleeper.process.pid)
    wait_until(lambda: b.states(sleeper.me) == [UP, SILENT])
    pass_three_heartbeats(b, sleeper.peer(), wait_until=wait_until)
    sleeper.process.send_signal(signal.SIGCONT)
    wait_until(lambda: b.states(sleeper.me) == [UP, SILENT, UP])
    pass_three_heartbeats(b, sleeper.peer(), wait_until=wait_until)
    assert sleeper.leave() == [["left"]]


def test_a_hung_agent_is_silent(a: Agent, b: Agent, wait_until: Wait) -> None:
    a.hold(b.peer())
    wait_until(lambda: a.states(b.me) == [UP])
    b.is_loop_alive = False
    wait_until(lambda: a.states(b.me) == [UP, SILENT])
    b.is_loop_alive = True
    wait_until(lambda: a.states(b.me) == [UP, SILENT, UP])


def test_a_connection_that_is_only_cut_is_opened_again(
    a: Agent, b: Agent, make_proxy: MakeProxy, wait_until: Wait
) -> None:
    proxy = make_proxy(b.links.port)
    a.hold(b.peer(proxy.port))
    wait_until(lambda: a.states(b.me) == [UP])
    proxy.cut()
    wait_until(lambda: proxy.accepted == 2)
    b.is_loop_alive = False
    wait_until(lambda: a.states(b.me) == [UP, SILENT])
    b.is_loop_alive = True
    wait_until(lambda: a.states(b.me) == [UP, SILENT, UP])


def test_a_silent_peer_is_dialled_again_because_its_connection_may_never_recover(
    a: Agent, b: Agent, make_proxy: MakeProxy, wait_until: Wait
) -> None:
    proxy = make_proxy(b.links.port)
    a.hold(b.peer(proxy.port))
    wait_until(lambda: a.states(b.me) == [UP])
    proxy.swallow()
    proxy.delays_s = (0.0, 0.5)  # the end of the old connection is received before the new one's welcome
    wait_until(lambda: a.states(b.me) == [UP, SILENT])
    silent_at = time.monotonic()
    wait_until(lambda: a.states(b.me) == [UP, SILENT, UP])
    assert time.monotonic() - silent_at < 2.5 * HEARTBEAT_S  # one to notice, no second silence
    pass_three_heartbeats(a, b.peer(proxy.port), wait_until=wait_until)
    assert a.states(b.me) == [UP, SILENT, UP]
    assert proxy.accepted == 2


def test_a_peer_that_refuses_is_lost_and_is_up_when_it_is_back(
    a: Agent, b: Agent, make_proxy: MakeProxy, wait_until: Wait
) -> None:
    proxy = make_proxy(b.links.port)
    a.hold(b.peer(proxy.port))
    wait_until(lambda: a.states(b.me) == [UP])
    proxy.refuse()
    wait_until(lambda: a.states(b.me) == [UP, LOST])
    pass_three_heartbeats(a, b.peer(proxy.port), wait_until=wait_until)
    proxy.accept_again()
    wait_until(lambda: a.states(b.me) == [UP, LOST, UP])


def test_a_peer_whose_port_takes_calls_but_does_not_answer_is_lost(
    a: Agent, b: Agent, make_proxy: MakeProxy, wait_until: Wait, monkeypatch: pytest.MonkeyPatch
) -> None:
    proxy = make_proxy(b.links.port)
    a.hold(b.peer(proxy.port))
    wait_until(lambda: a.states(b.me) == [UP])
    with socket.create_server(("127.0.0.1", 0)) as mute:
        proxy.target = mute.getsockname()[1]
        monkeypatch.setattr(dialler, "_REOPEN_S", 0.3)
        proxy.cut()
        wait_until(lambda: a.states(b.me) == [UP, LOST])
    assert a.told[-1][2] == "connection closed, then no answer"


def test_another_incarnation_at_the_port_means_that_the_peer_is_lost(
    a: Agent, b: Agent, make_agent: MakeAgent, make_proxy: MakeProxy, wait_until: Wait
) -> None:
    successor = make_agent("b", incarnation="2")
    successor.hold()
    proxy = make_proxy(b.links.port)
    a.hold(b.peer(proxy.port))
    wait_until(lambda: a.states(b.me) == [UP])
    proxy.target = successor.links.port
    proxy.cut()
    wait_until(lambda: a.states(b.me) == [UP, LOST])
    assert a.told[-1][2] == "connection closed, then another agent answers there"
    a.hold(successor.peer(proxy.port))
    wait_until(lambda: a.states(successor.me) == [UP])


def test_a_peer_that_was_never_reached_is_silent_and_not_lost(quick_a: Agent, wait_until: Wait) -> None:
    with hold_port("127.0.0.1") as refusing:
        ghost = Peer(Identity("ghost", "1"), *refusing.getsockname())
        quick_a.hold(ghost)
        wait_until(lambda: quick_a.states(ghost.identity) == [SILENT])
        pass_three_heartbeats(quick_a, ghost, wait_until=wait_until)
    assert quick_a.told[0][1:] == (SILENT, "no answer to 3 heartbeats: refused")
    assert quick_a.states(ghost.identity) == [SILENT]


def test_a_peer_that_died_while_it_was_not_held_is_lost_when_it_is_held_again(
    a: Agent, b: Agent, wait_until: Wait
) -> None:
    a.hold(b.peer())
    wait_until(lambda: a.states(b.me) == [UP])
    a.hold()
    wait_until(lambda: _callers(b) == 0)
    b.links.close(goodbye=False)
    a.hold(b.peer())
    wait_until(lambda: a.states(b.me) == [UP, LOST])


# Clocks

HOUR_S = 3600.0


def test_agents_an_hour_apart_know_it_and_by_how_much_they_may_be_wrong(a: Agent, b: Agent, wait_until: Wait) -> None:
    b.ahead_s = HOUR_S
    a.hold(b.peer())
    b.hold(a.peer())
    wait_until(lambda: min(len(a.clocks), len(b.clocks)) > 0)
    for agent, other, ahead_s in ((a, b, HOUR_S), (b, a, -HOUR_S)):
        who, found_s, error_s = agent.clocks[0]
        assert who == other.me
        assert abs(found_s - ahead_s) <= error_s < HOUR_S / 10


@pytest.mark.parametrize("jumps", ["theirs", "ours"])
def test_a_clock_that_jumps_while_linked_is_noticed_and_the_link_stays_up(
    a: Agent, b: Agent, wait_until: Wait, jumps: str
) -> None:
    a.hold(b.peer())
    wait_until(lambda: a.clocks != [])
    jumped = a if jumps == "ours" else b
    jumped.ahead_s = HOUR_S
    ahead_s = -HOUR_S if jumps == "ours" else HOUR_S
    wait_until(lambda: abs(a.clocks[-1][1] - ahead_s) <= a.clocks[-1][2] < 0.2)
    assert a.states(b.me) == [UP]


@pytest.mark.parametrize("delays_s", [(0.1, 0.0), (0.0, 0.1)], ids=["there", "back"])
def test_a_slow_way_gives_a_large_error_not_a_wrong_clock(
    a: Agent, b: Agent, make_proxy: MakeProxy, wait_until: Wait, delays_s: tuple[float, float]
) -> None:
    proxy = make_proxy(b.links.port)
    proxy.delays_s = delays_s
    b.ahead_s = HOUR_S
    a.hold(b.peer(proxy.port))
    wait_until(lambda: a.clocks != [])
    _, found_s, error_s = a.clocks[0]
    assert error_s >= 0.1
    assert abs(found_s - HOUR_S) <= error_s


# Leaving, holding, dropping


def test_a_peer_that_leaves_in_order_is_not_reported(a: Agent, make_program: MakeProgram, wait_until: Wait) -> None:
    leaver = make_program("leaver")
    a.hold(leaver.peer())
    wait_until(lambda: a.states(leaver.me) == [UP])
    assert leaver.leave() == [["left"]]
    pass_three_heartbeats(a, leaver.peer(), wait_until=wait_until)
    assert a.states(leaver.me) == [UP]


def test_a_peer_that_closes_without_goodbye_is_lost(a: Agent, b: Agent, wait_until: Wait) -> None:
    a.hold(b.peer())
    wait_until(lambda: a.states(b.me) == [UP])
    b.links.close(goodbye=False)
    wait_until(lambda: a.states(b.me) == [UP, LOST])


def test_an_agent_that_becomes_another_incarnation_says_goodbye(a: Agent, b: Agent, wait_until: Wait) -> None:
    a.hold(b.peer())
    wait_until(lambda: a.states(b.me) == [UP])
    b.links.hold(SHARED, Identity("b", "2"), ())
    wait_until(lambda: _callers(b) == 0)
    pass_three_heartbeats(a, b.peer(), wait_until=wait_until)
    assert a.states(b.me) == [UP]


def test_holding_the_same_peers_again_leaves_their_links_alone(
    a: Agent, b: Agent, make_agent: MakeAgent, make_proxy: MakeProxy, wait_until: Wait
) -> None:
    proxy, c = make_proxy(b.links.port), make_agent("c")
    c.hold()
    a.hold(b.peer(proxy.port))
    wait_until(lambda: a.states(b.me) == [UP])
    a.hold(b.peer(proxy.port), c.peer())
    wait_until(lambda: a.states(c.me) == [UP])
    a.hold(b.peer(proxy.port))
    wait_until(lambda: _callers(c) == 0)
    assert (proxy.accepted, a.reported_states(b.me)) == (1, [UP] * 3), "told again with each order"


def test_a_peer_whose_removal_was_superseded_is_notified_again(
    a: Agent, b: Agent, make_proxy: MakeProxy, wait_until: Wait
) -> None:
    """Calls in quick succession are merged, although the caller dropped the peer in between."""
    proxy = make_proxy(b.links.port)
    a.hold(b.peer(proxy.port))
    wait_until(lambda: a.states(b.me) == [UP])
    is_ordered = threading.Event()
    a.links._loop.call_soon_threadsafe(is_ordered.wait)
    a.hold()
    a.hold(b.peer(proxy.port))
    is_ordered.set()
    wait_until(lambda: a.reported_states(b.me) == [UP, UP])
    assert proxy.accepted == 1


def test_a_peer_that_has_left_is_not_notified_again(
    a: Agent, b: Agent, make_agent: MakeAgent, wait_until: Wait
) -> None:
    c = make_agent("c")
    c.hold()
    a.hold(b.peer())
    wait_until(lambda: a.states(b.me) == [UP])
    b.links.close()
    wait_until(lambda: all(task.done() for _, task in a.links._links.values()))
    a.hold(b.peer(), c.peer())
    wait_until(lambda: a.states(c.me) == [UP])
    assert a.reported_states(b.me) == [UP]


def test_many_quick_changes_leave_nothing_behind(a: Agent, b: Agent, make_agent: MakeAgent, wait_until: Wait) -> None:
    c = make_agent("c")
    c.hold()
    with hold_port("127.0.0.1") as refusing:
        ghost = Peer(Identity("ghost", "1"), *refusing.getsockname())
    a.hold()
    descriptors, threads = _descriptors(), set(threading.enumerate())
    for number in range(100):
        a.hold(*[(b.peer(), c.peer()), (c.peer(),), (ghost,), ()][number % 4])
        if number % 10 == 0:
            wait_until(lambda: not a.links._has_request.is_set())  # now and then a change is carried out to its end
    a.hold(b.peer())
    wait_until(lambda: UP in a.states(b.me) and _callers(b) == 1 and _callers(c) == 0)
    a.hold()
    wait_until(lambda: _descriptors() <= descriptors)
    wait_until(lambda: set(threading.enumerate()) <= threads)
    wait_until(lambda: _tasks(a) == _tasks(c))


def test_closing_twice_and_holding_after_it_do_no_harm(a: Agent, b: Agent) -> None:
    a.links.close()
    a.hold(b.peer())
    a.links.close()
    assert a.told == []


def test_nobody_is_answered_before_the_secret_is_known(a: Agent, b: Agent, wait_until: Wait) -> None:
    b.hold(a.peer())
    wait_until(lambda: b.states(a.me) == [SILENT])
    a.hold()
    wait_until(lambda: b.states(a.me) == [SILENT, UP])


def test_an_unforeseen_error_ends_the_thread_loudly(
    b: Agent, monkeypatch: pytest.MonkeyPatch, wait_until: Wait
) -> None:
    failed: list[threading.ExceptHookArgs] = []
    monkeypatch.setattr(threading, "excepthook", failed.append)

    def raise_error(*_: object) -> None:
        raise ZeroDivisionError

    links = LinkPool(
        on_change=raise_error,
        on_clock=lambda *_: None,
        on_part=lambda _: None,
        log_files=NoLogs(),
        live_ranks=no_live_ranks,
        is_loop_alive=lambda: True,
        heartbeat_s=HEARTBEAT_S,
    )
    links.hold(SHARED, Identity("a", "1"), (b.peer(),))
    wait_until(lambda: failed != [])
    links.close()
    assert failed[0].thread is not None
    assert failed[0].thread.name == "links"
    failed.clear()


# Parts of snapshots


def part(step: int, rank: int = 0, size_bytes: int = 100) -> SnapshotPart:
    copy = StateId(run="r", group=1, step=step)
    return SnapshotPart(copy=copy, world_size=4, rank=rank, checksum=2**64 - step, data=bytes([step]) * size_bytes)


def test_every_peer_is_given_each_part(a: Agent, b: Agent, make_agent: MakeAgent, wait_until: Wait) -> None:
    c = make_agent("c")
    c.hold()
    a.hold(b.peer(), c.peer())
    wait_until(lambda: a.states(b.me) == [UP] and a.states(c.me) == [UP])
    for step in range(1, 6):
        a.links.send_part(part(step))
        wait_until(lambda step=step: b.parts[-1:] == c.parts[-1:] == [part(step)])
    a.links.send_part(part(6, size_bytes=LINK_PART_BYTES))
    wait_until(lambda: b.parts[-1:] == c.parts[-1:] == [part(6, size_bytes=LINK_PART_BYTES)])
    assert [each.copy.step for each in b.parts] == [1, 2, 3, 4, 5, 6]


def test_a_peer_that_is_reached_later_is_given_the_newest_two_of_each_rank(
    quick_a: Agent, b: Agent, make_proxy: MakeProxy, wait_until: Wait
) -> None:
    a = quick_a
    proxy = make_proxy(b.links.port)
    proxy.refuse()
    a.hold(b.peer(proxy.port))
    wait_until(lambda: a.states(b.me) == [SILENT])
    for step in (1, 2, 3, 4):
        for rank in (0, 1):
            a.links.send_part(part(step, rank))
    proxy.accept_again()
    wait_until(lambda: len(b.parts) == 4)
    pass_three_heartbeats(a, b.peer(proxy.port), wait_until=wait_until)
    assert sorted((each.copy.step, each.rank) for each in b.parts) == [(3, 0), (3, 1), (4, 0), (4, 1)]


def test_a_part_that_was_cut_off_is_handed_over_again(
    a: Agent, b: Agent, make_proxy: MakeProxy, wait_until: Wait
) -> None:
    proxy = make_proxy(b.links.port)
    a.hold(b.peer(proxy.port))
    wait_until(lambda: a.states(b.me) == [UP])
    proxy.delays_s = (0.05, 0.0)  # 256 chunks: this takes seconds
    before = len(proxy.said)
    a.links.send_part(part(7, size_bytes=LINK_PART_BYTES))
    wait_until(lambda: len(proxy.said) > before + 10_000)
    proxy.delays_s = (0.0, 0.0)
    proxy.cut()
    wait_until(lambda: b.parts == [part(7, size_bytes=LINK_PART_BYTES)])
    assert proxy.accepted == 2


def test_the_agent_is_notified_when_all_peers_have_the_parts(
    a: Agent, b: Agent, make_agent: MakeAgent, make_proxy: MakeProxy, wait_until: Wait
) -> None:
    c, arrived = make_agent("c"), list[tuple[list[SnapshotPart], list[SnapshotPart]]]()
    c.hold()
    proxy = make_proxy(c.links.port)
    a.hold(b.peer(), c.peer(proxy.port))
    wait_until(lambda: a.states(b.me) == [UP] and a.states(c.me) == [UP])
    proxy.delays_s = (0.01, 0.0)
    a.links.send_part(part(1, size_bytes=LINK_PART_BYTES // 4))
    a.links.when_delivered(lambda: arrived.append((b.parts[:], c.parts[:])))
    wait_until(lambda: len(arrived) == 1)
    assert arrived == [([part(1, size_bytes=LINK_PART_BYTES // 4)],) * 2]
    a.links.when_delivered(lambda: arrived.append(([], [])))
    wait_until(lambda: len(arrived) == 2)


def test_a_part_is_safe_once_one_peer_has_stored_it(
    a: Agent, b: Agent, make_agent: MakeAgent, make_proxy: MakeProxy, wait_until: Wait
) -> None:
    c, stored = make_agent("c"), list[tuple[int, int]]()
    c.hold()
    slow, slower = make_proxy(b.links.port), make_proxy(c.links.port)
    a.hold(b.peer(slow.port), c.peer(slower.port))
    wait_until(lambda: a.states(b.me) == [UP] and a.states(c.me) == [UP])
    slow.delays_s, slower.delays_s = (0.001, 0.0), (0.05, 0.0)
    a.links.send_part(part(1, size_bytes=LINK_PART_BYTES // 4), lambda: stored.append((len(b.parts), len(c.parts))))
    wait_until(lambda: stored == [(1, 0)])


def test_no_rank_waits_for_peers_of_which_none_answers(
    quick_a: Agent, b: Agent, make_proxy: MakeProxy, wait_until: Wait
) -> None:
    a, ended = quick_a, list[list[LinkState]]()
    proxy = make_proxy(b.links.port)
    proxy.refuse()
    a.hold(b.peer(proxy.port))
    wait_until(lambda: a.links._links != {})
    a.links.send_part(part(1), lambda: ended.append(a.states(b.me)))
    wait_until(lambda: ended == [[SILENT]])
    a.links.send_part(part(2), lambda: ended.append([]))
    wait_until(lambda: ended == [[SILENT], []])


@pytest.mark.parametrize("has_left", [True, False])
def test_no_rank_waits_for_a_peer_that_is_no_neighbour_any_more(
    a: Agent, make_agent: MakeAgent, make_proxy: MakeProxy, wait_until: Wait, *, has_left: bool
) -> None:
    c, ended = make_agent("c"), threading.Event()
    c.hold()
    proxy = make_proxy(c.links.port)
    a.hold(c.peer(proxy.port))
    wait_until(lambda: a.states(c.me) == [UP])
    proxy.delays_s = (0.05, 0.0)
    a.links.send_part(part(1, size_bytes=LINK_PART_BYTES), ended.set)
    assert not ended.wait(HEARTBEAT_S)
    if has_left:
        c.links.close()
    else:
        a.hold()
    wait_until(ended.is_set)
    assert c.parts == []


def test_a_node_without_peers_has_nothing_to_wait_for(a: Agent, wait_until: Wait) -> None:
    a.hold()
    arrived = threading.Event()
    a.links.when_delivered(arrived.set)
    wait_until(arrived.is_set)


def test_heartbeats_go_between_parts(a: Agent, b: Agent, make_proxy: MakeProxy, wait_until: Wait) -> None:
    """Of which one is always on its way."""
    proxy = make_proxy(b.links.port)
    proxy.delays_s = (0.01, 0.0)  # more than half a second for each part
    a.hold(b.peer(proxy.port))
    wait_until(lambda: a.states(b.me) == [UP])
    stop_at = time.monotonic() + 5 * HEARTBEAT_S
    step = 0
    while time.monotonic() < stop_at:
        step += 1
        a.links.send_part(part(step % 256, size_bytes=LINK_PART_BYTES // 4))
        time.sleep(0.01)  # faster than parts are delivered
    assert a.states(b.me) == [UP]
    assert len(b.parts) > 3


def test_a_peer_that_takes_nothing_costs_no_more_than_the_newest(
    a: Agent, make_program: MakeProgram, wait_until: Wait
) -> None:
    stopped = make_program("stopped")
    a.hold(stopped.peer())
    wait_until(lambda: a.states(stopped.me) == [UP])
    freeze(stopped.process.pid)
    for step in range(1, 100):
        a.links.send_part(part(step, size_bytes=LINK_PART_BYTES))
    wait_until(lambda: a.states(stopped.me) == [UP, SILENT])
    (held, _), *_ = a.links._links.values()
    assert [each.copy.step for each in held._outbox._pending[0]] == [98, 99]
    assert held._current is not None
    assert held._current._writer.transport.get_write_buffer_size() < LINK_PART_BYTES + 4096


# Without the secret


def test_an_agent_with_another_secret_is_refused_and_reported_once(
    b: Agent, make_agent: MakeAgent, make_proxy: MakeProxy, wait_until: Wait
) -> None:
    intruder, proxy = make_agent("a", shared="a guess", heartbeat_s=QUICK_S), make_proxy(b.links.port)
    with capture_logs() as lines:
        intruder.hold(b.peer(proxy.port))
        wait_until(lambda: proxy.accepted >= 3)
    assert UP not in intruder.states(b.me)
    assert LOST not in intruder.states(b.me)
    assert [line["event"] for line in lines] == ["a caller at the agents' port does not know this job's secret"]


def test_a_listener_with_another_secret_is_not_taken_for_the_peer(
    quick_a: Agent, make_agent: MakeAgent, wait_until: Wait
) -> None:
    impostor = make_agent("b", shared="a guess")
    impostor.hold()
    quick_a.hold(impostor.peer())
    wait_until(lambda: quick_a.states(impostor.me) == [SILENT])


OVERSIZE = b"\x00\x00\xff\xff\x01" + b"x" * 65535
UNKNOWN = b"\x00\x00\x00\x00\x63"
TOO_SOON = b"\x00\x00\x00\x00\x05"
GARBAGE = b"GET / HTTP/1.1\r\nHost: somewhere\r\n\r\n"


@in_clear_text
@pytest.mark.parametrize("words", [OVERSIZE, UNKNOWN, TOO_SOON, GARBAGE], ids=["oversize", "unknown", "ping", "http"])
def test_a_caller_with_another_protocol_is_disconnected_without_an_answer(
    a: Agent, b: Agent, words: bytes, wait_until: Wait
) -> None:
    a.hold(b.peer())
    wait_until(lambda: a.states(b.me) == [UP])
    assert _answers_to(b, words) == b""
    pass_three_heartbeats(a, b.peer(), wait_until=wait_until)
    assert a.states(b.me) == [UP]


async def _close_while_somebody_calls(turns: int) -> None:
    """Call, and close after so many turns of the loop: before, between and after the steps of accepting."""
    listener = socket.create_server(("127.0.0.1", 0))
    async with asyncio.TaskGroup() as tasks:
        log_server = LogServer(NoLogs(), no_live_ranks, InternalErrors("nothing"))
        accepting = Listener(
            listener,
            tasks,
            log_server,
            is_loop_alive=lambda: True,
            wall_clock=time.time,
            on_part=lambda _: None,
            tls=in_the_clear(),
        )
        await accepting.answer_as(Credential(b"secret", Identity("b", "1")))
        with socket.create_connection(listener.getsockname()) as caller:
            for _ in range(turns):
                await asyncio.sleep(0)
            await accepting.close(goodbye=False)
            caller.setblocking(False)
            async with asyncio.timeout(DEADLINE_S):
                with suppress(ConnectionResetError):
                    assert await asyncio.get_running_loop().sock_recv(caller, 1) == b""


@pytest.mark.parametrize("turns", range(5))
def test_a_caller_is_disconnected_while_the_listener_closes(turns: int) -> None:
    with warnings.catch_warnings(record=True, action="always") as warned:
        asyncio.run(_close_while_somebody_calls(turns))
        gc.collect()
    assert [str(each.message) for each in warned] == []


def test_many_silent_connections_keep_no_peer_out_and_are_closed(
    a: Agent, b: Agent, make_agent: MakeAgent, wait_until: Wait
) -> None:
    a.hold(b.peer())
    wait_until(lambda: a.states(b.me) == [UP])
    crowd = [socket.create_connection(("127.0.0.1", b.links.port)) for _ in range(200)]
    try:
        late = make_agent("late")
        late.hold(b.peer())
        wait_until(lambda: late.states(b.me) == [UP])
        assert _callers(b) <= 2 + 64
        for sock in crowd:
            sock.settimeout(DEADLINE_S)
            assert sock.recv(1) == b""
        wait_until(lambda: _callers(b) == 2)
        assert a.states(b.me) == [UP]
    finally:
        for sock in crowd:
            sock.close()


@in_clear_text
def test_a_recorded_handshake_opens_nothing(a: Agent, b: Agent, make_proxy: MakeProxy, wait_until: Wait) -> None:
    proxy = make_proxy(b.links.port)
    a.hold(b.peer(proxy.port))
    wait_until(lambda: a.states(b.me) == [UP])
    answer = _answers_to(b, proxy.said)
    assert answer[4] == FrameKind.CHALLENGE
    assert len(answer) == 5 + 32, "something was said after the challenge"


@in_clear_text
def test_an_agents_own_proof_is_of_no_use_against_it(a: Agent, make_proxy: MakeProxy, wait_until: Wait) -> None:
    a.hold()
    mirror = make_proxy(a.links.port)
    victim = Peer(Identity("b", "1"), "127.0.0.1", mirror.port)
    a.hold(victim)
    wait_until(lambda: a.states(victim.identity) == [SILENT])
    assert mirror.accepted >= 2
    assert a.told[-1][2] == "no answer to 3 heartbeats: connection closed"


@in_clear_text
def test_an_echo_is_not_an_answer(quick_a: Agent, wait_until: Wait) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        threading.Thread(target=_echo, args=(listener,), daemon=True).start()
        peer = Peer(Identity("b", "1"), "127.0.0.1", listener.getsockname()[1])
        quick_a.hold(peer)
        wait_until(lambda: quick_a.states(peer.identity) == [SILENT])
        quick_a.hold()
        listener.shutdown(socket.SHUT_RDWR)


@in_clear_text
def test_a_goodbye_that_the_peer_did_not_say_is_none(
    a: Agent, b: Agent, make_proxy: MakeProxy, wait_until: Wait
) -> None:
    proxy = make_proxy(b.links.port)
    a.hold(b.peer(proxy.port))
    wait_until(lambda: a.states(b.me) == [UP])
    proxy.inject(b"\x00\x00\x00\x20\x07" + b"m" * 32)
    wait_until(lambda: proxy.accepted == 2)
    proxy.refuse()
    wait_until(lambda: a.states(b.me) == [UP, LOST])


# Encrypted


def test_nothing_that_crosses_the_wire_can_be_read(a: Agent, b: Agent, make_proxy: MakeProxy, wait_until: Wait) -> None:
    proxy = make_proxy(b.links.port)
    a.hold(b.peer(proxy.port))
    wait_until(lambda: a.states(b.me) == [UP])
    a.links.send_part(part(7, size_bytes=LINK_PART_BYTES // 2))
    wait_until(lambda: len(b.parts) == 1)
    assert b.parts == [part(7, size_bytes=LINK_PART_BYTES // 2)]
    for plain in (b"elastic-agent link", b"node_id", bytes([7]) * 16):
        assert plain not in proxy.said


def test_a_node_with_another_certificate_is_not_taken_for_the_peer(
    quick_a: Agent, make_agent: MakeAgent, wait_until: Wait
) -> None:
    """Even if it knows the secret: a man in the middle could have obtained the proof from the peer itself."""
    impostor = make_agent("b", tls=link_tls(None))
    impostor.hold()
    quick_a.hold(Peer(impostor.me, "127.0.0.1", impostor.links.port, TLS.fingerprint))
    wait_until(lambda: quick_a.states(impostor.me) == [SILENT])
    assert quick_a.told[-1][2].endswith("it shows another certificate than its record in etcd names")


@pytest.mark.parametrize("words", [OVERSIZE, GARBAGE], ids=["oversize", "http"])
def test_a_client_without_tls_is_disconnected(a: Agent, b: Agent, words: bytes, wait_until: Wait) -> None:
    a.hold(b.peer())
    wait_until(lambda: a.states(b.me) == [UP])
    alert = b"\x15\x03"
    assert _answers_to(b, words)[:2] in {b"", alert}
    assert a.states(b.me) == [UP]


def test_where_an_authority_is_given_agents_must_have_a_certificate_of_it(
    make_agent: MakeAgent, tmp_path: Path, wait_until: Wait
) -> None:
    authority = Authority(tmp_path)
    a, b = (make_agent(name, heartbeat_s=QUICK_S, tls=link_tls(authority.files(name, name))) for name in "ab")
    other = make_agent("c", heartbeat_s=QUICK_S)
    with capture_logs() as lines:
        other.hold(a.peer())
        a.hold(b.peer(), other.peer())
        b.hold(a.peer())
        wait_until(lambda: UP in a.states(b.me) and UP in b.states(a.me))
        wait_until(lambda: SILENT in a.states(other.me) and SILENT in other.states(a.me))
    assert UP not in a.states(other.me) + other.states(a.me)
    why = next(why for who, _, why in a.told if who == other.me)
    assert re.search("its certificate is not accepted: self.signed certificate", why)
    assert [line["event"] for line in lines] == ["an agent without a certificate called; give it --tls_cert too"]


def test_an_agent_that_encrypts_is_linked_with_one_that_cannot(
    a: Agent, make_agent: MakeAgent, wait_until: Wait
) -> None:
    plain = make_agent("b", tls=CLEAR)
    plain.hold(a.peer())
    a.hold(plain.peer())
    wait_until(lambda: a.states(plain.me) == [UP] and plain.states(a.me) == [UP])


def _tasks(agent: Agent, what: str = "") -> int:
    """How many tasks run on an agent's links thread."""
    return sum(what in str(task.get_coro()) for task in asyncio.all_tasks(agent.links._loop))


def _callers(agent: Agent) -> int:
    """How many are connected to an agent's port."""
    return _tasks(agent, "Listener._receive")


def _descriptors() -> set[str]:
    """What this process has open: each socket has a name of its own."""
    found = set()
    for descriptor in Path("/proc/self/fd").iterdir():
        with suppress(OSError):  # closed meanwhile
            found.add(str(descriptor.readlink()))
    return found


def _answers_to(agent: Agent, words: bytes) -> bytes:
    """Send bytes to an agent's port; return everything received until it closes the connection."""
    received = b""
    with socket.create_connection(("127.0.0.1", agent.links.port), timeout=DEADLINE_S) as sock, suppress(OSError):
        sock.sendall(words)
        while data := sock.recv(4096):
            received += data
    return received


def _echo(listener: socket.socket) -> None:
    with suppress(OSError):
        while True:
            sock, _ = listener.accept()
            with sock:
                while data := sock.recv(4096):
                    sock.sendall(data)
