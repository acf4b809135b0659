"""The sockets at which agents reach each other."""

from __future__ import annotations

import socket
from contextlib import suppress

BACKLOG = 128


def listen() -> socket.socket:
    """Listen on all interfaces, at a port chosen by the kernel. No child process inherits the socket."""
    if socket.has_dualstack_ipv6():
        with suppress(OSError):  # IPv6 is compiled in, but disabled on this machine
            return socket.create_server(("", 0), family=socket.AF_INET6, backlog=BACKLOG, dualstack_ipv6=True)
    return socket.create_server(("", 0), backlog=BACKLOG)
