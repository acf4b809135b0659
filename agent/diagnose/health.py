"""Whether this node is fit to train: by the operator's `--health_check`, and by whether its GPUs answer.

It is examined before the agent joins, after each failure of a local worker, and again and again while something is
wrong, so that a node comes back when it is well. A thread of its own runs one command after another: recovery never
waits for them. What is found is told once, and then whenever it changes.

A command may hang, even so that SIGKILL does not end it (a driver that is gone leaves `nvidia-smi` in the kernel): such
a one is left alone, and counts as trouble for as long as it is there.
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
"""What both CUDA and `nvidia-smi` take: no parts of GPUs, and no shortened names."""
_NO_GPU = frozenset({"", "-1", "NoDevFiles"})
"""Values of CUDA_VISIBLE_DEVICES by which a user wants none."""
_DEVICES = Path("/dev")
_DIES_WITHIN_S = 2.0
_OUTPUT_BYTES = 4096
_LINE_CHARACTERS = 200
_READ_BYTES = 1 << 16


class Health:
    """Examines the node on a thread of its own, and posts what it finds."""

    def __init__(self, config: HealthConfig, environ: Mapping[str, str], post: Callable[[Event], None]) -> None:
        """`environ`: what the user gave to the agent. Nothing runs before `start`."""
        self._config = config
        self._environ = without_secrets(environ)
        self._post = post
        self._told: str | None = None
        self._stuck: dict[tuple[str, ...], subprocess.Popen[bytes]] = {}
        """Commands that were killed, and live on."""
        self._wanted = threading.Event()
        self._is_closing = False
        self._close_r, self._close_w = os.pipe2(os.O_CLOEXEC)
        self._thread = threading.Thread(target=self._work, name="health", daemon=True)

    def start(self) -> None:
        """Examine the node now. The first finding is posted whatever it is."""
        self._thread.start()

    def look(self) -> None:
        """Examine it again, once what is under way has ended."""
        self._wanted.set()

    def close(self) -> None:
        """End what is under way; nothing is posted any more."""
        self._is_closing = True
        os.write(self._close_w, b".")
        self._wanted.set()
        if self._thread.ident is not None:
            self._thread.join()
        os.close(self._close_r)
        os.close(self._close_w)

    def _work(self) -> None:
        while not self._is_closing:
            self._wanted.clear()
            trouble = self._own_check() or self._gpu_check()
            if trouble != self._told and not self._is_closing:
                self._tell(trouble)
            self._wanted.wait(self._config.retry_s if trouble else None)

    def _tell(self, trouble: str) -> None:
        if trouble:
            log.warning("this node is not fit to train", trouble=trouble, again_in_s=self._config.retry_s)
        elif self._told:
            log.info("this node is fit to train again")
        self._told = trouble
        self._post(HealthChecked(trouble))

    def _own_check(self) -> str:
        if not self._config.command:
            return ""
        trouble, _ = self._run(self._config.command, self._config.timeout_s)
        return trouble

    def _gpu_check(self) -> str:
        """Ask the driver for all GPUs that the workers may use, if there are any."""
        query = gpu_query(self._environ)
        if not query:
            return ""
        trouble, output = self._run(query, _GPU_WITHIN_S)
        odd = [line for line in output.splitlines() if any(words in line for words in _GPU_IN_TROUBLE)]
        return f"nvidia-smi: {odd[0] if odd else trouble}" if odd or trouble else ""

    def _run(self, command: tuple[str, ...], timeout_s: float) -> tuple[str, str]:
        """What is wrong by a command: nothing if it ends with code 0 in time; and the end of what it printed."""
        if command in self._stuck and self._stuck[command].poll() is None:
            return "hangs, and cannot be killed", ""
        try:
            process = subprocess.Popen(
                command,
                env=self._environ,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # it is killed with all that it starts; a terminal's Ctrl-C is not for it
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
        """Read what it prints until it ends, and no longer: a child of it may hold the output open."""
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
    """The command that asks for the GPUs that workers may use; empty: there are none, or nobody to ask."""
    visible = environ.get("CUDA_VISIBLE_DEVICES")
    if visible in _NO_GPU or which("nvidia-smi") is None or not any(_DEVICES.glob("nvidia[0-9]*")):
        return ()
    if visible and all(map(_GPU_ID.fullmatch, visible.split(","))):
        return (*_GPU_QUERY, f"--id={visible}")
    return _GPU_QUERY


def _kill(process: subprocess.Popen[bytes]) -> bool:
    """Kill a command and all that it started; False: it lives on, in the kernel."""
    with suppress(ProcessLookupError, PermissionError):  # the latter also of a corpse that was another user's, as sudo
        os.killpg(process.pid, signal.SIGKILL)
    with suppress(subprocess.TimeoutExpired):
        process.wait(_DIES_WITHIN_S)
    with suppress(ChildProcessError):  # its orphans have come to us
        while os.waitpid(-process.pid, os.WNOHANG)[0]:
            pass
    return process.returncode is not None


def _last_line(output: str) -> str:
    lines = [" ".join(line.split()) for line in output.splitlines()]
    return next((line[:_LINE_CHARACTERS] for line in reversed(lines) if line), "")
