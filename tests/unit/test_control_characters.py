"""A worker's text may set colours on a terminal, and nothing else."""

from __future__ import annotations

import io
import os
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agent.operate.log_sources import LogLibrary
from agent.operate.node_logs import GroupNode, LogSelection, NodeLogs
from agent.workers.rank_logs import LogArchive
from agent.workers.terminal import escape_control_bytes, escape_controls


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        (b"plain\ttext\r\n", b"plain\ttext\r\n"),
        ("naïve 日本 …".encode(), "naïve 日本 …".encode()),
        (b"\x1b[1;31mred\x1b[0m \x1b[38:5:9mx\x1b[m", b"\x1b[1;31mred\x1b[0m \x1b[38:5:9mx\x1b[m"),
        (b"\x1b]0;title\x07", rb"\x1b]0;title\x07"),
        (b"\x1b[2J\x1b[1A\x1bc", rb"\x1b[2J\x1b[1A\x1bc"),
        (b"\x1b[31;\x1b[5n", rb"\x1b[31;\x1b[5n"),
        (b"\xc2\x9b5n", rb"\x9b5n"),
        (b"\x9b5n \xff", rb"\x9b5n \xff"),
        (b"a\bb\x7f\0", rb"a\x08b\x7f\x00"),
    ],
)
def test_control_characters_are_escaped_and_colours_stay(text: bytes, shown: bytes) -> None:
    assert escape_control_bytes(text) == shown


@settings(deadline=None)
@given(st.text())
def test_harmless_text_is_unchanged(text: str) -> None:
    assert escape_controls(escape_controls(text)) == escape_controls(text)


@pytest.mark.parametrize("rank", [None, 0])
@pytest.mark.parametrize("is_terminal", [False, True])
def test_logs_are_escaped_on_a_terminal_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rank: int | None, *, is_terminal: bool
) -> None:
    """Elsewhere, as in a pipe or a file, the bytes are those that the rank wrote."""
    out = io.TextIOWrapper(io.BytesIO())
    monkeypatch.setattr(out, "isatty", lambda: is_terminal, raising=False)
    monkeypatch.setattr(sys, "stdout", out)
    wanted = LogSelection(rank=rank, group=1, lines=None, is_followed=False, log_dir=tmp_path, as_json=False)
    library = LogLibrary("r", "s", LogArchive(tmp_path, "job"))
    render = NodeLogs(library, GroupNode(1, "a", (0,)), wanted, None)._render(0)
    line = os.fsencode("\x1b]0;title\x07")
    shown = render(line) if render else line
    assert shown.endswith(rb"\x1b]0;title\x07" if is_terminal else line)
