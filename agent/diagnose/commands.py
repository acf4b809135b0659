"""Runs commands of the operator: with all that they start, within a time limit, and so that they can be ended at once.

A command may hang so that even SIGKILL does not end it (if the driver is gone, `nvidia-smi` stays in the kernel). Such
a process is left alone, and the command counts as failed while it exists.
"""

from __future__ import annotations

import math
import os
import selectors
import signal
import subprocess
import time
from collections.abc import Mapping
from contextlib import suppress

from agent.workers.environment import without_secrets

_DIES_WITHIN_S = 2.0
_OUTPUT_BYTES = 4096
_LINE_CHARACTERS = 200
_READ_BYTES = 1 << 16
_WAIT_S = 3600.0
"""At most: the kernel knows no endless time."""


class CommandRunner:
    """Runs one command after another on the caller's thread, until another thread closes it."""

    def __init__(self, environ: Mapping[str, str]) -> None:
        """Prepare to run commands in `environ`, the environment that the agent was given, without its secrets."""
        self._environ = without_secrets(environ)
        self._stuck: dict[tuple[str, ...], subprocess.Popen[bytes]] = {}
        """Commands that were killed but still exist."""
        self.is_closing = False
        self._close_r, self._close_w = os.pipe2(os.O_CLOEXEC)

    def end(self) -> None:
        """End a command that is under way, and all later ones. May be called from another thread."""
        self.is_closing = True
        os.write(self._close_w, b".")

    def close(self) -> None:
        """Give the pipe back, once no command is under way."""
        os.close(self._close_r)
        os.close(self._close_w)

    def run(self, command: tuple[str, ...], timeout_s: float = math.inf) -> tuple[str, str]:
        """Run a command. Return the problem (empty if it exits with 0 in time), and the end of its output."""
        if command in self._stuck and self._stuck[command].poll() is None:
            return "hangs, and cannot be killed", ""
        try:
            process = subprocess.Popen(
                command,
                env=self._environ,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # killed with all its children; not reached by a terminal's Ctrl-C
            )
        except OSError as error:
            return f"{command[0]} cannot be run: {error.strerror}", ""
        has_ended, output = self._follow(process, timeout_s)
        if not _kill(process):
            self._stuck[command] = process
        if not has_ended:
            return f"did not end within {timeout_s:g} s", output
        code = process.returncode
        return (last_line(output) or f"ended with code {code}") if code else "", output

    def _follow(self, process: subprocess.Popen[bytes], timeout_s: float) -> tuple[bool, str]:
        """Read the output until the command ends, but not until end of file: a child may hold the pipe open."""
        assert process.stdout is not None  # noqa: S101 - it is a pipe
        output = b""
        pidfd = os.pidfd_open(process.pid)
        give_up_at = time.monotonic() + timeout_s
        os.set_blocking(process.stdout.fileno(), False)
        with process.stdout as pipe, selectors.DefaultSelector() as selector:
            for source in (pipe, pidfd, self._close_r):
                selector.register(source, selectors.EVENT_READ)
            has_ended = False
            while not has_ended and not self.is_closing and time.monotonic() < give_up_at:
                ready = {key.fileobj for key, _ in selector.select(min(give_up_at - time.monotonic(), _WAIT_S))}
                has_ended = pidfd in ready
                if pipe in ready:
                    data = os.read(pipe.fileno(), _READ_BYTES)
                    output = (output + data)[-_OUTPUT_BYTES:]
                    if not data:
                        selector.unregister(pipe)
        os.close(pidfd)
        return has_ended, output.decode(errors="replace")


def _kill(process: subprocess.Popen[bytes]) -> bool:
    """Kill a command and all its children. Return False if it cannot be killed."""
    with suppress(ProcessLookupError, PermissionError):  # PermissionError: it ended as another user, as under sudo
        os.killpg(process.pid, signal.SIGKILL)
    with suppress(subprocess.TimeoutExpired):
        process.wait(_DIES_WITHIN_S)
    with suppress(ChildProcessError):  # this process is the subreaper of its orphans
        while os.waitpid(-process.pid, os.WNOHANG)[0]:
            pass
    return process.returncode is not None


def last_line(output: str) -> str:
    """Return the last line of a command's output that is not blank, shortened; empty: there is none."""
    lines = [" ".join(line.split()) for line in output.splitlines()]
    return next((line[:_LINE_CHARACTERS] for line in reversed(lines) if line), "")
