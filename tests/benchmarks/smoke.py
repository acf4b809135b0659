"""The smallest size of each word. It takes seconds and shows that all of the word still runs; its figures say nothing.

A size is a list of options, as one would give them. Options on the command line come after them, so they win.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

_OUT = "--out=.cache/bench/smoke"
"""What other runs have written stays as it is."""

SIZES: dict[str, tuple[str, ...]] = {
    "recovery": (
        _OUT,
        "--scenarios=worker",
        "--launchers=ours,ours-run",
        "--runs=1",
        "--calm_s=0.5",
        "--patience_s=60",
    ),
    "micro": (
        *(_OUT, "--sizes_mb=1", "--snapshots_mb=1", "--snapshots=3", "--idle_s=1", "--runs=1"),
        *("--sharded=20:0.2", "--sharded_steps=30"),
    ),
    "lost": (_OUT, "--cases=1:0.02,1:0.02:sharded,20:0.02:sharded:node", "--calm_s=0.5", "--runs=1"),
    "store": (_OUT, "--sizes_mb=1", "--runs=1"),
    "meet": (_OUT, "--agents=4", "--torch_agents=4", "--runs=1", "--rest_s=1", "--outage_s=1"),
    "turns": (_OUT, "--nodes=20", "--runs=3"),
    "ps": (
        *(_OUT, "--quick", "--sizes_kb=1", "--dims=16", "--runs=50"),
        *("--kills=1", "--calm_s=0.5", "--around_s=1", "--spare=0"),
    ),
    "guard": (_OUT, "--repetitions=1"),
}
_MAY_BE_EMPTY = frozenset({"machine", "incidents", "standbys", "note", "back_pause_s"})
"""Neither samples nor figures."""


def require_whole(word: str, written: Sequence[Path]) -> None:
    """End this process with code 1 and one line if these files lack a sample or a figure."""
    for path in written:
        for problem in problems(msgspec.json.decode(path.read_bytes())):
            sys.exit(f"bench: {word} --smoke failed: {path.name}: {problem}")


def problems(found: object, where: str = "") -> Iterator[str]:
    """What is missing in values that were written as JSON, where NaN and infinity are null."""
    if found is None or (isinstance(found, float) and not math.isfinite(found)):
        yield f"{where} is not a finite number"
    elif isinstance(found, Mapping):
        yield from _problems_of(found, where)
    elif isinstance(found, list):
        if not found:
            yield f"{where} has no samples"
        for number, each in enumerate(found):
            yield from problems(each, f"{where}[{number}]")


def _problems_of(found: Mapping[str, Any], where: str) -> Iterator[str]:
    if not found.get("has_started", True):
        yield f"{where}: the job did not start: {found['note']}"
    elif found.get("note"):
        yield f"{where}: {found['note']}"
    else:
        for name, each in found.items():
            if name not in _MAY_BE_EMPTY:
                yield from problems(each, f"{where}.{name}" if where else name)
