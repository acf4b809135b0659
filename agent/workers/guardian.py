"""The process between the agent and one worker. It makes sure that no process of the worker outlives either of them.

This is a script of its own (`python -I -S guardian.py SOCKET ORDER`) that uses the standard library only. It is started
ahead of time and waits for `S`. Then it starts the worker described in ORDER, a memfd with JSON (an environment may be
larger than a packet), and runs one loop that waits on descriptors only:

| event | action |
|---|---|
| `T` from the agent | send SIGTERM to the worker's main process |
| `A` from the agent | turn the standby into a rank, see below |
| `M` from the agent | the worker is a rank of another group now: read ORDER again, write to that rank's log |
| `K` from the agent, or end of the socket (the agent died) | send SIGKILL to the whole process tree |
| SIGCHLD | reap; if the worker ended: report it, kill what it left, report `gone`, exit |
| output of the worker | see `output.py` |
| message of a standby | forward it to the agent |

Why no process escapes: the guardian is a *child subreaper* and inherits every orphan below it. A process that leaves
its session or its parent stays in this tree, and a process without children has no descendants. If the guardian itself
is killed, the worker dies by its parent-death signal, and its orphans are inherited by the agent (`reaper.py`).

A worker may start as a *standby*. Its order then names a socket (`hook_fd`) on which the standby reports once that its
imports are done. Its output stays in the pipes until `A` announces that ORDER was rewritten for a rank; then it is read
into that rank's log, and the worker may continue. A standby that closes the socket before that would run the script
without a rank, so it is killed.

Packets to the agent are JSON: `{"started": pid}`, `{"exited": {...}}`, `{"warning": text}`, `{"gone": true}`, and the
messages of a standby: `{"warm": {...}}` or `{"tainted": [...]}`.
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

TYPE_CHECKING = False  # importing `typing` would take longer than all other imports
if TYPE_CHECKING:
    from collections.abc import Callable

    from agent.workers.exit_causes import ExitCauses, fatal_signal_of
    from agent.workers.last_error import find_error, find_script_error, read_error_file, start_error
    from agent.workers.output import Output
    from agent.workers.process_tree import kill_descendants, surviving_descendants
    from agent.workers.terminal import Terminal, escape_controls, is_terminal
    from agent.workers.worker_start import CANNOT_START, StartOrder, become_worker, latin_bytes
else:
    sys.path.append(os.path.dirname(__file__))  # noqa: PTH120 - pathlib is slow; `-I` leaves this directory out of the
    # path
    from exit_causes import ExitCauses, fatal_signal_of
    from last_error import find_error, find_script_error, read_error_file, start_error
    from output import Output
    from process_tree import kill_descendants, surviving_descendants
    from terminal import Terminal, escape_controls, is_terminal
    from worker_start import CANNOT_START, become_worker, latin_bytes

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
_READ_BYTES = 1 << 16
_STANDBY_MESSAGES = ("warm", "tainted")
_DRAIN_READS = 32
_CAUSE_WITHIN_S = 1.5
_MAX_NAMED = 3
_AGENT_OUTPUT_S = 0.05
"""Time for the agent to print its own lines, which it writes on a thread."""
_U64 = struct.Struct("<Q")
_libc = ctypes.CDLL(None)  # loaded before the fork: the child loads nothing


class Guardian:
    """One worker, its process tree and its output."""

    def __init__(self, sock: int, order_fd: int) -> None:
        self._sock = sock
        self._order_fd = order_fd
        self._order = _read_order(order_fd)
        self._standby_socket = self._order["hook_fd"]
        """Socket to a standby. None: the worker is a rank."""
        self._worker = 0
        self._status: int | None = None
        """Exit status of the worker, as returned by wait(). None while it is alive."""
        self._poller = select.poll()
        self._handlers: dict[int, Callable[[], object]] = {}
        self._streams: dict[int, int] = {}
        """Output stream of the worker (1 or 2), by the descriptor of its pipe."""
        self._has_killed = False
        """Whether the guardian has killed the worker."""
        self._is_reading = True
        self._output: Output | None = None
        """None while the worker is a standby."""
        self._page = mmap.mmap(self._order["page_fd"], 0)
        self._output_bytes = 0
        self._wake_r, self._wake_w = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._exit_causes = ExitCauses()
        for fd in self._order["inherited_fds"]:
            os.set_inheritable(fd, False)
        self._terminals: dict[int, Terminal] = {}
        """The terminal of each output stream that is one."""
        if self._order["terminal_fd"] is not None:
            os.set_inheritable(self._order["terminal_fd"], False)
            terminal = Terminal(self._order["terminal_fd"])
            self._terminals = {stream: terminal for stream in (1, 2) if is_terminal(stream)}
        if self._standby_socket is not None:
            os.set_inheritable(self._standby_socket, False)

    def run(self) -> None:
        """Guard the worker until none of its processes is left."""
        # SIGCHLD, not the worker's pidfd: orphans must be reaped too, or zombies accumulate during a long training.
        signal.signal(signal.SIGCHLD, lambda _number, _frame: None)
        signal.set_wakeup_fd(self._wake_w, warn_on_full_buffer=False)
        try:
            self._start()
        except OSError as error:
            tail = f"elastic-agent: cannot start a process: {error.strerror}"
            self._send({"exited": {**_exit_fields(CANNOT_START << 8, tail), "at": time.time()}})
            self._send({"gone": True})
            return
        if self._standby_socket is None:
            self._read_output()
        else:
            self._watch(self._standby_socket, self._on_standby_message)
        self._watch(self._sock, self._on_agent_command)
        self._watch(self._wake_r, self._on_wakeup)
        while self._status is None:
            for fd, _ in self._poller.poll():
                self._handlers[fd]()
        self._finish(self._status)

    def _start(self) -> None:
        pipes = {stream: os.pipe2(os.O_CLOEXEC) for stream in (1, 2)}
        guardian = os.getpid()
        # Block signals: a SIGTERM that arrives before the child has reset its handlers would be ignored. A blocked one
        # is kept.
        signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        self._worker = os.fork()
        if self._worker == 0:
            become_worker(self._order, guardian, pipes[1][1], pipes[2][1])
        signal.pthread_sigmask(signal.SIG_SETMASK, ())
        self._send({"started": self._worker})
        for fd in self._order["inherited_fds"]:
            if fd != self._order_fd:
                os.close(fd)  # otherwise the agent could not detect that the worker closed its own copy
        for stream, (read, write) in pipes.items():
            os.close(write)
            os.set_blocking(read, False)
            self._streams[read] = stream

    def _read_output(self) -> Output:
        """Start to read the worker's output."""
        prefix = self._order["console_prefix"]
        self._output = Output(
            log_path=latin_bytes(self._order["log_path"]),
            console_prefix=None if prefix is None else latin_bytes(prefix),
            console_streams=() if prefix is None else self._order["console_streams"],
            warn=lambda text: self._send({"warning": text}),
            on_drained=self._wake,
            terminals=self._terminals,
            holds_tracebacks=self._order["holds_tracebacks"],
        )
        for pipe in self._streams:
            self._watch(pipe, partial(self._read_pipe, pipe, self._output))
        return self._output

    def _on_standby_message(self) -> None:
        """Forward a message of the standby to the agent."""
        if self._standby_socket is None:
            return
        try:
            received = json.loads(_receive(self._standby_socket))
            message = {key: received[key] for key in _STANDBY_MESSAGES if key in received}
        except (
            ValueError,
            TypeError,
        ):  # also at the end of the socket: then nothing holds the standby before its script
            self._has_killed = True
            self._close_standby_socket()
            kill_descendants()
        else:
            self._send(message)

    def _adopt(self) -> None:
        """Turn the standby into the rank that the rewritten order describes."""
        if self._standby_socket is None:
            return  # it has just failed, and its end will be reported
        self._read_order_again()
        with suppress(OSError):  # it has ended, and SIGCHLD reports that
            os.write(self._standby_socket, b"go")
        self._close_standby_socket()
        self._exit_causes = ExitCauses()
        self._read_output()

    def _move(self) -> None:
        """Write the output to the log of the rank that the worker is now, in another group."""
        if self._output is None:
            return
        self._drain(self._output)
        self._read_order_again()
        prefix = self._order["console_prefix"]
        self._output.begin_group(
            latin_bytes(self._order["log_path"]),
            None if prefix is None else latin_bytes(prefix),
            () if prefix is None else self._order["console_streams"],
            holds_tracebacks=self._order["holds_tracebacks"],
        )

    def _read_order_again(self) -> None:
        self._order = _read_order(self._order_fd)
        with suppress(OSError), open(f"/proc/{self._worker}/oom_score_adj", "w") as file:  # noqa: PTH123 - slow import
            file.write(str(self._order["oom_score_adj"]))

    def _close_standby_socket(self) -> None:
        if self._standby_socket is not None:
            self._poller.unregister(self._standby_socket)
            os.close(self._standby_socket)
            self._standby_socket = None

    def _watch(self, fd: int, handler: Callable[[], object]) -> None:
        self._handlers[fd] = handler
        self._poller.register(fd, select.POLLIN)

    def _wake(self) -> None:
        with suppress(BlockingIOError):  # enough wake-ups are pending
            os.write(self._wake_w, b".")

    def _on_agent_command(self) -> None:
        order = _receive(self._sock)
        if self._status is not None:
            return  # already reaped: its pid may belong to another process
        if order == b"A":
            self._adopt()
            return
        if order == b"M":
            self._move()
            return
        with suppress(ProcessLookupError, PermissionError):
            os.kill(self._worker, signal.SIGTERM if order == b"T" else signal.SIGKILL)
        if order == b"T":
            return
        if not order:
            self._poller.unregister(self._sock)  # an ended socket would stay readable
        self._has_killed = True
        kill_descendants()  # only now: finding them takes longer than the worker's death

    def _on_wakeup(self) -> None:
        """Reap children, and resume reading when the log has caught up."""
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

    def _set_reading(self, is_reading: bool) -> None:  # noqa: FBT001 - the method name explains the value
        self._is_reading = is_reading
        for pipe in self._streams:
            if is_reading:
                self._poller.register(pipe, select.POLLIN)
            else:
                self._poller.unregister(pipe)

    def _read_pipe(self, pipe: int, output: Output) -> bool:
        """Read from a pipe of the worker. Return False if it was empty or has ended."""
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
        """Read what was written so far, without waiting for the end: a grandchild may hold the pipe open."""
        for pipe in tuple(self._streams):
            reads = 0
            while reads < _DRAIN_READS and self._read_pipe(pipe, output):
                reads += 1

    def _finish(self, status: int) -> None:
        at = time.time()
        output = self._output or self._read_output()
        self._drain(output)
        try:
            cause = self._describe_exit(status, output)
        except Exception as error:  # noqa: BLE001 - output and files of a script may be anything; report the end
            # without a cause
            cause = {}
            self._send({"warning": f"cannot determine why process {self._worker} ended: {error!r}"})
        if status == 0 and not self._has_killed:
            self._warn_of_survivors()
        is_unexplained = status != 0 and not (cause.get("error") or cause.get("why"))
        message = {**_exit_fields(status, output.tail_of_both_streams if is_unexplained else output.tail), **cause}
        # It may be printed on a terminal, here or on other nodes.
        message = {name: escape_controls(value) if isinstance(value, str) else value for name, value in message.items()}
        self._send({"exited": {**message, "at": at}})
        with suppress(ChildProcessError):  # raised at once in most cases: there is no other child to look for
            while True:
                # Each death may leave orphans that were started after the last search. They are now children of this
                # process.
                if os.waitpid(-1, os.WNOHANG)[0] == 0:
                    kill_descendants()
                    os.waitpid(-1, 0)
        self._drain(output)
        if output.is_holding:  # the next group need not wait until the console shows this rank's last lines
            output.end_log()
            self._send({"gone": True})
            self._wait_for_cause()
            output.release()
            output.end()
        else:
            output.end()
            self._send({"gone": True})

    def _warn_of_survivors(self) -> None:
        """Warn of processes that outlive the script, such as a daemon: they do not outlive the rank."""
        try:  # mostly there is no child, and searching /proc is slow on a busy machine
            os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        except ChildProcessError:
            return
        survivors = surviving_descendants()
        if survivors:
            rank = self._order["env"].get("RANK", "?")
            names = ", ".join(f"{pid} ({command})" for pid, command in survivors[:_MAX_NAMED])
            more = f" and {len(survivors) - _MAX_NAMED} more" if len(survivors) > _MAX_NAMED else ""
            what, verb = ("process", "is") if len(survivors) == 1 else ("processes", "are")
            self._send(
                {
                    "warning": f"rank {rank} ended with code 0 and left {what} {names}{more}, which {verb} killed: "
                    "a rank lasts as long as the process that was started"
                }
            )

    def _wait_for_cause(self) -> None:
        """Wait until the agent ends the group. By then it has printed the failure that came first."""
        agent = select.poll()
        agent.register(self._sock, select.POLLIN)
        agent.poll(_CAUSE_WITHIN_S * 1000)
        time.sleep(_AGENT_OUTPUT_S)

    def _describe_exit(self, status: int, output: Output) -> dict[str, object]:
        """Describe what ended the worker; empty if the guardian killed it or it exited with 0."""
        if status == 0 or (self._has_killed and fatal_signal_of(status) == signal.SIGKILL):
            return {}
        stderr_text = output.stderr_text
        error_file = latin_bytes(self._order["env"].get("TORCHELASTIC_ERROR_FILE", ""))
        error, traceback = read_error_file(error_file)
        if not error and os.waitstatus_to_exitcode(status) == CANNOT_START:
            error = start_error(stderr_text)
        if not error:
            error, traceback = find_error(stderr_text, fatal_signal_of(status))
            traceback = "" if traceback in output.tail else traceback
        script_error = find_script_error(stderr_text) if fatal_signal_of(status) == 0 else ""
        why = self._exit_causes.explain(self._worker, status, stderr_text)
        return {"error": error, "traceback": traceback, "why": why, "script_error": script_error}

    def _send(self, message: dict[str, object]) -> None:
        with suppress(OSError):  # the agent is gone, and the end of the socket reports that
            os.write(self._sock, json.dumps(message).encode())


