"""Row 2: how long after SIGKILL the memory of a process is free again."""

from __future__ import annotations

import time
from collections.abc import Iterator

import torch
from gpu_check.processes import started
from gpu_check.results import CheckFailed, Options, Result, seconds

SIZES_GB = (1, 20, 60)
TIMES = 3
SLACK_BYTES = 64 << 20
WITHIN_S = 30.0


def check(_options: Options) -> Iterator[Result]:
    """Yield a result for each size that fits."""
    for gigabytes in SIZES_GB:
        free, _ = torch.cuda.mem_get_info()
        if free < (gigabytes + 1) * 10**9:
            yield Result(what=f"SIGKILL at {gigabytes} GB", figures=f"left out: only {free / 1e9:.0f} GB are free")
            continue
        taken = [_kill(gigabytes, free) for _ in range(TIMES)]
        ended, freed = zip(*taken, strict=True)
        yield Result(
            what=f"SIGKILL at {gigabytes} GB",
            figures=f"process ended {seconds(ended)}, memory free {seconds(freed)}",
        )


def _kill(gigabytes: int, free: int) -> tuple[float, float]:
    """Return the seconds from SIGKILL until the process has ended, and until as much memory is free as before."""
    with started("memory_holder.py", gigabytes) as process:
        if free - torch.cuda.mem_get_info()[0] < gigabytes * 10**9:
            raise CheckFailed(f"the process does not hold {gigabytes} GB")
        at = time.monotonic()
        process.kill()
        process.wait()
        ended_s = time.monotonic() - at
        while torch.cuda.mem_get_info()[0] < free - SLACK_BYTES:  # there is no event for it
            if time.monotonic() - at > WITHIN_S:
                raise CheckFailed(f"the memory of a killed process is not free after {WITHIN_S:g} s")
            time.sleep(0.001)
        return ended_s, time.monotonic() - at
