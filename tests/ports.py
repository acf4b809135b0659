"""Ports for what starts later than it is told which one to take: free ones, or ones that are held for it."""

from __future__ import annotations

import random
import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress

from agent.ports import hold_port

_PORTS = range(10_240, 32_768)
"""Below those that the system gives to connections: until it is taken again nobody gets such a one by chance."""


def free_ports(count: int) -> list[int]:
    """Ports that are all free at once."""
    found: list[int] = []
    with ExitStack() as probes:
        while len(found) < count:
            port = random.choice(_PORTS)  # two test runs hardly ever want the same
            with suppress(OSError):
                probes.enter_context(socket.create_server(("127.0.0.1", port)))
                found.append(port)
    return found


def free_port() -> int:
    """A port that is free."""
    return free_ports(1)[0]


@contextmanager
def held_ports(count: int) -> Iterator[list[int]]:
    """So many of these."""
    with ExitStack() as stack:
        yield [stack.enter_context(hold_port("127.0.0.1")).getsockname()[1] for _ in range(count)]
