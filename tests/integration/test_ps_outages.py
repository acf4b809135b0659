"""A parameter-server job whose etcd is unavailable or comes back empty, and training continues."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from cases import some
from integration.conftest import PATIENCE_S, Coordinator
from integration.test_ps_job import COUNTING, counts, running, wait_for_copies, wait_for_steps
from integration.test_ps_operate import wait_until_it_runs

AWAY_S = 8.0
"""Longer than a lease."""


def frozen(coordinator: Coordinator, train_on: Callable[[], None]) -> None:
    coordinator.freeze()
    train_on()
    coordinator.thaw()


def restarted(coordinator: Coordinator, train_on: Callable[[], None]) -> None:
    coordinator.kill()
    train_on()
    coordinator.restart()


def emptied(coordinator: Coordinator, train_on: Callable[[], None]) -> None:
    coordinator.kill()
    train_on()
    coordinator.restart(empty=True)


@pytest.mark.long("simulation/test_role_jobs.py")
@pytest.mark.parametrize("outage", some([emptied], of=[frozen, restarted, emptied]))
def test_an_etcd_outage_has_no_effect_and_a_lost_server_is_replaced_afterwards(
    tmp_path: Path, coordinator: Coordinator, outage: Callable[[Coordinator, Callable[[], None]], None]
) -> None:
    enough = tmp_path / "enough"
    job = (f"--elastic_server={coordinator.endpoint}", "--job_id=outage")
    with running(tmp_path, *job, "--server_num=2", "--worker_num=2", "--ps_replicas=1", COUNTING, enough) as node:
        number = wait_for_copies(node, 0)
        wait_for_steps(node, 2, 5)
        before = node.of("PSERVER"), node.of("TRAINER")

        def train_on() -> None:
            until = time.monotonic() + AWAY_S
            while time.monotonic() < until:
                wait_for_steps(node, 2, 1)

        outage(coordinator, train_on)
        wait_until_it_runs(job, node)
        wait_for_steps(node, 2, 5)
        assert (node.of("PSERVER"), node.of("TRAINER")) == before
        os.kill(before[0][0], signal.SIGKILL)
        wait_for_copies(node, number)
        wait_for_steps(node, 2, 5)
        assert node.of("TRAINER") == before[1]
        enough.touch()
        assert node.process.wait(PATIENCE_S) == 0, node.output.read_text()
        for worker in range(2):
            counted, there = counts(node, worker)
            assert counted == there, node.output.read_text()
