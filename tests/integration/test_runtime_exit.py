"""The end of a script: its exit code is kept, whatever torch's threads are doing."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from trainer_runtime import process_exit

BOUND_S = 120.0

LATE_THREAD = """
import atexit, ctypes
atexit.register(ctypes.PyDLL(None).usleep, 300_000)  # runs last, and keeps the interpreter's lock
import os, sys, threading, torch, torch.distributed as dist
import trainer_runtime as tr
from trainer_runtime import process_exit
process_exit.IDLE_WITHIN_S = process_exit.LEAVE_WITHIN_S = 60.0  # who wants the processor besides is not our business
tr.init()
dist.all_reduce(torch.ones(1))
cpu = min(os.sched_getaffinity(0))
python = {thread.native_id for thread in threading.enumerate()}
for thread in map(int, os.listdir("/proc/self/task")):
    os.sched_setaffinity(thread, {cpu})
    if thread not in python:
        os.sched_setscheduler(thread, os.SCHED_IDLE, os.sched_param(0))
for _ in range(10_000):
    wire = torch.ones(1)
    dist.all_reduce(wire)
    if wire._use_count() > 1:
        print("gloo's thread has not let go of the tensor")
        break
sys.exit(101)
"""


def test_an_exit_right_after_a_collective_waits_for_gloos_thread(tmp_path: Path) -> None:
    """On a busy machine it lags behind; asking for the interpreter's lock too late, it would end all by SIGABRT.

    Here it gets a processor only when nobody else wants one, as when the main thread waits, and the main thread
    finalises the interpreter without letting go of the lock.
    """
    environment = {name: value for name, value in os.environ.items() if name != "RANK"}
    done = subprocess.run(
        [sys.executable, "-c", LATE_THREAD],
        env=environment,
        cwd=tmp_path,
        check=False,
        capture_output=True,
        text=True,
        timeout=BOUND_S,
    )
    assert done.stdout == "gloo's thread has not let go of the tensor\n"
    assert (done.returncode, done.stderr) == (101, "")


def test_an_exit_does_not_wait_for_long_for_a_thread_that_never_rests(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process_exit, "IDLE_WITHIN_S", 0.2)
    stop = threading.Event()

    def work() -> None:
        data = bytes(64 << 20)
        while not stop.is_set():
            hashlib.sha256(data)  # without the interpreter's lock

    thread = threading.Thread(target=work)
    thread.start()
    began = time.monotonic()
    process_exit._wait_for_idle_threads()
    waited_s = time.monotonic() - began
    stop.set()
    thread.join()
    assert waited_s < BOUND_S


LEAVER = """
import atexit, logging.handlers, sys
from trainer_runtime.process_exit import restart_at_exit

class Late:
    def __del__(self):
        print("torn down", flush=True)

late = Late()
keeps = logging.handlers.MemoryHandler(1000, target=logging.StreamHandler(sys.stdout))
logging.getLogger().addHandler(keeps)
atexit.register(print, "handler")
try:
    if "plain" not in sys.argv:
        restart_at_exit()
    raise SystemExit(101)
finally:
    logging.warning("kept")
    sys.stdout.write("finally\\n")
    if "late" in sys.argv:
        atexit.register(print, "late handler")
"""


@pytest.mark.parametrize("how", ["plain", "quick", "late"])
def test_a_rank_whose_group_is_over_runs_its_exit_handlers_and_ends_without_more(tmp_path: Path, how: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", LEAVER, how],
        cwd=tmp_path,
        check=False,
        capture_output=True,
        text=True,
        timeout=BOUND_S,
    )
    late = ["late handler"] if how == "late" else []
    ends = [] if how == "quick" else ["torn down"]
    assert done.stdout.splitlines() == ["finally", *late, "handler", "kept", *ends]
    assert (done.returncode, done.stderr) == (101, "")
