"""Stands between the agent and one worker, so that nothing of the worker outlives either of them.

A script of its own (`python -I -S guardian.py SOCKET ORDER`), standard library only. It is started ahead, waits
for `S`, starts the worker described in ORDER (a memfd with JSON: an environment may be larger than a packet), and
then has one loop, woken by descriptors alone:

| woken by | does |
|---|---|
| `T` from the agent | SIGTERM to the worker's main process |
| `A` from the agent | the worker, which stood by, becomes a rank: see below |
| `K` from the agent, or the socket's end (the agent died, however) | SIGKILL to the whole tree |
| SIGCHLD | reap; if it was the worker: say so at once, kill what it left, say `gone`, end |
| the worker's output | see `output.py` |
| a word from a worker that stands by | pass it on |

Why nothing escapes: as a *child subreaper* it inherits every orphan below it, so a process that leaves its session
or its parent stays in this tree; and a process without children has no descendants. If the guardian itself is
killed, the worker dies by its parent-death signal, and the orphans go to the agent (`reaper.py`).

A worker may *stand by*: its order has the number of a socket to it (`hook_fd`), where it says once what it has
imported. Its output stays in the pipes, until `A` says that ORDER has been rewritten for a rank: then it is read into
that rank's log, and the worker is told to go on. One that lets go of the socket before would run the script unasked,
so it is killed.

Packets to the agent are JSON: `{"started": pid}`, `{"exited": {...}}`, `{"warning": text}`, `{"gone": true}`, and what
a worker says that stands by: `{"warm": {...}}` or `{"tainted": [...]}`.
"""

from __future__ import annotations

import ctypes
import json
import mmap
import os
import select
import signal
import struct
import sys
import time
from contextlib import suppress
from functools import partial

TYPE_CHECKING = False  # `typing` would take longer to import than the rest
if TYPE_CHECKING:
    from collections.abc import Callable

    from agent.workers.exit_causes import ExitCauses, death_of
    from agent.workers.last_error import find_error, find_mistake, not_started, read_error_file
    from agent.workers.output import Output
    from agent.workers.process_tree import kill_descendants, left_behind
    from agent.workers.terminal import Terminal, harmless, is_terminal
    from agent.workers.worker_start import CANNOT_START, StartOrder, become_worker, latin_bytes
else:
    sys.path.append(os.path.dirname(__file__))  # noqa: PTH120 - pathlib is slow; `-I` leaves this out of the path
    from exit_causes import ExitCauses, death_of
    from last_error import find_error, find_mistake, not_started, read_error_file
    from output import Output
    from process_tree import kill_descendants, left_behind
    from terminal import Terminal, harmless, is_terminal
    from worker_start import CANNOT_START, become_worker, latin_bytes

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
_READ_BYTES = 1 << 16
_SAYINGS = ("warm", "tainted")
_DRAIN_READS = 32
_CAUSE_WITHIN_S = 1.5
_LEFT_SHOWN = 3
_AGENTS_LINES_S = 0.05
"""The agent's lines are on their way to the console by then, written on a thread."""
_U64 = struct.Struct("<Q")
_libc = ctypes.CDLL(None)  # before the fork: nothing is loaded in the child


