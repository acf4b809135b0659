"""Reserves ports for listeners that start later.

A port is chosen long before the process that listens on it exists, and no other program may get it in between. A bound
socket with SO_REUSEADDR that does not listen reserves it: a listener with SO_REUSEADDR (etcd and torch's stores set it)
can still bind the port, while the kernel assigns it neither to `bind(0)` nor to an outgoing connection.
"""

from __future__ import annotations

import socket


def hold_port(host: str) -> socket.socket:
    """Reserve a free port of an IP address until the returned socket is closed.

    Args:
        host: an IP address of this machine; `::` stands for all addresses of both families.

    Raises:
        OSError: no port is free, or the machine has no such address.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    held = socket.socket(family, socket.SOCK_STREAM)
    try:
        if family == socket.AF_INET6:
            held.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        held.bind((host, 0))
        # Only after bind: otherwise the kernel could choose a port that another such socket holds.
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    except OSError:
        held.close()
        raise
    return held


class PortHold:
    """Reserves the port of the next master, and the previous one, which the current master may be about to bind."""

    def __init__(self) -> None:
        self._current = _hold()
        self._previous: socket.socket | None = None

    @property
    def port(self) -> int:
        """The port of the next master."""
        return int(self._current.getsockname()[1])

    def renew(self) -> int:
        """Reserve another port and return it. The previous one stays reserved until the next call."""
        following = _hold()
        if self._previous:
            self._previous.close()
        self._previous, self._current = self._current, following
        return self.port

    def close(self) -> None:
        """Release both ports."""
        for held in (self._previous, self._current):
            if held:
                held.close()


def _hold() -> socket.socket:
    try:
        return hold_port("::")
    except OSError:  # no IPv6 on this host
        return hold_port("0.0.0.0")  # noqa: S104 - never listens
