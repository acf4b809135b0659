"""Which checkpoint is resumed from, what counts as damage, what is written and deleted."""

from __future__ import annotations

import errno
import hashlib
import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from trainer_runtime import checkpoint
from trainer_runtime.checkpoint import CheckpointError, find, first_free_group
from trainer_runtime.manifest import (
    MANIFEST,
    Manifest,
    StoredFile,
    decode,
    encode,
    parse_stem,
    private_name,
    require_private_name,
    stem_of,
)
from trainer_runtime.resume import StartingPoint, start_alone
from trainer_runtime.writer import Content, Writer


def make(directory: Path, run: str, group: int, step: int, saved_at: float = 0.0) -> str:
    """Put an undamaged checkpoint there; return its stem."""
    stem, data = stem_of(run, group, step), f"{run}-{group}-{step}".encode()
    (directory / stem).mkdir()
    (directory / stem / "state.pt").write_bytes(data)
    manifest = Manifest(
        run=run,
        group=group,
        step=step,
        private=private_name(stem),
        files=(StoredFile("state.pt", len(data), hashlib.sha256(data).hexdigest()),),
        world_size=2,
        saved_at=saved_at,
        metrics={},
        previous=(),
    )
    (directory / stem / "manifest.json").write_bytes(encode(manifest))
    return stem


def write(writer: Writer, step: int, **options: Any) -> Manifest:  # noqa: ANN401 - passed on
    writer.write(Content({"w": torch.ones(3)}), step=step, world_size=2, metrics={}, **options)
    assert writer.finish()
    stem = stem_of("us", writer._group, step)
    return decode((writer._directory / stem / MANIFEST).read_bytes(), stem)


def new_writer(directory: Path, group: int = 1, keep: int = 2, start: StartingPoint | None = None) -> Writer:
    return Writer(directory, "us", group, keep=keep, start=start or StartingPoint())


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


@pytest.mark.parametrize(
    ("there", "fresh", "chosen"),
    [
        ([], False, None),
        ([("us", 1, 10, 0)], False, "us-1-10"),
        ([("us", 1, 10, 0), ("us", 1, 20, 0)], False, "us-1-20"),
        ([("us", 1, 30, 9), ("us", 2, 20, 0)], False, "us-2-20"),  # the higher group, whatever the clocks say
        ([("us", 1, 10, 0), ("old", 9, 90, 9)], False, "us-1-10"),  # our own run first
        ([("old", 9, 90, 1), ("older", 1, 5, 2)], False, "older-1-5"),  # of others the newest
        ([("old", 1, 30, 9), ("old", 2, 40, 8), ("older", 1, 50, 7)], False, "old-2-40"),  # its clocks may differ, too
        ([("old", 9, 90, 1), ("old", 9, 95, 1)], False, "old-9-95"),
        ([("old", 9, 90, 1)], True, None),
        ([("old", 9, 90, 1), ("us", 1, 10, 0)], True, "us-1-10"),
        ([("us-g000009", 9, 90, 1)], True, None),  # a run whose name looks like ours is not ours
    ],
)
def test_choice(tmp_path: Path, there: list[tuple[str, int, int, float]], fresh: bool, chosen: str | None) -> None:  # noqa: FBT001
    for run, group, step, saved_at in there:
        make(tmp_path, run, group, step, float(saved_at))
    found = find(tmp_path, "us", fresh=fresh)
    assert (found and bytes(found.data.data).decode()) == chosen


def test_a_directory_that_is_not_there_holds_nothing(tmp_path: Path) -> None:
    assert find(tmp_path / "none", "us", fresh=False) is None


def test_files_of_others_are_no_manifests(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "us-g000001-s000000001").mkdir()
    (tmp_path / "us-g000001-s000000001" / "state.pt").write_bytes(b"without a manifest it does not exist")
    (tmp_path / "us-g000001-s000000002").write_bytes(b"not even a directory")
    make(tmp_path, "us", 1, 3)
    (tmp_path / "us-g000001-s000000003").rename(tmp_path / private_name("us-g000001-s000000003"))
    assert find(tmp_path, "us", fresh=False) is None


def damage_data(path: Path) -> None:
    raw = bytearray(path.with_name("state.pt").read_bytes())
    raw[0] ^= 1
    path.with_name("state.pt").write_bytes(raw)


def damage_field(path: Path, **fields: object) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


def nested(depth: int) -> list[Any]:
    """Lists in lists."""
    return [nested(depth - 1)] if depth else []


def replace_by_fifo(path: Path) -> None:
    """Reading it would wait for somebody who writes."""
    path.unlink()
    os.mkfifo(path)


