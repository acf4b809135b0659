"""A training that one node's rank disturbs in a way of choice, once, in the job's first group.

Usage: failing_job.py DIRECTORY STEPS KIND. The rank on node b does it after step 200. All ranks take part in each step,
so the others wait for it; the result is that of `counting`.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

import trainer_runtime as tr
from trainer_runtime import contract

NODE = "b"
STEP = 200
STEP_TIME_S = 0.02


def disturb(kind: str) -> None:  # noqa: C901 - one a kind
    """Do it."""
    match kind:
        case "exception":
            raise ValueError("the sample 17 is damaged")
        case "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        case "memory":
            hoard = []
            while True:
                hoard.append(bytearray(os.urandom(1 << 20) * 64))
        case "segfault":
            ctypes.string_at(0)
        case "collective":
            dist.barrier()  # of which the others know nothing
        case "sleep":
            time.sleep(3600.0)
        case "lock":
            while True:  # a signal ends such a sleep
                ctypes.PyDLL(None).sleep(3600)  # does not let go of the interpreter's lock
        case "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        case _:
            pass


def main() -> None:
    """Train."""
    from counting import train  # noqa: PLC0415 - it lies beside this script, and elsewhere for who only reads the names

    directory, steps, kind = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
    tr.init()
    state = tr.State(value=torch.zeros((), dtype=torch.float64), save_every=5, keep=2)
    is_mine = os.environ[contract.GROUP] == "1" and os.environ[contract.NODE_ID] == NODE

    def before_step() -> None:
        if is_mine and state.step == STEP:
            disturb(kind)

    train(state, directory, steps, STEP_TIME_S, before_step)


if __name__ == "__main__":
    main()
