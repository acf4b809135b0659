"""Low priority while a standby imports, so that it takes little of the processors that training wants.

Only by means that can be undone without a privilege that this process lacks: a rank that stays slow is worse than one
whose start was noticed.
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

_LOW = 10
"""A tenth of what a training rank gets where both want a processor. At the lowest priority of all, 19, ranks that keep
every processor busy would hold up their own standbys for minutes."""
_LOWEST = 19
_AUTOGROUP = "/proc/self/autogroup"
_AUTOGROUP_WAIT_S = 5.0
"""The kernel takes one change in 0.1 s from all unprivileged processes together."""


@contextmanager
def low_priority() -> Iterator[None]:
    """Run at a low priority that can be left again; if there is none, as before."""
    before = os.getpriority(os.PRIO_PROCESS, 0)
    if _can_raise():
        os.setpriority(os.PRIO_PROCESS, 0, max(before, _LOW))
        try:
            yield
        finally:
            for thread in os.listdir("/proc/self/task"):  # those that the modules started have inherited it
                with suppress(ProcessLookupError):
                    os.setpriority(os.PRIO_PROCESS, int(thread), before)
    elif _set_autogroup(_LOW):
        try:
            yield
        finally:
            if not _set_autogroup(0):
                raise OSError(f"its priority could not be raised again ({_AUTOGROUP})")
    else:
        yield


def _can_raise() -> bool:
    """Find out by a thread's own priority, which is lost with it: what the limits and capabilities say is not all."""
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
    """Set the priority of this session (each worker is one) among the others; False: it cannot be."""
    deadline = time.monotonic() + _AUTOGROUP_WAIT_S
    while True:
        try:
            with open(_AUTOGROUP, "w") as file:
                file.write(str(nice))
        except OSError as error:
            if error.errno != errno.EAGAIN or time.monotonic() > deadline:
                return False
            time.sleep(0.02)  # nothing tells when the kernel takes it
        else:
            return True
