"""Where checkpoints go is checked as the agent starts, not by the first save."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from agent.cli import agent_config
from agent.cli.agent_config import _command_meant, _place_of
from agent.errors import ConfigError

PYTHON = (sys.executable, "train.py")


def test_a_directory_need_not_exist_if_it_can_be_made(tmp_path: Path) -> None:
    for name in (".", "new", "new/job/deeper"):
        assert _place_of(str(tmp_path / name), PYTHON) == str((tmp_path / name).absolute())
    assert _place_of(None, PYTHON) == ""


def test_what_cannot_be_a_directory_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    for name in ("file", "file/job", "link", "link/job"):
        there = tmp_path / Path(name).parts[0]
        with pytest.raises(ConfigError, match=f"cannot be a directory, because {there} is none: name another one"):
            _place_of(str(tmp_path / name), PYTHON)


def test_a_directory_that_cannot_be_made_is_refused_and_one_that_is_read_only_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may be writable again by the first save."""
    monkeypatch.setattr(os, "access", lambda _path, _mode: False)  # root may write everywhere
    with pytest.raises(ConfigError, match=f"{tmp_path}/new is not there and cannot be made in {tmp_path}: make it"):
        _place_of(str(tmp_path / "new"), PYTHON)
    assert _place_of(str(tmp_path), PYTHON) == str(tmp_path)


def test_an_object_store_without_its_package_is_refused_unless_another_python_runs_the_ranks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(agent_config, "find_spec", lambda name: None if name in {"s3fs", "gcsfs"} else object())
    for url, package in (("s3://bucket/job", "s3fs"), ("gs://bucket/job", "gcsfs")):
        with pytest.raises(ConfigError, match=rf"{url} needs the package {package}, which is not installed: pip inst"):
            _place_of(url, PYTHON)
        assert _place_of(url, ("/usr/bin/other-python", "train.py")) == url
    assert _place_of("memory://job", PYTHON) == "memory://job"
    assert _place_of("file:///tmp/job", PYTHON) == "file:///tmp/job"


@pytest.mark.parametrize(("word", "command"), [("statsu", "status"), ("Status", "status"), ("historry", "history")])
def test_a_mistyped_command_is_no_script_and_is_suggested(word: str, command: str) -> None:
    assert _command_meant(word) == f"; the command is called {command}"
    assert not _command_meant("train.py")
