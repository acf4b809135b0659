"""One job of this machine, disturbed and watched: what a change costs, and whether each step is as it should be."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from gpu_check.results import JOBS, ROOT, CheckFailed, Options, Result

from agent.local_etcd.embedded import EmbeddedEtcd
from agent.rehearse.cluster import LocalCluster, Timeout, TraceLine, read_trace, wait_for

JOB = JOBS / "job.py"
PATIENCE_S = 90.0
STEP_S = 0.02
MANY_STEPS = 10**6
"""The job is ended from outside."""
LARGEST_DIFFERENCE = 1e-6
"""Of a loss, relative: sums in another order, in double precision."""


class Watched:
    """A job of nodes with one rank each, all on one GPU.

    Args:
        cluster: runs the nodes.
    """

    def __init__(self, cluster: LocalCluster) -> None:
        self.cluster = cluster
        self.directory = cluster.directory
        self._command = [str(JOB), str(self.directory), str(MANY_STEPS), str(STEP_S)]

    def start(self, name: str, np: str) -> None:
        """Start a node."""
        self.cluster.start(name, np, self._command)

    def trace(self) -> list[TraceLine]:
        """All steps so far, in the order of time."""
        lines = [line for path in self.directory.glob("trace-*") for line in read_trace(path)]
        return sorted(lines, key=lambda line: line.t)

    def wait_for(self, condition: Callable[[], Any], what: str) -> Any:  # noqa: ANN401 - what it returned
        """Wait for a condition. Raises `CheckFailed` with what the nodes printed last."""
        try:
            return wait_for(condition, PATIENCE_S, what)
        except Timeout as timeout:
            tails = "".join(f"\n--- {name}\n{node.text()[-2000:]}" for name, node in self.cluster.nodes.items())
            raise CheckFailed(f"{timeout}{tails}") from timeout

    def train(self, steps: int) -> TraceLine:
        """Wait until the job has made this many more steps; return the last one."""
        goal = max((line.step for line in self.trace()), default=0) + steps
        return self.wait_for(lambda: (lines := self.trace()) and lines[-1].step >= goal and lines[-1], f"step {goal}")  # type: ignore[no-any-return]

    def warm_up(self) -> None:
        """Wait until every rank has a warm standby."""

        def is_warm() -> bool:
            nodes = self.cluster.status()["nodes"]
            return all(node["standby"].startswith("1 of 1 warm") for node in nodes)

        self.wait_for(is_warm, "warm standbys")

    def cost_of(self, do: Callable[[], object], world: int) -> tuple[float, int]:
        """Disturb the job; return the seconds to the first step of a new group of that size, and the steps replayed."""
        before = self.train(20)
        at = time.time()
        do()
        return self.cost_since(at, before.group, world)

    def cost_since(self, at: float, group: int, world: int) -> tuple[float, int]:
        """Of a disturbance at that time (seconds since 1970), in that group. Likewise."""

        def resumed() -> TraceLine | None:
            return next((line for line in self.trace() if line.group > group and line.world == world), None)

        first: TraceLine = self.wait_for(resumed, f"a step in a group of {world} after group {group}")
        replayed = {line.step for line in self.trace() if line.group < first.group and line.step >= first.step}
        return first.t - at, len(replayed)

    def history(self) -> list[dict[str, Any]]:
        """The job's incidents, as `elastic-agent history --json` has them."""
        found: list[dict[str, Any]] = json.loads(self.cluster.ask("history", "--json"))
        return found


@contextmanager
def watched(options: Options, name: str, *agent_options: str) -> Iterator[Watched]:
    """Yield a job without nodes, in a directory of that name; all of its processes end with the context."""
    directory = options.directory / name
    directory.mkdir(parents=True)
    environ = {**os.environ, "PYTHONPATH": f"{ROOT}:{os.environ.get('PYTHONPATH', '')}"}
    with (
        EmbeddedEtcd() as etcd,
        LocalCluster(
            directory, etcd.endpoint, f"gpu-check-{name}", ("--standby=learned", *agent_options), environ
        ) as cluster,
    ):
        yield Watched(cluster)


def compare_with_undisturbed(lines: Sequence[TraceLine], directory: Path) -> Result:
    """Compare each step's loss with that of one undisturbed process.

    Raises:
        CheckFailed: a step is missing, or the undisturbed process failed.
    """
    last = max(line.step for line in lines)
    missing = set(range(1, last + 1)) - {line.step for line in lines}
    if missing:
        raise CheckFailed(f"steps {sorted(missing)[:5]} were never made")
    directory.mkdir()
    argv = [sys.executable, str(JOB), str(directory), str(last), "0"]
    environ = {**os.environ, "PYTHONPATH": f"{ROOT}:{os.environ.get('PYTHONPATH', '')}"}
    done = subprocess.run(argv, cwd=directory, env=environ, capture_output=True, text=True, check=False)
    if done.returncode:
        raise CheckFailed(f"the undisturbed process failed: {done.stderr[-2000:]}")
    right = {line.step: line.loss for path in directory.glob("trace-*") for line in read_trace(path)}
    largest = max(abs(line.loss - right[line.step]) / abs(right[line.step]) for line in lines)
    return Result(
        what="losses beside those of one undisturbed process",
        figures=f"{last} steps, largest relative difference {largest:.1e}",
        is_fine=largest < LARGEST_DIFFERENCE,
    )
