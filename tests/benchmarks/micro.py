"""What things cost by themselves: a commit, a save, a snapshot, an agent."""

from __future__ import annotations

import json
import secrets
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import psutil
from benchmarks.launchers import elastic_agent
from benchmarks.losing import Case, parse_case
from benchmarks.nodes import Marked
from waiting import comes_true

from agent.local_etcd.embedded import EmbeddedEtcd
from agent.store.api import KeyRange
from agent.store.etcd import EtcdStore
from agent.store.keys import JobKeys

_HERE = Path(__file__).resolve().parent
_LOOPBACK = {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
_READY_WITHIN_S = 30.0
_SCRIPT_WITHIN_S = 900.0
_SETTLE_S = 3.0
_IDLE_WORKER = ("--no_python", "sleep", "100000")

_OVERHEAD = 0.01
"""Of the steps' time, which is what agents allow by default."""
_STEPS_S = (0.02, 0.2, 1.0)

HEADINGS = ("what", "of", "n", "median", "worst")


@dataclass(frozen=True)
class Sizes:
    """What is measured."""

    saves_mb: Sequence[int]
    snapshots_mb: Sequence[int]
    """Of the state that a snapshot is taken of."""
    sharded: Sequence[Case]
    """The sharded models, with the length of their steps."""


def measure(
    directory: Path, sizes: Sizes, *, snapshots: int, sharded_steps: int, idle_s: float, runs: int
) -> dict[str, Any]:
    """All of it; one thing at a time.

    Args:
        directory: for what the jobs write.
        sizes: what is saved, and of what snapshots are taken.
        snapshots: number of snapshots of each size.
        sharded_steps: number of steps of each sharded model.
        idle_s: how long agents are watched whose workers just run.
        runs: how often agents start, each size is saved, and each sharded model is trained.
    """
    with EmbeddedEtcd(port=0) as etcd, closing(EtcdStore([etcd.endpoint])) as store:
        bench = Bench(directory, etcd.endpoint, store)
        return {
            "agent": {"ready_s": [bench.ready_s() for _ in range(runs)], **bench.idle(idle_s)},
            "commit": bench.report_of("commit_job.py"),
            "saves": {size: bench.report_of("saving_job.py", str(size), str(runs)) for size in sizes.saves_mb},
            "snapshots": [bench.snapshots_of(size, snapshots) for size in sizes.snapshots_mb],
            "sharded": [
                {"case": str(case), **bench.sharded(case, sharded_steps)} for case in sizes.sharded for _ in range(runs)
            ],
        }


class Bench:
    """Jobs that share one etcd."""

    def __init__(self, directory: Path, etcd: str, store: EtcdStore) -> None:
        self._directory = directory
        self._etcd = etcd
        self._store = store

    def ready_s(self) -> float:
        """From the start of an agent's process until it is registered."""
        job_id, marked = self._job()
        with marked:
            began = time.monotonic()
            marked.start("a", self._agent(job_id, "a", "1", *_IDLE_WORKER))
            self._wait_for_nodes(job_id, 1)
            return time.monotonic() - began

    def idle(self, for_s: float) -> dict[str, Any]:
        """What an agent takes whose workers run: memory, processor time, and whether torch is in it."""
        job_id, marked = self._job()
        with marked:
            nodes = [marked.start(name, self._agent(job_id, name, "2", *_IDLE_WORKER)) for name in ("a", "b")]
            self._wait_for_nodes(job_id, len(nodes))
            time.sleep(min(_SETTLE_S, for_s))  # what the start costs must not be measured
            agents = [psutil.Process(node.process.pid) for node in nodes]
            before = [sum(agent.cpu_times()[:2]) for agent in agents]
            time.sleep(for_s)  # the period that is measured
            used = [sum(agent.cpu_times()[:2]) - spent for agent, spent in zip(agents, before, strict=True)]
            return {
                "idle_s": for_s,
                "rss_mb": [agent.memory_info().rss / 1e6 for agent in agents],
                "idle_cpu_percent": [seconds / for_s * 100 for seconds in used],
                "has_torch": any("torch" in each.path for agent in agents for each in agent.memory_maps()),
            }

    def report_of(self, script: str, *arguments: str, options: Sequence[str] = (), np: int = 1) -> Any:  # noqa: ANN401 - what it wrote
        """Run a script on so many nodes, to its end; return what it wrote. Raises `RuntimeError`."""
        job_id, marked = self._job()
        with marked:
            out = marked.directory / "found.json"
            command = (str(_HERE / script), str(out), *arguments)
            names = [f"n{number}" for number in range(np)]
            nodes = [marked.start(name, self._agent(job_id, name, str(np), *options, *command)) for name in names]
            codes = [node.process.wait(_SCRIPT_WITHIN_S) for node in nodes]
            if any(codes) or not out.exists():
                output = (marked.directory / "n0.out").read_text(errors="replace")
                raise RuntimeError(f"{script} ended with codes {codes}: {output[-2000:]}")
            return json.loads(out.read_text(encoding="utf-8"))

    def snapshots_of(self, megabytes: int, count: int) -> Any:  # noqa: ANN401 - what the script wrote
        """What snapshots of so much cost, with one after every step."""
        return self.report_of("snapshot_job.py", str(megabytes), str(count), options=("--snapshot_overhead=100",))

    def sharded(self, case: Case, steps: int) -> dict[str, Any]:
        """Train a sharded model on two nodes, with snapshots as often as the default allows."""
        found: dict[str, Any] = self.report_of(
            "sharded_job.py", str(case.megabytes), str(case.step_s), str(steps), np=2
        )
        return found

    def _job(self) -> tuple[str, Marked]:
        job_id = f"bench-{secrets.token_hex(4)}"
        return job_id, Marked(self._directory / job_id, _LOOPBACK)

    def _agent(self, job_id: str, name: str, np: str, *command: str) -> list[str]:
        return [*elastic_agent("run", self._etcd, job_id), f"--np={np}", f"--node_id={name}", *command]

    def _wait_for_nodes(self, job_id: str, count: int) -> None:
        there = (KeyRange(JobKeys(job_id).nodes, is_prefix=True),)
        if not comes_true(lambda: len(self._store.read(there).items) >= count, _READY_WITHIN_S, every_s=0.002):
            raise TimeoutError(f"{count} agents were not registered within {_READY_WITHIN_S:g} s")


def rows(found: Mapping[str, Any]) -> list[tuple[str, ...]]:
    """The cells under `HEADINGS`."""
    agent, commit = found["agent"], found["commit"]
    cells = [
        build_row("agent: start until registered", "", agent["ready_s"], "{:.2f} s"),
        build_row("agent: resident memory", "", agent["rss_mb"], "{:.0f} MB"),
        build_row(f"agent: a core's time, idle for {agent['idle_s']:g} s", "", agent["idle_cpu_percent"], "{:.2f} %"),
        ("agent: torch is mapped into it", "", "", "yes" if agent["has_torch"] else "no", ""),
        build_row("commit() with nothing due", "", [commit["commit_ns"] - commit["nothing_ns"]], "{:.0f} ns"),
    ]
    for size, saves in found["saves"].items():
        cells += _save_rows(f"{size} MB", saves)
    return [*cells, *_snapshot_rows(found["snapshots"]), *_sharded_rows(found["sharded"])]


def _save_rows(of: str, saves: Sequence[Mapping[str, Any]]) -> list[tuple[str, ...]]:
    cells = []
    for how in dict.fromkeys(save["how"] for save in saves):
        mine = [save for save in saves if save["how"] == how]
        cells.append(
            build_row(f"{how}: training stands still", of, [save["stall_s"] * 1e3 for save in mine], "{:.1f} ms")
        )
        cells.append(build_row(f"{how}: until the save is whole", of, [save["whole_s"] for save in mine], "{:.2f} s"))
    ours = [save for save in saves if "commits_s" in save]
    between = [seconds * 1e3 for save in ours for seconds in save["commits_s"]]
    cells.append(build_row("elastic-agent: commits between saves", of, between, "{:.3f} ms"))
    shares = [sum(save["commits_s"]) / save["elapsed_s"] * 100 for save in ours]
    cells.append(build_row("elastic-agent: their share of the time", of, shares, "{:.2f} %"))
    return cells


def _snapshot_rows(found: Sequence[Mapping[str, Any]]) -> list[tuple[str, ...]]:
    cells = []
    for each in found:
        of = f"{each['megabytes']:.0f} MB, {each['tensors']} tensors"
        cells.append(
            build_row(
                "snapshot: training stands still", of, [one["held_s"] * 1e3 for one in each["taken"]], "{:.2f} ms"
            )
        )
        cells.append(
            build_row("snapshot: until it is whole", of, [one["whole_s"] * 1e3 for one in each["taken"]], "{:.1f} ms")
        )
    what = f"largest of these with one after every step, for {_OVERHEAD:.0%}"
    for step_s in _STEPS_S:
        fitting = [each for each in found if _snapshot_cost_s(each, step_s) <= _OVERHEAD * step_s]
        largest = f"{max(each['megabytes'] for each in fitting):.0f} MB" if fitting else "none"
        cells.append((what, f"{step_s * 1e3:.0f} ms steps", "", largest, ""))
    return cells


def _sharded_rows(found: Sequence[Mapping[str, Any]]) -> list[tuple[str, ...]]:
    cells = []
    for name in dict.fromkeys(each["case"] for each in found):
        runs = [each for each in found if each["case"] == name]
        case = parse_case(name)
        of = f"{case.megabytes} MB, {case.step_s * 1e3:g} ms steps"
        between = [float(later - earlier) for each in runs for earlier, later in pairwise(each["snapshots"])]
        handed_on = [seconds for each in runs for seconds in each["handed_on_s"]]
        cells += [
            build_row("sharded: steps between snapshots", of, between, "{:g}"),
            build_row("sharded: until the next node holds a snapshot", of, handed_on, "{:.2f} s"),
            build_row("sharded: share of the time, by copying", of, [*map(_copying_percent, runs)], "{:.2f} %"),
            build_row("sharded: share with the sending", of, [*map(_whole_percent, runs)], "{:.2f} %"),
        ]
    return cells


def _copying_percent(found: Mapping[str, Any]) -> float:
    """Percent of the time by which `commit` and optimizer take longer in the step of a snapshot and in the next one."""
    near = {step + later for step in found["snapshots"] for later in (0, 1)}
    own_s = [seconds for number, seconds in _numbered(found, "own_s") if number in near]
    others_s = [seconds for number, seconds in _numbered(found, "own_s") if number not in near]
    usual_s = statistics.median(others_s or own_s)
    return sum(seconds - usual_s for seconds in own_s) / sum(found["steps_s"]) * 100


def _whole_percent(found: Mapping[str, Any]) -> float:
    """Percent of the time by which steps are longer, all in all, than those in which nothing is copied or sent."""
    sending_s = statistics.median(found["handed_on_s"])
    busy = set[int]()
    for snapshot in found["snapshots"]:
        passed_s = 0.0
        for number, seconds in _numbered(found, "steps_s"):
            if number >= snapshot and (number <= snapshot + 1 or passed_s < sending_s):
                busy.add(number)
            passed_s += seconds if number > snapshot else 0.0
    whole = [(number, seconds) for number, seconds in _numbered(found, "steps_s") if number >= found["snapshots"][0]]
    idle_s = [seconds for number, seconds in whole if number not in busy] or [min(seconds for _, seconds in whole)]
    return (1 - statistics.mean(idle_s) / statistics.mean(seconds for _, seconds in whole)) * 100


def _numbered(found: Mapping[str, Any], what: str) -> Iterator[tuple[int, float]]:
    """Yield the seconds of each measured step with its number."""
    return enumerate(found[what], found["first_step"])


def _snapshot_cost_s(found: Mapping[str, Any], step_s: float) -> float:
    """What one takes from the training, where the optimizer's step begins so long after the commit before."""
    return statistics.median(one["held_s"] + max(0.0, one["whole_s"] - step_s) for one in found["taken"])


def build_row(what: str, of: str, values: Sequence[float], form: str) -> tuple[str, ...]:
    """The cells of some samples under `HEADINGS`."""
    return what, of, str(len(values)), form.format(statistics.median(values)), form.format(max(values))
