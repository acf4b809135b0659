"""A killed server or worker is replaced by its standby, a process of the same command with all imports done."""

from __future__ import annotations

import json
import os
import queue
import signal
import sys
from contextlib import closing
from pathlib import Path

import pytest
from integration.ps_cluster import PATIENCE_S
from waiting import has_ended, wait_for

from agent.config import WorkerConfig
from agent.roles.events import ProcessExited, ReplicaReported
from agent.roles.plan import RolePlan, RoleProcess
from agent.workers import standbys
from agent.workers.role_environment import RoleFacts
from agent.workers.role_processes import RoleProcesses
from trainer_runtime import contract

SHOWS = f"""
import json, os, time
names = ("TRAINING_ROLE", "PADDLE_PORT", "PADDLE_TRAINER_ID", "{contract.PS_INCARNATION}")
print(json.dumps([os.getpid(), *(os.environ.get(name) for name in names)]), flush=True)
time.sleep(1000)
"""
SERVER, WORKER = RoleProcess("server", 0, "127.0.0.1", 7001), RoleProcess("worker", 1, "127.0.0.1", 7003)
PLAN = RolePlan((SERVER, RoleProcess("worker", 0, "127.0.0.1", 7002), WORKER))

Told = queue.Queue[ProcessExited | ReplicaReported]


@pytest.fixture
def told() -> Told:
    return queue.Queue()


@pytest.fixture
def workers(tmp_path: Path, told: Told, monkeypatch: pytest.MonkeyPatch) -> RoleProcesses:
    monkeypatch.setattr(standbys, "DEFAULT_MODULES", ("decimal",))
    script = tmp_path / "train.py"
    script.write_text(SHOWS)
    config = WorkerConfig((sys.executable, str(script)), tmp_path / "log", tmp_path / "rows", 3, standby="torch")
    facts = RoleFacts(PLAN, "job", "run", "node", "secret", tmp_path / "rows", fresh=False, gpus=())
    return RoleProcesses(told.put, config, os.environ, facts, 5.0)


def shown(workers: RoleProcesses, post: RoleProcess, number: int) -> list[object]:
    """Return process id and variables of the process that was started there, by its number in order."""
    path = workers.log_path(post)
    wait_for(lambda: path.exists() and path.read_text().count("\n") >= number, f"process {number} of {post.name}")
    found: list[object] = json.loads(path.read_text().splitlines()[number - 1])
    return found


def warm(workers: RoleProcesses, post: RoleProcess) -> int:
    """Return the process id of a post's standby, once it is warm."""
    slot = workers._workers[post]._standbys._slots[0]

    def pid() -> int | None:
        standby = slot.standby
        return standby.watcher.process.worker_pid if standby and standby.warm else None

    wait_for(pid, f"a warm standby of {post.name}", PATIENCE_S)
    return pid() or 0


@pytest.mark.parametrize(
    ("post", "variables"),
    [(SERVER, ["PSERVER", "7001", None]), (WORKER, ["TRAINER", "7003", "1"])],
    ids=["server", "worker"],
)
def test_a_killed_process_is_replaced_by_its_standby(
    workers: RoleProcesses, told: Told, post: RoleProcess, variables: list[str | None]
) -> None:
    """Repeatedly; each process gets its own role, and no process is left over."""
    with closing(workers):
        workers.start(post, 1)
        pid, *first = shown(workers, post, 1)
        assert first == [*variables, "1"]
        pids = []
        for incarnation in (2, 3):
            pids.append(warm(workers, post))
            os.kill(int(str(pid)), signal.SIGKILL)
            gone = told.get(timeout=PATIENCE_S)
            assert isinstance(gone, ProcessExited)
            assert (gone.process, gone.reason) == (post, "was killed by SIGKILL")
            workers.start(post, incarnation)
            pid, *then = shown(workers, post, incarnation)
            assert then == [*variables, str(incarnation)]
            assert pid == pids[-1], "the warm standby"
        pids.append(warm(workers, post))
    assert all(has_ended(each) for each in pids)
