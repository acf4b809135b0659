"""Keeps the agent's children running: a child that is stopped (SIGSTOP, a debugger that was killed) is continued.

A stopped guardian neither reads its worker's output nor ends the worker, and a stopped web page answers no request. No
file descriptor reports the stop, so the agent waits for stops of all its children with `waitid`. If the agent ended
while a child is stopped, nothing would continue the child, and it would outlive the agent. So each child asks the
kernel for a signal at the agent's end, and then finds its end of a pipe or socket closed.
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
"""Time from a stop to SIGCONT. If a whole node is being stopped, the agent is stopped, too, before it has passed. It
also limits the cost when another program keeps stopping the child."""
_LOOK_AGAIN_S = 1.0
"""How often to look for children while there are none."""
_WARNINGS = 10
"""At most so many stops are logged."""


def keep_children_going() -> None:
    """Continue stopped children from now on, on a thread of its own."""
    threading.Thread(target=_keep_going, name="children", daemon=True).start()


def _keep_going() -> None:
    warnings = 0
    while True:
        try:
            stopped = os.waitid(os.P_ALL, 0, os.WSTOPPED | os.WNOWAIT)  # WNOWAIT: others still wait for the child's end
        except ChildProcessError:
            time.sleep(_LOOK_AGAIN_S)
            continue
        time.sleep(_PAUSE_S)
        if stopped is None:
            continue
        with suppress(
            ProcessLookupError, PermissionError
        ):  # PermissionError: another user's process, such as `sudo` in a health check
            os.kill(stopped.si_pid, signal.SIGCONT)
            if warnings < _WARNINGS:
                warnings += 1
                log.warning(
                    f"process {stopped.si_pid} was stopped by somebody, and goes on", what=_name(stopped.si_pid)
                )


def _name(pid: int) -> str:
    with suppress(OSError):
        words = Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").split("\0")
        return " ".join(words[:5]).strip()
    return "unknown"


def at_parents_end(number: signal.Signals) -> Callable[[], None]:
    """Return a `preexec_fn` by which the kernel sends the child a signal when the *thread* that started it ends.

    If that was not the parent's last thread, the child then belongs to another thread of the parent, and is sent the
    signal again when that one ends. All names are looked up before the fork: after it this is not safe.
    """
    prctl = ctypes.CDLL(None).prctl
    parent = os.getpid()

    def ask_kernel() -> None:
        prctl(_PR_SET_PDEATHSIG, int(number), 0, 0, 0)
        if os.getppid() != parent:  # the parent ended before the call
            os._exit(1)

    return ask_kernel
