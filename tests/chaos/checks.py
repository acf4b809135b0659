"""What has to hold after each fault, and at the end of a training."""

from __future__ import annotations

import contextlib
import re
import secrets
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from chaos.cluster import IMAGE, JOB_ID, ROOT, Cluster, run
from chaos.fault import SAVE_EVERY, Fault
from chaos.ledger import STEPS_PER_EPOCH, faults_in, lost_after, replayed_steps, spans
from chaos.training import digest

from agent.rehearse.cluster import Timeout, wait_for

_WITHIN_S = 150.0
_COMMITS_WITHIN_S = 60.0
_GONE_WITHIN_S = 10.0
_LEAVES_WITHIN_S = 1.0
"""Much less than a lease: who ends in order takes its keys along."""
_PLANNED = ("join", "drain", "scale")
"""Causes of a group for which no step may be repeated."""
_PREFIX = f"/elastic-agent/{JOB_ID}/"
_OF_A_GROUP = re.compile(rf"{_PREFIX}status/(\d+)/")
_KINDS = {
    "agent": re.compile("python3 /opt/venv/bin/elastic-agent "),
    "guardian": re.compile(r"python3 -I -S \S*/guardian\.py "),
    "rank": re.compile(r"python3 /chaos/training\.py "),
    "": re.compile("/sbin/docker-init |sh -ec ps |ps -e"),
}
_OF_A_NODE = Counter(agent=1, guardian=2, rank=2)
"""A rank and its standby, each with its guardian."""
_FIRST_WORDS = re.compile(r"\./(?P<run>[^/]+)/.*:group (?P<group>\d+) rank (?P<rank>\d+) pid (?P<pid>\d+) ")


# After a fault


@dataclass(frozen=True)
class Before:
    """What is known of a cluster before a fault."""

    group: int
    committed: int
    """The step of the committed checkpoint."""
    restarts: int
    """What the restart budget has been used for."""
    counted_from: int
    """The step at which it was last refilled."""


def look(cluster: Cluster) -> Before:
    """At a cluster that trains."""
    return Before(cluster.ledger.newest_group, cluster.committed_step(), *_budget(cluster))


def wrong_after(cluster: Cluster, fault: Fault, before: Before, reference: Reference) -> Iterator[str]:
    """What a fault has done that it may not do, some time after all nodes train again."""
    yield from _odd_processes(cluster)
    _await_commit(cluster)
    yield from _wrong_weights(cluster, reference)
    lost = lost_after(cluster.ledger.lines, before.group)
    if lost > fault.most_lost:
        yield f"{lost} steps lost, at most {fault.most_lost} allowed"
    groups = cluster.ledger.newest_group - before.group
    if groups > fault.most_groups:
        yield f"{groups} groups came of it, at most {fault.most_groups} allowed"
    restarts, counted_from = _budget(cluster)
    used = restarts - (before.restarts if counted_from == before.counted_from else 0)
    if used > fault.failures:
        yield f"it cost {used} restarts, at most {fault.failures} allowed"
    yield from _wrong_beginnings(cluster, fault, before)
    yield from _unwanted_groups(cluster)


def _budget(cluster: Cluster) -> tuple[int, int]:
    group = cluster.record("shared/group")
    return int(group["restarts"]), int(group.get("counted_from", 0))


def _unwanted_groups(cluster: Cluster) -> Iterator[str]:
    """Since all nodes train again."""
    if cluster.ledger.newest_group > cluster.settled_group:
        yield f"group {cluster.ledger.newest_group} followed {cluster.settled_group}, and nothing had happened"


def _wrong_beginnings(cluster: Cluster, fault: Fault, before: Before) -> Iterator[str]:
    """Groups that begin before the committed checkpoint, or that were planned and do steps again."""
    replayed = replayed_steps(cluster.ledger.lines)
    trained = {span.group for span in spans(cluster.ledger.lines)}
    for span in spans(cluster.ledger.lines):
        if span.group <= before.group:
            continue
        if span.first <= before.committed and not fault.is_damage:
            yield f"group {span.group} began with step {span.first}, and step {before.committed} was committed"
        cause = cluster.record(f"incidents/{span.group}")["cause"]
        if replayed[span.group] and cause in _PLANNED and span.group - 1 in trained:
            yield f"group {span.group} ({cause}) repeated {replayed[span.group]} steps"


def _odd_processes(cluster: Cluster) -> list[str]:
    """Nodes that have others than those of a node, or not as many; the dead ones that nobody waited for are others."""
    found: list[str] = []

    def is_usual() -> bool:
        said = {node: cluster.inside(node, "ps -eo args=").splitlines() for node in cluster.running()}
        kinds = {node: Counter(filter(None, map(_kind, lines))) for node, lines in said.items()}
        found[:] = [f"processes of {node}: {said[node]}" for node, kind in kinds.items() if kind != _OF_A_NODE]
        return not found

    with contextlib.suppress(Timeout):
        wait_for(is_usual, _GONE_WITHIN_S, "no odd process")
    return found


def _kind(line: str) -> str:
    return next((kind for kind, pattern in _KINDS.items() if pattern.search(line)), line)


