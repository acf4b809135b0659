"""Nodes that see one checkpoint directory through mounts that cache names and attributes, as NFS does.

Each node has a mount of its own by FUSE, for which the kernel remembers names, their attributes, and names that were
not there. So for some time what one node writes, renames or deletes is not seen by another one that has looked before.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from integration.conftest import PATIENCE_S, PATIENT
from integration.saving_job import Saving

from agent.core.saved_states import Checkpoint
from agent.local_etcd.embedded import EmbeddedEtcd
from agent.rehearse.cluster import wait_for

CACHED_S = 20
CACHING = f"attr_timeout={CACHED_S},entry_timeout={CACHED_S},negative_timeout={CACHED_S}"
_SHOWN_BY = "test_a_checkpoint_that_a_mount_does_not_show_yet_is_waited_for"


def mount(directory: Path, at: Path) -> None:
    """Mount a directory a second time, with caches. Skips the test where that is impossible."""
    if shutil.which("bindfs") is None:
        pytest.skip("bindfs is not installed")
    at.mkdir()
    mounted = subprocess.run(["bindfs", "-o", CACHING, directory, at], capture_output=True, text=True, check=False)
    if mounted.returncode != 0 or not os.path.ismount(at):
        pytest.skip(f"FUSE cannot mount here: {mounted.stderr.strip()}")


@pytest.fixture
def mounts(tmp_path: Path) -> Iterator[dict[str, Path]]:
    """The mount of each node."""
    real = tmp_path / "real"
    real.mkdir()
    made = {name: tmp_path / f"mount-{name}" for name in "ab"}
    try:
        for at in made.values():
            mount(real, at)
        yield made
    finally:
        for at in made.values():  # lazily: a worker that is about to be killed may still have a file open
            if os.path.ismount(at):
                subprocess.run(["umount", "--lazy", at], check=True)


@pytest.fixture
def saving(etcd: EmbeddedEtcd, tmp_path: Path) -> Iterator[Saving]:
    options = *PATIENT, "--snapshot_overhead=0"  # else no checkpoint is read: memory has what is newer
    with Saving(tmp_path, etcd.endpoint, f"saving-{tmp_path.name}", options) as job:
        yield job


@pytest.mark.long(_SHOWN_BY)
def test_nodes_that_take_turns_go_on_from_the_checkpoint_that_the_other_one_committed(
    saving: Saving, mounts: dict[str, Path]
) -> None:
    """Each in its turn is killed, and comes back; the other one has written and deleted checkpoints meanwhile."""

    def join(name: str) -> None:
        saving.join(name, "1:2", f"--checkpoint_dir={mounts[name]}/checkpoints")

    def committed() -> Checkpoint:
        found = saving.committed()
        assert found is not None
        return found

    for name in mounts:
        join(name)
    saving.wait_for_step(1, world=2)
    for lost in "abab":
        saving.wait_for_commit(committed().copy.step + 20 if saving.committed() else 20)
        group = saving.newest_group()
        saving.nodes[lost].kill()
        begun_at = saving.first_step(after_group=group)
        assert begun_at <= committed().copy.step + 1
        resumed = committed().copy.step
        saving.wait_for_commit(resumed + 20)
        group = saving.newest_group()
        join(lost)
        saving.wait_for_step(1, after_group=group, world=2)
    saving.finish()
    saving.assert_result()
    assert "is not shared" not in saving.log_text()
    assert "ROLLED BACK" not in saving.log_text()


@pytest.mark.long(_SHOWN_BY)
def test_a_checkpoint_whose_writer_is_killed_before_the_rename_is_renamed_through_the_other_mount(
    saving: Saving, mounts: dict[str, Path]
) -> None:
    for name, at in mounts.items():
        saving.join(name, "1:2", f"--checkpoint_dir={at}/checkpoints")
    saving.wait_for_step(1, world=2)
    saving.wait_for_commit(15)
    step = saving.hold("before rename")
    group = saving.newest_group()
    writer = next(node["node_id"] for node in saving.status()["nodes"] if node["ranks"] == [0])
    (saving.directory / "hold").unlink(missing_ok=True)
    saving.nodes[writer].kill()
    assert saving.first_step(after_group=group) == step + 1, saving.log_text()
    saving.finish()
    saving.assert_result()


def test_a_checkpoint_that_a_mount_does_not_show_yet_is_waited_for(saving: Saving, mounts: dict[str, Path]) -> None:
    """The other node has looked for its final name just before the writer gave it that name, and was then lost."""
    saving.count = 400
    for name, at in mounts.items():
        saving.join(name, "1:2", f"--checkpoint_dir={at}/checkpoints")
    saving.wait_for_step(1, world=2)
    saving.wait_for_commit(15)
    step = saving.hold("before rename")
    committed = saving.committed()
    assert committed is not None
    group = saving.newest_group()
    writer = next(node["node_id"] for node in saving.status()["nodes"] if node["ranks"] == [0])
    other = next(name for name in mounts if name != writer)
    assert not (mounts[other] / "checkpoints" / committed.name).exists()
    (saving.directory / "hold").write_text("before commit")
    wait_for((mounts[writer] / "checkpoints" / committed.name).exists, PATIENCE_S, "the rename")
    assert not (mounts[other] / "checkpoints" / committed.name).exists(), "else this shows nothing"
    (saving.directory / "hold").unlink()
    saving.nodes[writer].kill()
    begun_at = saving.first_step(after_group=group)
    assert "this node sees its name, but cannot open it yet" in saving.log_text()
    assert "ROLLED BACK" not in saving.log_text()
    assert begun_at >= step + 1, "the next one may have been committed just before the writer was lost"
    saving.finish()
    saving.assert_result()
