"""Calls of a function by the main thread, whatever it is doing.

A thread that asks what the main thread has done so far must not ask in the middle of one of torch's operations, which
first changes a tensor and then counts its version up. Between two bytecodes none is under way.
"""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

_PENDING_CALL = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p)


class MainThreadCall:
    """A function that the main thread is to call between two of its bytecodes.

    It may interrupt any Python code, also code that holds a lock, so it must not take one. Keep this object until it
    was called.

    Args:
        function: must not raise an exception.
    """

    def __init__(self, function: Callable[[], None]) -> None:
        def call(_argument: object) -> int:
            function()
            return 0

        self._call = _PENDING_CALL(call)

    def request(self) -> None:
        """Ask for the call, which comes once the main thread runs Python code, or never where too many are requested.

        Source: `Py_AddPendingCall` of Python's C API, which any thread may call.
        """
        ctypes.pythonapi.Py_AddPendingCall(self._call, None)
