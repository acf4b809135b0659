"""Row 5: what a step loses to snapshots of 1 to 10 GB, and how fast memory is copied, pinned and not."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

from gpu_check.results import JOBS, ROOT, CheckFailed, Options, Result

SIZES_GB = (1, 3, 10)
STEPS = 10
WITHIN_S = 120.0


def check(options: Options) -> Iterator[Result]:
    """Yield a result for each size, and one for the copies."""
    found: dict[str, Any] = {}
    for gigabytes, memory in product(SIZES_GB, ("pageable", "pinned")):
        found = _measure(options, gigabytes, memory)
        lost_s, worst_s = (found[name] - found["bare_s"] for name in ("with_s", "worst_s"))
        yield Result(
            what=f"a snapshot of {found['gigabytes']:.1f} GB after each step of {found['bare_s'] * 1e3:.0f} ms",
            figures=(
                f"{memory}: a step loses {lost_s * 1e3:.0f} ms (worst {worst_s * 1e3:.0f} ms); "
                f"commit() holds it up for {found['held_s'] * 1e3:.1f} ms"
            ),
        )
    yield Result(
        what="copies from the GPU",
        figures=(
            f"pageable {found['pageable_gb_s']:.1f} GB/s, pinned {found['pinned_gb_s']:.1f} GB/s; "
            f"pinning 1 GB takes {found['pin_s'] * 1e3:.0f} ms"
        ),
    )


def _measure(options: Options, gigabytes: int, memory: str) -> dict[str, Any]:
    directory = options.directory / f"snapshots-{gigabytes}-{memory}"
    directory.mkdir()
    out = directory / "found.json"
    command = [str(JOBS / "snapshot_parts.py"), str(out), str(gigabytes), str(STEPS), memory]
    argv = [sys.executable, "-m", "agent", "--standalone", "--standby=off", "--snapshot_overhead=100", *command]
    environ = {**os.environ, "PYTHONPATH": f"{ROOT}:{os.environ.get('PYTHONPATH', '')}"}
    try:
        done = subprocess.run(
            argv, cwd=directory, env=environ, capture_output=True, text=True, timeout=WITHIN_S, check=False
        )
    except subprocess.TimeoutExpired as error:
        raise CheckFailed(f"the job with {gigabytes} GB did not end within {WITHIN_S:g} s") from error
    if done.returncode or not Path(out).exists():
        raise CheckFailed(f"the job with {gigabytes} GB failed: {done.stdout[-1000:]}{done.stderr[-2000:]}")
    found: dict[str, Any] = json.loads(out.read_text())
    return found
