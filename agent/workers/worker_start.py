"""What the guardian's child does until it is the worker, and the order that tells it.

Part of the guardian (`guardian.py`), so standard library only, and quick to import.
"""

from __future__ import annotations

import ctypes
import os
import signal
from contextlib import suppress

TYPE_CHECKING = False  # `typing` would take longer to import than the rest
if TYPE_CHECKING:
    from typing import NoReturn, TypedDict

    class StartOrder(TypedDict):
        """What to start. Strings are bytes read as Latin-1, so that no locale can change them."""

        argv: list[str]
        env: dict[str, str]
        cwd: str
        cpus: list[int]
        """Where it may run; none: anywhere."""
        stdin: str | None
        """File that is its standard input. None: the guardian's, which is the agent's."""
        log_path: str
        console_prefix: str | None
        console_streams: list[int]
        """What goes to the console: 1, 2 or both. It counts where there is a prefix."""
        holds_tracebacks: bool
        """There are other ranks, and a traceback may be due to the failure of one of them."""
        terminal_fd: int | None
        """Memory that all who write to the console share, if it is a terminal (`terminal.py`)."""
        inherited_fds: list[int]
        page_fd: int
        output_at: int
        oom_score_adj: int
        hook_fd: int | None
        """The guardian's end of the socket to a worker that is to stand by. None: it is a rank from the start."""


CANNOT_START = 127
"""Exit code of a worker that could not be started, as a shell gives it."""
_PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None)  # before the fork: nothing is loaded in the child


def become_worker(order: StartOrder, guardian: int, out: int, err: int) -> NoReturn:
    """In the child: become the worker, or end with 127 and a line that says why."""
    what = "begin"
    try:
        os.setsid()
        _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != guardian:  # it died before the line above, which then comes too late
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
    """The exact bytes that the agent was given."""
    return text.encode("latin-1")
