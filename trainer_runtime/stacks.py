"""How an agent is shown what a rank does: its stacks, on a signal, also where C code holds the interpreter's lock.

The handler is `faulthandler`'s, which is C and needs nothing that may be locked. It appends to the memory file that the
agent handed down. The signal is a real-time one that nothing else in this process catches.
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


def offer_stacks(page: ControlPage) -> None:
    """Let the agent ask for the stacks of this process; once is enough."""
    descriptor = handed_down()
    number = _free_signal()
    if page.stacks or descriptor is None or number is None:
        return
    os.set_inheritable(descriptor, False)  # the programs that the script starts have no part in this
    # Both, and in this order: who reads the page sends the signal, which ends a process that does not catch it.
    faulthandler.register(number, file=descriptor, all_threads=True, chain=False)
    page.stacks = number


def handed_down() -> int | None:
    """Return the descriptor of the agent's file; None where there is none, as in a program that the script started.

    That one has the variable, and may have something else under the number.
    """
    descriptor = int(os.environ.get(contract.STACKS_FD, "-1"))
    with suppress(OSError):
        if contract.STACKS_NAME in str(Path(f"/proc/self/fd/{descriptor}").readlink()):
            return descriptor
    return None


def _free_signal() -> int | None:
    """Return the highest real-time signal that nobody in this process catches or ignores."""
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines() if ":" in line)
    taken = int(status["SigCgt"], 16) | int(status["SigIgn"], 16)  # what C code has set too
    numbers = range(signal.SIGRTMAX, signal.SIGRTMIN - 1, -1)
    return next((number for number in numbers if not taken >> (number - 1) & 1), None)
