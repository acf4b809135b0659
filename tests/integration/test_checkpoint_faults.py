"""Checkpoints that are damaged, half done, on a full disk, or where nobody can read them: what the job then does.

Real agents, killed in the middle; what counts is the step that the next group goes on from, and the result.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
from integration import held_saves
from integration.conftest import PATIENCE_S, PATIENT
from integration.saving_job import Saving
from integration.test_runtime_ranks import started

from agent.core.saved_states import Checkpoint
from agent.local_etcd.embedded import EmbeddedEtcd
from agent.rehearse.cluster import wait_for
from trainer_runtime import contract
from trainer_runtime.manifest import MANIFEST, STATE, final_name

DISK_BYTES = 1 << 20

LOOK = """
import sys, torch
step, weight = int(sys.argv[2]), float(sys.argv[3])
saved = torch.load(sys.argv[1], weights_only=True)
net = torch.nn.Linear(1, 1, bias=False, dtype=torch.float64)
net.load_state_dict(saved["objects"]["model"])
torch.optim.SGD(net.parameters(), lr=1.0, momentum=0.5).load_state_dict(saved["objects"]["optimizer"])
assert saved["position"]["step"] == step, saved["position"]
assert abs(net.weight.item() / weight - 1) < 1e-9, net.weight
assert len(saved["ranks"]) == 2
assert "trainer_runtime" not in sys.modules
"""


@pytest.fixture
def saving(etcd: EmbeddedEtcd, tmp_path: Path) -> Iterator[Saving]:
    options = *PATIENT, "--snapshot_overhead=0"  # else no checkpoint is read: memory has what is newer
    with Saving(tmp_path, etcd.endpoint, f"saving-{tmp_path.name}", options) as job:
        yield job


def truncate(place: Path) -> None:
    state = place / STATE
    state.write_bytes(state.read_bytes()[:-100])


def flip_a_bit(place: Path) -> None:
    state = place / STATE
    content = bytearray(state.read_bytes())
    content[len(content) // 2] ^= 1
    state.write_bytes(content)


def damage_manifest(place: Path) -> None:
    manifest = place / MANIFEST
    manifest.write_bytes(manifest.read_bytes().replace(b'"step"', b'"spet"'))


DAMAGES = (
    (truncate, "should have"),
    (flip_a_bit, "does not have the SHA-256 that its manifest lists"),
    (damage_manifest, "does not have the SHA-256 that the job's record lists"),
    (shutil.rmtree, "it has no manifest"),
)


@pytest.mark.long("checkpoint-flipped in containers; damaged-checkpoint.txt")
def test_a_damaged_checkpoint_is_passed_over_for_the_next_older_one(saving: Saving) -> None:
    """Each is said, and recorded; the training ends as ever, and its last checkpoint opens in plain torch."""
    for name in ("a", "b"):
        saving.join(name, "2")
    saving.wait_for_commit(15)
    for turn, (damage, said) in enumerate(DAMAGES):
        saving.hold("before commit")
        committed = saving.committed()
        assert committed is not None
        assert committed.kept
        damage(saving.checkpoints / committed.name)
        group = saving.newest_group()
        saving.kill_worker("ab"[turn % 2])
        older = final_name(committed.kept[-1])
        begun_at = saving.first_step(after_group=group)
        assert begun_at == int(older.split("-s")[-1]) + 1, saving.log_text()
        saving.wait_for_words(committed.name, "cannot be used", said)
        saving.wait_for_words(f"ROLLED BACK to {saving.checkpoints / older}; the damaged {committed.name} is left")
        saving.wait_for_commit(committed.copy.step + 5)
    saving.finish()
    saving.assert_result()
    last = saving.committed()
    assert last is not None
    assert last.copy.step == saving.count
    wanted = str(saving.count), repr(held_saves.expected(saving.count))
    look = [sys.executable, "-c", LOOK, str(saving.checkpoints / last.name / STATE), *wanted]
    subprocess.run(look, check=True, timeout=PATIENCE_S)


@pytest.mark.long("unit/test_runtime_fence.py, of one rank")
def test_a_writer_killed_before_the_commit_or_before_the_rename(saving: Saving) -> None:
    """Before: nothing counts but what was committed, and what was written stays. After: the next group renames it."""
    for name in ("a", "b"):
        saving.join(name, "2")
    saving.wait_for_commit(15)
    step = saving.hold("before commit")
    committed = saving.committed()
    assert committed is not None
    assert committed.copy.step < step
    group = saving.newest_group()
    (private,) = saving.checkpoints.glob(f".*-s{step:09d}.*")
    writer = next(n["node_id"] for n in saving.status()["nodes"] if n["ranks"] == [0])
    saving.kill_worker(writer)
    assert saving.first_step(after_group=group) == committed.copy.step + 1, saving.log_text()
    assert (private / MANIFEST).exists(), "nobody deletes what no record names"
    saving.wait_for_commit(step)
    step = saving.hold("before rename")
    committed = saving.committed()
    assert committed is not None
    assert committed.copy.step == step
    assert (saving.checkpoints / committed.private / MANIFEST).exists()
    assert not (saving.checkpoints / committed.name).exists()
    group = saving.newest_group()
    saving.kill_worker(writer)
    assert saving.first_step(after_group=group) == step + 1, saving.log_text()
    saving.wait_for_words(f"renamed the committed checkpoint {saving.checkpoints / committed.name} to its final name")
    saving.finish()
    saving.assert_result()
    assert {path for path in saving.checkpoints.iterdir() if path.name.startswith(".")} == {private}


@pytest.fixture
def small_disk(saving: Saving) -> Iterator[Path]:
    """A file system of its own for the checkpoints."""
    saving.checkpoints.mkdir(parents=True)
    mounting = ["mount", "-t", "tmpfs", "-o", f"size={DISK_BYTES}", "none", str(saving.checkpoints)]
    mounted = subprocess.run(mounting, capture_output=True, text=True, check=False)
    if mounted.returncode != 0:
        pytest.skip(f"no file system can be mounted here: {mounted.stderr.strip()}")
    yield saving.checkpoints
    # Lazily: a worker that is about to be killed may still have a file open.
    subprocess.run(["umount", "--lazy", str(saving.checkpoints)], check=True)


def fill(saving: Saving) -> bool:
    """Leave no room, whatever has been deleted since; for a condition to be waited for."""
    with (saving.checkpoints / "filler").open("ab", buffering=0) as file:
        try:
            while file.write(bytes(4096)):
                continue
        except OSError as error:
            return error.errno == errno.ENOSPC
    raise AssertionError


def make_room(saving: Saving) -> bool:
    (saving.checkpoints / "filler").unlink()
    return True


def remount(how: str, saving: Saving) -> bool:
    """Let it be read only, or not; False: somebody is writing just now."""
    remounting = ["mount", "-o", f"remount,{how}", str(saving.checkpoints)]
    return subprocess.run(remounting, capture_output=True, check=False).returncode == 0


def not_saved(saving: Saving, why: str) -> list[int]:
    """Steps that were said not to have been saved, for that reason."""
    start = "trainer_runtime: step "
    lines = [line[line.index(start) :] for line in saving.nodes["a"].text().splitlines() if start in line]
    wanted = f" was NOT saved in {saving.checkpoints}: "
    return [int(line.removeprefix(start).split()[0]) for line in lines if wanted in line and why in line]


def make_read_only(saving: Saving) -> bool:
    """Not within a save: what it has begun could not be removed; nor between a commit and its rename."""
    if not remount("ro", saving):
        return False
    if any(saving.checkpoints.glob(f".*-g{saving.newest_group():06d}-*")):
        wait_for(partial(remount, "rw", saving), PATIENCE_S, "a disk that can be written")
        for step in not_saved(saving, "Read-only file system"):
            for begun in saving.checkpoints.glob(f".*-s{step:09d}.*"):
                shutil.rmtree(begun)  # a save that was within a moment of it could not
        return False
    return True


FAILING_DISKS = (
    ("No space left on device", fill, make_room),
    ("Read-only file system", make_read_only, partial(remount, "rw")),
)


@pytest.mark.long("disk-full in containers")
def test_a_full_or_read_only_disk_stops_no_training(saving: Saving, small_disk: Path) -> None:
    """One line for each save that fails; the older checkpoint is kept, and resumed from; later saves work again."""
    saving.join("a", "1", "--nproc_per_node=2")
    saving.wait_for_commit(0)
    for why, fail, mend in FAILING_DISKS:
        until = partial(wait_for, within_s=PATIENCE_S, what=why)
        until(lambda why=why, fail=fail: fail(saving) and len(not_saved(saving, why)) > 1)
        kept = saving.committed()
        assert kept is not None
        assert not [path for step in not_saved(saving, why) for path in small_disk.glob(f".*-s{step:09d}.*")]
        group = saving.newest_group()
        saving.kill_worker("a")
        assert saving.first_step(after_group=group) == kept.copy.step + 1, saving.log_text()
        until(lambda why=why, fail=fail: fail(saving) and len(not_saved(saving, why)) > 3)
        steps = not_saved(saving, why)
        until(lambda mend=mend: mend(saving))
        saving.wait_for_commit(max(steps))
    saving.finish()
    saving.assert_result()


def join_on_own_disk(saving: Saving, name: str, np: str, *options: str) -> None:
    """Start a node whose directory of checkpoints nobody else sees."""
    saving.join(name, np, f"--checkpoint_dir={saving.directory / name}", *options)


@pytest.mark.long("own-disk.txt")
def test_what_only_one_nodes_disk_has_is_waited_for(saving: Saving) -> None:
    """Nobody else begins at step 0; with that node gone the job waits and says so, without any other it goes on."""
    join_on_own_disk(saving, "a", "1:2")
    join_on_own_disk(saving, "b", "1:2")
    group = saving.wait_for_step(1, world=2)
    owner = str(
        wait_for(lambda: (now := saving.committed()) and now.node, PATIENCE_S, f"a commit; {saving.log_text()}")
    )
    saving.wait_for_words(f"{saving.directory / owner} is not shared: 1 of 2 nodes do not see", of=owner)
    saving.nodes[owner].kill()

    def is_waited_for() -> Checkpoint | None:
        committed, status = saving.committed(), saving.status()
        assert committed is not None
        assert status["checkpoint_node"] == owner
        reason = f"waiting for {owner}: only its own disk has the checkpoint {committed.name}"
        return committed if status["reason"] == reason else None

    committed = wait_for(is_waited_for, PATIENCE_S, f"a wait for {owner}; {saving.log_text()}")
    join_on_own_disk(saving, "c", "1:2")
    wait_for(lambda: "c" in {n["node_id"] for n in saving.status()["nodes"]}, PATIENCE_S, f"c; {saving.log_text()}")
    assert is_waited_for()
    assert saving.newest_group() == group
    join_on_own_disk(saving, owner, "1:2")
    assert saving.first_step(after_group=group) == committed.copy.step + 1, saving.log_text()
    group = saving.wait_for_step(committed.copy.step + 1, after_group=group, world=2)
    ranks = {n["node_id"]: n["ranks"] for n in saving.status()["nodes"]}
    assert ranks[owner] == [0]
    before = saving.wait_for_commit(committed.copy.step)
    saving.nodes[next(name for name, its in ranks.items() if its == [1])].kill()
    assert saving.first_step(after_group=group) > before.copy.step, saving.log_text()
    saving.finish()
    saving.assert_result()


@pytest.mark.long("own-disk-and-memory.txt")
def test_a_job_that_continues_from_memory_without_the_node_of_the_checkpoints_saves_on_another_disk(
    saving: Saving,
) -> None:
    """The directory was never made there. Whoever comes later does not begin from what the lost one has."""
    for name in ("a", "b"):
        join_on_own_disk(saving, name, "1:2", "--snapshot_overhead=100")
    lost = str(wait_for(lambda: (now := saving.committed()) and now.node, PATIENCE_S, f"a commit; {saving.log_text()}"))
    left = "b" if lost == "a" else "a"
    saving.hold("before commit")  # what is in memory is newer
    group = saving.newest_group()
    saving.nodes[lost].kill()
    (saving.directory / "hold").unlink()
    committed = saving.wait_for_commit(saving.first_step(after_group=group))
    assert committed.node == left, saving.log_text()
    assert not [name for name in committed.kept if f"-g{group:06d}-" in name]
    saving.nodes[left].kill()
    group = saving.newest_group()
    join_on_own_disk(saving, lost, "1:2")
    saving.wait_for_words(f"waiting for {left}: only its own disk has the checkpoint", of=lost)
    committed = saving.committed()
    assert committed is not None
    join_on_own_disk(saving, left, "1:2")
    assert saving.first_step(after_group=group) == committed.copy.step + 1, saving.log_text()
    saving.finish()
    saving.assert_result()


@pytest.mark.long("unit/test_runtime_resume.py")
def test_an_older_runs_checkpoint_on_another_nodes_disk_is_no_reason_for_step_0(saving: Saving) -> None:
    """Etcd knows nothing of it, and the first node has none: the job begins where the other one can read it."""
    older = saving.directory / "b"
    alone = [sys.executable, held_saves.__file__, str(saving.directory), "15", "0"]
    subprocess.run(alone, check=True, timeout=PATIENCE_S, env=os.environ | {contract.CHECKPOINT_DIR: str(older)})
    saving.trace.unlink()
    join_on_own_disk(saving, "a", "2")
    wait_for(lambda: "waiting for 1 of 2 nodes" in saving.nodes["a"].text(), PATIENCE_S, "a is the older node")
    join_on_own_disk(saving, "b", "2")
    assert saving.first_step(after_group=0) == 16, saving.log_text()
    said = f"cannot read the checkpoint in {saving.directory / 'a'}: this node, where rank 0 is, has none"
    assert f"waiting for the checkpoint: a {said}" in saving.status()["cause"]
    saving.finish()
    saving.assert_result()


@pytest.mark.long("unreadable-everywhere.txt, unreadable-elsewhere.txt")
def test_a_directory_that_goes_away_is_waited_for_and_costs_nothing(saving: Saving) -> None:
    """No save makes another in its place; without it nobody takes a step, and the budget is for other things."""
    for name in ("a", "b"):
        saving.join(name, "2", "--max_restarts=1")
    saving.wait_for_commit(10)
    away = saving.checkpoints.rename(saving.directory / "away")
    wait_for(
        lambda: "No such file or directory" in saving.log_text(), PATIENCE_S, f"a failed save; {saving.log_text()}"
    )
    committed, group = saving.committed(), saving.newest_group()
    assert committed is not None
    saving.kill_worker("b")

    def has_tried_again() -> bool:
        status = saving.status()
        assert status["state"] == "training", status
        return (
            status["group"] >= group + 3
            and "waiting for the checkpoint: " in status["cause"]
            and f" cannot read the checkpoint in {saving.checkpoints}: " in status["cause"]
            and status["restarts"] == 1
        )

    wait_for(has_tried_again, PATIENCE_S, f"a few tries; {saving.log_text()}")
    assert saving.newest_group() == group, "nobody took a step"
    wait_for(lambda: is_renamed(away, saving.checkpoints), PATIENCE_S, "the directory is back")
    assert saving.first_step(after_group=group) == committed.copy.step + 1, saving.log_text()
    saving.finish()
    saving.assert_result()


def is_renamed(old: Path, new: Path) -> bool:
    """Rename a directory, unless there is something under that name for a moment."""
    with contextlib.suppress(OSError):
        old.rename(new)
    return not old.exists()


READ_SLOWLY = """
import mmap, time
from datetime import timedelta
import torch.distributed as dist
import trainer_runtime as tr
from trainer_runtime.node_memory import NodeMemory
from trainer_runtime.sharing import Shared, share_from_main

def read():
    time.sleep(15)
    return Shared(7, NodeMemory(mmap.mmap(-1, 3)))

tr.init()
dist.distributed_c10d._set_pg_timeout(timedelta(seconds=10))
number, data, _ = share_from_main(read)
print("received", number, len(data.data))
"""


@pytest.mark.long("no other test; it waits longer than a time-out of torch's")
def test_a_wait_for_the_checkpoint_may_be_longer_than_a_collective(tmp_path: Path) -> None:
    """The node whose disk has it may be away for hours; nobody fails for that."""
    with started(["-c", READ_SLOWLY], world=2, group=1, directory=tmp_path) as ranks:
        results = ranks.finish()
    assert [(code, output.splitlines()[-1:]) for code, output in results] == [(0, ["received 7 3"])] * 2, results
