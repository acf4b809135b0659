"""How many files this agent may have open: some twenty for each local rank.

It takes all that the system lets it have, up to a bound, and its workers have what the agent itself was started with.
"""

from __future__ import annotations

import resource
from contextlib import suppress
from functools import cache

_MOST = 1 << 16
"""In containers a thousand million may be allowed, and there are programs that go through all numbers up to there."""


def raise_limit() -> None:
    """Let this process have more files open, if the system lets it."""
    soft, hard = _started_with()
    if soft < (most := min(hard, _MOST)):
        with suppress(OSError, ValueError):  # a sandbox does not allow it: then it has what it had
            resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


def restore_limit(pid: int) -> None:
    """Give a process, and what it will start, the limit that this one was started with."""
    with suppress(OSError):  # it has ended, or a sandbox does not allow it: then it has more than it needs
        resource.prlimit(pid, resource.RLIMIT_NOFILE, _started_with())


@cache
def _started_with() -> tuple[int, int]:
    return resource.getrlimit(resource.RLIMIT_NOFILE)
