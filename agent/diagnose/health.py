"""Whether this node is fit to train, according to the operator's `--health_check` and to its GPUs.

The node is checked before the agent joins, after each failure of a local worker, and periodically while a check fails,
so that the node returns when it has recovered. A thread of its own runs one command after another; recovery never waits
for it. The first result is posted, and after that each change.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from shutil import which

from agent.config import HealthConfig
from agent.core.events import Event, HealthChecked
from agent.diagnose.commands import CommandRunner
from agent.observe.log import log

_GPU_WITHIN_S = 10.0
_GPU_QUERY = ("nvidia-smi", "--query-gpu=index,uuid,temperature.gpu,memory.total", "--format=csv,noheader")
_GPU_IN_TROUBLE = ("ERR!", "Unknown Error", "GPU is lost", "fallen off the bus", "requires reset")
_GPU_ID = re.compile(r"\d+|GPU-[\da-f-]{36}")
"""Identifiers that both CUDA and `nvidia-smi` accept: no MIG devices and no abbreviated UUIDs."""
_NO_GPU = frozenset({"", "-1", "NoDevFiles"})
"""Values of CUDA_VISIBLE_DEVICES that select no GPU."""
_DEVICES = Path("/dev")


class Health:
    """Checks the node on a thread of its own, and posts the results."""

    def __init__(self, config: HealthConfig, environ: Mapping[str, str], post: Callable[[Event], None]) -> None:
        """Prepare the checks; nothing runs before `start`. `environ` is the environment that the agent was given."""
        self._config = config
        self._environ = environ
        self._commands = CommandRunner(environ)
        self._post = post
        self._reported: str | None = None
        self._is_requested = threading.Event()
        self._thread = threading.Thread(target=self._run_checks, name="health", daemon=True)

    def start(self) -> None:
        """Check the node now. The first result is posted whatever it is."""
        self._thread.start()

    def check_again(self) -> None:
        """Check the node again, after a check that is under way."""
        self._is_requested.set()

    def close(self) -> None:
        """End a check that is under way. Nothing is posted any more."""
        self._commands.end()
        self._is_requested.set()
        if self._thread.ident is not None:
            self._thread.join()
        self._commands.close()

    def _run_checks(self) -> None:
        while not self._commands.is_closing:
            self._is_requested.clear()
            trouble = self._operator_check() or self._gpu_check()
            if trouble != self._reported and not self._commands.is_closing:
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
        trouble, _ = self._commands.run(self._config.command, self._config.timeout_s)
        return trouble

    def _gpu_check(self) -> str:
        """Query the driver for all GPUs that the workers may use, if there are any."""
        query = gpu_query(self._environ)
        if not query:
            return ""
        trouble, output = self._commands.run(query, _GPU_WITHIN_S)
        failed_lines = [line for line in output.splitlines() if any(words in line for words in _GPU_IN_TROUBLE)]
        return f"nvidia-smi: {failed_lines[0] if failed_lines else trouble}" if failed_lines or trouble else ""


def gpu_query(environ: Mapping[str, str]) -> tuple[str, ...]:
    """Return the command that queries the GPUs of the workers; empty if there are no GPUs or no `nvidia-smi`."""
    visible = environ.get("CUDA_VISIBLE_DEVICES")
    if visible in _NO_GPU or which("nvidia-smi") is None or not any(_DEVICES.glob("nvidia[0-9]*")):
        return ()
    if visible and all(map(_GPU_ID.fullmatch, visible.split(","))):
        return (*_GPU_QUERY, f"--id={visible}")
    return _GPU_QUERY