class Guardian:
    """One worker and all that comes of it."""

    def __init__(self, sock: int, order_fd: int) -> None:
        self._sock = sock
        self._order_fd = order_fd
        self._order = _read_order(order_fd)
        self._hook = self._order["hook_fd"]
        """Socket to a worker that stands by. None: it is a rank."""
        self._worker = 0
        self._status: int | None = None
        """Of the worker, as wait() gives it; None while it lives."""
        self._poller = select.poll()
        self._handlers: dict[int, Callable[[], object]] = {}
        self._streams: dict[int, int] = {}
        """Pipe to stream (1 or 2) of the worker's output."""
        self._is_killed = False
        """By us."""
        self._is_reading = True
        self._output: Output | None = None
        """None while the worker stands by."""
        self._page = mmap.mmap(self._order["page_fd"], 0)
        self._output_bytes = 0
        self._wake_r, self._wake_w = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._postmortem = ExitCauses()
        for fd in self._order["inherited_fds"]:
            os.set_inheritable(fd, False)
        self._terminals: dict[int, Terminal] = {}
        """By the stream that is one."""
        if self._order["terminal_fd"] is not None:
            os.set_inheritable(self._order["terminal_fd"], False)
            terminal = Terminal(self._order["terminal_fd"])
            self._terminals = {stream: terminal for stream in (1, 2) if is_terminal(stream)}
        if self._hook is None:
            os.close(order_fd)
        else:
            os.set_inheritable(self._hook, False)

    def run(self) -> None:
        """Guard the worker until nothing of it is left."""
        # SIGCHLD, not the worker's pidfd: orphans must be reaped too, or they add up over a long training.
        signal.signal(signal.SIGCHLD, lambda _number, _frame: None)
        signal.set_wakeup_fd(self._wake_w, warn_on_full_buffer=False)
        try:
            self._start()
        except OSError as error:
            tail = f"elastic-agent: cannot start a process: {error.strerror}"
            self._send({"exited": {**_exited(CANNOT_START << 8, tail), "at": time.time()}})
            self._send({"gone": True})
            return
        if self._hook is None:
            self._read_output()
        else:
            self._on(self._hook, self._listen)
        self._on(self._sock, self._obey)
        self._on(self._wake_r, self._look_around)
        while self._status is None:
            for fd, _ in self._poller.poll():
                self._handlers[fd]()
        self._end(self._status)

    def _start(self) -> None:
        pipes = {stream: os.pipe2(os.O_CLOEXEC) for stream in (1, 2)}
        guardian = os.getpid()
        # A SIGTERM that comes before the child has reset its dispositions would be ignored; if blocked, it is kept.
        signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        self._worker = os.fork()
        if self._worker == 0:
            become_worker(self._order, guardian, pipes[1][1], pipes[2][1])
        signal.pthread_sigmask(signal.SIG_SETMASK, ())
        self._send({"started": self._worker})
        for fd in self._order["inherited_fds"]:
            if fd != self._order_fd:
                os.close(fd)  # else the agent could not see that the worker has closed its own
        for stream, (read, write) in pipes.items():
            os.close(write)
            os.set_blocking(read, False)
            self._streams[read] = stream

    def _read_output(self) -> Output:
        """Begin to."""
        prefix = self._order["console_prefix"]
        self._output = Output(
            log_path=latin_bytes(self._order["log_path"]),
            console_prefix=None if prefix is None else latin_bytes(prefix),
            console_streams=() if prefix is None else self._order["console_streams"],
            warn=lambda text: self._send({"warning": text}),
            on_room=self._wake,
            terminals=self._terminals,
            holds_tracebacks=self._order["holds_tracebacks"],
        )
        for pipe in self._streams:
            self._on(pipe, partial(self._take, pipe, self._output))
        return self._output

    def _listen(self) -> None:
        """Hear what a worker says that stands by."""
        if self._hook is None:
            return
        try:
            said = json.loads(_receive(self._hook))
            told = {key: said[key] for key in _SAYINGS if key in said}
        except (ValueError, TypeError):  # its end too: nobody holds it in the place where it should wait
            self._is_killed = True
            self._dismiss_hook()
            kill_descendants()
        else:
            self._send(told)

    def _adopt(self) -> None:
        """Let the worker that stands by be the rank that ORDER tells of now."""
        if self._hook is None:
            return  # it has just failed, and its end will be told
        self._order = _read_order(self._order_fd)
        os.close(self._order_fd)
        with suppress(OSError), open(f"/proc/{self._worker}/oom_score_adj", "w") as file:  # noqa: PTH123 - as below
            file.write(str(self._order["oom_score_adj"]))
        with suppress(OSError):  # it has ended: SIGCHLD says so
            os.write(self._hook, b"go")
        self._dismiss_hook()
        self._postmortem = ExitCauses()
        self._read_output()

    def _dismiss_hook(self) -> None:
        if self._hook is not None:
            self._poller.unregister(self._hook)
            os.close(self._hook)
            self._hook = None

    def _on(self, fd: int, handler: Callable[[], object]) -> None:
        self._handlers[fd] = handler
        self._poller.register(fd, select.POLLIN)

    def _wake(self) -> None:
        with suppress(BlockingIOError):  # full of wakes already
            os.write(self._wake_w, b".")

    def _obey(self) -> None:
        order = _receive(self._sock)
        if self._status is not None:
            return  # it was reaped just now: its number may be another's
        if order == b"A":
            self._adopt()
            return
        with suppress(ProcessLookupError, PermissionError):
            os.kill(self._worker, signal.SIGTERM if order == b"T" else signal.SIGKILL)
        if order == b"T":
            return
        if not order:
            self._poller.unregister(self._sock)  # an ended socket is readable for ever
        self._is_killed = True
        kill_descendants()  # only now: the look around takes longer than the worker's death

    def _look_around(self) -> None:
        """A child ended, or the log can take more."""
        with suppress(BlockingIOError):
            os.read(self._wake_r, _READ_BYTES)
        with suppress(ChildProcessError):
            while self._status is None:
                pid, status = os.waitpid(-1, os.WNOHANG)
                if pid == 0:
                    break
                if pid == self._worker:
                    self._status = status
        if not self._is_reading and self._output and not self._output.is_full:
            self._set_reading(True)

    def _set_reading(self, is_reading: bool) -> None:  # noqa: FBT001 - its name says it
        self._is_reading = is_reading
        for pipe in self._streams:
            if is_reading:
                self._poller.register(pipe, select.POLLIN)
            else:
                self._poller.unregister(pipe)

    def _take(self, pipe: int, output: Output) -> bool:
        """Pass on what a pipe holds. False: nothing there."""
        try:
            data = os.read(pipe, _READ_BYTES)
        except BlockingIOError:
            return False
        if not data:
            del self._streams[pipe]
            if self._is_reading:
                self._poller.unregister(pipe)
            return False
        self._output_bytes += len(data)
        _U64.pack_into(self._page, self._order["output_at"], self._output_bytes)
        output.feed(self._streams[pipe], data)
        if self._is_reading and output.is_full:
            self._set_reading(False)
        return True

    def _drain(self, output: Output) -> None:
        """Take what was written so far, without waiting for the end: a grandchild may hold the pipe open."""
        for pipe in tuple(self._streams):
            reads = 0
            while reads < _DRAIN_READS and self._take(pipe, output):
                reads += 1

    def _end(self, status: int) -> None:
        at = time.time()
        output = self._output or self._read_output()
        self._drain(output)
        try:
            cause = self._cause(status, output)
        except Exception as error:  # noqa: BLE001 - whatever a script left: an end without a cause is told too
            cause = {}
            self._send({"warning": f"it could not be found out why process {self._worker} ended: {error!r}"})
        if status == 0 and not self._is_killed:
            self._tell_left_behind()
        is_unexplained = status != 0 and not (cause.get("error") or cause.get("why"))
        told = {**_exited(status, output.tail_of_both if is_unexplained else output.tail), **cause}
        # All that shows it, here and on other nodes, may be a terminal.
        told = {name: harmless(value) if isinstance(value, str) else value for name, value in told.items()}
        self._send({"exited": {**told, "at": at}})
        with suppress(ChildProcessError):  # mostly at once: then nothing is left, and there is nothing to look for
            while True:
                # Each death may leave orphans, now our children, that were born after the look around.
                if os.waitpid(-1, os.WNOHANG)[0] == 0:
                    kill_descendants()
                    os.waitpid(-1, 0)
        self._drain(output)
        if output.is_holding:  # the next group need not wait for what is shown of this one
            output.end_log()
            self._send({"gone": True})
            self._wait_for_cause()
            output.release()
            output.end()
        else:
            output.end()
            self._send({"gone": True})

    def _tell_left_behind(self) -> None:
        """A script that goes on in a process of its own, as a daemon does, has not ended with the rank."""
        try:  # mostly there is none; to look through /proc takes the longer the more the machine does
            os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        except ChildProcessError:
            return
        left = left_behind()
        if left:
            rank = self._order["env"].get("RANK", "?")
            named = ", ".join(f"{pid} ({command})" for pid, command in left[:_LEFT_SHOWN])
            more = f" and {len(left) - _LEFT_SHOWN} more" if len(left) > _LEFT_SHOWN else ""
            what, verb = ("process", "is") if len(left) == 1 else ("processes", "are")
            self._send(
                {
                    "warning": f"rank {rank} ended with code 0 and left {what} {named}{more}, which {verb} killed: "
                    "a rank lasts as long as the process that was started"
                }
            )

    def _wait_for_cause(self) -> None:
        """Until the agent ends the group: it has told of the failure that was first."""
        agent = select.poll()
        agent.register(self._sock, select.POLLIN)
        agent.poll(_CAUSE_WITHIN_S * 1000)
        time.sleep(_AGENTS_LINES_S)

    def _cause(self, status: int, output: Output) -> dict[str, object]:
        """What ended it, if it was not we."""
        if status == 0 or (self._is_killed and death_of(status) == signal.SIGKILL):
            return {}
        words = output.errors
        error_file = latin_bytes(self._order["env"].get("TORCHELASTIC_ERROR_FILE", ""))
        error, traceback = read_error_file(error_file)
        if not error and os.waitstatus_to_exitcode(status) == CANNOT_START:
            error = not_started(words)
        if not error:
            error, traceback = find_error(words, death_of(status))
            traceback = "" if traceback in output.tail else traceback
        mistake = find_mistake(words) if death_of(status) == 0 else ""
        why = self._postmortem.why(self._worker, status, words)
        return {"error": error, "traceback": traceback, "why": why, "mistake": mistake}

    def _send(self, message: dict[str, object]) -> None:
        with suppress(OSError):  # the agent is gone: the socket's end says so
            os.write(self._sock, json.dumps(message).encode())


