"""Stacks of a Python process by py-spy, if that is installed: it reads the process's memory, and does not stop it."""

from __future__ import annotations

import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path

import msgspec

_WITHIN_S = 5.0


class SpyFrame(msgspec.Struct, frozen=True):
    """A line that is being executed."""

    name: str
    filename: str
    line: int


class SpyThread(msgspec.Struct, frozen=True):
    """One of a process's threads, the innermost frame first."""

    os_thread_id: int | None
    frames: list[SpyFrame]


_decoder = msgspec.json.Decoder(list[SpyThread])


def look(pids: list[int]) -> dict[int, list[SpyThread]]:
    """The threads of each process, its main one first; what cannot be looked at is left out. Takes seconds at most."""
    program = shutil.which("py-spy") or shutil.which("py-spy", path=str(Path(sys.executable).parent))
    if program is None:
        return {}
    give_up_at = time.monotonic() + _WITHIN_S
    started = {pid: _start(program, pid) for pid in pids if pid}
    found = {pid: _result(started, pid, give_up_at) for pid, started in started.items()}
    return {pid: threads for pid, threads in found.items() if threads}


def _start(program: str, pid: int) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [program, "dump", "--nonblocking", "--json", "--full-filenames", f"--pid={pid}"],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )


def _result(started: subprocess.Popen[bytes], pid: int, give_up_at: float) -> list[SpyThread]:
    """Its main thread first; empty if it failed, or takes too long."""
    try:
        output, _ = started.communicate(timeout=max(0.0, give_up_at - time.monotonic()))
        threads = _decoder.decode(output)
    except subprocess.TimeoutExpired:
        started.kill()
        # Reaped elsewhere: it may hang in the kernel with what it looks at.
        threading.Thread(target=started.communicate, name="reap-py-spy", daemon=True).start()
        return []
    except ValueError:  # it is no JSON, or no UTF-8
        return []
    return sorted(threads, key=lambda thread: thread.os_thread_id != pid)
