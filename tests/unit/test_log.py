"""The agent's log on standard error: its format, and that no state of the descriptor ends or blocks the agent."""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress

import pytest
from structlog.testing import capture_logs
from waiting import wait_for

from agent.observe.log import InternalErrors
from agent.observe.stderr import LineWriter

SPEAKER = """
from agent.observe.log import configure, log
from agent.workers import output
output._FLUSH_S = 60.0  # on a busy machine
configure("node-a")
log.info("training", ranks=2)
log.warning("bad name \\udcff", reason="two words")
try:
    raise ValueError("why")
except ValueError:
    log.exception("internal error")
"""


@pytest.fixture
def pipe() -> Iterator[tuple[int, int]]:
    ends = os.pipe()
    yield ends
    for end in ends:
        with suppress(OSError):  # the test has closed it
            os.close(end)


def wait_until(is_so: Callable[[], bool]) -> None:
    wait_for(is_so, "the condition", every_s=0.002)


def test_an_agent_imports_no_heavy_module_that_it_does_not_use() -> None:
    """Each would take a good part of the half second in which an agent should start."""
    heavy = "sorted({'torch', 'rich', 'etcd3', 'numpy'}.intersection(sys.modules))"
    check = f"import sys, agent.cli.command_line, agent.cli.start; sys.exit(' '.join({heavy}) or 0)"
    subprocess.run([sys.executable, "-c", check], timeout=60, check=True)


def test_a_line_has_time_node_level_and_fields() -> None:
    """All lines are written although the process ends right after the last one."""
    done = subprocess.run([sys.executable, "-c", SPEAKER], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == ""
    lines = [line.partition(" ")[2] for line in done.stderr.splitlines()[:3]]
    assert lines == [
        "elastic-agent[node-a] training ranks=2",
        r"elastic-agent[node-a] warning: bad name \udcff reason='two words'",
        "elastic-agent[node-a] error: internal error",
    ]
    assert done.stderr.endswith("ValueError: why\n")


def test_a_pipe_without_a_reader_loses_lines_only(pipe: tuple[int, int]) -> None:
    """The writer's thread continues, and writes again when it can."""
    read, write = pipe
    os.close(read)
    writer = LineWriter(write)
    writer.write("lost")
    wait_until(lambda: writer._sink._is_idle)
    assert writer._missing_lines == 1
    other_read, other_write = os.pipe()
    os.dup2(other_write, write)
    os.close(other_write)
    writer.write("kept")
    writer.flush()
    assert os.read(other_read, 100) == b"elastic-agent: 1 lines not shown\nkept\n"
    os.close(other_read)


def test_a_full_disk_loses_lines_only() -> None:
    full = os.open("/dev/full", os.O_WRONLY)
    writer = LineWriter(full)
    for _ in range(3):
        writer.write("one\ntwo")
        wait_until(lambda: writer._sink._is_idle)
    with open(os.devnull, "wb") as elsewhere:  # noqa: PTH123 - for its descriptor
        os.dup2(elsewhere.fileno(), full)
    assert writer._missing_lines == 6
    writer.write("three")
    wait_until(lambda: writer._sink._is_idle)
    assert writer._missing_lines == 0
    os.close(full)


def test_a_pipe_that_nobody_reads_blocks_nothing(pipe: tuple[int, int]) -> None:
    """The queue is bounded, dropped lines are counted, and flushing ends in bounded time."""
    read, write = pipe
    fcntl.fcntl(write, fcntl.F_SETPIPE_SZ, 4096)
    writer = LineWriter(write)
    line = "x" * 9_999
    began_at = time.monotonic()
    for _ in range(1000):
        writer.write(line)
    writer.flush()
    assert time.monotonic() - began_at < 60.0
    assert writer._sink._backlog_bytes < 5 << 20
    dropped = writer._missing_lines
    assert dropped > 400
    with os.fdopen(os.dup(read), "rb") as reader:
        for _ in range(1000 - dropped):
            assert reader.readline() == f"{line}\n".encode()
        wait_until(lambda: not writer._sink.is_full)
        writer.write("last")
        assert reader.readline() == b"elastic-agent: %d lines not shown\n" % dropped
        assert reader.readline() == b"last\n"


def test_a_repeated_error_is_logged_once() -> None:
    mishaps = InternalErrors("the mirror")
    with capture_logs() as said:
        for error in (ValueError("a"), ValueError("a"), ValueError("b"), ValueError("a")):
            mishaps.report(error)
    assert [str(each["exc_info"]) for each in said] == ["a", "b", "a"]
    assert {each["where"] for each in said} == {"the mirror"}
