"""Dumping of a rank's stacks for the agent, on a signal, even while C code holds the interpreter lock.

The handler is that of `faulthandler`, which is written in C and takes no lock. It appends to the memory file that the
agent handed down. The signal is a real-time signal that nothing else in this process handles.
"""

from __future__ import annotations

import faulthandler
import os
import signal
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from trainer_runtime import contract

if TYPE_CHECKING:
    from trainer_runtime.contract import ControlPage


def register_stack_dump(page: ControlPage) -> None:
    """Let the agent request the stacks of this process; further calls do nothing."""
    descriptor = stacks_descriptor()
    number = _free_signal()
    if page.stacks or descriptor is None or number is None:
        return
    os.set_inheritable(descriptor, False)  # child processes of the script must not inherit it
    # In this order: the agent may send the signal as soon as it is on the page. Unhandled, it kills the process.
    faulthandler.register(number, file=descriptor, all_threads=True, chain=False)
    page.stacks = number


def stacks_descriptor() -> int | None:
    """Return the descriptor of the agent's file; None if there is none.

    A program that the script started inherits the variable, and may have another file under the number.
    """
    descriptor = int(os.environ.get(contract.STACKS_FD, "-1"))
    with suppress(OSError):
        if contract.STACKS_NAME in str(Path(f"/proc/self/fd/{descriptor}").readlink()):
            return descriptor
    return None


def _free_signal() -> int | None:
    """Return the highest real-time signal that this process neither handles nor ignores."""
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines() if ":" in line)
    taken = int(status["SigCgt"], 16) | int(status["SigIgn"], 16)  # includes handlers set by C code
    numbers = range(signal.SIGRTMAX, signal.SIGRTMIN - 1, -1)
    return next((number for number in numbers if not taken >> (number - 1) & 1), None)
