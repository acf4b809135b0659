"""Row 3: from a killed worker to the next step, without and with a standby, and what a context would add to one."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from gpu_check.processes import run, started
from gpu_check.results import Options, Result, seconds
from gpu_check.watched import watched

TIMES = 3


def check(options: Options) -> Iterator[Result]:
    """Yield a result for each kind of start."""
    times = 1 if options.is_smoke else TIMES
    for standby in ("learned",) if options.is_smoke else ("off", "learned"):
        with watched(options, f"starts-{standby}", f"--standby={standby}") as job:
            job.start("node-a", "1")
            job.train(20)
            taken = []
            for _ in range(times):
                if standby != "off":
                    job.warm_up()
                taken.append(job.cost_of(job.cluster.nodes["node-a"].kill_worker, 1)[0])
        yield Result(what=f"killed worker to next step, --standby={standby}", figures=seconds(taken))
    if options.device == "cuda":
        free = torch.cuda.mem_get_info()[0]
        with started("start_parts.py"):
            held = free - torch.cuda.mem_get_info()[0]
        parts = [run("start_parts.py")[0] for _ in range(times)]
        figures = ", ".join(f"{name.removesuffix('_s')} {seconds([part[name] for part in parts])}" for name in parts[0])
        yield Result(what="parts of a start", figures=f"{figures}; a context with cuBLAS holds {held / 1e6:.0f} MB")
