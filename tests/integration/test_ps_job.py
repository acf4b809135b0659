"""Whole parameter-server jobs: an agent, servers and workers, some of which are killed during training."""

from __future__ import annotations

import os
import random
import re
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil
import pytest
from cases import some
from waiting import has_ended, wait_for

from agent.rehearse.cluster import LocalNode

PATIENCE_S = 120.0
COUNTING = Path(__file__).with_name("ps_counting.py")


class Running(LocalNode):
    """An agent with servers and workers."""

    log_dir: Path

    def of(self, role: str) -> dict[int, int]:
        """Return the process ids of a role, by index."""
        found = {}
        for process in self.descendants():
            with suppress(psutil.Error):
                env = process.environ()
                # A guardian has the agent's environment. Processes that a script has started are below the script.
                if env.get("TRAINING_ROLE") == role and process.parent() in self.guardians():
                    found[_index(env, role)] = process.pid
        return found

    def output_of(self, name: str) -> str:
        """Return all output of a process."""
        return "".join(path.read_text() for path in self.log_dir.glob(f"*/*/{name}"))


def _index(env: dict[str, str], role: str) -> int:
    if role == "TRAINER":
        return int(env["PADDLE_TRAINER_ID"])
    return env["PADDLE_PSERVERS_IP_PORT_LIST"].split(",").index(f"{env['POD_IP']}:{env['PADDLE_PORT']}")


@contextmanager
def running(directory: Path, *arguments: str | Path) -> Iterator[Running]:
    argv: Sequence[str | Path] = [
        *(sys.executable, "-m", "agent", f"--log_dir={directory}/log", f"--checkpoint_dir={directory}/rows"),
        *arguments,
    ]
    output = directory / "output"
    with output.open("wb") as file:
        node = Running("node", subprocess.Popen(argv, stdout=file, stderr=file, cwd=directory), output)
    node.log_dir = directory / "log"
    below = []
    try:
        yield node
        below = node.descendants()
    finally:
        node.process.send_signal(signal.SIGTERM)
        try:
            node.process.wait(PATIENCE_S)
        finally:
            node.process.kill()
    wait_for(lambda: all(has_ended(process.pid) for process in below), "the end of all processes")


def steps(node: Running, worker: int) -> int:
    return len(re.findall(r"^step ", node.output_of(f"workerlog.{worker}"), re.MULTILINE))


def wait_for_steps(node: Running, workers: int, more: int) -> None:
    before = [steps(node, worker) for worker in range(workers)]
    wait_for(
        lambda: all(steps(node, worker) >= before[worker] + more for worker in range(workers)),
        f"{more} steps more than {before}; {node.output.read_text()}",
        PATIENCE_S,
    )


def maps(node: Running) -> dict[int, tuple[int, bool]]:
    """Return for each shard the newest map that changed its place, and whether the shard has a replica in it."""
    lines = re.findall(r"has shard (\d+), and it is (on|nowhere).* \(map (\d+)\)", node.output_of("serverlog.*"))
    return {
        int(shard): (int(number), where == "on")
        for shard, where, number in sorted(lines, key=lambda line: int(line[2]))
    }


def wait_for_copies(node: Running, after_map: int) -> int:
    """Wait until all shards have a replica in a newer map; return its number."""

    def newest() -> int:
        return max((number for number, _ in maps(node).values()), default=0)

    wait_for(
        lambda: newest() > after_map and all(is_whole for _, is_whole in maps(node).values()),
        f"copies after map {after_map}; there is {maps(node)}; {node.output.read_text()}",
        PATIENCE_S,
    )
    return newest()


def counts(node: Running, worker: int) -> tuple[int, int]:
    """Return the counts of a worker and of the servers."""
    found = re.search(r"counted (\d+), servers have (\d+)", node.output_of(f"workerlog.{worker}"))
    assert found, node.output_of(f"workerlog.{worker}")[-2000:]
    return int(found[1]), int(found[2])


@pytest.mark.long
def test_twenty_servers_are_killed_and_each_push_counts_once(tmp_path: Path) -> None:
    """With replicas nothing is lost, and no worker is restarted."""
    chance = random.Random(1)
    enough = tmp_path / "enough"
    options = ("--server_num=3", "--worker_num=2", "--ps_replicas=1", "--max_restarts=100")
    with running(tmp_path, *options, COUNTING, enough) as node:
        wait_for_steps(node, 2, 5)
        workers = node.of("TRAINER")
        number = wait_for_copies(node, 0)
        for _ in range(20):
            os.kill(node.of("PSERVER")[chance.randrange(3)], signal.SIGKILL)
            wait_for_steps(node, 2, 5)
            number = wait_for_copies(node, number)
        assert node.of("TRAINER") == workers
        enough.touch()
        assert node.process.wait(PATIENCE_S) == 0, node.output.read_text()
        for worker in range(2):
            counted, there = counts(node, worker)
            assert counted == there, node.output.read_text()


@pytest.mark.long("unit/test_ps_persistence.py")
def test_without_replicas_a_killed_server_continues_with_its_rows_on_disk(tmp_path: Path) -> None:
    enough = tmp_path / "enough"
    with running(tmp_path, "--server_num=2", "--worker_num=2", COUNTING, enough) as node:
        wait_for_steps(node, 2, 5)
        wait_for(lambda: len(list((tmp_path / "rows").rglob("*.rows"))) >= 2, "rows on disk", PATIENCE_S)
        workers = node.of("TRAINER")
        os.kill(node.of("PSERVER")[0], signal.SIGKILL)
        wait_for_steps(node, 2, 5)
        assert node.of("TRAINER") == workers
        enough.touch()
        assert node.process.wait(PATIENCE_S) == 0, node.output.read_text()
        assert "what was pushed since is lost" in node.output_of("serverlog.0")
        for worker in range(2):
            counted, there = counts(node, worker)
            assert 0 < there <= counted


@pytest.mark.long("integration/test_ps_servers.py, integration/test_ps_standby.py")
@pytest.mark.parametrize("mode", some(["sync"], of=["async", "sync"]))
def test_a_killed_worker_is_started_again_and_the_others_go_on(tmp_path: Path, mode: str) -> None:
    enough = tmp_path / "enough"
    with running(tmp_path, "--server_num=2", "--worker_num=3", COUNTING, enough, mode) as node:
        wait_for_steps(node, 3, 5)
        servers, workers = node.of("PSERVER"), node.of("TRAINER")
        os.kill(workers[1], signal.SIGKILL)
        wait_for_steps(node, 3, 5)
        assert node.of("PSERVER") == servers
        assert {**node.of("TRAINER"), 1: 0} == {**workers, 1: 0}
        enough.touch()
        assert node.process.wait(PATIENCE_S) == 0, node.output.read_text()
