"""A job whose checkpoints are in an object store, which is away for a while; then all nodes are lost at once."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from integration.conftest import PATIENCE_S, Job
from integration.test_snapshots_job import assert_identical, committed
from object_stores import BUCKET, ObjectStore, object_store

from agent.rehearse.cluster import read_trace, wait_for

SHARDED = Path(__file__).with_name("sharded_job.py")
STEPS = 120
SAVE_EVERY = 10
"""Of that job."""

Make = Callable[..., Job]


@pytest.fixture
def server() -> Iterator[ObjectStore]:
    with object_store() as running:
        yield running


def saved(job: Job) -> int:
    """The step of the committed checkpoint."""
    found = committed(job)
    return found.copy.step if found is not None else 0


def test_a_sharded_job_trains_without_its_store_and_goes_on_from_it(job: Make, server: ObjectStore) -> None:
    undisturbed, running = job(), job(f"--checkpoint_dir=s3://{BUCKET}/jobs/sharded")
    running.environ |= server.environment

    def start(job: Job, step_time_s: str) -> None:
        for name in ("a", "b"):
            job.start(name, "2", [str(SHARDED), str(job.directory), str(STEPS), step_time_s])

    start(running, "0.2")
    wait_for(lambda: saved(running) >= SAVE_EVERY, PATIENCE_S, f"a checkpoint; {running.log_text()}")
    server.go_away()
    running.wait_for_step(read_trace(running.trace)[-1].step + 2 * SAVE_EVERY)
    server.come_back()
    away = read_trace(running.trace)[-1].step
    wait_for(lambda: saved(running) > away, PATIENCE_S, f"another checkpoint; {running.log_text()}")
    assert "was NOT saved" in running.log_text()
    for node in list(running.nodes.values()):
        node.kill()
    last = saved(running)
    start(running, "0")
    start(undisturbed, "0")
    running.finish()
    undisturbed.finish()
    text = running.log_text()
    assert f"resumed at step {last} from s3://{BUCKET}/jobs/sharded" in text
    assert "Traceback" not in text
    assert_identical(running.weights, undisturbed.weights)
    assert not (running.directory / "checkpoints").exists(), "nothing is on a disk"
    assert saved(running) == STEPS
