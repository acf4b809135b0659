"""A disk that is full, or fails, in the middle of a save: nothing is left behind and the step can be saved again."""

from __future__ import annotations

import errno
import json
import os
import resource
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import trainer_runtime as tr
from trainer_runtime import checkpoint_files, contract, writer
from trainer_runtime.checkpoint import find
from trainer_runtime.resume import StartingPoint
from trainer_runtime.writer import Content, Writer

if TYPE_CHECKING:
    from collections.abc import Iterator

MANY: dict[str, float] = {f"metric_{number}": 0.0 for number in range(300)}
"""They make the manifest larger than `full_disk` allows; the state stays smaller."""


@contextmanager
def full_disk() -> Iterator[None]:
    """Let this process write no file beyond 4 KiB. No longer than needed: pytest's own output is a file, too."""
    old = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, old[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, old)


def write_x(path: Path) -> None:
    (path / "x").write_text("X")


def save(by: Writer, step: int = 1) -> None:
    by.write(Content({"w": torch.ones(3)}), step=step, world_size=1, metrics={**MANY}, hooks=[write_x])
    assert by.finish()


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


def stem(step: int) -> str:
    return f"us-g000001-s{step:09d}"


@pytest.fixture
def ours(tmp_path: Path) -> Writer:
    return Writer(tmp_path, "us", 1, keep=2, start=StartingPoint())


def test_a_disk_full_at_the_state_is_an_os_error_and_leaves_nothing_behind(tmp_path: Path, ours: Writer) -> None:
    """Torch itself reports it as a RuntimeError about positions."""
    with full_disk():
        ours.write(Content({"w": torch.ones(100_000)}), step=1, world_size=1, metrics={})
        with pytest.raises(OSError, match="File too large"):
            ours.finish()
    assert names(tmp_path) == []


def test_a_disk_full_at_the_manifest_leaves_nothing_behind_and_the_step_can_be_saved_later(
    tmp_path: Path, ours: Writer
) -> None:
    """The state and the hooks' files are there by then."""
    with pytest.raises(OSError, match="File too large") as caught, full_disk():
        save(ours)
    assert caught.value.__notes__ == [
        f"checkpoint us-g000001-s000000001 was NOT written in {tmp_path}; the older ones are untouched"
    ]
    assert names(tmp_path) == []
    save(ours)
    assert names(tmp_path) == [stem(1)]


def test_a_manifest_that_may_not_be_durable_is_taken_back(
    tmp_path: Path, ours: Writer, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(ours, step=1)

    def fail(directory: Path) -> None:
        if (directory / stem(2)).exists():
            raise OSError(errno.EIO, os.strerror(errno.EIO))

    with monkeypatch.context() as patch:
        patch.setattr(checkpoint_files, "sync_directory", fail)
        with pytest.raises(OSError, match="Input/output error"):
            save(ours, step=2)
    assert names(tmp_path) == [stem(1)]
    save(ours, step=2)
    found = find(tmp_path, "us", fresh=True)
    assert found
    assert found.manifest.step == 2


def test_what_could_not_be_taken_back_does_not_hinder_the_next_attempt(
    tmp_path: Path, ours: Writer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A disk that went read-only, say."""

    def fail(*_args: object, **_options: object) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    with monkeypatch.context() as patch:
        patch.setattr(writer, "write_synced", fail)
        patch.setattr(os, "unlink", fail)
        with pytest.raises(OSError, match="Read-only"):
            save(ours)
    (left,) = names(tmp_path)
    assert left.startswith(f".{stem(1)}.")
    save(ours)
    assert names(tmp_path) == [left, stem(1)]


def test_what_somebody_else_put_there_is_never_replaced(tmp_path: Path, ours: Writer) -> None:
    (tmp_path / stem(1)).write_bytes(b"theirs")
    with pytest.raises(tr.CheckpointError, match="name is never used twice"):
        save(ours)
    assert (tmp_path / stem(1)).read_bytes() == b"theirs"


def test_not_even_one_that_came_meanwhile(tmp_path: Path, ours: Writer) -> None:
    def meanwhile(_path: Path) -> None:
        (tmp_path / stem(1)).mkdir()
        (tmp_path / stem(1) / "state.pt").write_bytes(b"theirs")

    ours.write(Content({}), step=1, world_size=1, metrics={}, hooks=[meanwhile])
    with pytest.raises(OSError, match="not empty"):
        ours.finish()
    assert names(tmp_path) == [stem(1)]
    assert names(tmp_path / stem(1)) == ["state.pt"]


@pytest.fixture
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tr.State:
    for name in (contract.RUN_ID, contract.GROUP, contract.FRESH, contract.CONTROL_FD):
        monkeypatch.delenv(name, raising=False)
    tr.init()
    return tr.State(checkpoint_dir=tmp_path, save_every=1, best=0.0)


def settle(state: tr.State) -> None:
    """Wait for what is being written; what became of it is left to whoever asks next."""
    assert state._saver
    assert state._saver.writer
    assert state._saver.writer._thread
    state._saver.writer._thread.join()


def test_a_disk_full_at_the_last_step_does_not_fail_a_training_that_can_be_saved_at_its_end(
    tmp_path: Path, state: tr.State, capsys: pytest.CaptureFixture[str]
) -> None:
    for _ in state.epochs(1):
        state.commit()
        state.save()
        with full_disk():
            state.commit(**MANY)
            settle(state)
        assert "step 2 was NOT saved" in capsys.readouterr().err
    saved = [json.loads(path.read_text())["step"] for path in tmp_path.glob("*/manifest.json")]
    assert sorted(saved) == [1, 2]


def test_a_disk_still_full_at_the_end_is_reported_at_the_end(tmp_path: Path, state: tr.State) -> None:
    epochs = state.epochs(1)
    next(epochs)
    with full_disk():
        state.commit(**MANY)
        settle(state)
        with pytest.raises(OSError, match="File too large") as caught:
            next(epochs)
    assert f"s000000001-1 was NOT written in {tmp_path}" in caught.value.__notes__[0]
    assert names(tmp_path) == []


def test_a_sharded_step_that_was_not_saved_is_saved_at_the_end(tmp_path: Path) -> None:
    """That is another save of it, for which all ranks write their shards anew."""
    tr.init()
    model = torch.nn.Linear(2, 2)
    fully_shard(model, mesh=init_device_mesh("cpu", (1,)))
    state = tr.State(checkpoint_dir=tmp_path, save_every=1, model=model)
    epochs = state.epochs(1)
    next(epochs)
    with full_disk():
        state.commit(**MANY)
        settle(state)
    assert list(epochs) == []
    assert names(tmp_path) == ["local-g000001-s000000001-1"]


def test_a_save_that_is_larger_than_a_file_may_be_names_the_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (8 << 20, resource.RLIM_INFINITY))
    writer.warn_not_saved(7, tmp_path, OSError(errno.EFBIG, "File too large"))
    assert (
        "[Errno 27] File too large (a file may have no more than 8 MiB: ulimit -f); what was saved"
        in capsys.readouterr().err
    )
