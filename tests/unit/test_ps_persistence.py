"""Persistence of a shard: a server restores what the last one wrote, up to the last intact file, and detects damage."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
import torch
from waiting import wait_for

from trainer_runtime.checkpoint import DamagedError
from trainer_runtime.ps import persistence
from trainer_runtime.ps.messages import Gradients, Push
from trainer_runtime.ps.persistence import (
    Ownership,
    ShardPersistence,
    ShardSnapshot,
    capture,
    load,
    note_finished,
    save,
    set_aside_finished,
)
from trainer_runtime.ps.process import ProcessState
from trainer_runtime.ps.roles import Role
from trainer_runtime.ps.rules import Adagrad
from trainer_runtime.ps.server_process import ShardLoader
from trainer_runtime.ps.shard import Author, Shard
from trainer_runtime.ps.table import TableSpec
from trainer_runtime.ps.worker_progress import ASYNC

A = Author(0, 1)
SPEC = TableSpec("t", 4, Adagrad(0.1))
EVERYTHING = torch.arange(1000)


def new_shard() -> Shard:
    shard = Shard(ASYNC)
    shard.declare(SPEC)
    return shard


def train(shard: Shard, steps: int) -> None:
    for _ in range(steps):
        step = shard.applied.get(A, 0) + 1
        torch.manual_seed(step)
        ids = torch.randint(0, 1000, (100,)).unique()
        for change in shard.push(A, Push(step, 1.0, (Gradients(0, ids, torch.randn(len(ids), 4)),)), 0):
            shard.apply(change)


def rows(shard: Shard) -> torch.Tensor:
    return shard.tables[0].pull(EVERYTHING)


def restored(directory: Path) -> tuple[Shard, float | None]:
    shard = Shard(ASYNC)
    return shard, ShardPersistence(directory, shard, threading.Condition()).restore()


def test_a_new_server_restores_what_the_last_one_wrote(tmp_path: Path) -> None:
    shard = new_shard()
    persister = ShardPersistence(tmp_path, shard, threading.Condition())
    assert persister.restore() is None
    for _ in range(12):
        train(shard, 3)
        persister.write()
    names = {path.name[:5] for path in tmp_path.iterdir()}
    assert names == {"whole", "since"}
    again, at = restored(tmp_path)
    assert at is not None
    assert again.applied == shard.applied
    assert torch.equal(rows(again), rows(shard))


def test_a_restored_server_continues_the_existing_files(tmp_path: Path) -> None:
    shard = new_shard()
    first = ShardPersistence(tmp_path, shard, threading.Condition())
    train(shard, 20)
    first.write()
    train(shard, 1)
    first.write()
    again = Shard(ASYNC)
    second = ShardPersistence(tmp_path, again, threading.Condition())
    second.restore()
    train(again, 1)
    second.write()
    train(shard, 1)
    assert torch.equal(rows(restored(tmp_path)[0]), rows(shard))


def test_nothing_is_written_without_changes(tmp_path: Path) -> None:
    shard = new_shard()
    persister = ShardPersistence(tmp_path, shard, threading.Condition())
    train(shard, 20)

    def is_written() -> bool:
        before = {path.name for path in tmp_path.iterdir()}
        persister.write()
        return {path.name for path in tmp_path.iterdir()} != before

    assert [is_written(), is_written()] == [True, False]
    train(shard, 1)
    assert [is_written(), is_written()] == [True, False]
    shard.lease("data", 3, None, 0)
    shard.lease("data", 3, 0, 0)
    assert [is_written(), is_written()] == [True, False], "a part of the data is done"
    shard.tables[0].shrink(1)
    assert [is_written(), is_written()] == [True, False]
    persister = ShardPersistence(tmp_path, Shard(ASYNC), threading.Condition())
    persister.restore()
    assert not is_written()


@pytest.mark.parametrize("damage", ["flipped", "cut short", "empty"])
def test_restore_stops_before_a_damaged_file(tmp_path: Path, damage: str) -> None:
    """Files after the damaged one are ignored, and the restored state is the same at the next restore."""
    shard = new_shard()
    persister = ShardPersistence(tmp_path, shard, threading.Condition())
    train(shard, 20)
    persister.write()
    wanted = rows(shard)
    for _ in range(2):
        train(shard, 1)
        persister.write()
    hurt = tmp_path / "since-000001-000001.rows"
    data = bytearray(hurt.read_bytes())
    data[len(data) // 2] ^= 1
    hurt.write_bytes({"flipped": bytes(data), "cut short": bytes(data[:-9]), "empty": b""}[damage])
    for _ in range(2):
        again, _at = restored(tmp_path)
        assert again.applied == {A: 20}
        assert torch.equal(rows(again), wanted)


def test_a_damaged_whole_file_is_replaced_by_the_one_before(tmp_path: Path) -> None:
    shard = new_shard()
    persister = ShardPersistence(tmp_path, shard, threading.Condition())
    train(shard, 20)
    persister.write()
    wanted = rows(shard)
    shard.tables[0].shrink(-1)  # it drops no row, but the next file is a whole one
    train(shard, 1)
    persister.write()
    newest = tmp_path / "whole-000002.rows"
    newest.write_bytes(newest.read_bytes()[:-1])
    assert torch.equal(rows(restored(tmp_path)[0]), wanted)
    (tmp_path / "whole-000001.rows").write_bytes(b"")
    with pytest.raises(DamagedError, match=r"all rows in .* are damaged"):
        restored(tmp_path)


def test_changes_after_a_damaged_whole_file_do_not_follow_the_next_one(tmp_path: Path) -> None:
    """Also when the next whole file gets the number of the damaged one."""
    shard = new_shard()
    persister = ShardPersistence(tmp_path, shard, threading.Condition())
    train(shard, 20)
    persister.write()
    shard.tables[0].shrink(-1)
    for _ in range(2):
        train(shard, 1)
        persister.write()
    assert (tmp_path / "since-000002-000001.rows").exists()
    (tmp_path / "whole-000002.rows").write_bytes(b"")

    again = Shard(ASYNC)
    persister = ShardPersistence(tmp_path, again, threading.Condition())
    persister.restore()
    assert again.applied == {A: 20}
    again.tables[0].shrink(-1)
    persister.write()
    assert {path.name for path in tmp_path.glob("*-000002*")} == {"whole-000002.rows"}
    assert restored(tmp_path)[0].applied == {A: 20}


def test_a_replica_that_becomes_the_primary_needs_no_disk(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """It writes its rows once the disk is back, with a number above all existing files."""

    def mount(name: str) -> None:
        (tmp_path / "next").symlink_to(name)
        (tmp_path / "next").replace(tmp_path / "disk")  # at once: between two steps its directory would be made again

    (tmp_path / "real").mkdir()
    (tmp_path / "none").touch()
    mount("real")
    older = new_shard()
    train(older, 1)
    directory = tmp_path / "disk" / "shard"
    before = ShardPersistence(directory, older, threading.Condition())
    before.restore()
    before.write()
    mount("none")

    shard = new_shard()
    train(shard, 5)
    persister = ShardPersistence(directory, shard, threading.Condition(), every_s=0.01)
    persister.follow()
    persister.start()
    wait_for(lambda: "cannot be written" in caplog.text, "an error in the log")
    mount("real")
    wait_for((directory / "whole-000002.rows").exists, "a file with rows")
    persister.close()
    assert restored(directory)[0].applied == shard.applied


def test_lack_of_memory_is_logged_and_retried(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    lacking = [RuntimeError("can't allocate memory"), MemoryError()]

    def capture_if_there_is_memory(shard: Shard, since: dict[str, int]) -> ShardSnapshot:
        if lacking:
            raise lacking.pop()
        return capture(shard, since)

    monkeypatch.setattr(persistence, "capture", capture_if_there_is_memory)
    shard = new_shard()
    train(shard, 1)
    persister = ShardPersistence(tmp_path, shard, threading.Condition(), every_s=0.01)
    persister.start()
    wait_for((tmp_path / "whole-000001.rows").exists, "a file with rows")
    persister.close()
    assert "can't allocate memory" in caplog.text


def test_dropped_rows_are_not_restored(tmp_path: Path) -> None:
    shard = new_shard()
    persister = ShardPersistence(tmp_path, shard, threading.Condition())
    train(shard, 20)
    persister.write()
    assert shard.tables[0].shrink(1) > 0
    persister.write()
    again, _ = restored(tmp_path)
    assert len(again.tables[0]) == 0


@pytest.mark.parametrize("shards", [1, 2, 5])
def test_rows_saved_by_some_servers_are_loaded_by_another_number(tmp_path: Path, shards: int) -> None:
    before = [new_shard() for _ in range(3)]
    owners = [Ownership(number, 3) for number in range(3)]
    whole = new_shard()
    train(whole, 30)
    part = whole.tables[0].changed_since(0)
    for shard, owner in zip(before, owners, strict=True):
        mine = owner.mask(part.ids)
        shard.tables[0].put(type(part)(part.ids[mine], part.rows[mine], part.touched[mine]))
        save(shard, threading.Condition(), tmp_path, owner)
    after = [Shard(ASYNC) for _ in range(shards)]
    for number, shard in enumerate(after):
        load(shard, tmp_path, Ownership(number, shards))
    assert sum(len(shard.tables[0]) for shard in after) == len(whole.tables[0])
    for number, shard in enumerate(after):
        mine = EVERYTHING[Ownership(number, shards).mask(EVERYTHING)]
        assert torch.equal(shard.tables[0].pull(mine), whole.tables[0].pull(mine))


def test_an_incomplete_set_of_parts_is_not_loaded(tmp_path: Path) -> None:
    save(new_shard(), threading.Condition(), tmp_path, Ownership(0, 2))
    with pytest.raises(FileNotFoundError, match="wanted a complete set of parts"):
        load(Shard(ASYNC), tmp_path, Ownership(0, 1))


def test_a_shard_of_a_finished_run_is_set_aside_and_one_of_another_run_is_not(tmp_path: Path) -> None:
    place = tmp_path / "shard-0-of-1"
    shard = new_shard()
    for steps in (3, 5):  # the rows of a second finished run replace those of the first
        train(shard, steps)
        persister = ShardPersistence(place, shard, threading.Condition())
        assert persister.restore() is None
        persister.write()
        assert set_aside_finished(place) is None, "its run has not finished"
        note_finished(tmp_path)
        assert set_aside_finished(place) == tmp_path / "finished-shard-0-of-1"
        assert [path.name for path in tmp_path.iterdir()] == ["finished-shard-0-of-1"]
    (tmp_path / "finished-shard-0-of-1").rename(place)
    again = new_shard()
    assert ShardPersistence(place, again, threading.Condition()).restore() is not None, (
        "a run continues with the rows after renaming back"
    )
    assert again.applied == shard.applied


def test_a_replica_is_not_taken_for_the_shard_of_an_earlier_run(tmp_path: Path) -> None:
    """A shard can move to a machine whose disk has the shard of an earlier, finished run."""
    place = tmp_path / "shard-0-of-1"
    old = new_shard()
    train(old, 1)
    files = ShardPersistence(place, old, threading.Condition())
    files.restore()
    files.write()
    note_finished(tmp_path)
    copied = new_shard()
    train(copied, 2)
    role = Role("server", 0, (("127.0.0.1", 1),), 1, b"", 1, frozenset())
    persister = ShardLoader(ProcessState(role, ASYNC, rows_dir=tmp_path), None, 60.0).load_shard(
        0, copied, threading.Condition(), restores=False
    )
    assert persister is not None
    persister.close()
    assert set_aside_finished(place) is None, "it belongs to a run that has not finished"
    again, _ = restored(place)
    assert again.applied == copied.applied
