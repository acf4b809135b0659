"""What the agent's children share: they go on when somebody stops them (SIGSTOP, a debugger that was killed).

A stopped guardian neither takes its worker's output nor ends it, a stopped page answers nobody, and no descriptor tells
of it: so the agent waits for the stop itself, of all its children alike. Should the agent end first, nobody would wake
them and they would outlive it: so each of them asks the kernel to be woken by the agent's end, and then sees that its
end of a pipe or socket is closed.
"""

from __future__ import annotations

import ctypes
import os
import signal
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from agent.observe.log import log

_PR_SET_PDEATHSIG = 1
_PAUSE_S = 0.1
"""Who stops a whole node has stopped the agent by then. It also bounds what a fight over a process costs."""
_LOOK_AGAIN_S = 1.0
"""For children, where there were none."""
_TOLD = 10


def keep_children_going() -> None:
    """From now on, on a thread of its own."""
    threading.Thread(target=_keep_going, name="children", daemon=True).start()


def _keep_going() -> None:
    told = 0
    while True:
        try:
            stopped = os.waitid(os.P_ALL, 0, os.WSTOPPED | os.WNOWAIT)  # whose end is to be heard hears it all the same
        except ChildProcessError:
            time.sleep(_LOOK_AGAIN_S)
            continue
        time.sleep(_PAUSE_S)
        if stopped is None:
            continue
        with suppress(ProcessLookupError, PermissionError):  # another user's, as `sudo` in a health check
            os.kill(stopped.si_pid, signal.SIGCONT)
            if told < _TOLD:
                told += 1
                log.warning(
                    f"process {stopped.si_pid} was stopped by somebody, and goes on", what=_name(stopped.si_pid)
                )


def _name(pid: int) -> str:
    with suppress(OSError):
        words = Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").split("\0")
        return " ".join(words[:5]).strip()
    return "unknown"


def at_parents_end(number: signal.Signals) -> Callable[[], None]:
    """What a child runs before it becomes another program: it is sent a signal when the *thread* that started it ends.

    When that was not the parent's last thread, the child is another one's then, and is sent it again with that one's
    end. Everything is looked up here: after a fork it is too late.
    """
    prctl = ctypes.CDLL(None).prctl
    parent = os.getpid()

    def ask_kernel() -> None:
        prctl(_PR_SET_PDEATHSIG, int(number), 0, 0, 0)
        if os.getppid() != parent:  # it died before it was asked for
            os._exit(1)

    return ask_kernel
