"""How it is written where something listens: an address and a port, or a Unix socket of this machine."""

from __future__ import annotations

SOCKET = "unix:"
"""What the endpoint of a Unix socket begins with; its absolute path follows."""


def endpoint_of(host: str, port: int) -> str:
    """`host:port`, with an IPv6 address in brackets."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
