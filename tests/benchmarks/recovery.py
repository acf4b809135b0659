"""Recovery: seconds from a fault, or a planned change, to the first finished step of the new world.

Launchers take turns, run by run and scenario by scenario, so that what else the machine does falls on all of them. A
job is fresh for every sample, trains for a while, and is ended afterwards with all of its processes. All is read from
the trace that the training script writes, the same for all launchers; only the phases come from our own incidents.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from benchmarks.jobs import Job, NotStartedError, Step
from benchmarks.launchers import OURS, Launcher
from benchmarks.scenarios import Scenario, setting_of
from waiting import comes_true

from agent.core.view import ClusterView
from agent.observe.incidents import incident_json
from agent.operate.jobs import read_incidents, read_view
from agent.store.etcd import EtcdStore
from agent.store.keys import JobKeys

_SETTLED_WITHIN_S = 60.0
_SETTLED = re.compile(r"off$|(\d+) of \1 (warm|set up), [^;]*$")
"""What a node says of its standbys when nothing of them is under way: no successors either."""
_TOLD_WITHIN_S = 10.0


@dataclass(frozen=True)
class Sample:
    """One job, and what became of it."""

    scenario: str
    launcher: str
    run: int
    directory: str
    """Where its outputs are."""
    seconds: float | None = None
    """To the first finished step of the new world. None: there was none in time."""
    pause_s: float | None = None
    """Between the old world's last finished step and that one."""
    steps_lost: int | None = None
    """Finished before, and to be done again."""
    back_pause_s: float | None = None
    """The same once more, as the world has its size again. None: it had it at once."""
    note: str = ""
    """What went wrong."""
    has_started: bool = True
    """False: it never trained as it was to be; then it is no sample of a recovery."""
    incidents: tuple[dict[str, Any], ...] = ()
    """Ours: what the job's own records say."""
    standbys: tuple[str, ...] = ()
    """Ours: what the nodes said of their standby processes just before."""


@dataclass(frozen=True)
class Plan:
    """What is to be measured."""

    scenarios: Sequence[Scenario]
    launchers: Sequence[Launcher]
    runs: int
    """Of each scenario and launcher."""
    slow_runs: int
    """Of launchers that are not quick."""
    calm_s: float
    """How long a job trains before anything is done to it."""
    patience_s: float
    """No recovery within this time is none."""
    setup_s: float = 0.0
    """How long the script sets up."""

    def turns(self) -> Iterator[tuple[int, Scenario, Launcher]]:
        """In their order."""
        for run in range(max(self.runs, self.slow_runs)):
            for scenario in self.scenarios:
                for launcher in self.launchers:
                    wanted = self.runs if launcher.is_quick else min(self.runs, self.slow_runs)
                    if run < wanted and scenario.applies_to(launcher):
                        yield run, scenario, launcher


