"""What is to be started on this node for one group."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path


@dataclass(frozen=True)
class RankCommand:
    """One rank process."""

    local_rank: int
    rank: int
    argv: tuple[str, ...]
    env: Mapping[str, str]
    """Complete: nothing of the agent's own environment is added, but for the control page and the guardian's mark."""
    cwd: Path
    log_path: Path
    """Appended to; its directories are made where missing."""
    console_prefix: str | None
    """Put before each line on the agent's console. None: nothing goes there."""


@dataclass(frozen=True)
class Launch:
    """All local rank processes of one group."""

    group: int
    commands: tuple[RankCommand, ...]
