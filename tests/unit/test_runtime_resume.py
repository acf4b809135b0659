"""Resuming under an agent: the record decides, damage is answered by a rollback, an older run is adopted."""

from __future__ import annotations

import errno
import os
import shutil
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from fake_agent import FakeAgent
from waiting import wait_for

import trainer_runtime as tr
from trainer_runtime import agent_channel, contract, restoring
from trainer_runtime.checkpoint import CheckpointError
from trainer_runtime.exchange import Exchange
from trainer_runtime.manifest import final_name, stem_of
from trainer_runtime.resume import DirectoryOpener, StartingPoint, start_alone, start_under_agent
from trainer_runtime.shared_directory_check import DirectorySight, check_shared_directory
from trainer_runtime.writer import Content, Writer

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


@pytest.fixture
def agent() -> Iterator[FakeAgent]:
    made = FakeAgent()
    yield made
    made.close()


def resume(directory: Path, agent: FakeAgent, *, fresh: bool = False) -> StartingPoint:
    return start_under_agent(directory, "us", agent.open(), fresh=fresh)


def save(directory: Path, agent: FakeAgent, *steps: int, group: int = 1, keep: int = 3) -> None:
    """A group that resumes and saves at these steps."""
    ours = agent.open()
    start = start_under_agent(directory, "us", ours, fresh=False)
    writer = Writer(directory, "us", group, keep=keep, start=start, channel=ours)
    for step in steps:
        writer.write(Content({"w": torch.ones(3)}), step=step, world_size=2, metrics={})
        assert writer.finish()


def save_alone(directory: Path, run: str, *steps: int) -> None:
    writer = Writer(directory, run, 1, keep=9, start=start_alone(directory, run, fresh=True))
    for step in steps:
        writer.write(Content({}), step=step, world_size=1, metrics={})
        assert writer.finish()


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


def begun_at(start: StartingPoint) -> tuple[str, int, int] | None:
    manifest = start.found.manifest if start.found else None
    return manifest and (manifest.run, manifest.group, manifest.step)


def damage(directory: Path, step: int) -> None:
    (directory / stem_of("us", 1, step) / "state.pt").write_bytes(b"x")


def test_a_job_without_checkpoints_begins_at_step_0(tmp_path: Path, agent: FakeAgent) -> None:
    assert resume(tmp_path / "none", agent) == StartingPoint()
    assert agent.asked == []


def test_the_record_decides_and_not_what_looks_newest(tmp_path: Path, agent: FakeAgent) -> None:
    """A group that was cut off left files of a higher number and step, which nobody committed."""
    save(tmp_path, agent, 10, 20)
    save_alone(tmp_path, "us", 90)
    (tmp_path / stem_of("us", 1, 90)).rename(tmp_path / stem_of("us", 9, 90))
    start = resume(tmp_path, agent)
    assert begun_at(start) == ("us", 1, 20)
    assert [final_name(name) for name in start.kept] == [stem_of("us", 1, 10), stem_of("us", 1, 20)]
    save(tmp_path, agent, 30, group=2, keep=1)
    assert names(tmp_path) == [stem_of("us", 2, 30), stem_of("us", 9, 90)]


def test_files_of_the_own_run_are_not_looked_at_where_nothing_was_committed(tmp_path: Path, agent: FakeAgent) -> None:
    save_alone(tmp_path, "us", 90)
    assert resume(tmp_path, agent) == StartingPoint()
    assert agent.asked == []


def test_another_runs_newest_is_adopted_by_a_commit(tmp_path: Path, agent: FakeAgent) -> None:
    save_alone(tmp_path, "old", 10, 20)
    start = resume(tmp_path, agent)
    assert (begun_at(start), start.kept, start.superseded) == (("old", 1, 20), (), ())
    (asked,) = agent.asked
    assert asked["copy"] == {"run": "old", "group": 1, "step": 20, "save": 0}
    assert (asked["name"], asked["private"], asked["is_rollback"]) == (stem_of("old", 1, 20), "", False)
    assert (asked["kept"], asked["superseded"]) == ([], [])
    assert begun_at(resume(tmp_path, agent)) == ("old", 1, 20)
    assert len(agent.asked) == 1, "the second time it is what the record names"