def _await_commit(cluster: Cluster) -> None:
    """Checkpoints go on being committed. Raises `Timeout`."""
    cluster.ledger.follow()
    newest = cluster.ledger.newest_step
    enough = newest + SAVE_EVERY
    wait_for(
        lambda: cluster.ledger.follow() and cluster.ledger.newest_step > enough, _COMMITS_WITHIN_S, f"step {enough}"
    )
    wait_for(lambda: cluster.committed_step() > newest, _COMMITS_WITHIN_S, f"a checkpoint after step {newest}")


def _wrong_weights(cluster: Cluster, reference: Reference) -> list[str]:
    """Where the weights at the end of an epoch, of whatever group, are not those of an undisturbed run: the first."""
    cluster.ledger.follow()
    done = range(STEPS_PER_EPOCH, cluster.ledger.newest_step, STEPS_PER_EPOCH)
    ends = {step for span in spans(cluster.ledger.lines) for step in (span.last, span.reached)}
    noted = sorted(_digests(cluster.directory), reverse=True)  # the furthest first: the reference goes there at once
    wrong = [step for step, found in noted if found != reference.digest(step)]
    missing = sorted({*done} - ends - {step for step, _ in noted})
    return [
        *(f"the weights after {step} steps are not those of an undisturbed run" for step in sorted(wrong)[:1]),
        *(f"nobody noted the weights after {step} steps" for step in missing[:1]),
    ]


# At the end


def finish(cluster: Cluster, reference: Reference) -> list[str]:
    """Have the training end, and return what is wrong with its result, or with what it leaves."""
    cluster.stop_training()
    try:
        wait_for(lambda: not cluster.running(), _WITHIN_S, "the end of all nodes")
    except Timeout as error:
        return [str(error)]
    problems = _left_in_etcd(cluster)  # first: what is left goes by itself when its lease ends
    problems += [f"{node} ended with code {code}" for node, code in _codes(cluster) if code]
    result = cluster.directory / "weights.pt"
    if not result.exists():
        return [*problems, "there is no result"]
    found = torch.load(result, weights_only=True)
    cluster.ledger.follow()
    problems += faults_in(cluster.ledger.lines, found["step"])
    if digest(found["weights"]) != reference.digest(found["step"]):
        problems.append(f"the weights after {found['step']} steps are not those of an undisturbed run")
    return [*problems, *_unwanted_groups(cluster), *_wrong_logs(cluster)]


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
    """Keys that stand for living agents, keys of groups long gone, and leases: of all, a moment after their end."""
    group = int(cluster.record("shared/group")["number"])
    of_living = tuple(_PREFIX + name for name in ("nodes/", "shared/leader", "shared/suspects/"))

    def is_left(key: str) -> bool:
        told = _OF_A_GROUP.match(key)
        return key.startswith(of_living) or (told is not None and int(told[1]) < group - 1)

    def left() -> list[str]:
        keys = cluster.etcdctl("get", "--prefix", "--keys-only", _PREFIX).split()
        leases = cluster.etcdctl("lease", "list").split("\n")[1:]
        return [*filter(is_left, keys), *(f"lease {each}" for each in leases if each)]

    with contextlib.suppress(Timeout):
        wait_for(lambda: not left(), _LEAVES_WITHIN_S, "nothing left")
    return [f"left in etcd: {each}" for each in left()]


def _wrong_logs(cluster: Cluster) -> list[str]:
    """Each rank of each group that took a step has its log, with its first words, and all are of one run."""
    script = f"cd /logs/{JOB_ID} && grep -rHE '^group [0-9]+ rank' --include='rank-*.log' ."
    said = [told for told in map(_FIRST_WORDS.match, cluster.observe(script).splitlines()) if told]
    runs = sorted({told["run"] for told in said})
    told_of = {(int(told["group"]), int(told["rank"]), int(told["pid"])) for told in said}
    wanted = {(line.group, line.rank, line.pid) for line in cluster.ledger.lines}
    missing = [f"no log of rank {rank} of group {group}" for group, rank, _ in sorted(wanted - told_of)]
    return [*missing, *([f"logs of several runs: {runs}"] if len(runs) > 1 else [])]


class Reference:
    """What comes of a training that nothing happens to, after any number of epochs."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._digests: dict[int, str] = {}

    def digest(self, step: int) -> str:
        """Of the weights at the end of an epoch. Trains as far as that, if it has not before."""
        if step not in self._digests:
            self._train(2 * step // STEPS_PER_EPOCH)
        return self._digests.get(step, "no epoch ends there")

    def _train(self, epochs: int) -> None:
        out = self._directory / f"reference-{epochs}"
        out.mkdir(parents=True)
        mounts = ("-v", f"{ROOT / 'tests' / 'chaos'}:/chaos:ro", "-v", f"{out}:/ledger")
        alone = ("--network=none", "--user=root", "-e", "OMP_NUM_THREADS=1", "--entrypoint=python", "--workdir=/tmp")
        command = ("/chaos/training.py", "/ledger", f"--epochs={epochs}", f"--save_every={10**9}")
        name = f"elastic-agent-chaos-reference-{secrets.token_hex(3)}"
        try:
            run("docker", "run", "--rm", f"--name={name}", *alone, *mounts, IMAGE, *command, within_s=60 + epochs)
        except BaseException:
            run("docker", "rm", "-f", "-v", name)
            raise
        self._digests |= dict(_digests(out))
