"""Where checkpoints go, and what a mistyped command gets."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from agent.cli import agent_config
from agent.cli.agent_config import _command_meant, _place_of
from agent.errors import ConfigError

PYTHON = (sys.executable, "train.py")


def test_a_directory_is_named_and_not_looked_for(tmp_path: Path) -> None:
    assert _place_of(str(tmp_path / "new"), PYTHON) == str(tmp_path / "new")
    assert _place_of("new/job", PYTHON) == str(Path("new/job").absolute())
    assert not _place_of(None, PYTHON)


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
