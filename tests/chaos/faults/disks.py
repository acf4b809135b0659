"""Disks that take nothing, and checkpoints that are damaged."""

from __future__ import annotations

from collections.abc import Iterator
from random import Random

from chaos.cluster import Cluster
from chaos.fault import COLD_S, SAVE_EVERY, Recovery, Undisturbed, Wait, fault, one
from chaos.ledger import first_step_after

_DAMAGED_LOST = 3 * SAVE_EVERY
"""What is newest may not be committed yet, the next is damaged, and the one before it was begun a while before."""


@fault("disk-full", "the checkpoints' volume is full, and a node is killed meanwhile")
def disk_full(cluster: Cluster, chance: Random) -> Iterator[Wait]:
    # Again, for the room of a checkpoint that is removed meanwhile.
    cluster.observe("for turn in 1 2 3; do head -c 1G /dev/zero >>/checkpoints/filling || sleep 1; done")
    try:
        yield from _without_disk(cluster, chance)
    finally:
        cluster.observe("rm /checkpoints/filling")


@fault("disk-read-only", "the checkpoints' volume is read-only, and a node is killed meanwhile")
def disk_read_only(cluster: Cluster, chance: Random) -> Iterator[Wait]:
    cluster.observe("mount -o remount,ro /checkpoints")
    try:
        yield from _without_disk(cluster, chance)
    finally:
        cluster.observe("mount -o remount,rw /checkpoints")


def _without_disk(cluster: Cluster, chance: Random) -> Iterator[Wait]:
    victim = one(cluster, chance)
    cluster.inside(
        victim, "! head -c 65536 /dev/zero 2>/dev/null >/checkpoints/probe || { rm /checkpoints/probe; exit 1; }"
    )
    before = cluster.record("shared/checkpoint")["number"]
    yield Undisturbed(2 * SAVE_EVERY * cluster.step_time_s)
    written = cluster.record("shared/checkpoint")["number"] - before
    assert written <= 1, f"{written} checkpoints were committed there"  # the first was whole before
    cluster.kill(victim)
    yield Recovery()
    cluster.start(victim)


@fault(
    "checkpoint-truncated",
    "all nodes are killed, and the newest checkpoint is cut in half",
    most_lost=_DAMAGED_LOST,
    most_groups=4,
    is_damage=True,
)
def checkpoint_truncated(cluster: Cluster, _: Random) -> Iterator[Wait]:
    yield from _damaged(cluster, 'truncate -s "$(( $(stat -c %s "$file") / 2 ))" "$file"')


@fault(
    "checkpoint-flipped",
    "all nodes are killed, and a bit of the newest checkpoint is flipped",
    most_lost=_DAMAGED_LOST,
    most_groups=4,
    is_damage=True,
)
def checkpoint_flipped(cluster: Cluster, _: Random) -> Iterator[Wait]:
    flip = (
        'at=$(( $(stat -c %s "$file") / 2 )); byte=$(od -An -tu1 -j $at -N 1 "$file"); '
        'printf "\\\\$(printf %o $(( byte ^ 1 )))" | dd of="$file" bs=1 seek=$at conv=notrunc status=none'
    )
    yield from _damaged(cluster, flip)


def _damaged(cluster: Cluster, how: str) -> Iterator[Wait]:
    nodes, known = cluster.running(), cluster.ledger.newest_group
    cluster.kill(*nodes)
    record = cluster.record("shared/checkpoint")
    committed = record["name"]  # in place, or under its private name yet, which has this in it
    cluster.observe(f"file=$(find /checkpoints -path '*{committed}*/state.pt'); test -f \"$file\"; {how}")
    cluster.start(*nodes)
    yield Recovery(soon_s=COLD_S)
    found = first_step_after(cluster.ledger.lines, known)
    wanted = int(record["kept"][-1].split("-s")[1].split(".")[0]) + 1
    assert found == wanted, f"it began with step {found}, and the one before the damaged leads to {wanted}"
