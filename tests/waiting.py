"""Waiting for what other threads and processes bring about."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import psutil

_EVERY_S = 0.01


def wait_for(is_so: Callable[[], object], what: str, within_s: float = 60.0, *, every_s: float = _EVERY_S) -> None:
    """Wait until the condition is true; fail in time if it never is."""
    assert comes_true(is_so, within_s, every_s=every_s), f"not in time: {what}"


def comes_true(is_so: Callable[[], object], within_s: float, *, every_s: float = _EVERY_S) -> bool:
    """Wait until the condition is true, and return whether it was in time. It is checked every `every_s` seconds."""
    give_up_at = time.monotonic() + within_s
    while not is_so():
        if time.monotonic() >= give_up_at:
            return False
        time.sleep(every_s)
    return True


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