def listed(file: str) -> dict[str, object]:
    return {"file": file, "bytes": 1, "sha256": ""}


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (damage_data, "does not have the SHA-256"),
        (lambda path: path.with_name("state.pt").write_bytes(b""), "should have 7 bytes, has 0"),
        (lambda path: path.with_name("state.pt").unlink(), "is missing"),
        (lambda path: path.write_bytes(b'{"v": 1, "ru'), "it is not JSON"),
        (lambda path: path.write_bytes(b"\xff\xfe\x00"), "it is not JSON"),
        (lambda path: path.write_bytes(b"[" * 1_000_000), "its JSON is nested too deeply"),
        (lambda path: damage_field(path, run=nested(300)), "its field 'run' should be a str, got [[["),
        (replace_by_fifo, "manifest.json is not a regular file"),
        (lambda path: replace_by_fifo(path.with_name("state.pt")), "state.pt is not a regular file"),
        (lambda path: damage_field(path, files=[listed("state.pt"), listed("extra/\0")]), "which is not inside"),
        (lambda path: path.write_bytes(b"[]"), "wanted a manifest of version 2, got []"),
        (lambda path: damage_field(path, v=3), "wanted a manifest of version 2"),
        (lambda path: damage_field(path, step="20"), "its field 'step' should be a int, got '20'"),
        (lambda path: damage_field(path, files=[3]), "its field 'file' should be a str, got None"),
        (lambda path: damage_field(path, files=[]), "does not list state.pt first"),
        (lambda path: damage_field(path, files=[listed("../secret")]), "does not list state.pt first"),
        (lambda path: damage_field(path, files=[listed("state.pt"), listed("extra/../x")]), "which is not inside"),
        (lambda path: damage_field(path, step=21), "is about us-g000001-s000000021"),
        (lambda path: damage_field(path, private=".us-g000001-s000000019.00000000"), "not about us-g000001-s000000020"),
        (lambda path: damage_field(path, previous=["../x"]), "private name of a checkpoint, got '../x'"),
        (
            lambda path: damage_field(path, previous=[".me-g000001-s000000001.00000000"]),
            "an older checkpoint of its run",
        ),
    ],
)
def test_a_damaged_one_is_skipped_with_one_line(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    damage: Any,  # noqa: ANN401 - a lambda in the table
    said: str,
) -> None:
    make(tmp_path, "us", 1, 10)
    stem = make(tmp_path, "us", 1, 20)
    damage(tmp_path / stem / "manifest.json")
    found = find(tmp_path, "us", fresh=False)
    assert found
    assert found.manifest.step == 10
    (line,) = capsys.readouterr().err.splitlines()
    assert stem in line
    assert said in line


def test_all_damaged_is_an_error_and_not_a_start_from_step_0(tmp_path: Path) -> None:
    for run in ("us", "old"):
        (tmp_path / make(tmp_path, run, 1, 10) / "state.pt").write_bytes(b"x")
    with pytest.raises(CheckpointError, match=f"found 2 in {tmp_path} and all are damaged"):
        find(tmp_path, "us", fresh=False)
    with pytest.raises(CheckpointError, match="found 1 in"):
        find(tmp_path, "us", fresh=True)


def test_a_read_error_is_raised_and_not_skipped(tmp_path: Path) -> None:
    make(tmp_path, "us", 1, 10)
    path = tmp_path / make(tmp_path, "us", 1, 20) / "state.pt"
    path.unlink()
    path.symlink_to(path.name)  # a loop: open() fails for root too
    with pytest.raises(OSError, match="symbolic links") as caught:
        find(tmp_path, "us", fresh=False)
    assert caught.value.errno == errno.ELOOP


def test_a_manifest_that_is_too_large_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoint, "MANIFEST_BYTES", 64)
    make(tmp_path, "us", 1, 10)
    with pytest.raises(CheckpointError, match="found 1 in"):
        find(tmp_path, "us", fresh=False)


def test_a_state_that_was_moved_to_another_disk_is_found_by_its_link(tmp_path: Path) -> None:
    state = tmp_path / make(tmp_path, "us", 1, 10) / "state.pt"
    state.symlink_to(state.rename(tmp_path / "elsewhere"))
    assert find(tmp_path, "us", fresh=False)


@pytest.mark.parametrize("name", ["/tmp/x", "..", "us-g000001-s000000010", ".us-g000002-s000000010.00000000", ""])
def test_only_a_private_name_of_the_same_checkpoint_becomes_a_path(name: str) -> None:
    stem = stem_of("us", 1, 10)
    require_private_name(private_name(stem), stem)
    with pytest.raises(ValueError, match=r"wanted (the|a) private name"):
        require_private_name(name, stem)


@pytest.mark.parametrize(
    "stem",
    [
        "us-g\u0660\u0660\u0660\u0660\u0660\u0661-s000000010",
        f"us-g000001-s{'9' * 400}",
        "us-g000001-s000000010-0",
        "us",
    ],
)
def test_numbers_in_names_are_of_ten_digits_and_bounded(stem: str) -> None:
    assert parse_stem(stem) is None


def test_what_is_written_is_found_and_loads_safely(tmp_path: Path) -> None:
    written = write(new_writer(tmp_path), 5)
    found = find(tmp_path, "us", fresh=True)
    assert found
    assert found.manifest == written
    assert torch.load(tmp_path / written.stem / "state.pt", weights_only=True)["w"].sum() == 3
    assert names(tmp_path) == ["us-g000001-s000000005"]
    assert names(tmp_path / written.stem) == ["manifest.json", "state.pt"]


