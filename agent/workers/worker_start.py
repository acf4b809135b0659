"""Turns the guardian's child into the worker, as the start order describes it.

Part of the guardian (`guardian.py`), so standard library only, and quick to import.
"""

from __future__ import annotations

import ctypes
import os
import signal
from contextlib import suppress

TYPE_CHECKING = False  # importing `typing` would take longer than all other imports
if TYPE_CHECKING:
    from typing import NoReturn, TypedDict

    class StartOrder(TypedDict):
        """A process to start. Strings are bytes decoded as Latin-1, so that they do not depend on the locale."""

        argv: list[str]
        env: dict[str, str]
        cwd: str
        cpus: list[int]
        """CPUs on which it may run; empty: all."""
        stdin: str | None
        """File for its standard input. None: the guardian's, which is the agent's."""
        log_path: str
        console_prefix: str | None
        console_streams: list[int]
        """Streams that go to the console: 1, 2 or both. Ignored without a prefix."""
        holds_tracebacks: bool
        """Whether its group has other ranks, whose failure may have caused a traceback."""
        terminal_fd: int | None
        """Memory shared by all processes that write to the console, if that is a terminal (`terminal.py`)."""
        inherited_fds: list[int]
        page_fd: int
        output_at: int
        oom_score_adj: int
        hook_fd: int | None
        """The guardian's end of the socket to a standby. None: the worker is a rank from the start."""


CANNOT_START = 127
"""Exit code of a worker that could not be started, as in a shell."""
_PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None)  # loaded before the fork: the child loads nothing


def become_worker(order: StartOrder, guardian: int, out: int, err: int) -> NoReturn:
    """Become the worker, or print the reason and exit with 127. Called in the child."""
    what = "begin"
    try:
        os.setsid()
        _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != guardian:  # the guardian died before the line above, which was too late
            os.kill(os.getpid(), signal.SIGKILL)
        with suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:  # noqa: PTH123 - pathlib is slow
            file.write(str(order["oom_score_adj"]))
        what = f"open its standard input {order['stdin']}"
        stdin = 0 if order["stdin"] is None else os.open(latin_bytes(order["stdin"]), os.O_RDONLY)
        for stream, fd in enumerate((stdin, out, err)):
            os.dup2(fd, stream)
        for fd in order["inherited_fds"]:
            os.set_inheritable(fd, True)
        for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}:
            signal.signal(number, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_SETMASK, ())
        what = f"run on the CPUs {order['cpus']}"
        if order["cpus"]:
            os.sched_setaffinity(0, order["cpus"])
        what = "enter the directory " + order["cwd"]
        os.chdir(latin_bytes(order["cwd"]))
        what = "run " + order["argv"][0]
        os.execvpe(  # noqa: S606 - without a shell on purpose
            latin_bytes(order["argv"][0]),
            [latin_bytes(argument) for argument in order["argv"]],
            {latin_bytes(name): latin_bytes(value) for name, value in order["env"].items()},
        )
    except OSError as error:
        os.write(2, latin_bytes(f"elastic-agent: cannot {what}: {error.strerror}\n"))
    finally:
        os._exit(CANNOT_START)


def latin_bytes(text: str) -> bytes:
    """Return the exact bytes that the agent was given."""
    return text.encode("latin-1")
