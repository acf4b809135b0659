"""Printing a log: its last lines, complete lines after a prefix, and the limits of what is printed."""

from __future__ import annotations

import asyncio
import io

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agent.links.log_reader import ReadDeclined
from agent.links.queries import FindLogs, LogsFound, ReadLog
from agent.operate import node_logs
from agent.operate.node_logs import LinePrinter, LogFile, tail_offset

START = ReadLog(run="0a", group=1, node_id="a", rank=0, offset=0)
TEXTS = st.lists(st.sampled_from([b"\n", b"a", b"bc"]), max_size=60).map(b"".join)


class Source:
    """A log that may grow, end, and fail."""

    def __init__(self, data: bytes, part_bytes: int = 7) -> None:
        self.data = data
        self.part_bytes = part_bytes
        self.is_leaving = False
        self.why_not = ""

    async def find(self, find: FindLogs) -> LogsFound:
        raise AssertionError(find)

    async def read(self, read: ReadLog) -> bytes:
        if self.why_not:
            raise ReadDeclined(self.why_not)
        return self.data[read.offset : read.offset + self.part_bytes]


@settings(deadline=None)
@given(data=TEXTS, lines=st.integers(0, 12))
def test_the_tail_offset_is_where_the_last_lines_begin(data: bytes, lines: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(node_logs, "LOG_CHUNK_BYTES", 7)
        offset = asyncio.run(tail_offset(Source(data), START, len(data), lines))
    whole = data.splitlines(keepends=True)
    assert data[offset:] == b"".join(whole[len(whole) - lines if lines < len(whole) else 0 :])


@settings(deadline=None)
@given(parts=st.lists(TEXTS, max_size=5))
def test_each_prefix_is_followed_by_a_complete_line(parts: list[bytes]) -> None:
    out = io.BytesIO()
    lines = LinePrinter(out, b"> ".__add__)
    for part in parts:
        lines.feed(part)
        assert out.getvalue().endswith(b"\n") or not out.getvalue()
    lines.end()
    lines.end()
    whole = b"".join(parts).removesuffix(b"\n")
    shown = whole.split(b"\n") if any(parts) else []
    assert out.getvalue() == b"".join(b"> " + line + b"\n" for line in shown)


def test_a_line_that_never_ends_is_printed_in_pieces() -> None:
    out = io.BytesIO()
    lines = LinePrinter(out, b"> ".__add__)
    for _ in range(10):
        lines.feed(b"x" * 32768)
    assert out.getvalue().count(b"> ") > 2
    assert len(lines._rest) <= 1 << 16


def test_a_log_is_copied_byte_by_byte_without_a_prefix() -> None:
    out = io.BytesIO()
    lines = LinePrinter(out, None)
    lines.feed(b"50%\r100%")
    lines.end()
    assert out.getvalue() == b"50%\r100%"


def test_printing_continues_where_it_ended() -> None:
    out, source = io.BytesIO(), Source(b"one\n")
    file = LogFile(source, msgspec.structs.replace(START, offset=1), LinePrinter(out, None))
    asyncio.run(file.show())
    source.data += b"two, and more than a part\n"
    asyncio.run(file.show())
    assert out.getvalue() == b"ne\ntwo, and more than a part\n"


def test_printing_stops_at_the_given_offset() -> None:
    out = io.BytesIO()
    file = LogFile(Source(b"0123456789", part_bytes=4), START, LinePrinter(out, None))
    asyncio.run(file.show(until=6))
    assert out.getvalue() == b"012345"


def test_an_unreadable_log_is_truncated_unless_it_was_complete() -> None:
    source = Source(b"all of it")
    file = LogFile(source, START, LinePrinter(io.BytesIO(), None))
    asyncio.run(file.show())
    source.why_not = "gone"
    asyncio.run(file.show())
    assert (file.error, file.is_truncated) == ("gone", True)
    source.why_not, source.is_leaving = "", True
    asyncio.run(file.show())
    source.why_not = "gone"
    asyncio.run(file.show())
    assert (file.error, file.is_truncated) == ("gone", False)