def test_a_manifest_survives_its_codec(tmp_path: Path) -> None:
    written = write(new_writer(tmp_path), 5, hooks=[lambda path: (path / "a").write_text("A")])
    assert decode(encode(written), written.stem) == written


def test_the_newest_are_kept_and_others_left_alone(tmp_path: Path) -> None:
    old, lost = make(tmp_path, "old", 1, 1), make(tmp_path, "us", 1, 2)
    writer = new_writer(tmp_path, group=2)
    for step in (10, 20, 30):
        write(writer, step, hooks=[lambda path: (path / "x").write_text("X")])
    kept = [stem_of("us", 2, step) for step in (20, 30)]
    assert set(names(tmp_path)) == {old, lost, *kept}


def test_the_next_writer_of_the_run_deletes_what_the_last_one_kept(tmp_path: Path) -> None:
    writer = new_writer(tmp_path)
    write(writer, 10)
    write(writer, 20)
    write(new_writer(tmp_path, group=2, start=start_alone(tmp_path, "us", fresh=False)), 30)
    assert names(tmp_path) == [stem_of("us", 1, 20), stem_of("us", 2, 30)]


def test_what_could_not_be_deleted_is_deleted_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """By this writer, or by the next."""

    def fail(place: Path) -> None:
        if place.exists():
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        raise FileNotFoundError

    writer = new_writer(tmp_path, keep=1)
    write(writer, 10)
    with monkeypatch.context() as patch:
        patch.setattr("trainer_runtime.checkpoint_files.delete_checkpoint", fail)
        write(writer, 20)
        write(writer, 30)
    assert "could not delete the superseded checkpoint us-g000001-s000000010" in capsys.readouterr().err
    assert len(names(tmp_path)) == 3
    write(new_writer(tmp_path, group=2, keep=1, start=start_alone(tmp_path, "us", fresh=False)), 40)
    assert names(tmp_path) == [stem_of("us", 2, 40)]


def test_another_runs_checkpoints_stay_when_resumed_from(tmp_path: Path) -> None:
    make(tmp_path, "old", 1, 1)
    writer = new_writer(tmp_path, keep=1, start=start_alone(tmp_path, "us", fresh=False))
    write(writer, 2)
    write(writer, 3)
    assert names(tmp_path) == [stem_of("old", 1, 1), stem_of("us", 1, 3)]


def test_a_name_is_never_used_twice(tmp_path: Path) -> None:
    write(new_writer(tmp_path), 5)
    with pytest.raises(CheckpointError, match="name is never used twice"):
        write(new_writer(tmp_path), 5)


def test_a_group_of_its_own_without_an_agent(tmp_path: Path) -> None:
    assert first_free_group(tmp_path, "us") == 1
    make(tmp_path, "other", 7, 1)
    make(tmp_path, "us", 2, 1)
    (tmp_path / "us-g000003-s000000001").mkdir()  # a deletion that was interrupted
    assert first_free_group(tmp_path, "us") == 4


def test_a_hooks_file_is_part_of_the_checkpoint(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def hook(path: Path) -> None:
        assert path.parent.name.startswith(".us-g000001-s000000006.")
        assert names(path) == []
        (path / "deep").mkdir()
        (path / "deep" / "file").write_text("content")

    writer = new_writer(tmp_path)
    write(writer, 5)
    manifest = write(writer, 6, hooks=[hook])
    assert [entry.file for entry in manifest.files] == ["state.pt", "extra/deep/file"]
    (tmp_path / manifest.stem / "extra" / "deep" / "file").write_text("CONTENT")
    found = find(tmp_path, "us", fresh=False)
    assert found
    assert found.manifest.step == 5
    assert "deep/file does not have the SHA-256" in capsys.readouterr().err


def test_a_failing_hook_leaves_nothing_behind(tmp_path: Path) -> None:
    def hook(path: Path) -> None:
        (path / "half").write_text("h")
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        write(new_writer(tmp_path), 5, hooks=[hook])
    assert names(tmp_path) == []


def test_everything_is_on_disk_before_it_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """So a power failure at any moment leaves the whole checkpoint or none."""
    events: list[str] = []
    real_fsync, real_rename = os.fsync, os.rename

    def fsync(descriptor: int) -> None:
        events.append(Path(f"/proc/self/fd/{descriptor}").readlink().name.partition(".us-")[0])
        real_fsync(descriptor)

    def rename(path: Path, target: Path) -> None:
        events.append("rename")
        real_rename(path, target)

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(os, "rename", rename)
    write(new_writer(tmp_path), 1, hooks=[lambda path: (path / "x").write_text("X")])
    private, parent = "", tmp_path.name
    assert events == ["state.pt", "extra", "x", "manifest.json", private, parent, "rename", parent]
