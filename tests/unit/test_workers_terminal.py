"""An unfinished line on a terminal is shown as it comes, and never mixed with another writer's line."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import select
import struct
import subprocess
import sys
import termios
from collections.abc import Iterator

import pytest

from agent.workers.output import Output
from agent.workers.terminal import Terminal, _cut

ERASE = b"\r\x1b[K"


@pytest.fixture
def screen() -> Iterator[tuple[int, int]]:
    """A pseudoterminal of 40 columns: output written to the second descriptor is read unchanged from the first."""
    master, slave = pty.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 40, 0, 0))
    settings = termios.tcgetattr(slave)
    settings[1] &= ~termios.OPOST
    termios.tcsetattr(slave, termios.TCSANOW, settings)
    yield master, slave
    os.close(master)
    os.close(slave)


def shown(written: bytes) -> list[str]:
    """Return the lines that a terminal has on its screen."""
    return [re.split(r"\r\x1b\[K|\r", line)[-1] for line in written.decode().split("\n")]


def take(master: int, wanted: bytes) -> None:
    """Read this output, which may come in pieces."""
    taken = b""
    while len(taken) < len(wanted) and select.select([master], [], [], 10.0)[0]:
        taken += os.read(master, 1000)
    assert taken == wanted


def other_writes(terminal: Terminal, slave: int, call: str) -> None:
    """Write from another process."""
    code = f"from agent.workers.terminal import Terminal; Terminal({terminal.memory_fd}).write({slave}, {call})"
    subprocess.run([sys.executable, "-c", code], pass_fds=(terminal.memory_fd, slave), check=True)


def test_lines_of_other_writers_go_above_a_progress_bar(screen: tuple[int, int]) -> None:
    master, slave = screen
    terminal = Terminal.create()
    terminal.write(slave, b"", b"bar 10%")
    other_writes(terminal, slave, "b'from another\\n'")
    take(master, b"bar 10%" + ERASE + b"from another\nbar 10%")
    terminal.write(slave, b"", b"bar 20%")
    take(master, ERASE + b"bar 20%")
    terminal.write(slave, b"bar 20%\nnext\n")
    take(master, b"\nnext\n")
    other_writes(terminal, slave, "b'alone\\n'")
    take(master, b"alone\n")


def test_the_unfinished_line_of_a_killed_writer_stays(screen: tuple[int, int]) -> None:
    master, slave = screen
    terminal = Terminal.create()
    other_writes(terminal, slave, "b'', b'half a li'")
    terminal.write(slave, b"ours\n")
    take(master, b"half a li\nours\n")


@pytest.mark.parametrize(
    ("line", "columns", "expected"),
    [
        (b"short", 40, b"short"),
        (b"x" * 50, 40, b"x" * 39),
        ("█".encode() * 50, 40, "█".encode() * 39),
        ("進".encode() * 50, 40, "進".encode() * 19),
        (b"\x1b[32m" + b"x" * 50, 10, b"\x1b[32mxxxx\x1b[0m"),
        (b"x" * 50, 0, b"x" * 50),
    ],
)
def test_a_progress_bar_takes_one_row(line: bytes, columns: int, expected: bytes) -> None:
    assert _cut(line, columns) == expected


def test_control_characters_of_a_worker_are_escaped_on_the_terminal_only(
    screen: tuple[int, int], tmp_path: os.PathLike[str]
) -> None:
    """They could move the cursor over lines of other ranks. Colours stay, and the log has what was written."""
    master, slave = screen
    path = os.path.join(tmp_path, "log")  # noqa: PTH118 - the guardian's own kind of path
    saved = os.dup(2)
    os.dup2(slave, 2)
    written = b"\x1b[32mgreen\x1b[0m\x1b[2A\n"
    nested = "inner bar ██\x1b[A".encode()
    try:
        output = Output(os.fsencode(path), b"[0] ", pytest.fail, lambda: None, (2,), {2: Terminal.create()})
        output.feed(2, written)
        take(master, b"[0] \x1b[32mgreen\x1b[0m\\x1b[2A\n")
        output.feed(2, nested)
        take(master, "[0] inner bar ██\\x1b[A".encode())
        output.end()
    finally:
        os.dup2(saved, 2)
        os.close(saved)
    with open(path, "rb") as log:  # noqa: PTH123 - as above
        assert log.read() == written + nested


def test_a_progress_bar_moves_on_the_terminal_and_is_complete_in_the_log(
    screen: tuple[int, int], tmp_path: os.PathLike[str]
) -> None:
    master, slave = screen
    path = os.path.join(tmp_path, "log")  # noqa: PTH118 - the guardian's own kind of path
    saved = os.dup(2)
    os.dup2(slave, 2)
    try:
        output = Output(os.fsencode(path), b"[0] ", pytest.fail, lambda: None, (2,), {2: Terminal.create()})
        written = b""
        for chunk, seen in [
            (b"\r 10%|#   |", "[0]  10%|#   |"),
            (b"\r 50%|##  |", "[0]  50%|##  |"),
            (b"\r100%|####|\n", ""),
            (b"(Pdb) ", "[0] (Pdb) "),
            (b"1\n(more) ", "[0] (more) "),
        ]:
            output.feed(2, chunk)
            while shown(written)[-1] != seen and select.select([master], [], [], 10.0)[0]:
                written += os.read(master, 1000)
            assert shown(written)[-1] == seen
        output.end()
    finally:
        os.dup2(saved, 2)
        os.close(saved)
    assert shown(written)[:2] == ["[0] 100%|####|", "[0] (Pdb) 1"]
    with open(path, "rb") as log:  # noqa: PTH123 - as above
        assert log.read().startswith(b"\r 10%|#   |\r 50%|##  |\r100%|####|\n")