def _exited(status: int, tail: str) -> dict[str, object]:
    code = os.waitstatus_to_exitcode(status)
    if code < 0:
        return {"exit_code": None, "signal": -code, "tail": tail}
    return {"exit_code": code, "signal": None, "tail": tail}


def _read_order(fd: int) -> StartOrder:
    """The agent writes it again when a worker that stands by is to become a rank."""
    order: StartOrder = json.loads(os.pread(fd, os.fstat(fd).st_size, 0))
    return order


def _receive(sock: int) -> bytes:
    """One packet; nothing when the agent is gone."""
    try:
        return os.read(sock, _READ_BYTES)
    except OSError:
        return b""


def main() -> None:
    """Wait for the order to start, and guard."""
    sock, order_fd = int(sys.argv[1]), int(sys.argv[2])
    for fd in (sock, order_fd):
        os.set_inheritable(fd, False)
    # What a terminal or a manager sends to all is for the agent to answer.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
        signal.signal(number, signal.SIG_IGN)
    _libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    # Somebody may have stopped us: wake up to see that the socket has ended (`agent/runtime/children.py`).
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGCONT, 0, 0, 0)
    if _receive(sock) != b"S":
        return
    Guardian(sock, order_fd).run()
    os._exit(0)  # not held up by a thread that writes to a dead console


if __name__ == "__main__":
    main()
