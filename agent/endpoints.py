"""How endpoints are written. Opens nothing: the cores import it."""

from __future__ import annotations

LOOPBACK = "127.0.0.1"

SOCKET = "unix:"
"""Prefix of the endpoint of a Unix socket; the socket's absolute path follows."""


def endpoint_of(host: str, port: int) -> str:
    """Return `host:port`, with brackets around an IPv6 address."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