def test_what_was_adopted_is_never_deleted(tmp_path: Path, agent: FakeAgent) -> None:
    save_alone(tmp_path, "old", 10, 20)
    save(tmp_path, agent, 21, 22, keep=1)
    assert names(tmp_path) == [stem_of("old", 1, 10), stem_of("old", 1, 20), stem_of("us", 1, 22)]


def test_a_fresh_start_adopts_nothing(tmp_path: Path, agent: FakeAgent) -> None:
    save_alone(tmp_path, "old", 10)
    assert resume(tmp_path, agent, fresh=True) == StartingPoint()
    assert agent.asked == []


def test_an_adoption_that_is_refused_is_a_restart(
    tmp_path: Path, agent: FakeAgent, capsys: pytest.CaptureFixture[str]
) -> None:
    save_alone(tmp_path, "old", 10)
    agent.refuses = "group 7 has been formed since"
    with pytest.raises(SystemExit) as left:
        resume(tmp_path, agent)
    assert left.value.code == contract.EXIT_RESTART
    assert "may not resume from old-g000001-s000000010: group 7" in capsys.readouterr().err


def test_other_runs_that_are_all_damaged_are_no_reason_for_step_0(tmp_path: Path, agent: FakeAgent) -> None:
    save_alone(tmp_path, "old", 10)
    (tmp_path / stem_of("old", 1, 10) / "state.pt").unlink()
    with pytest.raises(CheckpointError, match="and all are damaged"):
        resume(tmp_path, agent)


def test_a_committed_one_that_has_only_its_private_name_is_put_in_place(
    tmp_path: Path, agent: FakeAgent, capsys: pytest.CaptureFixture[str]
) -> None:
    save(tmp_path, agent, 10)
    assert agent.committed
    (tmp_path / agent.committed["name"]).rename(tmp_path / agent.committed["private"])
    assert begun_at(resume(tmp_path, agent)) == ("us", 1, 10)
    assert names(tmp_path) == [stem_of("us", 1, 10)]
    assert "its writer exited before that" in capsys.readouterr().err


def other_manifest(directory: Path) -> None:
    """Whole in itself, but not what was committed."""
    place = directory / stem_of("us", 1, 30)
    (place / "manifest.json").write_bytes((place / "manifest.json").read_bytes() + b"\n")


@pytest.mark.parametrize(
    ("harm", "said"),
    [
        (lambda directory: damage(directory, 30), "state.pt should have"),
        (lambda directory: (directory / stem_of("us", 1, 30) / "state.pt").unlink(), "state.pt is missing"),
        (lambda directory: (directory / stem_of("us", 1, 30) / "manifest.json").unlink(), "it has no manifest"),
        (lambda directory: shutil.rmtree(directory / stem_of("us", 1, 30)), "it has no manifest"),
        (other_manifest, "does not have the SHA-256 that the job's record lists"),
    ],
    ids=["state", "no state", "no manifest", "nothing", "another manifest"],
)
def test_damage_is_answered_by_a_recorded_rollback(
    tmp_path: Path,
    agent: FakeAgent,
    capsys: pytest.CaptureFixture[str],
    harm: Callable[[Path], object],
    said: str,
) -> None:
    save(tmp_path, agent, 10, 20, 30)
    assert agent.committed
    first, second = agent.committed["kept"]
    harm(tmp_path)
    capsys.readouterr()
    start = resume(tmp_path, agent)
    assert (begun_at(start), start.kept) == (("us", 1, 20), (first, second))
    asked = agent.asked[-1]
    assert (asked["copy"]["step"], asked["private"], asked["is_rollback"]) == (20, second, True)
    assert (asked["kept"], asked["superseded"]) == ([first], [])
    loud, rolled_back = capsys.readouterr().err.splitlines()
    assert "COMMITTED checkpoint" in loud
    assert said in loud
    assert "ROLLED BACK" in rolled_back
    assert begun_at(resume(tmp_path, agent)) == ("us", 1, 20)


def test_a_damaged_one_is_left_for_the_operator(tmp_path: Path, agent: FakeAgent) -> None:
    save(tmp_path, agent, 10, 20, 30)
    damage(tmp_path, 20)
    damage(tmp_path, 30)
    save(tmp_path, agent, 11, 12, group=2, keep=1)
    assert agent.asked[3]["copy"]["step"] == 10
    assert names(tmp_path) == [stem_of("us", 1, 20), stem_of("us", 1, 30), stem_of("us", 2, 12)]


