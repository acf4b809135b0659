"""What is done to a cluster, each by a name, and what has to come of it.

A fault is a generator: it strikes, and yields what is to be waited for; then it makes good what it did, or strikes
again. `play.py` waits, measures, and checks.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from random import Random

from chaos.cluster import ETCD, Cluster, CommandFailed, run
from chaos.ledger import spans


@dataclass(frozen=True)
class Recovery:
    """Wait until a group that is newer than those before the strike has finished a step."""

    world: int | None = None
    """So many ranks; None: any number."""
    soon_s: float | None = None
    """The longest pause that is no fault of ours; None: whatever Docker and Python take to start a node."""
    within_s: float = 60.0


@dataclass(frozen=True)
class Hold:
    """Keep it like this for so long."""

    seconds: float


@dataclass(frozen=True)
class Undisturbed:
    """Keep it like this for so long, while no process of the group changes and steps go on being made."""

    seconds: float


Wait = Recovery | Hold | Undisturbed
Strike = Callable[[Cluster, Random], Iterator[Wait]]


@dataclass(frozen=True)
class Fault:
    """One kind."""

    name: str
    title: str
    strike: Strike
    most_lost: int
    """Steps that it may cost."""
    failures: int = 0
    """Of its workers, that it may cost."""
    is_damage: bool = False
    """The committed checkpoint cannot be read."""


FAULTS: dict[str, Fault] = {}

SAVE_EVERY = 20
"""Steps. What a copy in memory costs where all of this shares a machine says how often one is taken, so a crash that
leaves a survivor costs a step or some; never more than the newest checkpoint does."""
_ALL_LOST = 3 * SAVE_EVERY
"""What is newest may not be committed yet, and the one before it may be what is damaged."""
_KILLED_S = 2.0
"""Connections close at once."""
_SILENT_S = 6.0
"""Nothing is heard any more: `--detect_within` and a second."""
_APART_S = 8.0
"""Its lease lives, and so more is waited for: that it has not ended, and that no step comes."""
_PAST_ITS_LEASE_S = 8.0
_LONG_S = 15.0
_NODE_MB = 2048
_PLENTY_MB = 64 << 10
_DELAY_S = 0.2
_CLOCK_ERROR_S = 60.0


def _fault(
    name: str, title: str, *, most_lost: int = SAVE_EVERY, failures: int = 0, is_damage: bool = False
) -> Callable[[Strike], Strike]:
    def add(strike: Strike) -> Strike:
        FAULTS[name] = Fault(name, title, strike, most_lost, failures, is_damage)
        return strike

    return add


def _some(cluster: Cluster, chance: Random, count: int) -> list[str]:
    """By rank, so that a seed strikes the same again: names of containers are drawn anew."""
    return chance.sample([host for _, (host, _) in sorted(cluster.ledger.pids().items())], count)


def _one(cluster: Cluster, chance: Random) -> str:
    return _some(cluster, chance, 1)[0]


def _others(cluster: Cluster, node: str) -> list[str]:
    return [cluster.address(other) for other in cluster.running() if other != node]


def _etcds(cluster: Cluster) -> list[str]:
    return [cluster.address(cluster.container(name)) for name in ETCD]


# Nodes


@_fault("node-killed", "a node is killed, and started again under its name")
def _node_killed(cluster: Cluster, chance: Random) -> Iterator[Wait]:
    victim = _one(cluster, chance)
    cluster.kill(victim)
    yield Recovery(cluster.nodes - 1, _KILLED_S)
    cluster.start(victim)


@_fault("node-replaced", "a node is killed, and another takes its place")
def _node_replaced(cluster: Cluster, chance: Random) -> Iterator[Wait]:
    victim = _one(cluster, chance)
    cluster.kill(victim)
    yield Recovery(cluster.nodes - 1, _KILLED_S)
    cluster.replace(victim)


@_fault("rank-0-killed", "the node of rank 0 is killed")
def _rank_0_killed(cluster: Cluster, _: Random) -> Iterator[Wait]:
    victim = cluster.node_of_rank(0)
    cluster.kill(victim)
    yield Recovery(cluster.nodes - 1, _KILLED_S)
    cluster.start(victim)


@_fault("leader-killed", "the node of the leader is killed")
def _leader_killed(cluster: Cluster, _: Random) -> Iterator[Wait]:
    victim = cluster.leader()
    cluster.kill(victim)
    yield Recovery(cluster.nodes - 1, _KILLED_S)
    cluster.start(victim)


@_fault("two-killed", "two of three nodes are killed at once", most_lost=_ALL_LOST)
def _two_killed(cluster: Cluster, chance: Random) -> Iterator[Wait]:
    victims = _some(cluster, chance, 2)
    cluster.kill(*victims)
    cluster.start(*victims)
    yield Recovery()


@_fault("all-killed", "all nodes are killed at once", most_lost=_ALL_LOST)
def _all_killed(cluster: Cluster, _: Random) -> Iterator[Wait]:
    victims = cluster.running()
    cluster.kill(*victims)
    cluster.start(*victims)
    yield Recovery()


@_fault("paused", "a node is paused for longer than its lease, and goes on")
def _paused(cluster: Cluster, chance: Random) -> Iterator[Wait]:
    victim = _one(cluster, chance)
    run("docker", "pause", victim)
    try:
        yield Recovery(cluster.nodes - 1, _SILENT_S)
        yield Hold(_PAST_ITS_LEASE_S)
    finally:
        run("docker", "unpause", victim)


@_fault("worker-killed", "a worker is killed", failures=1)
def _worker_killed(cluster: Cluster, chance: Random) -> Iterator[Wait]:
    victim = _one(cluster, chance)
    pids = dict(cluster.ledger.pids().values())
    cluster.inside(victim, f"kill -KILL {pids[victim]}")
    yield Recovery(soon_s=_KILLED_S)


@_fault("all-told-to-leave", "all nodes get SIGTERM at once, and the job is started later", most_lost=0)
def _all_told_to_leave(cluster: Cluster, _: Random) -> Iterator[Wait]:
    nodes = cluster.running()
    run("docker", "stop", *nodes)
    codes = run("docker", "inspect", "-f", "{{.State.ExitCode}}", *nodes).split()
    assert set(codes) == {"0"}, f"told to leave, they ended with {codes}"
    cluster.start(*nodes)
    yield Recovery()


@_fault("one-told-to-leave", "a node gets SIGTERM, and is started later", most_lost=0)
def _one_told_to_leave(cluster: Cluster, chance: Random) -> Iterator[Wait]:
    victim = _one(cluster, chance)
    run("docker", "kill", "-s", "TERM", victim)
    yield Recovery(cluster.nodes - 1, _KILLED_S)
    code = run("docker", "wait", victim).strip()
    assert code == "0", f"told to leave, it ended with {code}"
    cluster.start(victim)


# Networks


@_fault("cut-off", "a node is cut off from all others and from etcd")
def _cut_off(cluster: Cluster, chance: Random) -> Iterator[Wait]:
    victim = _one(cluster, chance)
    with _cut(cluster, victim, [*_others(cluster, victim), *_etcds(cluster)]):
        yield Recovery(cluster.nodes - 1, _SILENT_S)
        yield Hold(_PAST_ITS_LEASE_S)


@_fault("cut-from-etcd", "a node is cut off from etcd only")
def _cut_from_etcd(cluster: Cluster, chance: Random) -> Iterator[Wait]:
    victim = _one(cluster, chance)
    with _cut(cluster, victim, _etcds(cluster)):
        yield Recovery(cluster.nodes - 1, _SILENT_S, _LONG_S)
        yield Hold(_PAST_ITS_LEASE_S)


@_fault("cut-from-peers", "a node is cut off from the other nodes only")
def _cut_from_peers(cluster: Cluster, chance: Random) -> Iterator[Wait]:
    victim = _one(cluster, chance)
    with _cut(cluster, victim, _others(cluster, victim)):
        yield Recovery(cluster.nodes - 1, _APART_S)
        yield Hold(_LONG_S)


@_fault("deaf", "a node hears nothing, and is heard")
def _deaf(cluster: Cluster, chance: Random) -> Iterator[Wait]:
    victim = _one(cluster, chance)
    with _cut(cluster, victim, [*_others(cluster, victim), *_etcds(cluster)], "in"):
        yield Recovery(cluster.nodes - 1, _SILENT_S)
        yield Hold(_PAST_ITS_LEASE_S)


@_fault("mute", "a node is not heard, and hears")
def _mute(cluster: Cluster, chance: Random) -> Iterator[Wait]:
    victim = _one(cluster, chance)
    with _cut(cluster, victim, [*_others(cluster, victim), *_etcds(cluster)], "out"):
        yield Recovery(cluster.nodes - 1, _SILENT_S)
        yield Hold(_PAST_ITS_LEASE_S)


@contextlib.contextmanager
def _cut(cluster: Cluster, node: str, others: list[str], *ways: str) -> Iterator[None]:
    cluster.cut(node, others, ways=ways or ("in", "out"))
    try:
        yield
    finally:
        cluster.mend(node)


@_fault("lossy", "a node loses one packet in twenty")
def _lossy(cluster: Cluster, chance: Random) -> Iterator[Wait]:
    victim = _one(cluster, chance)
    cluster.in_network_of(victim, "iptables -A INPUT -m statistic --mode random --probability 0.05 -j DROP")
    try:
        yield Undisturbed(_LONG_S)
    finally:
        cluster.mend(victim)


# The end of the delay breaks what is connected by then.
@_fault("slow", "connections that a node opens are 200 ms slower each way, and another is killed", failures=1)
def _slow(cluster: Cluster, chance: Random) -> Iterator[Wait]:
    slow, victim = _some(cluster, chance, 2)
    with cluster.delay(slow, _DELAY_S):
        assert _answer_s(cluster, slow) > 1.5 * _DELAY_S, "nothing is slower"
        cluster.kill(victim)
        yield Recovery()
        cluster.start(victim)
        yield Hold(_LONG_S)


def _answer_s(cluster: Cluster, node: str) -> float:
    """What an answer from etcd takes there, on a new connection."""
    asked = (
        f"import time, urllib.request as web; t = time.monotonic(); web.urlopen('http://{ETCD[0]}:2379/health').read()"
    )
    return float(cluster.inside(node, f'python -c "{asked}; print(time.monotonic() - t)"'))


# etcd


@_fault("etcd-leader-killed", "the member of etcd that leads is killed", most_lost=0)
def _etcd_leader_killed(cluster: Cluster, _: Random) -> Iterator[Wait]:
    with _etcd_without(cluster, cluster.etcd_leader()):
        yield Undisturbed(_LONG_S)
    yield Undisturbed(_PAST_ITS_LEASE_S)


@_fault("etcd-two-killed", "two members of etcd are killed, for 30 s", most_lost=0)
def _etcd_two_killed(cluster: Cluster, chance: Random) -> Iterator[Wait]:
    with _etcd_without(cluster, *chance.sample(ETCD, 2)):
        yield Undisturbed(30.0)
    yield Undisturbed(_PAST_ITS_LEASE_S)


@_fault("etcd-stopped", "all members of etcd are stopped, for 60 s", most_lost=0)
def _etcd_stopped(cluster: Cluster, _: Random) -> Iterator[Wait]:
    with _etcd_without(cluster, *ETCD):
        yield Undisturbed(60.0)
    yield Undisturbed(_PAST_ITS_LEASE_S)


@_fault("etcd-paused", "all members of etcd are frozen, for 15 s", most_lost=0)
def _etcd_paused(cluster: Cluster, _: Random) -> Iterator[Wait]:
    members = [cluster.container(name) for name in ETCD]
    run("docker", "pause", *members)
    try:
        yield Undisturbed(_LONG_S)
    finally:
        run("docker", "unpause", *members)
    yield Undisturbed(_PAST_ITS_LEASE_S)


@contextlib.contextmanager
def _etcd_without(cluster: Cluster, *names: str) -> Iterator[None]:
    members = [cluster.container(name) for name in names]
    run("docker", "kill", "-s", "KILL", *members)
    try:
        yield
    finally:
        run("docker", "start", *members)
        cluster.wait_for_etcd()


@_fault("etcd-full", "etcd is out of space, and says so to whoever writes", most_lost=0)
def _etcd_full(cluster: Cluster, _: Random) -> Iterator[Wait]:
    with contextlib.suppress(CommandFailed):  # the last one is refused
        cluster.observe(
            "export ETCDCTL_API=3; head -c 1000000 /dev/zero | tr '\\0' x >/tmp/filling; "
            "for number in $(seq 64); do etcdctl --endpoints=etcd-1:2379 put /filling/$number </tmp/filling; done"
        )
    assert "NOSPACE" in cluster.etcdctl("alarm", "list"), "etcd has room for all that"
    yield Undisturbed(_LONG_S)
    revision = cluster.etcdctl("get", "/filling/1", "-w", "fields").split('"Revision" : ')[1].split()[0]
    cluster.etcdctl("del", "--prefix", "/filling/")
    cluster.etcdctl("compact", revision)
    cluster.etcdctl("defrag")
    cluster.etcdctl("alarm", "disarm")
    yield Undisturbed(_PAST_ITS_LEASE_S)


# Disks


@_fault("disk-full", "the checkpoints' volume is full, and a node is killed meanwhile")
def _disk_full(cluster: Cluster, chance: Random) -> Iterator[Wait]:
    # Again, for the room of a checkpoint that is removed meanwhile.
    cluster.observe("for turn in 1 2 3; do head -c 1G /dev/zero >>/checkpoints/filling || sleep 1; done")
    try:
        yield from _without_disk(cluster, chance)
    finally:
        cluster.observe("rm /checkpoints/filling")


@_fault("disk-read-only", "the checkpoints' volume is read-only, and a node is killed meanwhile")
def _disk_read_only(cluster: Cluster, chance: Random) -> Iterator[Wait]:
    cluster.observe("mount -o remount,ro /checkpoints")
    try:
        yield from _without_disk(cluster, chance)
    finally:
        cluster.observe("mount -o remount,rw /checkpoints")


def _without_disk(cluster: Cluster, chance: Random) -> Iterator[Wait]:
    victim = _one(cluster, chance)
    cluster.inside(
        victim, "! head -c 65536 /dev/zero 2>/dev/null >/checkpoints/probe || { rm /checkpoints/probe; exit 1; }"
    )
    before = cluster.record("checkpoint")["number"]
    yield Undisturbed(2 * SAVE_EVERY * cluster.step_time_s)
    written = cluster.record("checkpoint")["number"] - before
    assert written <= 1, f"{written} checkpoints were committed there"  # the first was whole before
    cluster.kill(victim)
    yield Recovery(soon_s=_KILLED_S)
    cluster.start(victim)


@_fault(
    "checkpoint-truncated",
    "all nodes are killed, and the newest checkpoint is cut in half",
    most_lost=_ALL_LOST,
    is_damage=True,
)
def _checkpoint_truncated(cluster: Cluster, _: Random) -> Iterator[Wait]:
    yield from _damaged(cluster, 'truncate -s "$(( $(stat -c %s "$file") / 2 ))" "$file"')


@_fault(
    "checkpoint-flipped",
    "all nodes are killed, and a bit of the newest checkpoint is flipped",
    most_lost=_ALL_LOST,
    is_damage=True,
)
def _checkpoint_flipped(cluster: Cluster, _: Random) -> Iterator[Wait]:
    flip = (
        'at=$(( $(stat -c %s "$file") / 2 )); byte=$(od -An -tu1 -j $at -N 1 "$file"); '
        'printf "\\\\$(printf %o $(( byte ^ 1 )))" | dd of="$file" bs=1 seek=$at conv=notrunc status=none'
    )
    yield from _damaged(cluster, flip)


def _damaged(cluster: Cluster, how: str) -> Iterator[Wait]:
    nodes, known = cluster.running(), cluster.ledger.newest_group
    cluster.kill(*nodes)
    record = cluster.record("checkpoint")
    committed = record["name"]  # in place, or under its private name yet, which has this in it
    cluster.observe(f"file=$(find /checkpoints -path '*{committed}*/state.pt'); test -f \"$file\"; {how}")
    cluster.start(*nodes)
    yield Recovery()
    found = next(span.first for span in spans(cluster.ledger.lines) if span.group > known)
    wanted = int(record["kept"][-1].split("-s")[1].split(".")[0]) + 1
    assert found == wanted, f"it began with step {found}, and the one before the damaged leads to {wanted}"


# Machines


@_fault("out-of-memory", "a worker takes more memory than its node may, and is killed for it", failures=1)
def _out_of_memory(cluster: Cluster, chance: Random) -> Iterator[Wait]:
    victim = _one(cluster, chance)
    _limit_memory(victim, _NODE_MB)
    cluster.observe(f"echo {2 * _NODE_MB} >/ledger/eat.{victim}")
    yield Recovery()
    _limit_memory(victim, _PLENTY_MB)
    reason = cluster.record("group")["reason"]
    assert all(told in reason for told in (victim, "out of memory")), reason


def _limit_memory(node: str, megabytes: int) -> None:
    run("docker", "update", f"--memory={megabytes}m", f"--memory-swap={megabytes}m", node)


@_fault("clock-wrong", "a node's clock is an hour off, and another node is killed")
def _clock_wrong(cluster: Cluster, chance: Random) -> Iterator[Wait]:
    wrong, victim = _some(cluster, chance, 2)
    ahead_s = chance.choice((-3600, 3600))
    cluster.observe(f"echo {ahead_s} >/ledger/clock.{wrong}")
    run("docker", "restart", "-t", "0", wrong)
    told = float(cluster.inside(wrong, "python -c 'import time; print(time.time())'"))
    assert abs(told - time.time() - ahead_s) < _CLOCK_ERROR_S, "its clock is right"
    yield Recovery()
    cluster.wait_until_settled()
    cluster.kill(victim)
    yield Recovery(cluster.nodes - 1, _KILLED_S)
    cluster.start(victim)
    cluster.observe(f"rm /ledger/clock.{wrong}")
