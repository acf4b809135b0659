"""Steps that a killed worker or node costs, by the size of the State and the length of a step.

All options are the agent's defaults. Nothing is saved but snapshots in memory. How often those are taken follows from
what they cost, so a job trains for a number of steps before its worker is killed.
"""

from __future__ import annotations

import shutil
import statistics
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from benchmarks.launchers import Launcher, losing
from benchmarks.recovery import Plan, Recovery, Sample
from benchmarks.scenarios import SCENARIOS

from agent.local_etcd.embedded import EmbeddedEtcd
from agent.store.etcd import EtcdStore

_CALM_STEPS = 15
_PATIENCE_S = 100.0

HEADINGS = ("state", "steps of", "killed", "n", "recovered", "median steps lost", "most", "median s")


@dataclass(frozen=True)
class Case:
    """What is trained."""

    megabytes: int
    step_s: float
    is_sharded: bool = False
    """Over all ranks, by FSDP2."""
    scenario: str = "worker"
    """What is killed: a worker, or a node, without which the other one goes on."""

    def __str__(self) -> str:
        """As it is written on the command line."""
        options = [":sharded"] * self.is_sharded + [":node"] * (self.scenario == "node")
        return f"{self.megabytes}:{self.step_s:g}{''.join(options)}"


def parse_case(text: str) -> Case:
    """Read `MEGABYTES:SECONDS[:sharded][:node]`. Raises `ValueError`."""
    megabytes, step_s, *how = text.split(":")
    if how not in ([], ["sharded"], ["node"], ["sharded", "node"]):
        raise ValueError(f"wanted MEGABYTES:SECONDS[:sharded][:node], got {text!r}")
    return Case(int(megabytes), float(step_s), "sharded" in how, "node" if "node" in how else "worker")


def measure(directory: Path, cases: Sequence[Case], calm_s: float, runs: int) -> Iterator[tuple[Case, Sample]]:
    """In turns; each sample is a job of its own. The outputs of those that fail stay in the directory."""
    with EmbeddedEtcd(port=0) as etcd, closing(EtcdStore([etcd.endpoint])) as store:
        for run in range(runs):
            for case in cases:
                outputs = directory / f"{run}-{case}"
                for sample in Recovery(_plan(case, calm_s), outputs, store, etcd.endpoint).samples():
                    if not sample.note:
                        shutil.rmtree(outputs)
                    yield case, sample


def _plan(case: Case, calm_s: float) -> Plan:
    launcher: Launcher = losing(case.megabytes, case.step_s, is_sharded=case.is_sharded)
    calm_s = max(calm_s, _CALM_STEPS * case.step_s)
    return Plan((SCENARIOS[case.scenario],), (launcher,), runs=1, slow_runs=1, calm_s=calm_s, patience_s=_PATIENCE_S)


def rows(found: Mapping[Case, Sequence[Sample]]) -> list[tuple[str, ...]]:
    """The cells under `HEADINGS`."""
    return [_row(case, [sample for sample in samples if sample.has_started]) for case, samples in found.items()]


def _row(case: Case, samples: Sequence[Sample]) -> tuple[str, ...]:
    lost = [sample.steps_lost for sample in samples if sample.steps_lost is not None]
    seconds = [sample.seconds for sample in samples if sample.seconds is not None]
    return (
        f"{case.megabytes} MB{', sharded' if case.is_sharded else ''}",
        f"{case.step_s * 1e3:g} ms",
        case.scenario,
        str(len(samples)),
        f"{len(lost)} of {len(samples)}",
        f"{statistics.median(lost):g}" if lost else "",
        str(max(lost)) if lost else "",
        f"{statistics.median(seconds):.2f}" if seconds else "never",
    )
