"""How many files this agent may have open: some twenty for each local rank.

It takes all that the system lets it have, up to a bound, and its workers have what the agent itself was started with.
"""

from __future__ import annotations

import resource
from contextlib import suppress
from functools import cache

_MOST = 1 << 16
"""Where there is no limit: there are programs that go through all numbers that they could have open."""


def raise_limit() -> None:
    """Let this process have more files open, if the system lets it."""
    soft, hard = _started_with()
    most = _MOST if hard == resource.RLIM_INFINITY else min(hard, _MOST)
    if soft != resource.RLIM_INFINITY and soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


def restore_limit(pid: int) -> None:
    """Give a process, and what it will start, the limit that this one was started with."""
    with suppress(OSError):  # it has ended, or a sandbox does not allow it: then it has more than it needs
        resource.prlimit(pid, resource.RLIMIT_NOFILE, _started_with())


@cache
def _started_with() -> tuple[int, int]:
    return resource.getrlimit(resource.RLIMIT_NOFILE)
