"""How an address and a port are written as one."""

from __future__ import annotations


def endpoint_of(host: str, port: int) -> str:
    """`host:port`, with an IPv6 address in brackets."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