def test_a_rollback_passes_on_what_is_superseded(tmp_path: Path, agent: FakeAgent) -> None:
    save(tmp_path, agent, 10, 20, 30, keep=2)
    damage(tmp_path, 30)
    assert agent.committed
    superseded = agent.committed["superseded"]
    assert [final_name(name) for name in superseded] == [stem_of("us", 1, 10)]
    resume(tmp_path, agent)
    assert agent.committed["superseded"] == superseded


def test_a_rollback_completes_a_rename_too(tmp_path: Path, agent: FakeAgent) -> None:
    save(tmp_path, agent, 10, 20)
    assert agent.committed
    (tmp_path / stem_of("us", 1, 10)).rename(tmp_path / agent.committed["kept"][0])
    damage(tmp_path, 20)
    assert begun_at(resume(tmp_path, agent)) == ("us", 1, 10)


def test_a_rollback_that_is_refused_is_a_restart(tmp_path: Path, agent: FakeAgent) -> None:
    save(tmp_path, agent, 10, 20)
    damage(tmp_path, 20)
    agent.refuses = "group 7 has been formed since"
    with pytest.raises(SystemExit) as left:
        resume(tmp_path, agent)
    assert left.value.code == contract.EXIT_RESTART


def test_a_committed_checkpoint_that_is_lost_is_no_reason_for_step_0(tmp_path: Path, agent: FakeAgent) -> None:
    save(tmp_path, agent, 10, 20)
    save_alone(tmp_path, "old", 5)
    for step in (10, 20):
        shutil.rmtree(tmp_path / stem_of("us", 1, step))
    with pytest.raises(CheckpointError, match="it and the 1 older ones that were kept cannot be used here"):
        resume(tmp_path, agent)
    assert len(agent.asked) == 2


def test_a_read_error_is_no_damage(tmp_path: Path, agent: FakeAgent) -> None:
    save(tmp_path, agent, 10, 20)
    path = tmp_path / stem_of("us", 1, 20) / "state.pt"
    path.unlink()
    path.symlink_to(path.name)  # a loop: open() fails for root too
    with pytest.raises(OSError, match="symbolic links") as caught:
        resume(tmp_path, agent)
    assert caught.value.errno == errno.ELOOP
    assert len(agent.asked) == 2


def test_a_copy_that_is_not_the_committed_one_is_in_memory(tmp_path: Path, agent: FakeAgent) -> None:
    """The checkpoint is not read then, but what the run has on disk is still known."""
    save(tmp_path, agent, 10)
    assert agent.committed
    agent.copy = {"run": "us", "group": 1, "step": 13, "save": 0}
    start = resume(tmp_path / "not there", agent)
    assert (start.found, start.is_in_memory, start.kept) == (None, True, (agent.committed["private"],))


