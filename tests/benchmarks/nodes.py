"""Processes on this machine that play nodes, and the end of all that a job has started.

A node is a launcher with all of its descendants. Each process of a job carries a mark in its environment, so that at
the end even those are found that outlived their launcher.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import socket
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import psutil
from waiting import comes_true

_ROOT = Path(__file__).resolve().parents[2]
"""What is measured is the code that stands here, whatever is installed."""
MARK = "ELASTIC_AGENT_BENCH_MARK"
_GONE_WITHIN_S = 20.0


@dataclass(frozen=True)
class Node:
    """A launcher's process."""

    name: str
    process: subprocess.Popen[bytes]

    def family(self) -> list[int]:
        """The launcher and all of its descendants."""
        with contextlib.suppress(psutil.NoSuchProcess):
            below = psutil.Process(self.process.pid).children(recursive=True)
            return [self.process.pid, *(child.pid for child in below)]
        return []


class Marked:
    """Starts processes under a mark of their own, and ends all that carry it. Leaving the context ends them."""

    def __init__(self, directory: Path, environ: Mapping[str, str]) -> None:
        self.directory = directory
        self._mark = secrets.token_hex(8)
        self._environ = {**os.environ, "PYTHONPATH": str(_ROOT), **environ, MARK: self._mark}

    def __enter__(self) -> Self:
        """Nothing is started yet."""
        self.directory.mkdir(parents=True)
        return self

    def __exit__(self, *_exc: object) -> None:
        self.end()

    def start(self, name: str, argv: Sequence[str]) -> Node:
        """Start a launcher in a session of its own; what it prints goes to `NAME.out`."""
        with (self.directory / f"{name}.out").open("ab") as output:
            process = subprocess.Popen(
                argv,
                cwd=self.directory,
                env=self._environ,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        return Node(name, process)

    def ask(self, argv: Sequence[str]) -> None:
        """Run a command to its end. Raises `CalledProcessError`."""
        subprocess.run(argv, cwd=self.directory, env=self._environ, capture_output=True, check=True)

    def end(self) -> None:
        """Kill all that is marked, until nothing is left. Raises `TimeoutError`."""
        if not comes_true(self._has_ended, _GONE_WITHIN_S, every_s=0.02):
            raise TimeoutError(f"processes {self._living()} do not end")

    def _has_ended(self) -> bool:
        """Kill what is left. Whether nothing was."""
        left = self._living()
        strike(left, signal.SIGKILL)
        return not left

    def _living(self) -> list[int]:
        return [process.pid for process in psutil.process_iter() if self._is_ours(process)]

    def _is_ours(self, process: psutil.Process) -> bool:
        with contextlib.suppress(psutil.Error):
            is_mine = process.environ().get(MARK) == self._mark
            return is_mine and process.status() != psutil.STATUS_ZOMBIE
        return False


def strike(pids: Iterable[int], number: int) -> None:
    """Send a signal to each that is still there."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


def free_port() -> int:
    """A port of loopback that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
