"""Whether this node is fit to train, according to the operator's `--health_check` and to its GPUs.

The node is checked before the agent joins, after each failure of a local worker, and periodically while a check fails,
so that the node returns when it has recovered. A thread of its own runs one command after another; recovery never waits
for it. The first result is posted, and after that each change.

A command may hang so that even SIGKILL does not end it (if the driver is gone, `nvidia-smi` stays in the kernel). Such
a process is left alone, and the check counts as failed while it exists.
"""

from __future__ import annotations

import os
import re
import selectors
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from shutil import which

from agent.config import HealthConfig
from agent.core.events import Event, HealthChecked
from agent.observe.log import log
from agent.workers.environment import without_secrets

_GPU_WITHIN_S = 10.0
_GPU_QUERY = ("nvidia-smi", "--query-gpu=index,uuid,temperature.gpu,memory.total", "--format=csv,noheader")
_GPU_IN_TROUBLE = ("ERR!", "Unknown Error", "GPU is lost", "fallen off the bus", "requires reset")
_GPU_ID = re.compile(r"\d+|GPU-[\da-f-]{36}")
"""Identifiers that both CUDA and `nvidia-smi` accept: no MIG devices and no abbreviated UUIDs."""
_NO_GPU = frozenset({"", "-1", "NoDevFiles"})
"""Values of CUDA_VISIBLE_DEVICES that select no GPU."""
_DEVICES = Path("/dev")
_DIES_WITHIN_S = 2.0
_OUTPUT_BYTES = 4096
_LINE_CHARACTERS = 200
_READ_BYTES = 1 << 16


class Health:
    """Checks the node on a thread of its own, and posts the results."""

    def __init__(self, config: HealthConfig, environ: Mapping[str, str], post: Callable[[Event], None]) -> None:
        """Prepare the checks; nothing runs before `start`. `environ` is the environment that the agent was given."""
        self._config = config
        self._environ = without_secrets(environ)
        self._post = post
        self._reported: str | None = None
        self._stuck: dict[tuple[str, ...], subprocess.Popen[bytes]] = {}
        """Commands that were killed but still exist."""
        self._is_requested = threading.Event()
        self._is_closing = False
        self._close_r, self._close_w = os.pipe2(os.O_CLOEXEC)
        self._thread = threading.Thread(target=self._run_checks, name="health", daemon=True)

    def start(self) -> None:
        """Check the node now. The first result is posted whatever it is."""
        self._thread.start()

    def check_again(self) -> None:
        """Check the node again, after a check that is under way."""
        self._is_requested.set()

    def close(self) -> None:
        """End a check that is under way. Nothing is posted any more."""
        self._is_closing = True
        os.write(self._close_w, b".")
        self._is_requested.set()
        if self._thread.ident is not None:
            self._thread.join()
        os.close(self._close_r)
        os.close(self._close_w)

    def _run_checks(self) -> None:
        while not self._is_closing:
            self._is_requested.clear()
            trouble = self._operator_check() or self._gpu_check()
            if trouble != self._reported and not self._is_closing:
                self._report(trouble)
            self._is_requested.wait(self._config.retry_s if trouble else None)

    def _report(self, trouble: str) -> None:
        if trouble:
            log.warning("this node is not fit to train", trouble=trouble, again_in_s=self._config.retry_s)
        elif self._reported:
            log.info("this node is fit to train again")
        self._reported = trouble
        self._post(HealthChecked(trouble))

    def _operator_check(self) -> str:
        if not self._config.command:
            return ""
        trouble, _ = self._run(self._config.command, self._config.timeout_s)
        return trouble

    def _gpu_check(self) -> str:
        """Query the driver for all GPUs that the workers may use, if there are any."""
        query = gpu_query(self._environ)
        if not query:
            return ""
        trouble, output = self._run(query, _GPU_WITHIN_S)
        failed_lines = [line for line in output.splitlines() if any(words in line for words in _GPU_IN_TROUBLE)]
        return f"nvidia-smi: {failed_lines[0] if failed_lines else trouble}" if failed_lines or trouble else ""

    def _run(self, command: tuple[str, ...], timeout_s: float) -> tuple[str, str]:
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
        return (_last_line(output) or f"ended with code {code}") if code else "", output

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
            while not has_ended and not self._is_closing and time.monotonic() < give_up_at:
                ready = {key.fileobj for key, _ in selector.select(give_up_at - time.monotonic())}
                has_ended = pidfd in ready
                if pipe in ready:
                    data = os.read(pipe.fileno(), _READ_BYTES)
                    output = (output + data)[-_OUTPUT_BYTES:]
                    if not data:
                        selector.unregister(pipe)
        os.close(pidfd)
        return has_ended, output.decode(errors="replace")


def gpu_query(environ: Mapping[str, str]) -> tuple[str, ...]:
    """Return the command that queries the GPUs of the workers; empty if there are no GPUs or no `nvidia-smi`."""
    visible = environ.get("CUDA_VISIBLE_DEVICES")
    if visible in _NO_GPU or which("nvidia-smi") is None or not any(_DEVICES.glob("nvidia[0-9]*")):
        return ()
    if visible and all(map(_GPU_ID.fullmatch, visible.split(","))):
        return (*_GPU_QUERY, f"--id={visible}")
    return _GPU_QUERY


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


def _last_line(output: str) -> str:
    lines = [" ".join(line.split()) for line in output.splitlines()]
    return next((line[:_LINE_CHARACTERS] for line in reversed(lines) if line), "")
