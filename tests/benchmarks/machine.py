"""What the figures were taken on: without it no two of them can be compared."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

_QUIET_LOAD = 0.5
"""Processes that wanted a core in the minute before, on average: more of them disturb the measurement."""


def describe() -> dict[str, Any]:
    """The machine, its load at this moment, and what runs here."""
    return {
        "date": time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime()),
        "command": " ".join(["scripts/bench", *sys.argv[1:]]),
        "commit": _commit(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gb": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9),
        "load": round(os.getloadavg()[0], 2),
        "is_quiet": os.getloadavg()[0] <= _QUIET_LOAD,
        "python": platform.python_version(),
        "torch": version("torch"),
        "kernel": platform.release(),
    }


def sentence(machine: dict[str, Any]) -> str:
    """The same for people."""
    quiet = "" if machine["is_quiet"] else f", NOT on a quiet machine (load {machine['load']} at the start)"
    what = f"commit {machine['commit']}, Python {machine['python']}, torch {machine['torch']}"
    return f"`{machine['command']}`, {machine['date']}, {machine['cores']} cores, {what}{quiet}"


def _commit() -> str:
    asked = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty"]
    done = subprocess.run(asked, capture_output=True, text=True, check=False)
    return done.stdout.strip() or "unknown"
