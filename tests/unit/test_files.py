"""Directories where others may write: nothing there is waited for, and nothing of theirs is touched."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from agent.doctor.facts import Facts
from agent.files import open_regular
from agent.local_etcd.etcd_program import ScratchDir
from agent.workers.output import _Log


@pytest.fixture
def temporary(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The directory for temporary files. Its name is short: a socket in it must have room for its own."""
    with tempfile.TemporaryDirectory(dir="/tmp") as directory:
        monkeypatch.setattr("tempfile.tempdir", directory)
        yield Path(directory)


def forsaken(place: Path) -> Path:
    """What a killed agent left behind."""
    place.mkdir()
    (place / "in-use").touch()
    return place


def test_only_a_regular_file_is_opened(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "file").touch()
    (tmp_path / "link").symlink_to("file")
    for path in (tmp_path / "fifo", tmp_path, Path("/dev/zero")):
        with pytest.raises(OSError, match="not a regular file"):
            open_regular(path)
    os.close(open_regular(tmp_path / "link"))
    with pytest.raises(OSError, match="symbolic links"):
        open_regular(tmp_path / "link", os.O_RDONLY | os.O_NOFOLLOW)


def test_what_a_killed_agent_left_behind_is_removed(temporary: Path) -> None:
    left = forsaken(temporary / "elastic-agent-etcd-old")
    kept = ScratchDir()
    assert not left.exists()
    ScratchDir().remove()
    assert kept.path.exists(), "it is in use"
    kept.remove()


def test_what_others_put_under_such_names_is_neither_waited_for_nor_removed(temporary: Path) -> None:
    os.mkfifo(temporary / "elastic-agent-etcd-a")
    (temporary / "elastic-agent-etcd-b").mkdir()
    os.mkfifo(temporary / "elastic-agent-etcd-b" / "in-use")
    (temporary / "elastic-agent-etcd-c").symlink_to(forsaken(temporary / "elsewhere"))
    (temporary / "elastic-agent-etcd-d").mkdir()
    (temporary / "elastic-agent-etcd-d" / "in-use").symlink_to(temporary / "elsewhere" / "in-use")
    before = {*temporary.rglob("*")}
    ScratchDir().remove()
    assert {*temporary.rglob("*")} == before


def test_another_users_directory_is_left_alone(temporary: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also by root, although root could remove it."""
    left = forsaken(temporary / "elastic-agent-etcd-old")
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    ScratchDir().remove()
    assert left.exists()


def test_a_fifo_beside_the_script_is_not_waited_for(tmp_path: Path) -> None:
    (tmp_path / "train.py").touch()
    os.mkfifo(tmp_path / "model.py")
    assert [*Facts.here(tmp_path / "train.py").files] == ["train.py"]


@pytest.mark.parametrize("make", [os.mkfifo, lambda path: path.symlink_to("elsewhere")], ids=["fifo", "link"])
def test_a_foreign_file_in_the_place_of_a_log_is_reported_and_not_written_to(
    tmp_path: Path, make: Callable[[Path], object]
) -> None:
    make(tmp_path / "log")
    warnings: list[str] = []
    _Log(os.fsencode(tmp_path / "log"), warnings.append).write(b"x")
    (warning,) = warnings
    assert warning.startswith(f"cannot write all of the log {tmp_path / 'log'}: ")
    assert not (tmp_path / "elsewhere").exists()


def test_nobody_reads_a_log_by_a_fifo_in_its_place(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "log")
    reader = os.open(tmp_path / "log", os.O_RDONLY | os.O_NONBLOCK)
    warnings: list[str] = []
    _Log(os.fsencode(tmp_path / "log"), warnings.append).write(b"x")
    assert os.read(reader, 1) == b""
    os.close(reader)
    assert warnings
