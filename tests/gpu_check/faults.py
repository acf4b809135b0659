"""Row 7: faults of one rank's GPU work. Only that rank is lost: it alone is named, and training goes on."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path

from gpu_check.results import Options, Result
from gpu_check.watched import Watched, compare_with_undisturbed, watched

FAULTS = {
    "assert": "a device assert",
    "kill": "SIGKILL in the middle of a kernel",
    "endless": "a kernel that does not end",
}
HASTE = ("--hang_floor=4", "--hang_factor=5", "--hang_first=60")
"""So that a hang is certain after 8 s."""


def check(options: Options) -> Iterator[Result]:
    """Yield a result for each fault, and one for the losses."""
    with watched(options, "faults", *HASTE) as job:
        job.start("node-a", "2")
        job.start("node-b", "2")
        job.train(20)
        for fault in FAULTS:
            job.warm_up()
            yield _result(job, fault)
        job.train(20)
        lines = job.trace()
    yield compare_with_undisturbed(lines, options.directory / "undisturbed-faults")


def _result(job: Watched, fault: str) -> Result:
    job.train(20)
    (job.directory / f"cause-{fault}").touch()
    path = job.directory / f"caused-{fault}"
    job.wait_for(lambda: path.exists() and path.read_text(), f"the fault {fault}")
    mark = json.loads(path.read_text())
    group = max(line.group for line in job.trace() if line.t <= mark["t"])
    cost_s, replayed = job.cost_since(mark["t"], group, 2)
    job.wait_for(lambda: not Path(f"/proc/{mark['pid']}").exists(), "the end of the rank's process")
    gone_s = time.time() - mark["t"]
    incident = job.wait_for(lambda: next((i for i in job.history() if i["group"] > group), None), "its incident")
    cost = f"{cost_s:.2f} s, {replayed} steps replayed, its process gone after {gone_s:.1f} s"
    return Result(
        what=FAULTS[fault],
        figures=f"{cost}: {incident['reason']}",
        is_fine=incident["reason"].startswith(f"rank {mark['rank']} on "),
    )
