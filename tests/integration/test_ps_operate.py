"""The operator's commands on a job with parameter servers, and the errors of agents that do not fit the job."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from integration.conftest import PATIENCE_S
from integration.test_ps_job import Running, running
from waiting import wait_for

from agent.local_etcd.embedded import EmbeddedEtcd

# A server serves, and a worker trains, until it is stopped.
TRAIN = "import signal\nsignal.pause()\n"


@pytest.fixture
def here(etcd: EmbeddedEtcd, tmp_path: Path) -> Callable[..., tuple[str, ...]]:
    """Return the options that select the job."""
    (tmp_path / "train.py").write_text(TRAIN)
    return lambda: (f"--elastic_server={etcd.endpoint}", f"--job_id={tmp_path.name.replace('_', '-')}")


def ask(*words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "agent", *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S, check=False)


def status(job: tuple[str, ...]) -> dict[str, Any]:
    done = ask("status", *job, "--json")
    return json.loads(done.stdout) if done.returncode == 0 else {"processes": []}


def wait_until_it_runs(job: tuple[str, ...], node: Running) -> None:
    def runs() -> bool:
        processes = status(job)["processes"]
        return bool(processes) and all(process["state"] == "running" for process in processes)

    wait_for(runs, f"all processes; {node.output.read_text()}", PATIENCE_S)


def test_a_job_is_shown_stopped_and_reset(tmp_path: Path, here: Callable[..., tuple[str, ...]]) -> None:
    job = here()
    line = (*job, "--server_num=2", "--worker_num=1", "--ps_replicas=1", "train.py")
    with running(tmp_path, *line) as node:
        wait_until_it_runs(job, node)
        shown = status(job)
        assert shown["state"] == "training"
        assert [process["name"] for process in shown["processes"]] == ["server-0", "server-1", "worker-0"]
        assert [process["shards"] for process in shown["processes"]] == [[0], [1], []]
        output = ask("status", *job).stdout
        assert "training: all are there" in output
        assert shown["processes"][0]["endpoint"] in output
        refused = ask("scale", *job, "--np=2")
        assert refused.returncode == 2
        assert "has parameter servers: only status, stop and reset support such jobs" in refused.stderr
        assert ask("reset", *job, "--yes").returncode == 2, "the job is running"
        stopped = ask("stop", *job, "--yes", "--wait=60")
        assert stopped.returncode == 0, stopped.stderr
        assert node.process.wait(PATIENCE_S) == 0, node.output.read_text()
    assert status(job)["state"] == "succeeded"
    with running(tmp_path, *line) as node:
        assert node.process.wait(PATIENCE_S) == 0
        assert "has ended before: stopped by" in node.output.read_text()
    assert ask("reset", *job, "--yes").returncode == 0
    with running(tmp_path, *line) as node:
        wait_until_it_runs(job, node)


@pytest.mark.long("no other test")
def test_a_job_has_ranks_or_servers(tmp_path: Path, here: Callable[..., tuple[str, ...]]) -> None:
    job = here()
    with running(tmp_path, *job, "--server_num=1", "--worker_num=1", "train.py") as node:
        wait_until_it_runs(job, node)
        script = str(tmp_path / "train.py")
        refused = ask(*job, script)
        assert refused.returncode == 2
        assert "is one with parameter servers: give another --job_id" in refused.stderr
        other = ask(*job, "--server_num=2", "--worker_num=1", script)
        assert other.returncode == 2
        assert "has other processes" in other.stderr
