"""Measure what a killed server or worker costs a parameter-server job, in whole jobs with the real agent.

The cost of a lost server is the time until each worker has finished its next step. The cost of a lost worker is
measured by the steps of the others in the seconds before and after.
"""

from __future__ import annotations

import itertools
import json
import os
import re
import secrets
import signal
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import psutil
from benchmarks.launchers import elastic_agent
from benchmarks.nodes import Marked
from benchmarks.ps_wire import percentile

from agent.local_etcd.embedded import EmbeddedEtcd

_JOB = Path(__file__).with_name("ps_job.py")
_WITHIN_S = 60.0
_POLL_S = 0.005
_STILL_S = 0.5

HEADINGS = ("what happens", "n", "median s", "worst s")
WORKER_HEADINGS = ("what happens", "n", "steps' p99 before, ms", "after, ms", "ratio, median", "worst")


Losses = list[dict[str, float]]


@dataclass(frozen=True)
class Size:
    """The extent of the measurements."""

    kills: int
    """Number of kills of each kind."""
    calm_s: float
    """Seconds of training before each kill, in which the server's rows get on disk: see `ps_job.py`."""
    around_s: float
    """Seconds before and after the kill of a worker in which the steps of the other workers are measured."""
    spare: int
    """Servers and workers in addition to the minimum for a kind of kill."""


def measure(directory: Path, names: Sequence[str], size: Size) -> dict[str, Losses]:
    """Measure the named kinds of `KILLS`, one job after the other."""
    with EmbeddedEtcd(port=0) as etcd:
        return {name: KILLS[name](directory / name, etcd.endpoint, size) for name in names}


class Job(Marked):
    """A job. Leaving the context ends it."""

    def __init__(
        self, directory: Path, etcd: str, size: Size, *, servers: int, workers: int, replicas: int = 0
    ) -> None:
        super().__init__(directory, {"OMP_NUM_THREADS": "1"})
        self._size, self._servers, self._workers, self._replicas = size, servers, workers, replicas
        roles = (f"--server_num={servers}", f"--worker_num={workers}", f"--ps_replicas={replicas}")
        places = (f"--log_dir={directory}/log", f"--checkpoint_dir={directory}/rows", "--max_restarts=1000000")
        start = elastic_agent("run", etcd, f"bench-{secrets.token_hex(4)}")
        self._argv = [*start, *roles, *places, str(_JOB), str(directory)]

    def __enter__(self) -> Self:
        """The job trains."""
        super().__enter__()
        self._agent = psutil.Process(self.start("agent", self._argv).process.pid)
        self._settle(0)
        return self

    def lose_server(self, index: int) -> dict[str, float]:
        """Kill a server; return the costs."""
        newest, before = max(self._maps().values(), default=(0, True))[0], len(self._lines(f"server-{index}"))
        killed_at = self._kill(f"server-{index}")
        first = [self._first_step(worker, killed_at) for worker in range(self._workers)]
        self._wait(lambda: len(self._lines(f"server-{index}")) > before, f"server {index}")
        server = self._lines(f"server-{index}")[-1]
        self._settle(newest)
        return {
            "seconds": max(first) - killed_at,
            "after_s": max(first) - server["ready"],
            "until_started_s": server["began"] - killed_at,
            "imports_s": server["imported"] - server["began"],
        }

    def lose_worker(self, index: int) -> dict[str, float]:
        """Kill a worker; return the costs for the others."""
        around_s = self._size.around_s
        self._wait_for_seconds(around_s)
        killed_at = self._kill(f"worker-{index}")
        self._wait_for_seconds(around_s)
        before, after = [], []
        for worker in set(range(self._workers)) - {index}:
            times = [line["t"] for line in self._lines(f"worker-{worker}")]
            steps = [(end, end - begin) for begin, end in itertools.pairwise(times)]
            before += [took_s for end, took_s in steps if killed_at - around_s < end <= killed_at]
            after += [took_s for end, took_s in steps if killed_at < end <= killed_at + around_s]
        restarted = self._first_step(index, killed_at) - killed_at
        self._settle(0)
        return {"before_s": percentile(before, 99), "after_s": percentile(after, 99), "until_restarted_s": restarted}

    def _kill(self, name: str) -> float:
        victim = int(self._lines(name)[-1]["pid"])
        at = time.monotonic()
        os.kill(victim, signal.SIGKILL)
        return at

    def _first_step(self, worker: int, after: float) -> float:
        def found() -> float | None:
            return next((line["t"] for line in self._lines(f"worker-{worker}") if line["t"] > after), None)

        at: float = self._wait(found, f"a step of worker {worker}")
        return at

    def _settle(self, after_map: int) -> None:
        """Wait for replicas in a newer map, for warm standbys of all processes, and for a while of training."""
        if self._replicas:
            self._wait(lambda: self._is_whole(after_map), f"copies after map {after_map}")
        self._wait(self._is_warm, "warm standbys")
        self._wait_for_seconds(self._size.calm_s)

    def _wait_for_seconds(self, seconds: float) -> None:
        """Wait until all workers have made a step after so many seconds."""
        until = time.monotonic() + seconds
        for worker in range(self._workers):
            self._first_step(worker, until)

    def _is_warm(self) -> bool:
        """Return whether each process has a standby and all standbys have become idle."""
        with suppress(psutil.Error, OSError):
            below = self._agent.children(recursive=True)
            standbys = [each for each in below if Path(f"/proc/{each.pid}/oom_score_adj").read_text() == "1000\n"]
            before = [each.cpu_times()[:2] for each in standbys]
            time.sleep(_STILL_S)
            is_still = before == [each.cpu_times()[:2] for each in standbys]
            return is_still and len(standbys) >= self._servers + self._workers
        return False

    def _is_whole(self, after_map: int) -> bool:
        maps = self._maps().values()
        return len(maps) == self._servers and all(has_copy for _, has_copy in maps) and max(maps)[0] > after_map

    def _maps(self) -> dict[int, tuple[int, bool]]:
        """Return for each shard the newest map that changed its place, and whether the shard has a replica in it."""
        said = "".join(path.read_text() for path in self.directory.glob("log/*/*/serverlog.*"))
        lines = re.findall(r"has shard (\d+), and it is (on|nowhere).* \(map (\d+)\)", said)
        return {
            int(shard): (int(number), where == "on")
            for shard, where, number in sorted(lines, key=lambda line: int(line[2]))
        }

    def _lines(self, name: str) -> Losses:
        path = self.directory / name
        content = path.read_bytes() if path.exists() else b""
        return [json.loads(line) for line in content.splitlines(keepends=True) if line.endswith(b"\n")]

    def _wait(self, condition: Callable[[], Any], what: str) -> Any:  # noqa: ANN401 - the condition's result
        give_up_at = time.monotonic() + _WITHIN_S
        while not (found := condition()):
            if time.monotonic() > give_up_at:
                output = (self.directory / "agent.out").read_text(errors="replace")
                raise TimeoutError(f"not within {_WITHIN_S:g} s: {what}; {output[-2000:]}")
            time.sleep(_POLL_S)
        return found


