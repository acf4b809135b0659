"""The working directory of a rehearsed script."""

from __future__ import annotations

from pathlib import Path

import pytest

from agent.rehearse import workspace
from agent.rehearse.stage import newest_checkpoint_in
from agent.rehearse.workspace import mirror


def test_what_a_script_writes_stays_in_the_mirror(tmp_path: Path) -> None:
    """In new files, in files that it replaces or writes over, and in directories that are there already."""
    here, there = tmp_path / "here", tmp_path / "there"
    (here / "out").mkdir(parents=True)
    (here / "model.pt").write_text("the user's")
    (here / "out" / "log.txt").write_text("the user's")
    mirror(here, there)
    assert (there / "out" / "log.txt").read_text() == "the user's"
    for path in ("model.pt", "out/log.txt", "out/new.txt"):
        (there / path).write_text("the rehearsal's")
    assert (here / "model.pt").read_text() == "the user's"
    assert sorted(path.name for path in (here / "out").iterdir()) == ["log.txt"]


def test_checkpoints_of_the_job_itself_are_not_seen(tmp_path: Path) -> None:
    here = tmp_path / "here"
    for name in ("checkpoints", "log", ".git", "data"):
        (here / name).mkdir(parents=True)
    mirror(here, tmp_path / "there")
    assert [path.name for path in (tmp_path / "there").iterdir()] == ["data"]


def test_large_things_are_links(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Large files, and directories of many files."""
    monkeypatch.setattr(workspace, "_COPIED_BYTES", 3)
    monkeypatch.setattr(workspace, "_MOST_HERE", 2)
    here, there = tmp_path / "here", tmp_path / "there"
    (here / "images").mkdir(parents=True)
    for number in range(3):
        (here / "images" / f"{number}.png").write_text("x")
    (here / "large.bin").write_text("four")
    mirror(here, there)
    assert (there / "large.bin").is_symlink()
    assert (there / "images").is_symlink()
    assert (there / "images" / "1.png").read_text() == "x"


def test_a_mirror_inside_what_it_shows_has_an_end(tmp_path: Path) -> None:
    (tmp_path / "tmp").mkdir()
    mirror(tmp_path, tmp_path / "tmp" / "there")
    assert (tmp_path / "tmp" / "there" / "tmp").is_symlink()


def test_the_newest_checkpoint_may_be_one_that_closes_an_epoch(tmp_path: Path) -> None:
    """Private ones, and those without a manifest, are none yet."""
    assert newest_checkpoint_in(tmp_path) is None
    for name in ("r-g000001-s000000005", "r-g000001-s000000010-1", ".r-g000001-s000000015.0123abcd"):
        (tmp_path / "checkpoints" / name).mkdir(parents=True)
        (tmp_path / "checkpoints" / name / "manifest.json").touch()
    (tmp_path / "checkpoints" / "r-g000001-s000000020").mkdir()
    assert newest_checkpoint_in(tmp_path) == 10