def _exit_fields(status: int, tail: str) -> dict[str, object]:
    code = os.waitstatus_to_exitcode(status)
    if code < 0:
        return {"exit_code": None, "signal": -code, "tail": tail}
    return {"exit_code": code, "signal": None, "tail": tail}


def _read_order(fd: int) -> StartOrder:
    """Read the start order. The agent rewrites it when a standby is to become a rank."""
    order: StartOrder = json.loads(os.pread(fd, os.fstat(fd).st_size, 0))
    return order


def _receive(sock: int) -> bytes:
    """Read one packet; empty if the agent is gone."""
    try:
        return os.read(sock, _READ_BYTES)
    except OSError:
        return b""


def main() -> None:
    """Wait for the command to start, and guard the worker."""
    sock, order_fd = int(sys.argv[1]), int(sys.argv[2])
    for fd in (sock, order_fd):
        os.set_inheritable(fd, False)
    # A terminal or a service manager sends these to all processes. The agent handles them.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
        signal.signal(number, signal.SIG_IGN)
    _libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    # If this process was stopped, continue it, so that it notices the socket's end (`agent/children.py`).
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGCONT, 0, 0, 0)
    if _receive(sock) != b"S":
        return
    Guardian(sock, order_fd).run()
    os._exit(0)  # not delayed by a thread that writes to a blocked console


if __name__ == "__main__":
    main()
