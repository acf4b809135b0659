"""Plays faults on a cluster that trains, measures what they cost, and checks the result."""

from __future__ import annotations

import contextlib
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from random import Random

import torch
from chaos.cluster import IMAGE, JOB_ID, ROOT, Cluster, CommandFailed, now, run
from chaos.faults import SAVE_EVERY, Fault, GoesOn, Hold, Recovery, Undisturbed, Wait
from chaos.ledger import STEPS_PER_EPOCH, Line, faults_in, lost_steps
from chaos.training import digest

from agent.rehearse.cluster import Timeout, wait_for

_WITHIN_S = 150.0
_CALM_STEPS = 2 * SAVE_EVERY + SAVE_EVERY // 2
_SOME_STEPS = 10
_LEAVES_WITHIN_S = 30.0
_STALLED_S = 10.0
"""While nothing is to be disturbed, no pause is as long."""


@dataclass(frozen=True)
class Outcome:
    """What one fault has cost."""

    fault: str
    seed: int
    has_recovered: bool
    pauses_s: tuple[float, ...]
    """Of each wait: the longest time without a finished step."""
    lost: int
    """Steps that were committed and had to be done again."""
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


def play(cluster: Cluster, fault: Fault, seed: int, reference: Reference) -> Outcome:
    """Let a fault come over a cluster that trains, until it does so again with all of its nodes; check its weights."""
    pauses: list[float] = []
    late: list[str] = []
    problems: list[str] = []
    has_recovered, lost = False, 0
    try:
        _calm(cluster)
        known = cluster.ledger.newest_group
        _strike(cluster, fault.strike(cluster, Random(seed)), pauses, late)
        cluster.ledger.follow()
        cluster.undisturbed_since = len(cluster.ledger.lines)
        cluster.wait_until_settled(_WITHIN_S)
    except (Timeout, Broken, CommandFailed, AssertionError) as error:
        problems.append(f"{type(error).__name__}: {error}")
    else:
        has_recovered = True
        lost = sum(steps for group, steps in lost_steps(cluster.ledger.lines).items() if group > known)
        if lost > fault.most_lost:
            problems.append(f"{lost} steps lost, at most {fault.most_lost} allowed")
        if lost < fault.least_lost:
            problems.append(f"{lost} steps lost, and it should cost at least {fault.least_lost}")
        problems += wrong_weights(cluster, reference)
    return Outcome(fault.name, seed, has_recovered, tuple(pauses), lost, tuple(late), tuple(problems))


def _calm(cluster: Cluster) -> None:
    """Wait until all nodes have trained together for a while since the last fault was over, with a checkpoint or two."""
    cluster.wait_until_settled(_WITHIN_S)
    cluster.ledger.follow()
    group = cluster.ledger.newest_group

    def has_trained() -> bool:
        cluster.ledger.follow()
        steps = {line.step for line in cluster.ledger.lines[cluster.undisturbed_since :] if line.group == group}
        return len(steps) > _CALM_STEPS or cluster.ledger.newest_group > group

    wait_for(has_trained, _WITHIN_S, f"{_CALM_STEPS} steps of group {group}")


def _strike(cluster: Cluster, waits: Iterator[Wait], pauses: list[float], late: list[str]) -> None:
    """Play the parts of a fault; note what each has cost, and what took too long."""
    while True:
        cluster.ledger.follow()
        known, since = len(cluster.ledger.lines), now()
        wait = next(waits, None)
        if wait is None:
            return
        until = _await(cluster, wait, known)
        pauses.append(cluster.ledger.longest_pause_s(since, until))
        if isinstance(wait, Recovery) and wait.soon_s is not None and pauses[-1] > wait.soon_s:
            late.append(f"no step for {pauses[-1]:.2f} s, at most {wait.soon_s:g} allowed")


def _await(cluster: Cluster, wait: Wait, known: int) -> float:
    """Wait, and return when it was over."""
    match wait:
        case Recovery(world, _, within_s):
            return _recovered(cluster, known, within_s, world)
        case GoesOn(within_s):
            wait_for(lambda: _commits(cluster, known) > _SOME_STEPS, within_s, f"{_SOME_STEPS} steps")
        case Hold(seconds):
            time.sleep(seconds)
        case Undisturbed(seconds):
            _stay_undisturbed(cluster, seconds)
    cluster.ledger.follow()
    return now()


