"""The processes of a node: which are its ranks, and that they end with the process that started the node."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from agent.rehearse.cluster import _is_rank

STARTING = """
import sys, time
from pathlib import Path
from agent.rehearse.cluster import LocalCluster
cluster = LocalCluster(Path(sys.argv[1]), "127.0.0.1:1", "job")
print(cluster.start("a", "1", ["train.py"]).process.pid, flush=True)
time.sleep(600)  # until the test kills it
"""

BUSY = """
import os
print(flush=True)
while True:
    files = [os.open(os.devnull, os.O_RDONLY) for _ in range(9)]
    for file in files:
        os.close(file)
"""


@pytest.fixture
def order() -> Iterator[int]:
    fd = os.memfd_create("elastic-agent:order")
    yield fd
    os.close(fd)


@pytest.mark.parametrize("is_handed_down", [True, False])
def test_a_standby_that_opens_files_is_no_rank(*, order: int, is_handed_down: bool) -> None:
    """Nor is one that ends, and closes one file after another."""
    numbers = [order] if is_handed_down else []
    with subprocess.Popen([sys.executable, "-c", BUSY], stdout=subprocess.PIPE, pass_fds=numbers) as process:
        assert process.stdout
        process.stdout.readline()
        seen = [_is_rank(psutil.Process(process.pid)) for _ in range(2000)]
        process.kill()
        while not (status := os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)):
            if is_handed_down:
                seen.append(_is_rank(psutil.Process(process.pid)))
        assert set(seen) == {not is_handed_down}
        assert status.si_status
        assert not _is_rank(psutil.Process(process.pid))


def test_a_node_ends_with_the_process_that_started_it(tmp_path: Path) -> None:
    """Also if that is killed, and cannot end the node itself."""
    with subprocess.Popen([sys.executable, "-c", STARTING, str(tmp_path)], stdout=subprocess.PIPE) as process:
        assert process.stdout
        node = psutil.Process(int(process.stdout.readline()))
        process.kill()
        node.wait(30.0)
