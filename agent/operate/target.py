"""Which job a command is about, and where it is."""

from __future__ import annotations

from dataclasses import dataclass

from agent.store.access import Access


@dataclass(frozen=True)
class Target:
    """As given on the command line."""

    server: Access
    job_id: str | None
    """None: the only live one there."""
    timeout_s: float
    """How long to try to reach etcd."""
