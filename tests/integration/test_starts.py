"""Many starts of the same job: every node comes to the same ranks, however it is seeded; and what differs is told."""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from pathlib import Path

import pytest
from integration.conftest import PATIENCE_S, PATIENT, Job, open_store

from agent.local_etcd.embedded import EmbeddedEtcd
from agent.rehearse.cluster import LocalCluster
from agent.store.keys import JobKeys, view_of

STARTS = 50
NODES = ("d", "b", "a", "c")


@pytest.mark.timeout(1200)
@pytest.mark.long
def test_fifty_starts_of_four_agents_agree_on_every_rank(etcd: EmbeddedEtcd, tmp_path: Path) -> None:
    """PYTHONHASHSEED is another for each agent; the group record's order is the one that all of them use."""
    chance = random.Random(50)
    store = open_store(etcd.endpoint)
    script = tmp_path / "ranks.py"
    script.write_text("import os; print(os.environ['RANK'], os.environ['WORLD_SIZE'], os.environ['MASTER_PORT'])\n")
    for start in range(STARTS):
        directory = tmp_path / str(start)
        directory.mkdir()
        keys = JobKeys(f"starts-{os.getpid()}-{start}")
        with LocalCluster(directory, etcd.endpoint, keys.job_id, [*PATIENT, "--console_ranks=all"]) as cluster:
            for name in NODES:
                cluster.environ["PYTHONHASHSEED"] = str(chance.randrange(1, 2**32))
                cluster.start(name, "4", [str(script)])
            assert [node.wait(PATIENCE_S) for node in cluster.nodes.values()] == [0] * 4
            group = view_of(store.read(keys.whole()), keys, is_whole=True).group
            assert group is not None
            assert (group.value.number, sorted(m.node_id for m in group.value.members)) == (1, sorted(NODES))
            port = group.value.members[0].port
            for rank, member in enumerate(group.value.members):
                assert f"[rank{rank}]: {rank} 4 {port}" in cluster.nodes[member.node_id].text()
    store.close()


def test_nodes_with_different_software_are_reported(job: Callable[..., Job]) -> None:
    """By whichever of them leads; they train all the same."""
    running = job()
    for name in "ab":
        script = running.directory / name / "train.py"
        script.parent.mkdir()
        script.write_text(f"import time; time.sleep(1.0)  # as {name} has it")
        running.start(name, "2", [str(script)])
    running.finish()
    assert running.log_text().count("runs other software: its script, or a module that it imports") == 1
