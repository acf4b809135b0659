"""A killed worker with a warm standby, over the bare start of the same training: seconds to the next finished step."""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from contextlib import closing
from pathlib import Path

from benchmarks.jobs import Job, NotStartedError, Step
from benchmarks.launchers import OURS, PLAIN, Launcher, Place
from benchmarks.recovery import wait_until_settled
from benchmarks.scenarios import SCENARIOS

from agent.local_etcd.embedded import EmbeddedEtcd
from agent.store.etcd import EtcdStore

_WITHIN_S = 200.0
_WORLD = 2


def _bare(place: Place, name: str, np: str) -> list[str]:
    where = ["MASTER_ADDR=127.0.0.1", f"MASTER_PORT={place.port}", f"RANK={name}", f"WORLD_SIZE={np}"]
    return ["env", *where, sys.executable, *place.script(PLAIN)]


_BARE = Launcher("bare", "two processes without a launcher", _bare)


def ratio(repetitions: int) -> float:
    """Median of the ratios of so many kills and bare starts, in turns. Raises `NotStartedError`."""
    with (
        tempfile.TemporaryDirectory(prefix="elastic-agent-bench-") as directory,
        EmbeddedEtcd(port=0) as etcd,
        closing(EtcdStore([etcd.endpoint])) as store,
        Job(OURS, Path(directory, "ours"), etcd.endpoint, str(_WORLD)) as job,
    ):
        job.start("a", "b")
        job.train(_WORLD, 0.0)
        ratios = []
        for number in range(repetitions):
            if not wait_until_settled(store, job):
                raise NotStartedError("the standby processes did not become warm")
            recovered_s = _recover(job)
            ratios.append(recovered_s / _start_bare(Path(directory, f"bare-{number}"), etcd.endpoint))
        return statistics.median(ratios)


def _recover(job: Job) -> float:
    job.trace.read()
    old = {step.pid for step in job.trace.steps}
    at = SCENARIOS["worker"].do(job)
    return _first(job, old).t - at


def _start_bare(directory: Path, etcd: str) -> float:
    with Job(_BARE, directory, etcd, str(_WORLD)) as job:
        at = time.time()
        job.start(*map(str, range(_WORLD)))
        return _first(job, set()).t - at


def _first(job: Job, old: set[int]) -> Step:
    """Wait for the first step of processes that are not old ones."""
    give_up_at = time.monotonic() + _WITHIN_S
    first = job.wait_for_step(lambda step: step.pid not in old and step.world == _WORLD, give_up_at)
    if first is None:
        raise NotStartedError(f"{job.launcher.title}: no step of a new process within {_WITHIN_S:g} s")
    return first
