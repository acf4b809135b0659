"""What is done to a job, and what has to come of it."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from dataclasses import dataclass

from benchmarks.jobs import Job
from benchmarks.launchers import Launcher, elastic_agent
from benchmarks.nodes import strike


@dataclass(frozen=True)
class Scenario:
    """A fault or a planned change."""

    name: str
    title: str
    do: Callable[[Job], float]
    """Does it; returns when, on the wall clock."""
    np: str = "1:2"
    before: int = 2
    """Nodes that train before, one rank each."""
    after: int = 2
    """And after."""
    has_spare: bool = False
    """A job of ours has one more node than trains, which waits."""
    loses_node: bool = False
    needs_elastic: bool = False

    def applies_to(self, launcher: Launcher) -> bool:
        """Whether the launcher has anything like it."""
        return launcher.is_elastic or not self.needs_elastic


@dataclass(frozen=True)
class Setting:
    """A scenario as one launcher can play it."""

    np: str
    spares: tuple[str, ...]
    """Nodes that are started once the others train."""
    after: int


def setting_of(scenario: Scenario, launcher: Launcher) -> Setting:
    """One whose world never shrinks is given a spare, which takes the lost node's place."""
    if scenario.loses_node and not launcher.is_elastic:
        np = str(scenario.before) if launcher.is_ours else f"{scenario.before}:{scenario.before + 1}"
        return Setting(np, ("c",), scenario.before)
    np = scenario.np if launcher.is_elastic else str(scenario.before)
    return Setting(np, ("b",) if scenario.has_spare and launcher.is_ours else (), scenario.after)


def _kill_worker(job: Job) -> float:
    victim = next(step.pid for step in reversed(job.trace.steps) if step.rank == 1)
    at = time.time()
    strike([victim], signal.SIGKILL)
    return at


def _kill_node(job: Job) -> float:
    family = job.nodes["b"].family()
    at = time.time()
    strike(family, signal.SIGSTOP)  # first: none lives to see another die
    strike(family, signal.SIGKILL)
    return at


def _silence_node(job: Job) -> float:
    family = job.nodes["b"].family()
    at = time.time()
    strike(family, signal.SIGSTOP)
    return at


def _join(job: Job) -> float:
    at = time.time()
    job.start("b")
    return at


def _ask_to_leave(job: Job) -> float:
    at = time.time()
    strike([job.nodes["b"].process.pid], signal.SIGTERM)
    return at


def _scale(np: str, *names: str) -> Callable[[Job], float]:
    def do(job: Job) -> float:
        at = time.time()
        if job.launcher.is_ours:
            job.ask([*elastic_agent("scale", job.place.etcd, job.place.job_id), f"--np={np}"])
        else:
            job.restart(np, *names)
        return at

    return do


SCENARIOS = {
    each.name: each
    for each in (
        Scenario("worker", "a worker is killed", _kill_worker),
        Scenario("node", "a node is killed", _kill_node, after=1, loses_node=True),
        Scenario("silent", "a node falls silent", _silence_node, after=1, loses_node=True),
        Scenario("join", "a node joins", _join, before=1, needs_elastic=True),
        Scenario("leave", "a node is asked to leave", _ask_to_leave, after=1, loses_node=True),
        Scenario("scale-up", "scale from 1 to 2", _scale("2", "a", "b"), np="1", before=1, has_spare=True),
        Scenario("scale-down", "scale from 2 to 1", _scale("1", "a"), np="2", after=1),
    )
}
PLANNED = frozenset({"join", "leave", "scale-up", "scale-down"})
