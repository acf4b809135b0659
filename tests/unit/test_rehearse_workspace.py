"""The working directory of a rehearsed script."""

from __future__ import annotations

from pathlib import Path

import pytest

from agent.rehearse import workspace
from agent.rehearse.job import newest_checkpoint_in
from agent.rehearse.workspace import make_workspace


def test_files_that_a_script_writes_stay_in_the_workspace(tmp_path: Path) -> None:
    """New files, overwritten files, and files in existing directories."""
    here, there = tmp_path / "here", tmp_path / "there"
    (here / "out").mkdir(parents=True)
    (here / "model.pt").write_text("the user's")
    (here / "out" / "log.txt").write_text("the user's")
    make_workspace(here, there)
    assert (there / "out" / "log.txt").read_text() == "the user's"
    for path in ("model.pt", "out/log.txt", "out/new.txt"):
        (there / path).write_text("the rehearsal's")
    assert (here / "model.pt").read_text() == "the user's"
    assert sorted(path.name for path in (here / "out").iterdir()) == ["log.txt"]


def test_checkpoints_of_earlier_runs_are_left_out(tmp_path: Path) -> None:
    here = tmp_path / "here"
    for name in ("checkpoints", "log", ".git", "data"):
        (here / name).mkdir(parents=True)
    make_workspace(here, tmp_path / "there")
    assert [path.name for path in (tmp_path / "there").iterdir()] == ["data"]


def test_large_files_and_directories_are_links(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workspace, "_MAX_COPIED_BYTES", 3)
    monkeypatch.setattr(workspace, "_MAX_ENTRIES", 2)
    here, there = tmp_path / "here", tmp_path / "there"
    (here / "images").mkdir(parents=True)
    for number in range(3):
        (here / "images" / f"{number}.png").write_text("x")
    (here / "large.bin").write_text("four")
    make_workspace(here, there)
    assert (there / "large.bin").is_symlink()
    assert (there / "images").is_symlink()
    assert (there / "images" / "1.png").read_text() == "x"


def test_a_workspace_inside_its_source_does_not_contain_itself(tmp_path: Path) -> None:
    (tmp_path / "tmp").mkdir()
    make_workspace(tmp_path, tmp_path / "tmp" / "there")
    assert (tmp_path / "tmp" / "there" / "tmp").is_symlink()


def test_the_newest_checkpoint_may_be_one_that_closes_an_epoch(tmp_path: Path) -> None:
    """Private directories, and those without a manifest, do not count."""
    assert newest_checkpoint_in(tmp_path) is None
    for name in ("r-g000001-s000000005", "r-g000001-s000000010-1", ".r-g000001-s000000015.0123abcd"):
        (tmp_path / "checkpoints" / name).mkdir(parents=True)
        (tmp_path / "checkpoints" / name / "manifest.json").touch()
    (tmp_path / "checkpoints" / "r-g000001-s000000020").mkdir()
    assert newest_checkpoint_in(tmp_path) == 10
