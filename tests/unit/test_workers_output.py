"""How a rank's output is shown: whole lines, long lines in pieces, the last state of a progress bar."""

from __future__ import annotations

import os
import select
import threading
from pathlib import Path

import pytest

from agent.workers.output import Output, _Console, _Log, _visible, _whole_characters


class Sink:
    """Writes data at once."""

    def __init__(self) -> None:
        self.is_full = False
        self.writes: list[bytes] = []

    def put(self, _write: object, data: bytes) -> None:
        self.writes.append(data)


@pytest.fixture
def sink() -> Sink:
    return Sink()


@pytest.fixture
def console(sink: Sink, monkeypatch: pytest.MonkeyPatch) -> _Console:
    monkeypatch.setattr(os, "isatty", lambda _fd: False)
    return _Console(1, b"[0] ", sink)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("line", "shown"),
    [(b"", b""), (b"plain", b"plain"), (b"dos\r", b"dos"), (b"1%\r2%\r3%", b"3%"), (b"1%\r2%\r", b"2%"), (b"\r", b"")],
)
def test_a_terminal_shows_the_last_state_of_a_line(line: bytes, shown: bytes) -> None:
    assert _visible(line) == shown


@pytest.mark.parametrize(
    ("chunks", "shown"),
    [
        ([b"a\nb\n"], b"[0] a\n[0] b\n"),
        ([b"a", b"b", b"\n"], b"[0] ab\n"),
        ([b"\n\n"], b"[0] \n[0] \n"),
        ([b"1%\r", b"2%\r", b"3%", b"\nx\n"], b"[0] 3%\n[0] x\n"),
        ([b"no end"], b"[0] no end\n"),
        ([b"[0] marked by torch\n[1] not\n"], b"[0] marked by torch\n[0] [1] not\n"),
        ([b"\xff\xfe\n"], b"[0] \xff\xfe\n"),
    ],
)
def test_lines_are_shown_whole(console: _Console, sink: Sink, chunks: list[bytes], shown: bytes) -> None:
    for chunk in chunks:
        console.feed(chunk)
    console.end()
    assert b"".join(sink.writes) == shown


@pytest.mark.parametrize(
    ("text", "missing"),
    [
        ("a█".encode(), 0),
        ("a█".encode()[:-1], 2),
        ("a█".encode()[:-2], 1),
        (b"plain", 0),
        (b"\x80\x80\x80\x80", 0),
        (b"", 0),
    ],
)
def test_a_character_of_which_bytes_are_missing_is_not_shown_yet(text: bytes, missing: int) -> None:
    assert _whole_characters(text) == text[: len(text) - missing]


def test_a_log_and_the_directories_that_are_made_for_it_are_for_the_user_alone(tmp_path: Path) -> None:
    """Whatever the umask is. Existing directories stay as they are."""
    (tmp_path / "log").mkdir(0o755)
    before = os.umask(0)
    try:
        log = _Log(os.fsencode(tmp_path / "log" / "job" / "run" / "rank.log"), pytest.fail)
        log.write(b"\x1b[2J\n")
    finally:
        os.umask(before)
    modes = {path.name: path.stat().st_mode & 0o777 for path in (tmp_path / "log").rglob("*")}
    assert modes == {"job": 0o700, "run": 0o700, "rank.log": 0o600}
    assert (tmp_path / "log").stat().st_mode & 0o777 == 0o755
    assert (tmp_path / "log" / "job" / "run" / "rank.log").read_bytes() == b"\x1b[2J\n", "files keep the bytes"
    os.close(log._fd)


def test_a_log_directory_that_is_a_dangling_link_is_reported_in_a_line(tmp_path: Path) -> None:
    (tmp_path / "log").symlink_to(tmp_path / "gone")
    told: list[str] = []
    _Log(os.fsencode(tmp_path / "log" / "job" / "run" / "rank.log"), told.append).write(b"a line\n")
    assert len(told) == 1
    assert "No such file or directory" in told[0]


@pytest.mark.parametrize("text", [b"x" * 100_000, b"x" * 100_000 + b"\n", b"word\n" * 20_000])
def test_no_write_is_larger_than_a_pipe_takes_at_once(console: _Console, sink: Sink, text: bytes) -> None:
    for start in range(0, len(text), 1000):
        console.feed(text[start : start + 1000])
    console.end()
    assert max(map(len, sink.writes)) <= select.PIPE_BUF
    assert all(write.startswith(b"[0] ") and write.endswith(b"\n") for write in sink.writes)
    assert b"".join(sink.writes).replace(b"[0] ", b"").replace(b"\n", b"") == text.replace(b"\n", b"")


def test_lines_that_a_blocked_console_could_not_take_are_counted(console: _Console, sink: Sink) -> None:
    sink.is_full = True
    console.feed(b"1\n2\n3\n")
    sink.is_full = False
    console.feed(b"4\n")
    assert sink.writes == [b"[0] (3 lines are only in the log: the console was blocked)\n[0] 4\n"]


def test_a_log_that_cannot_keep_up_holds_the_worker_back_until_there_is_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    is_back, opened = threading.Event(), _Log._open

    def open_late(log: _Log) -> None:  # as on an unreachable file server
        is_back.wait()
        opened(log)

    monkeypatch.setattr(_Log, "_open", open_late)
    room = []
    output = Output(os.fsencode(tmp_path / "log"), None, pytest.fail, lambda: room.append(True))
    for _ in range(5):
        output.feed(1, b"x" * (1 << 20))
    assert output.is_full
    is_back.set()
    output.end()
    assert (tmp_path / "log").stat().st_size == 5 << 20
    assert not output.is_full
    assert room


def test_the_last_lines_of_both_streams_come_in_their_order(tmp_path: Path) -> None:
    output = Output(os.fsencode(tmp_path / "log"), None, warn=lambda _: None, on_drained=lambda: None)
    for stream, said in ((1, b"reading\n"), (2, b"UserWarning: old\n"), (1, b"no such dataset: x\n")):
        output.feed(stream, said)
    assert output.tail == "UserWarning: old\n"
    assert output.tail_of_both_streams == "reading\nUserWarning: old\nno such dataset: x\n"
    output.end()
