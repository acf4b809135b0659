"""Strangers crowd the ports at which an agent answers others: the training goes on, and losses are noticed."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from threading import Event, Thread

import psutil
import pytest
from integration.conftest import PATIENCE_S, Job

from agent.rehearse.cluster import LocalNode, read_trace, wait_for

_CALLERS = 4
_MUTE = 200
_WORDS = (b"GET / HTTP/1.1\r\n\r\n", b"\0\0\0\x30\x01elastic-agent link 4", os.urandom(4096))


def ports_of(node: LocalNode) -> tuple[int, int]:
    """Where its agent is called by others: for links, and for large parts of snapshots."""
    open_ports = psutil.Process(node.process.pid).net_connections("tcp")
    links, parts = {int(each.laddr.port) for each in open_ports if each.status == psutil.CONN_LISTEN}
    return links, parts


@contextmanager
def crowd(ports: tuple[int, int]) -> Iterator[list[int]]:
    """Some hundred that say nothing, and some that call and say something as fast as they can. Gives their calls."""
    is_over, calls = Event(), [0] * _CALLERS

    def port_for(place: int) -> int:
        return ports[place % len(ports)]

    def call(place: int) -> None:
        while not is_over.is_set():
            with suppress(OSError), socket.create_connection(("127.0.0.1", port_for(place)), timeout=1.0) as caller:
                caller.sendall(_WORDS[calls[place] % len(_WORDS)])
                calls[place] += 1

    callers = [Thread(target=call, args=(place,)) for place in range(_CALLERS)]
    with ExitStack() as mute:
        for place in range(_MUTE):
            mute.enter_context(socket.create_connection(("127.0.0.1", port_for(place)), timeout=PATIENCE_S))
        for each in callers:
            each.start()
        try:
            yield calls
        finally:
            is_over.set()
            for each in callers:
                each.join()


@pytest.mark.long("contract/test_links.py: who speaks otherwise is cut off")
def test_a_crowd_of_strangers_leaves_the_training_alone(job: Callable[..., Job]) -> None:
    running = job()
    running.epochs = 50_000
    for name in "ab":
        running.join(name, "1:3")
    running.wait_for_step(5, world=2)
    with crowd(ports_of(running.nodes["a"])) as calls:
        first = read_trace(running.trace)[-1].step
        until = time.monotonic() + 5.0
        wait_for(lambda: time.monotonic() > until and min(calls) > 20, PATIENCE_S, f"enough calls: {calls}")
        running.wait_for_step(first + 20)
        assert running.status()["group"] == 1
        running.nodes["b"].kill()
        running.wait_for_step(first + 40, after_group=1, world=1)
    told = running.nodes["a"].text()
    assert told.count("does not know this job's secret") <= 1, "nobody fills the log"
