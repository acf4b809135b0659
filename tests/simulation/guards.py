"""The core's guards, and what happens without each: the file, the code, what takes its place, and what then fails.

`test_guards.py` plays each story on a core without the guard, in a process of its own.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Guard:
    """One guard, and the story that needs it."""

    why: str
    module: str
    code: str
    instead: str
    story: str
    """`scenario NAME`, `seed N` of the random clusters, or `story NAME N`: a test of `test_stories.py` and its seed."""


GUARDS = (
