"""Waiting for what other threads and processes bring about."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import psutil


def wait_for(is_so: Callable[[], object], what: str, within_s: float = 60.0) -> None:
    """Wait until the condition is true; fail in time if it never is."""
    give_up_at = time.monotonic() + within_s
    while not is_so():
        assert time.monotonic() < give_up_at, f"not in time: {what}"
        time.sleep(0.01)


def freeze(pid: int) -> None:
    """Stop a process. Returns when every thread of it has stopped: until then it may answer once more."""
    os.kill(pid, signal.SIGSTOP)
    threads = Path(f"/proc/{pid}/task")
    wait_for(lambda: all(_is_stopped(thread) for thread in threads.iterdir()), f"process {pid} stops")


def has_ended(pid: int) -> bool:
    """It runs no more. Who adopted an orphan may take seconds to reap it: until then there is a zombie of that pid."""
    try:
        return bool(psutil.Process(pid).status() == psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return True


def _is_stopped(thread: Path) -> bool:
    try:
        stat = (thread / "stat").read_text()
    except (FileNotFoundError, ProcessLookupError):  # it has just ended
        return True
    return stat.rpartition(")")[2].split()[0] == "T"