def _copies(directory: Path, etcd: str, size: Size) -> Losses:
    servers, workers = 2 + size.spare, 1 + size.spare
    with Job(directory, etcd, size, servers=servers, workers=workers, replicas=1) as job:
        return [job.lose_server(number % servers) for number in range(size.kills)]


def _disk(directory: Path, etcd: str, size: Size) -> Losses:
    servers, workers = 1 + size.spare, 1 + size.spare
    with Job(directory, etcd, size, servers=servers, workers=workers) as job:
        return [job.lose_server(number % servers) for number in range(size.kills)]


def _worker(directory: Path, etcd: str, size: Size) -> Losses:
    servers, workers = 1 + size.spare, 2 + size.spare
    with Job(directory, etcd, size, servers=servers, workers=workers) as job:
        return [job.lose_worker(number % workers) for number in range(size.kills)]


KILLS: dict[str, Callable[[Path, str, Size], Losses]] = {"copies": _copies, "disk": _disk, "worker": _worker}

_WHAT = (
    ("copies", "seconds", "a server is killed, with copies"),
    ("disk", "seconds", "a server is killed, rows on disk"),
    ("disk", "until_started_s", "of that: until the next process begins"),
    ("disk", "imports_s", "of that: its imports"),
    ("disk", "after_s", "of that: from when it listens"),
    ("worker", "until_restarted_s", "a worker is killed: until its own next step"),
)


def rows(found: Mapping[str, Sequence[Mapping[str, float]]]) -> list[tuple[str, ...]]:
    """Return the cells of the table with `HEADINGS`."""
    return [_row(title, found[kind], name) for kind, name, title in _WHAT if kind in found]


def _row(title: str, losses: Sequence[Mapping[str, float]], name: str) -> tuple[str, ...]:
    values = [loss[name] for loss in losses]
    return title, str(len(values)), f"{statistics.median(values):.2f}", f"{max(values):.2f}"


def worker_rows(losses: Sequence[Mapping[str, float]]) -> list[tuple[str, ...]]:
    """Return the cells of the table with `WORKER_HEADINGS`."""
    ratios = [loss["after_s"] / loss["before_s"] for loss in losses]
    times = [statistics.median(loss[name] for loss in losses) * 1e3 for name in ("before_s", "after_s")]
    figures = (f"{times[0]:.1f}", f"{times[1]:.1f}", f"{statistics.median(ratios):.2f}", f"{max(ratios):.2f}")
    return [("a worker is killed: the others' steps", str(len(losses)), *figures)]