def _commits(cluster: Cluster, known: int) -> int:
    """How many there are after the first so many lines."""
    cluster.ledger.follow()
    return sum(line.is_committed for line in cluster.ledger.lines[known:])


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
    """Raises `Broken` if a process of the group changes, or steps are no longer made."""
    before, since = cluster.ledger.pids(), now()
    time.sleep(seconds)
    cluster.ledger.follow()
    if cluster.ledger.pids() != before:
        raise Broken(f"the group's processes were {before}, and are {cluster.ledger.pids()}")
    pause_s = cluster.ledger.longest_pause_s(since, now())
    if pause_s > _STALLED_S:
        raise Broken(f"no step for {pause_s:.1f} s, though nothing was to be disturbed")


# The result


def finish(cluster: Cluster, reference: Reference) -> list[str]:
    """Have the training end, and return what is wrong with its result, or with what it leaves."""
    cluster.stop_training()
    try:
        wait_for(lambda: not cluster.running(), _WITHIN_S, "the end of all nodes")
    except Timeout as error:
        return [str(error)]
    problems = [f"{node} ended with code {code}" for node, code in _codes(cluster) if code]
    result = cluster.directory / "weights.pt"
    if not result.exists():
        return [*problems, "there is no result"]
    found = torch.load(result, weights_only=True)
    cluster.ledger.follow()
    problems += faults_in(cluster.ledger.lines, found["step"])
    if digest(found["weights"]) != reference.digest(found["step"]):
        problems.append(f"the weights after {found['step']} steps are not those of an undisturbed run")
    return [*problems, *_left_in_etcd(cluster), *_logs_missing(cluster)]


def wrong_weights(cluster: Cluster, reference: Reference) -> list[str]:
    """Where the weights at the end of an epoch, of whatever group, are not those of an undisturbed run: the first."""
    noted = sorted(_digests(cluster.directory), reverse=True)  # the furthest first: the reference goes there at once
    wrong = [step for step, found in noted if found != reference.digest(step)]
    return [f"the weights after {min(wrong)} steps are not those of an undisturbed run"] if wrong else []


def _digests(directory: Path) -> Iterator[tuple[int, str]]:
    """Step and digest of each epoch's end that a rank 0 has noted."""
    with contextlib.suppress(FileNotFoundError):
        text = (directory / "digests").read_text(encoding="ascii")
        for line in text[: text.rfind("\n") + 1].splitlines():
            step, found = line.split()
            yield int(step), found


def _codes(cluster: Cluster) -> Iterator[tuple[str, int]]:
    for node in cluster.all():
        yield node, int(run("docker", "inspect", "-f", "{{.State.ExitCode}}", node))


def _left_in_etcd(cluster: Cluster) -> list[str]:
    """Keys that stand for living agents, and leases: of all, some time after their end."""
    prefix = f"/elastic-agent/{JOB_ID}/"

    def left() -> list[str]:
        keys = cluster.etcdctl("get", "--prefix", "--keys-only", prefix).split()
        leases = cluster.etcdctl("lease", "list").split("\n")[1:]
        places = tuple(prefix + name for name in ("nodes/", "leader", "suspects/"))
        return [*(key for key in keys if key.startswith(places)), *(f"lease {each}" for each in leases if each)]

    with contextlib.suppress(Timeout):
        wait_for(lambda: not left(), _LEAVES_WITHIN_S, "nothing left")
    return [f"left in etcd: {each}" for each in left()]


def _logs_missing(cluster: Cluster) -> list[str]:
    """Each rank of each group that took a step has its log."""
    kept = cluster.observe(f"find /logs/{JOB_ID} -name 'rank-*.log'").split()
    names = {(path.parent.name, path.name.split(".")[0]) for path in map(Path, kept)}
    wanted = {(f"group-{line.group:06}", f"rank-{line.rank:05}") for line in cluster.ledger.lines}
    return [f"no log of {rank} of {group}" for group, rank in sorted(wanted - names)]


class Reference:
    """What comes of a training that nothing happens to, after any number of epochs."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._digests: dict[int, str] = {}

    def digest(self, step: int) -> str:
        """Of the weights at the end of an epoch. Trains as far as that, if it has not before."""
        if step not in self._digests:
            self._train(2 * step // STEPS_PER_EPOCH)
        return self._digests[step]

    def _train(self, epochs: int) -> None:
        out = self._directory / f"reference-{epochs}"
        out.mkdir(parents=True)
        mounts = ("-v", f"{ROOT / 'tests' / 'chaos'}:/chaos:ro", "-v", f"{out}:/ledger")
        alone = ("--network=none", "--user=root", "-e", "OMP_NUM_THREADS=1", "--entrypoint=python", "--workdir=/tmp")
        command = ("/chaos/training.py", "/ledger", f"--epochs={epochs}", f"--save_every={10**9}")
        subprocess.run(["docker", "run", "--rm", *alone, *mounts, IMAGE, *command], check=True, capture_output=True)
        self._digests |= dict(_digests(out))
