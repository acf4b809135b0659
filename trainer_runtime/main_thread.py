"""Calls of a function by the main thread, whatever it is doing.

A thread that asks what the main thread has done so far must not ask in the middle of one of torch's operations, which
first changes a tensor and then counts its version up. Between two bytecodes none is under way.
"""

from __future__ import annotations

import ctypes
from collections import deque
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

_due: deque[Callable[[], None]] = deque()


@ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p)  # type: ignore[untyped-decorator]
def _call_all(_argument: object) -> int:
    """Call what is due. This one C function exists as long as the process: it may be called late."""
    while _due:
        _due.popleft()()
    return 0


def call_on_main_thread(function: Callable[[], None]) -> None:
    """Let the main thread call a function between two of its bytecodes, once it runs Python code. Returns at once.

    The function may interrupt any Python code, also code that holds a lock, so it must not take one, nor raise an
    exception. It is called late where too many calls are pending: with the next one that is not.

    Source: `Py_AddPendingCall` of Python's C API, which any thread may call.
    """
    _due.append(function)
    ctypes.pythonapi.Py_AddPendingCall(_call_all, None)
