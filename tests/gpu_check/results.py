"""Results of the checks, and what the checks have in common."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
JOBS = Path(__file__).resolve().parent


@dataclass(frozen=True, kw_only=True)
class Options:
    """How the checks are run.

    Args:
        device: `cuda`, or `cpu` at the smoke size.
        is_smoke: the smallest size. It shows that a check still works; its figures say nothing.
        directory: for outputs, logs and checkpoints.
    """

    device: str
    is_smoke: bool
    directory: Path


@dataclass(frozen=True, kw_only=True)
class Result:
    """One line of the table."""

    what: str
    figures: str
    is_fine: bool = True


class CheckFailed(Exception):  # noqa: N818 - says what happened
    """A check could not be made to its end."""


def seconds(samples: Sequence[float]) -> str:
    """Samples for people: `0.21 s (worst 0.30, n=3)`."""
    if len(samples) == 1:
        return f"{samples[0]:.2f} s"
    return f"{statistics.median(samples):.2f} s (worst {max(samples):.2f}, n={len(samples)})"
