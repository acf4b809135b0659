"""How the ranks of one node are at this moment, for who watches the job: never for a decision."""

from __future__ import annotations

from typing import Literal

import msgspec

RankState = Literal["starting", "training", "phase", "standing", "ended"]
"""It has not got what it begins from; commits steps, or never tells; does something without steps; stands still for a
handoff; has ended."""


class LiveRank(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """One rank."""

    rank: int
    step: int
    """The last that it committed; 0: none in this group."""
    state: RankState


class LiveRanks(msgspec.Struct, frozen=True, kw_only=True):
    """One node."""

    group: int
    """Whose ranks these are; 0: none have been started yet."""
    ranks: tuple[LiveRank, ...]
    is_alive: bool
    """The agent's loop turns."""
    lease_left_s: float | None
    """Its lease surely lives for so long; None: it has none that was renewed."""
    etcd_s: float | None
    """What the last renewal took; None: there was none."""
