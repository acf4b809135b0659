"""The console of real agents when it is read, not read, or closed."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

DEADLINE_S = 60

CONSOLE = """
import os, queue, sys
from pathlib import Path
from typing import Any
from agent.workers.worker_group import WorkerGroup
from agent.workers.launch_plan import Launch, RankCommand
events = queue.Queue()
workers = WorkerGroup(events.put)
script, tmp = sys.argv[1], Path(sys.argv[2])
workers.start(Launch(1, tuple(
    RankCommand(rank, rank, ("/bin/sh", "-c", script), os.environ, tmp, tmp / f"{rank}.log", f"[rank{rank}]: ")
    for rank in range(2)
)))
codes = [events.get().exit_code for _ in range(2)]
events.get()
workers.close()
sys.exit(max(codes))
"""


def console_agent(script: str, tmp: Path, stdout: int) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-c", CONSOLE, script, str(tmp)], stdout=stdout, stderr=subprocess.STDOUT)


def test_the_console_shows_whole_lines_with_their_rank(tmp_path: Path) -> None:
    agent = console_agent("seq 1 20000; printf unfinished", tmp_path, subprocess.PIPE)
    output, _ = agent.communicate(timeout=DEADLINE_S)
    lines = output.decode().splitlines()
    for rank in range(2):
        own = [line.removeprefix(f"[rank{rank}]: ") for line in lines if line.startswith(f"[rank{rank}]: ")]
        assert own == [*map(str, range(1, 20_001)), "unfinished"]
    assert len(lines) == 2 * 20_001


def test_a_console_that_is_not_read_blocks_nothing(tmp_path: Path) -> None:
    agent = console_agent("seq 1 200000", tmp_path, subprocess.PIPE)
    assert agent.wait(DEADLINE_S) == 0
    assert (tmp_path / "1.log").read_text().endswith("\n200000\n")
    assert agent.stdout
    agent.stdout.close()


def test_a_closed_console_blocks_nothing(tmp_path: Path) -> None:
    read, write = os.pipe()
    os.close(read)
    agent = console_agent("seq 1 200000", tmp_path, write)
    os.close(write)
    assert agent.wait(DEADLINE_S) == 0
    assert (tmp_path / "1.log").read_text().endswith("\n200000\n")
