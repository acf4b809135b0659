"""Leave the process group when the script exits, however it exits, and keep its exit code.

Two things make that difficult.

**A stuck peer.** When a process group is deleted, it waits for operations in flight. The interpreter deletes it at exit
in any case, also after an exception: the exit then takes the whole timeout of the group (measured with gloo). Therefore
a daemon thread, whose references the interpreter never drops, takes a reference to the group at exit and destroys the
group properly, within `LEAVE_WITHIN_S`. The thread is started early because Python 3.12 starts no threads at exit.

**Late threads of torch.** The thread that waits for a collective continues as soon as the result is there, while gloo's
thread still has to release the tensors, for which it needs the interpreter lock. If the interpreter begins to finalize
while gloo's thread waits for that lock, Python before 3.14 ends the thread by unwinding its stack. C++ does not allow
that, and the process dies by SIGABRT: "terminate called without an active exception". This happens if a collective ends
just before the exit on a machine so busy that the thread does not get a processor. Deleting the group to join its
threads is not possible: DistributedDataParallel keeps a reference to it. So the exit waits, for at most
`IDLE_WITHIN_S`, until no other thread is runnable. A thread that still waits for a stuck peer sleeps, and is not waited
for; if its peer arrives or dies in the moment between the last check and the finalization, the abort can still happen.

The next group waits for a rank that leaves for a handoff, and an interpreter with torch loaded needs half a second of
processor time to finalize. So such a rank exits as soon as all exit handlers have run. This skips only the finalizers
of objects that are still alive, which Python does not guarantee to run. Apart from that, nothing here changes the exit
code or prevents the interpreter's finalization.
"""

from __future__ import annotations

import atexit
import os
import sys
import threading
import time
from contextlib import suppress
from functools import cache
from pathlib import Path

import torch.distributed as dist

from trainer_runtime import contract

LEAVE_WITHIN_S = 5.0
"""Seconds that an exit waits for the process group to be destroyed."""

IDLE_WITHIN_S = 1.0
"""Seconds that an exit waits for the other threads to become idle. The exit of a script with a thread that is always
busy takes this much longer."""

CHECK_EVERY_S = 0.005


@cache
def destroy_group_at_exit() -> None:
    """Arrange that the process group is destroyed when the interpreter exits; further calls do nothing."""
    leaving, left = threading.Event(), threading.Event()
    held: list[dist.ProcessGroup | None] = []

    def leave() -> None:
        leaving.wait()
        if dist.is_initialized():
            held.append(dist.group.WORLD)
            dist.destroy_process_group()
        left.set()
        threading.Event().wait()  # this frame keeps `held`, and therefore the group, alive until the process ends

    def at_exit() -> None:
        leaving.set()
        left.wait(LEAVE_WITHIN_S)
        _wait_for_idle_threads()

    threading.Thread(target=leave, name="leave-process-group", daemon=True).start()
    atexit.register(at_exit)


def restart_at_exit() -> None:
    """Arrange that this rank, whose group is over, exits with `EXIT_RESTART` once its exit handlers have run."""
    count = atexit._ncallbacks() + 1  # noqa: SLF001 - no public way to notice handlers registered after ours

    def end() -> None:
        if atexit._ncallbacks() != count:  # noqa: SLF001
            return  # later handlers have run already, and would run again: exit as any script does
        atexit.unregister(end)
        atexit._run_exitfuncs()  # noqa: SLF001 - as multiprocessing does in its children
        for stream in (sys.stdout, sys.stderr):
            with suppress(Exception):  # the stream is closed, or replaced by an object without flush
                stream.flush()
        os._exit(contract.EXIT_RESTART)

    atexit.register(end)


def _wait_for_idle_threads() -> None:
    """Wait until two checks in a row find all other threads idle.

    One check is not enough: a thread that waits for the interpreter lock, which the checking thread holds, sleeps as
    well. Between two checks it gets the lock.
    """
    deadline = time.monotonic() + IDLE_WITHIN_S
    calm = 0
    while calm < 2 and time.monotonic() < deadline:
        time.sleep(CHECK_EVERY_S)  # releases the interpreter lock
        calm = 0 if _is_another_thread_busy() else calm + 1


def _is_another_thread_busy() -> bool:
    """Return whether another thread of this process runs, is runnable, or waits for a disk."""
    own = str(threading.get_native_id())
    return any(_state(thread) in {"R", "D"} for thread in Path("/proc/self/task").iterdir() if thread.name != own)


def _state(thread: Path) -> str:
    try:
        stat = (thread / "stat").read_text(encoding="utf-8", errors="replace")
    except OSError:  # the thread has ended
        return "X"
    return stat.rpartition(")")[2].split()[0]  # the fields before are its id and its name, which may contain blanks
