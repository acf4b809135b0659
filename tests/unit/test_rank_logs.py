"""Which files under a log directory are the job's logs, and how they are read."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from agent.links.queries import FindLogs, LogEntry, ReadLog
from agent.workers.rank_logs import LogArchive, error_path, group_dir, log_path

FIND = FindLogs(run="0a", group=3, node_id="b")


def _read(rank: int, offset: int = 0) -> ReadLog:
    return ReadLog(run="0a", group=3, node_id="b", rank=rank, offset=offset)


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """The directory of the group's logs."""
    directory = group_dir(tmp_path, "job", "0a", 3)
    directory.mkdir(parents=True)
    return directory


@pytest.fixture
def archive(tmp_path: Path) -> LogArchive:
    return LogArchive(tmp_path, "job")


def test_only_the_nodes_own_logs_are_found_by_rank(archive: LogArchive, directory: Path) -> None:
    for node_id, rank in (("b", 10), ("b", 2), ("b", 123456), ("a", 2), ("b.b", 2), ("a.b", 1)):
        log_path(directory, node_id, rank).write_text("x" * rank if rank < 100 else "")
    error_path(log_path(directory, "b", 2)).touch()
    for name in ("rank-2.b.log", "rank-00003.b.log~", "rank-.b.log", "notes"):
        (directory / name).touch()
    found = archive.find(FIND)
    assert found.logs == (
        LogEntry(rank=2, size_bytes=2),
        LogEntry(rank=10, size_bytes=10),
        LogEntry(rank=123456, size_bytes=0),
    )
    assert found.directory == str(directory)


def test_a_group_without_logs_is_reported_with_its_directory(archive: LogArchive, tmp_path: Path) -> None:
    found = archive.find(FIND)
    assert (found.logs, found.directory) == ((), str(tmp_path / "job" / "0a" / "group-000003"))


def test_a_log_is_read_in_parts_to_its_end(archive: LogArchive, directory: Path) -> None:
    log_path(directory, "b", 1).write_bytes(b"0123456789")
    assert archive.read(_read(1), 4) == b"0123"
    assert archive.read(_read(1, 8), 4) == b"89"
    assert archive.read(_read(1, 10), 4) == b""
    assert archive.read(_read(1, 2**62), 4) == b""


def test_a_link_or_fifo_in_place_of_a_log_is_not_followed(archive: LogArchive, directory: Path, tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("secret")
    log_path(directory, "b", 1).symlink_to(tmp_path / "secret")
    os.mkfifo(log_path(directory, "b", 2))
    log_path(directory, "b", 3).mkdir()
    for rank in (1, 2, 3, 4):
        with pytest.raises(OSError, match=r"symbolic links|regular|directory|No such"):
            archive.read(_read(rank), 4)