def test_what_another_nodes_disk_keeps_is_not_looked_for_on_this_one(
    tmp_path: Path, agent: FakeAgent, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its node is lost, and what goes on from memory has this node's disk: it saves there, and alone is its owner."""
    monkeypatch.setenv(contract.NODE_ID, "b")
    save(tmp_path / "a", agent, 10)
    assert agent.committed
    agent.committed["node"] = "a"
    agent.copy = {"run": "us", "group": 1, "step": 13, "save": 0}
    opener = DirectoryOpener(tmp_path / "b", "us", 3, agent.open(), DirectorySight())  # there is nobody else to ask
    assert opener.open().is_in_memory
    assert opener.writer
    for step in (20, 30):
        opener.writer.write(Content({}), step=step, world_size=1, metrics={})
        assert opener.writer.finish()
    first, second = agent.asked[1:]
    assert (first["node"], first["kept"], first["superseded"]) == ("b", [], [])
    assert (second["node"], second["kept"], second["superseded"]) == ("b", [first["private"]], [])


@pytest.fixture
def under_agent(agent: FakeAgent, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    tr.init()
    agent_channel._open_once.cache_clear()
    variables = {contract.RUN_ID: "us", contract.GROUP: "3", contract.CHECKPOINT_DIR: str(tmp_path)}
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv(contract.FRESH, raising=False)
    monkeypatch.delenv(contract.CONTROL_FD, raising=False)
    monkeypatch.setenv(contract.CHANNEL_FD, str(agent.theirs.fileno()))
    yield
    taken = agent_channel.open_channel()
    assert taken
    taken._sock.detach()
    agent_channel._open_once.cache_clear()


@pytest.mark.usefixtures("under_agent")
def test_a_state_saves_and_resumes_through_the_agent(tmp_path: Path, agent: FakeAgent) -> None:
    for _ in (state := tr.State(save_every=2, best=0.0)).epochs(1):
        for _ in range(3):
            state.best += 1
            state.commit()
    assert [asked["name"] for asked in agent.asked] == [stem_of("us", 3, 2), stem_of("us", 3, 3, 1)]
    saved = torch.load(tmp_path / stem_of("us", 3, 3, 1) / "state.pt", weights_only=True)
    assert saved["objects"]["best"] == 3
    again = tr.State(best=0.0)
    again.restore()
    assert (again.step, again.best) == (3, 3.0), "in the same process too, whose group began at step 0"


@pytest.mark.usefixtures("under_agent")
def test_a_directory_whose_server_is_gone_is_reported_as_unreadable(
    tmp_path: Path, agent: FakeAgent, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where there are others, they all look at it first: nobody may fall over it there."""
    save(tmp_path, agent, 10)
    fail(monkeypatch, tmp_path, errno.ENOTCONN, "stat", "mkdir", "touch")
    monkeypatch.setattr(restoring, "world_size", lambda: 2)
    with pytest.raises(SystemExit):
        tr.State(best=0.0).restore()
    wait_for(lambda: agent.unreadable, "the agent is notified")
    assert [str(tmp_path) in said for said in agent.unreadable] == [True]


def test_a_probe_that_cannot_be_removed_hinders_nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tr.init()
    fail(monkeypatch, tmp_path, errno.ESTALE, "unlink")
    assert check_shared_directory(tmp_path) == DirectorySight()


def fail(monkeypatch: pytest.MonkeyPatch, directory: Path, number: int, *names: str) -> None:
    """Let these calls fail there as on a disk that is not at hand."""

    def replace(name: str) -> None:
        work = getattr(Path, name)

        def called(path: Path, **options: Any) -> Any:  # noqa: ANN401 - passed on
            if path.is_relative_to(directory):
                raise OSError(number, os.strerror(number))
            return work(path, **options)

        monkeypatch.setattr(Path, name, called)

    for name in names:
        replace(name)


@pytest.mark.usefixtures("under_agent")
def test_training_continues_after_a_refused_commit(agent: FakeAgent, capsys: pytest.CaptureFixture[str]) -> None:
    state = tr.State(save_every=1, best=0.0)
    state.restore()
    agent.refuses = "group 7 has been formed since"
    state.commit()
    state.commit()
    state.save()
    assert capsys.readouterr().err.count("was NOT saved: group 7 has been formed since") == 2


@pytest.mark.usefixtures("under_agent")
def test_no_more_is_kept_than_fits_into_the_record() -> None:
    tr.State(keep=100)
    with pytest.raises(ValueError, match="keep of at most 100 under an agent, got 101"):
        tr.State(keep=101)


@pytest.mark.usefixtures("under_agent")
def test_training_does_not_wait_for_a_verdict(
    agent: FakeAgent, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """While etcd is away the verdict takes as long as that; what falls due meanwhile is left out, and said."""
    is_back = threading.Event()
    left_out: list[int] = []
    monkeypatch.setattr(Exchange, "skip", lambda _self, step: left_out.append(step))
    agent.on_publish = lambda _asked: is_back.wait(60)
    state = tr.State(save_every=2, keep=1, best=0.0)
    state.restore()
    for _ in range(9):
        state.commit()
    said = capsys.readouterr().err
    assert "step 4 was NOT saved: step 2 still waits to be committed" in said
    assert "step 8 was NOT saved" in said
    assert left_out == [(4, 0), (6, 0), (8, 0)], "what the other ranks hand over of these is not wanted"
    assert agent.committed is None
    is_back.set()
    state.save()
    assert agent.committed is not None
    assert [asked["copy"]["step"] for asked in agent.asked] == [2, 9]


def test_a_committed_one_that_a_mount_does_not_show_yet_is_no_damage(
    tmp_path: Path, agent: FakeAgent, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A network file system may remember for a while that its final name was not there."""
    save(tmp_path, agent, 5, 10)
    monkeypatch.setattr("trainer_runtime.resume.exists", lambda path: path.name != stem_of("us", 1, 10))
    with pytest.raises(OSError, match="this node sees its name, but cannot open it yet"):
        resume(tmp_path, agent)