class Recovery:
    """Takes the samples."""

    def __init__(self, plan: Plan, directory: Path, store: EtcdStore, etcd: str) -> None:
        self._plan = plan
        self._directory = directory
        self._store = store
        self._etcd = etcd

    def samples(self) -> Iterator[Sample]:
        """One after the other."""
        for number, (run, scenario, launcher) in enumerate(self._plan.turns()):
            sample = Sample(scenario.name, launcher.name, run, f"{number}-{scenario.name}-{launcher.name}")
            try:
                yield replace(sample, **self._measure(scenario, launcher, self._directory / sample.directory))
            except NotStartedError as error:
                yield replace(sample, note=str(error), has_started=False)

    def _measure(self, scenario: Scenario, launcher: Launcher, directory: Path) -> dict[str, Any]:
        """What is to be told of one job."""
        setting = setting_of(scenario, launcher)
        with Job(launcher, directory, self._etcd, setting.np, self._plan.setup_s) as job:
            job.start(*("a", "b")[: scenario.before])
            job.train(scenario.before, 0.0)
            job.start(*setting.spares)
            job.train(scenario.before, self._plan.calm_s)
            if launcher.is_ours:
                wait_until_settled(self._store, job)  # else it goes on all the same; what they say is noted
            job.trace.read()
            old = {step.pid for step in job.trace.steps}
            group, standbys = self._group(job), self._standbys(job)
            at = scenario.do(job)
            give_up_at = time.monotonic() + self._plan.patience_s - (time.time() - at)

            def is_first(step: Step) -> bool:
                if (
                    launcher.keeps_processes and launcher.is_elastic
                ):  # after a failure the others go on at once, in a smaller world
                    return step.t > at and step.world != scenario.before
                return step.pid not in old and step.world == setting.after

            first = job.wait_for_step(is_first, give_up_at)
            if first is None:
                return {"note": self._why_not(job, setting.after), "standbys": standbys}
            before = [step for step in job.trace.steps if not is_first(step) and step.t < first.t]
            if launcher.keeps_processes and not launcher.is_elastic:  # a rank that stays may have a step before it
                times = sorted(step.t for step in job.trace.steps if step.t <= first.t)
                pause_s = max(later - earlier for earlier, later in pairwise(times) if later > at)
            else:
                pause_s = first.t - max(step.t for step in before)
            back_pause_s = self._back_pause_s(job, setting.after, first, give_up_at)
            return {
                "seconds": first.t - at,
                "pause_s": pause_s,
                "steps_lost": max(0, max(step.step for step in before) - first.step + 1),
                "back_pause_s": back_pause_s,
                "incidents": self._incidents(job, group),
                "standbys": standbys,
            }

    def _back_pause_s(self, job: Job, world: int, first: Step, give_up_at: float) -> float | None:
        if first.world == world:
            return None
        back = job.wait_for_step(lambda step: step.world == world and step.t > first.t, give_up_at)
        if back is None:
            return None
        return back.t - max(step.t for step in job.trace.steps if step.t < back.t)

    def _why_not(self, job: Job, world: int) -> str:
        if job.has_ended():
            return f"all launchers ended ({job.codes()})"
        return f"no step in a world of {world} within {self._plan.patience_s:g} s"

    def _group(self, job: Job) -> int:
        group = _view(self._store, job).group if job.launcher.is_ours else None
        return group.value.number if group is not None else 0

    def _standbys(self, job: Job) -> tuple[str, ...]:
        nodes = _view(self._store, job).nodes if job.launcher.is_ours else ()
        return tuple(f"{node.value.node_id}: {node.value.standby}" for node in nodes)

    def _incidents(self, job: Job, group: int) -> tuple[dict[str, Any], ...]:
        """What our job recorded after that group; complete, if its script tells of its steps."""
        if not job.launcher.is_ours:
            return ()
        keys = JobKeys(job.place.job_id)

        def is_complete() -> bool:
            incidents = read_incidents(self._store, keys)
            return bool(incidents) and incidents[-1].group > group and incidents[-1].phases.is_complete

        if job.launcher is OURS:
            comes_true(is_complete, _TOLD_WITHIN_S)
        told = [each for each in read_incidents(self._store, keys) if each.group > group]
        kept = ("group", "cause", "reason", "phases", "replayed_steps")
        shown = [incident_json(each) for each in told]
        return tuple({name: each[name] for name in kept} for each in shown)


def wait_until_settled(store: EtcdStore, job: Job) -> bool:
    """Wait until all nodes of a job of ours are there, with warm standbys, and spares that have set up if they can.

    Returns whether they are so.

    Raises:
        NotStartedError: not all nodes are there.
    """

    def is_settled() -> bool:
        view = _view(store, job)
        members = {member.identity for member in view.group.value.members} if view.group is not None else set()
        nodes = [node.value for node in view.nodes]
        spares = [node for node in nodes if node.member.identity not in members]
        have_set_up = not job.launcher.keeps_processes or all(node.is_set_up for node in spares)
        return len(nodes) == len(job.nodes) and have_set_up and all(_SETTLED.match(each.standby) for each in nodes)

    if comes_true(is_settled, _SETTLED_WITHIN_S):
        return True
    if len(_view(store, job).nodes) < len(job.nodes):
        raise NotStartedError(f"not all of its nodes joined within {_SETTLED_WITHIN_S:g} s")
    return False


def _view(store: EtcdStore, job: Job) -> ClusterView:
    return read_view(store, JobKeys(job.place.job_id))
