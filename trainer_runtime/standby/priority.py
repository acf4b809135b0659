"""Low priority while a standby imports, so that it takes little processor time from the training.

Only by means that can be undone without a privilege that this process lacks: a rank that stays slow is worse than a
standby whose start slows the training a little.
"""

from __future__ import annotations

import _thread
import errno
import os
import time
from contextlib import contextmanager, suppress

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator

LOW = 10
"""Nice value. A standby then gets a tenth of a training rank's share if both want a processor. At 19, the lowest
priority, ranks that keep every processor busy would delay their own standbys for minutes."""
_LOWEST = 19
_AUTOGROUP = "/proc/self/autogroup"
_AUTOGROUP_WAIT_S = 5.0
"""Seconds. The kernel accepts one change per 0.1 s from all unprivileged processes together."""


@contextmanager
def low_priority() -> Iterator[None]:
    """Run the block at a low priority that can be undone; if there is none, at the present priority."""
    before = os.getpriority(os.PRIO_PROCESS, 0)
    if can_raise():
        os.setpriority(os.PRIO_PROCESS, 0, max(before, LOW))
        try:
            yield
        finally:
            for thread in os.listdir("/proc/self/task"):  # threads that modules started have inherited the priority
                with suppress(ProcessLookupError):
                    os.setpriority(os.PRIO_PROCESS, int(thread), before)
    elif _set_autogroup(LOW):
        try:
            yield
        finally:
            if not _set_autogroup(0):
                raise OSError(f"its priority could not be raised again ({_AUTOGROUP})")
    else:
        yield


def can_raise() -> bool:
    """Return whether the priority can be raised again. Tried on a short-lived thread: limits do not tell everything."""
    is_done = _thread.allocate_lock()
    raised: list[bool] = []

    def attempt() -> None:
        try:
            own = os.getpriority(os.PRIO_PROCESS, 0)
            os.setpriority(os.PRIO_PROCESS, 0, min(own + 1, _LOWEST))
            os.setpriority(os.PRIO_PROCESS, 0, own)
            raised.append(True)
        except OSError:
            pass
        finally:
            is_done.release()

    is_done.acquire()
    _thread.start_new_thread(attempt, ())
    is_done.acquire()
    return bool(raised)


def _set_autogroup(nice: int) -> bool:
    """Set the priority of this session (each worker has its own) among all sessions; return whether it worked."""
    deadline = time.monotonic() + _AUTOGROUP_WAIT_S
    while True:
        try:
            with open(_AUTOGROUP, "w") as file:
                file.write(str(nice))
        except OSError as error:
            if error.errno != errno.EAGAIN or time.monotonic() > deadline:
                return False
            time.sleep(0.02)  # there is no event to wait for
        else:
            return True
