"""What TensorBoard and MLflow show of a training that has made steps again: one point a step, with the same values."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from integration.tracked_job import EVERY
from waiting import wait_for

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from integration.conftest import Job

SCRIPT = Path(__file__).with_name("tracked_job.py")
STEPS = 60
BOUND_S = 120.0

Points = dict[str, list[tuple[int, float]]]


def trace(directory: Path) -> list[dict[str, Any]]:
    """Return the steps that rank 0 has committed, in their order."""
    path = directory / "trace.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def await_step(directory: Path, *, group: int, step: int) -> None:
    wait_for(
        lambda: any(line["group"] == group and line["step"] >= step for line in trace(directory)),
        f"step {step} in group {group}",
        BOUND_S,
    )


def train(directory: Path, tracker: str, *, killed: Sequence[int] = ()) -> None:
    """Train to the end; kill one of the ranks in `killed` at step 27, the next one at step 47."""
    directory.mkdir()
    # From memory hardly a step would be made again.
    options = ["--standalone", "--nproc_per_node=2", f"--checkpoint_dir={directory}/saved", "--snapshot_overhead=0"]
    command = [sys.executable, "-m", "agent", *options, str(SCRIPT), str(directory), str(STEPS), "0.1", tracker]
    with (directory / "log.txt").open("w") as log:
        agent = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, cwd=directory)
        try:
            for number, rank in enumerate(killed, 1):
                await_step(directory, group=number, step=20 * number + 7)
                os.kill(int((directory / f"pid.{rank}").read_text()), signal.SIGKILL)
            if killed:
                await_step(directory, group=len(killed) + 1, step=0)
            (directory / "hurry").touch()
            assert agent.wait(BOUND_S) == 0, (directory / "log.txt").read_text()
        finally:
            agent.kill()
            agent.wait()


def assert_same_points(disturbed: Points, undisturbed: Points) -> None:
    steps = list(range(EVERY, STEPS + 1, EVERY))
    assert [step for step, _ in undisturbed["loss"]] == steps
    assert disturbed["loss"] == undisturbed["loss"]
    groups = disturbed["elastic_agent/group"]
    assert [step for step, _ in groups] == steps
    assert {group for _, group in groups} == {1.0, 2.0, 3.0}


def made_again(directory: Path) -> int:
    steps = [line["step"] for line in trace(directory)]
    return len(steps) - len(set(steps))


def tensorboard_points(directory: Path) -> Points:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator  # noqa: PLC0415 - may be absent

    events = EventAccumulator(str(directory / "board"), size_guidance={"scalars": 0})
    events.Reload()
    return {name: [(each.step, each.value) for each in events.Scalars(name)] for name in events.Tags()["scalars"]}


def mlflow_points(directory: Path) -> Points:
    from mlflow import MlflowClient  # noqa: PLC0415 - may be absent

    client = MlflowClient()
    experiment = client.get_experiment_by_name(directory.name)
    assert experiment is not None
    (run,) = client.search_runs([experiment.experiment_id])
    return {
        name: [(each.step, each.value) for each in client.get_metric_history(run.info.run_id, name)]
        for name in run.data.metrics
    }


@pytest.mark.filterwarnings("ignore")  # of the packages' own
@pytest.mark.parametrize("tracker", ["tensorboard", "mlflow"])
def test_a_step_that_was_made_again_has_one_point(
    tmp_path: Path, tracker: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip(tracker)
    if tracker == "mlflow":
        pytest.importorskip("sqlalchemy")
        monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path}/mlflow.db")
        sys.modules["mlflow"].MlflowClient().search_experiments()  # makes the tables, which takes long
    found = []
    for name, killed in (("undisturbed", ()), ("disturbed", (1, 0))):
        train(tmp_path / name, tracker, killed=killed)
        found.append({"tensorboard": tensorboard_points, "mlflow": mlflow_points}[tracker](tmp_path / name))
    assert made_again(tmp_path / "disturbed") >= 2 * EVERY
    assert_same_points(found[1], found[0])


@pytest.mark.filterwarnings("ignore")
def test_a_process_that_moves_between_groups_logs_each_step_once(job: Callable[..., Job]) -> None:
    """The other rank is killed, then rank 0 leaves, and the process that was rank 1 continues the log."""
    pytest.importorskip("tensorboard")
    points: list[list[tuple[int, float]]] = []
    for is_disturbed in (False, True):
        cluster = job("--snapshot_overhead=0")
        directory = cluster.directory
        command = [str(SCRIPT), str(directory), str(STEPS), "0.1", "tensorboard"]
        for name in "ab":
            cluster.start(name, "2", command, [])
        if is_disturbed:
            await_step(directory, group=1, step=1)
            cluster.start("c", "2", command, [])
            await_step(directory, group=1, step=27)
            wait_for(lambda: len(cluster.status()["nodes"]) == 3, "c is a spare", BOUND_S)  # noqa: B023 - now
            first = (directory / "pid.0").read_text()
            os.kill(int((directory / "pid.1").read_text()), signal.SIGKILL)
            await_step(directory, group=2, step=31)
            assert (directory / "pid.0").read_text() == first
            second = (directory / "pid.1").read_text()
            leaving = next(node["node_id"] for node in cluster.status()["nodes"] if 0 in node["ranks"])
            cluster.nodes[leaving].terminate()
            await_step(directory, group=3, step=0)
            assert (directory / "pid.0").read_text() == second
        cluster.finish()
        points.append(tensorboard_points(directory)["loss"])
    assert [step for step, _ in points[0]] == list(range(EVERY, STEPS + 1, EVERY))
    assert points[1] == points[0]
