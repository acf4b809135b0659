"""Leaving the process group when the script ends, in whatever way, with the exit code that it has.

Two things stand in the way.

**A peer that is stuck.** A process group with an operation under way waits for it when it is deleted, and the
interpreter deletes it at exit in any case, also after an exception: the exit then takes the whole timeout of the group
(measured with gloo). So at exit a daemon thread, whose references the interpreter never drops, takes hold of the group
and ends it in good order, for which it has `LEAVE_WITHIN_S`. The thread is started early because Python 3.12 starts
none at exit.

**Threads of torch that come late.** The waiter of a collective goes on as soon as the result is there, while gloo's
thread has yet to let go of the tensors, for which it takes the interpreter's lock. If the interpreter begins to
finalise while the thread waits for the lock, Python before 3.14 ends the thread by unwinding its stack, C++ does not
let itself be unwound there, and the process ends by SIGABRT: "terminate called without an active exception". It takes
a collective just before the exit and a machine so busy that the thread does not get a processor. The group cannot be
deleted to wait for its threads: DistributedDataParallel holds on to it. So the exit waits, for `CALM_WITHIN_S` at
most, until no other thread wants a processor. A thread that still waits for a stuck peer sleeps and is not waited for;
if its peer comes, or dies, in the very moment between our last look and the finalisation, this can still happen.

A rank of a group that is over has no time for the rest: an interpreter with torch in it takes half a second of a
processor to take itself apart, while the next group waits. So one that leaves for a handoff ends as soon as all exit
handlers have run. What is left out are finalisers of what is still alive, of which Python promises none. Apart from
that nothing here decides the exit code or keeps the interpreter from finalising.
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
"""How long an exit waits for the process group to end in good order."""

CALM_WITHIN_S = 1.0
"""How long an exit waits for the other threads to have no work. A script with a thread that never rests takes as much
longer to end."""

LOOK_EVERY_S = 0.005


@cache
def leave_at_exit() -> None:
    """See to it that the process group is left when the interpreter exits; once is enough."""
    leaving, left = threading.Event(), threading.Event()
    held: list[dist.ProcessGroup | None] = []

    def leave() -> None:
        leaving.wait()
        if dist.is_initialized():
            held.append(dist.group.WORLD)
            dist.destroy_process_group()
        left.set()
        threading.Event().wait()  # this frame keeps `held`, and so the group, to the very end

    def at_exit() -> None:
        leaving.set()
        left.wait(LEAVE_WITHIN_S)
        _wait_for_calm()

    threading.Thread(target=leave, name="leave-process-group", daemon=True).start()
    atexit.register(at_exit)


def end_at_exit() -> None:
    """See to it that this rank, whose group is over, ends with `EXIT_RESTART` once its exit handlers have run."""
    count = atexit._ncallbacks() + 1  # noqa: SLF001 - nothing else tells of handlers that come after ours

    def end() -> None:
        if atexit._ncallbacks() != count:  # noqa: SLF001
            return  # what was registered later has run, and would run again: end as any script does
        atexit.unregister(end)
        atexit._run_exitfuncs()  # noqa: SLF001 - as multiprocessing does in its children
        for stream in (sys.stdout, sys.stderr):
            with suppress(Exception):  # closed, or replaced by what has no flush
                stream.flush()
        os._exit(contract.EXIT_RESTART)

    atexit.register(end)


def _wait_for_calm() -> None:
    """Wait until two looks in a row find no other thread at work.

    One is not enough: a thread that waits for the interpreter's lock, which the looker has, sleeps as well. Between
    two looks it gets the lock.
    """
    deadline = time.monotonic() + CALM_WITHIN_S
    calm = 0
    while calm < 2 and time.monotonic() < deadline:
        time.sleep(LOOK_EVERY_S)  # lets go of the interpreter's lock
        calm = 0 if _is_another_thread_at_work() else calm + 1


def _is_another_thread_at_work() -> bool:
    """Tell whether another thread of this process has a processor, wants one, or waits for a disk."""
    own = str(threading.get_native_id())
    return any(_state(thread) in {"R", "D"} for thread in Path("/proc/self/task").iterdir() if thread.name != own)


def _state(thread: Path) -> str:
    try:
        stat = (thread / "stat").read_text(encoding="utf-8", errors="replace")
    except OSError:  # it has ended
        return "X"
    return stat.rpartition(")")[2].split()[0]  # what stands before is its number and its name, which may hold blanks
