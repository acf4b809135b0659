"""The page's address: the option `--http`, and the listening socket."""

from __future__ import annotations

import errno
import re
import socket
import time

from agent.endpoints import endpoint_of
from agent.errors import ConfigError

_BACKLOG = 128
_RETRY_FOR_S = 3.0
_RETRY_EVERY_S = 0.1
_WANTED = "--http must be HOST:PORT, or PORT for this machine only, for example --http=0.0.0.0:8080"


def parse_http(text: str) -> tuple[str, int]:
    """Parse the option: `8080` is ("127.0.0.1", 8080); IPv6 addresses are in brackets. Raises `ConfigError`."""
    host, colon, port = text.strip().rpartition(":")
    if not re.fullmatch(r"[0-9]{1,5}", port) or int(port) >= 65536 or (colon and not host):
        raise ConfigError(f"{_WANTED}, not {text!r}")
    bare = host.removeprefix("[").removesuffix("]")
    if (":" in bare) != host.startswith("["):
        raise ConfigError(f"{_WANTED}, IPv6 in brackets, not {text!r}")
    return bare or "127.0.0.1", int(port)


def listen(host: str, port: int) -> socket.socket:
    """Listen on an address. Port 0: the kernel chooses; `::`: on IPv4 addresses too.

    A taken port is retried for some seconds, since the page process of a killed agent may live a little longer.

    Raises:
        ConfigError: the address does not belong to this machine, or the port is still taken.
    """
    give_up_at = time.monotonic() + _RETRY_FOR_S
    while True:
        try:
            return _listen(host, port)
        except (OSError, UnicodeError) as error:
            if getattr(error, "errno", None) == errno.EADDRINUSE and time.monotonic() < give_up_at:
                time.sleep(_RETRY_EVERY_S)
                continue
            raise ConfigError(
                f"--http: {host}:{port} cannot be listened on: {getattr(error, 'strerror', None) or error}; choose "
                "another port, or an address of this machine"
            ) from None


def _listen(host: str, port: int) -> socket.socket:
    family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
    is_both = host == "::" and socket.has_dualstack_ipv6()
    return socket.create_server(address, family=family, backlog=_BACKLOG, dualstack_ipv6=is_both)


def url(listener: socket.socket, node_address: str, *, is_encrypted: bool = False) -> str:
    """Return the URL for browsers; it has the node's address if the socket listens on all addresses."""
    host, port = listener.getsockname()[:2]
    visible = node_address if host in {"0.0.0.0", "::"} else host  # noqa: S104 - compared, not bound
    return f"http{'s' if is_encrypted else ''}://{endpoint_of(visible, port)}"
