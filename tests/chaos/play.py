"""Plays faults on a cluster that trains, and measures what they cost."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from random import Random

from chaos.checks import Reference, look, wrong_after
from chaos.cluster import Cluster, CommandFailed, now
from chaos.fault import SAVE_EVERY, UNDISTURBED_S, Fault, Hold, Recovery, Undisturbed, Wait
from chaos.ledger import Line, lost_after

from agent.rehearse.cluster import Timeout, wait_for

_WITHIN_S = 150.0
_CALM_STEPS = 2 * SAVE_EVERY + SAVE_EVERY // 2
_STALLED_S = 10.0
"""While nothing is to be disturbed, no pause is as long; nor as half of that time, if that is shorter."""
_BACK_WITHIN_S = 60.0
"""All nodes, with warm standbys. A node that is soon lost again is let in ever later."""


@dataclass(frozen=True)
class Outcome:
    """What one fault has cost."""

    fault: str
    seed: int
    has_recovered: bool
    pauses_s: tuple[float, ...]
    """Of each wait: the longest time without a finished step."""
    back_s: float
    """The same from when the fault was about to be made good until all nodes trained, with warm standbys."""
    groups: int
    """That came of it."""
    lost: int
    """Steps that were committed and had to be repeated."""
    late: tuple[str, ...]
    """What took longer than it should on a machine that has nothing else to do."""
    problems: tuple[str, ...]
    """What broke the rules."""

    @property
    def is_right(self) -> bool:
        """Whether it has recovered, by the rules."""
        return self.has_recovered and not self.problems


class Broken(Exception):  # noqa: N818 - says what happened
    """What had to hold while a fault lasted did not."""


BREACHES = (Timeout, Broken, CommandFailed, AssertionError, subprocess.TimeoutExpired, LookupError, ValueError)
"""What says that something is not as it has to be. The last two: a record is not there, or is none."""


def play(cluster: Cluster, fault: Fault, seed: int, reference: Reference) -> Outcome:
    """Let a fault come over a cluster that trains, until it does so again with all of its nodes; check what it did."""
    pauses: list[float] = []
    late: list[str] = []
    problems: list[str] = []
    has_recovered, back_s, known = False, 0.0, cluster.ledger.newest_group
    try:
        _calm(cluster)
        before = look(cluster)
        known = before.group
        since = _strike(cluster, fault.strike(cluster, Random(seed)), pauses, late)
        back_s = _come_back(cluster, since, late)
        has_recovered = True
        problems += wrong_after(cluster, fault, before, reference)
    except BREACHES as error:
        problems.append(f"{type(error).__name__}: {error}")
    lost = lost_after(cluster.ledger.lines, known)
    groups = cluster.ledger.newest_group - known
    return Outcome(fault.name, seed, has_recovered, tuple(pauses), back_s, groups, lost, tuple(late), tuple(problems))


def _calm(cluster: Cluster) -> None:
    """Wait until all nodes have trained together for a while since the last fault, with a checkpoint or two.

    Raises `Broken` if the group is another than after that fault: nothing has happened to it.
    """
    if not cluster.settled_group:
        cluster.wait_until_settled(_WITHIN_S)
    group = cluster.settled_group

    def has_trained() -> bool:
        cluster.ledger.follow()
        if cluster.ledger.newest_group > group:
            raise Broken(f"group {cluster.ledger.newest_group} followed {group}, and nothing had happened")
        steps = {line.step for line in cluster.ledger.lines[cluster.undisturbed_since :] if line.group == group}
        return len(steps) > _CALM_STEPS

    wait_for(has_trained, _WITHIN_S, f"{_CALM_STEPS} steps of group {group}")


def _come_back(cluster: Cluster, since: float, late: list[str]) -> float:
    """Wait until all nodes train in one group again, and return the longest pause; note what took too long."""
    cluster.ledger.follow()
    cluster.undisturbed_since, over = len(cluster.ledger.lines), now()
    cluster.wait_until_settled(_WITHIN_S)
    cluster.ledger.follow()
    back = now()
    pause_s = cluster.ledger.longest_pause_s(since, back)
    if pause_s > UNDISTURBED_S:
        late.append(f"no step for {pause_s:.2f} s while nodes came back, at most {UNDISTURBED_S:g} allowed")
    if back - over > _BACK_WITHIN_S:
        late.append(f"all nodes were back after {back - over:.0f} s, at most {_BACK_WITHIN_S:g} allowed")
    return pause_s


def _strike(cluster: Cluster, waits: Iterator[Wait], pauses: list[float], late: list[str]) -> float:
    """Play the parts of a fault; note what each cost, and what took too long. Return when it was to be made good."""
    while True:
        cluster.ledger.follow()
        known, since = len(cluster.ledger.lines), now()
        wait = next(waits, None)
        if wait is None:
            return since
        until = _await(cluster, wait, known)
        pauses.append(cluster.ledger.longest_pause_s(since, until))
        if pauses[-1] > (soon_s := _soon_s(wait)):
            late.append(f"no step for {pauses[-1]:.2f} s, at most {soon_s:g} allowed")


def _soon_s(wait: Wait) -> float:
    match wait:
        case Recovery(_, soon_s) | Hold(_, soon_s):
            return soon_s
        case Undisturbed():
            return UNDISTURBED_S


def _await(cluster: Cluster, wait: Wait, known: int) -> float:
    """Wait, and return when it was over."""
    match wait:
        case Recovery(world, _, within_s):
            return _recovered(cluster, known, within_s, world)
        case Hold(seconds):
            time.sleep(seconds)  # the duration of the fault
        case Undisturbed(seconds):
            _stay_undisturbed(cluster, seconds)
    cluster.ledger.follow()
    return now()


def _recovered(cluster: Cluster, known: int, within_s: float, world: int | None) -> float:
    """When a group that is newer than those in the first so many lines had finished a step."""
    old = max(line.group for line in cluster.ledger.lines[:known])

    def first() -> Line | None:
        cluster.ledger.follow()
        return next((line for line in cluster.ledger.lines[known:] if _is_wanted(line)), None)

    def _is_wanted(line: Line) -> bool:
        return line.is_committed and line.group > old and world in {None, line.world}

    found: Line = wait_for(first, within_s, f"a step of a group after {old}" + (f", of {world}" if world else ""))
    return found.t


def _stay_undisturbed(cluster: Cluster, seconds: float) -> None:
    """Raises `Broken` if the group or a process of it changes, or steps are no longer made."""
    before, since = (cluster.ledger.newest_group, cluster.ledger.pids()), now()
    time.sleep(seconds)  # nothing may change in this time
    cluster.ledger.follow()
    after = (cluster.ledger.newest_group, cluster.ledger.pids())
    if after != before:
        raise Broken(f"group and processes were {before}, and are {after}")
    pause_s = cluster.ledger.longest_pause_s(since, now())
    if pause_s > min(_STALLED_S, seconds / 2):
        raise Broken(f"no step for {pause_s:.1f} of {seconds:g} s, though nothing was to be disturbed")
