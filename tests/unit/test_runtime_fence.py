"""Writing under an agent: nothing counts before the verdict, and nobody's committed files are touched after it."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
import torch
from fake_agent import FakeAgent

from trainer_runtime import contract
from trainer_runtime.agent_channel import AgentGoneError
from trainer_runtime.manifest import final_name, private_name, stem_of
from trainer_runtime.record import CommittedCheckpoint, StateId
from trainer_runtime.resume import StartingPoint, start_under_agent
from trainer_runtime.writer import Content, Writer

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

BOUND_S = 120


@pytest.fixture
def agent() -> Iterator[FakeAgent]:
    made = FakeAgent()
    yield made
    made.close()


def new_writer(directory: Path, agent: FakeAgent, *, group: int = 1, keep: int = 2) -> Writer:
    """A group's writer, after it has resumed."""
    channel = agent.open()
    start = start_under_agent(directory, "us", channel, fresh=True)
    return Writer(directory, "us", group, keep=keep, start=start, channel=channel)


def write(writer: Writer, step: int) -> bool:
    content = {"w": torch.full((3,), float(step))}
    writer.write(Content(content), step=step, world_size=2, metrics={})
    return writer.finish()


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


def stems(*steps: int, group: int = 1) -> list[str]:
    return [stem_of("us", group, step) for step in steps]


def test_all_is_written_before_it_is_asked_and_renamed_after_the_yes(tmp_path: Path, agent: FakeAgent) -> None:
    seen: list[list[str]] = []
    agent.on_publish = lambda asked: seen.extend([names(tmp_path), names(tmp_path / asked["private"])])
    assert write(new_writer(tmp_path, agent), 10)
    (asked,) = agent.asked
    assert seen == [[asked["private"]], ["manifest.json", "state.pt"]]
    assert names(tmp_path) == [asked["name"]] == stems(10)
    raw = (tmp_path / asked["name"] / "manifest.json").read_bytes()
    assert 0.0 <= asked.pop("took_s") < 60.0
    assert abs(asked.pop("at") - time.time()) < 60.0
    assert asked.pop("size_bytes") == (tmp_path / asked["name"] / "state.pt").stat().st_size
    assert asked == {
        "copy": {"run": "us", "group": 1, "step": 10, "save": 0},
        "name": "us-g000001-s000000010",
        "private": json.loads(raw)["private"],
        "manifest_sha256": hashlib.sha256(raw).hexdigest(),
        "kept": [],
        "superseded": [],
        "handoff": 0,
        "node": "",
        "is_rollback": False,
    }
    assert final_name(asked["private"]) == asked["name"]
    assert torch.load(tmp_path / asked["name"] / "state.pt", weights_only=True)["w"].tolist() == [10, 10, 10]


def test_after_a_no_the_own_files_go_and_all_others_stay(
    tmp_path: Path, agent: FakeAgent, capsys: pytest.CaptureFixture[str]
) -> None:
    writer = new_writer(tmp_path, agent)
    assert write(writer, 10)
    assert write(writer, 20)
    agent.refuses = "group 7 has been formed since"
    assert not write(writer, 30)
    assert names(tmp_path) == stems(10, 20)
    (line,) = capsys.readouterr().err.splitlines()
    assert line == "trainer_runtime: step 30 was NOT saved: group 7 has been formed since"
    agent.refuses = ""
    assert write(writer, 30)
    assert names(tmp_path) == stems(20, 30)


def test_the_record_lists_what_is_kept_and_what_may_go(tmp_path: Path, agent: FakeAgent) -> None:
    writer = new_writer(tmp_path, agent, keep=3)
    for step in (10, 20, 30, 40, 50):
        assert write(writer, step)
    lists = [
        ([final_name(name)[-2:] for name in asked["kept"]], [final_name(name)[-2:] for name in asked["superseded"]])
        for asked in agent.asked
    ]
    assert lists == [
        ([], []),
        (["10"], []),
        (["10", "20"], []),
        (["20", "30"], ["10"]),
        (["30", "40"], ["20"]),  # 10 is gone, and need not be told again
    ]
    assert names(tmp_path) == stems(30, 40, 50)


def test_nothing_is_deleted_before_the_yes(tmp_path: Path, agent: FakeAgent) -> None:
    writer = new_writer(tmp_path, agent, keep=1)
    assert write(writer, 10)
    seen: list[list[str]] = []
    agent.on_publish = lambda _asked: seen.append(names(tmp_path))
    assert write(writer, 20)
    assert stems(10)[0] in seen[0]
    assert names(tmp_path) == stems(20)


def test_the_next_group_goes_on_with_the_lists_of_the_record(tmp_path: Path, agent: FakeAgent) -> None:
    """Also with what a writer that died had no time to delete."""
    writer = new_writer(tmp_path, agent, keep=2)
    for step in (10, 20, 30):
        assert write(writer, step)
    assert agent.committed
    left = private_name(stem_of("us", 1, 5))
    for name in (left, final_name(left)):  # each of which could be there
        (tmp_path / name).mkdir()
        (tmp_path / name / "state.pt").touch()
    agent.committed = agent.committed | {"superseded": [left]}
    assert write(new_writer(tmp_path, agent, group=2, keep=2), 40)
    assert names(tmp_path) == [*stems(30), *stems(40, group=2)]


def test_files_that_no_record_names_are_never_deleted(tmp_path: Path, agent: FakeAgent) -> None:
    others = [*stems(70, group=6), private_name(stems(80, group=6)[0]), stem_of("old", 1, 1)]
    for name in others:
        (tmp_path / name).mkdir()
    writer = new_writer(tmp_path, agent, group=7, keep=1)
    assert write(writer, 71)
    assert write(writer, 72)
    assert set(names(tmp_path)) == {*others, *stems(72, group=7)}


def test_an_agent_that_ends_before_the_verdict_has_neither_committed_nor_refused(
    tmp_path: Path, agent: FakeAgent
) -> None:
    """So the files stay: the record may name them."""
    writer = new_writer(tmp_path, agent)
    agent.is_mute = True
    agent.on_publish = lambda _asked: agent.end()
    with pytest.raises(AgentGoneError, match="the agent has exited"):
        write(writer, 10)
    assert names(tmp_path) == [agent.asked[0]["private"]]
    with pytest.raises(AgentGoneError, match="the agent has exited"):
        write(writer, 20)


def test_a_disk_that_fails_after_the_commit_leaves_the_rename_to_the_next_reader(
    tmp_path: Path, agent: FakeAgent, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    writer = new_writer(tmp_path, agent, keep=1)
    assert write(writer, 10)

    def fail(_source: Path, _target: Path) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with monkeypatch.context() as patch:
        patch.setattr(os, "rename", fail)
        assert write(writer, 20)
    assert "is committed but could not be renamed" in capsys.readouterr().err
    assert names(tmp_path) == [agent.asked[1]["private"], *stems(10)]
    assert write(new_writer(tmp_path, agent, group=2, keep=2), 30)
    assert names(tmp_path) == [*stems(20), *stems(30, group=2)]


CHILD = """
import os, signal, sys, threading
from pathlib import Path
import torch
from trainer_runtime.agent_channel import AgentChannel
from trainer_runtime.resume import start_under_agent
from trainer_runtime.writer import Content, Writer
directory, channel = Path(sys.argv[1]), AgentChannel(int(sys.argv[2]))
start = start_under_agent(directory, "us", channel, fresh=True)
writer = Writer(directory, "us", 1, keep=1, start=start, channel=channel)
def write(step):
    writer.write(Content({"w": torch.ones(3)}), step=step, world_size=2, metrics={})
    return writer.finish()
write(10)
rename = os.rename
def rename_later(source, target):
    signal.pthread_kill(threading.get_ident(), signal.SIG%s)  # this thread goes no further
    rename(source, target)
os.rename = rename_later
assert write(20)
print("done")
"""


def stopped_publisher(directory: Path, agent: FakeAgent, what: str) -> subprocess.Popen[str]:
    """A process that has committed step 20 of group 1 and was struck before the rename."""
    fd = agent.theirs.fileno()
    return subprocess.Popen(
        [sys.executable, "-c", CHILD % what, str(directory), str(fd)],
        pass_fds=[fd],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_a_publisher_killed_between_yes_and_rename_has_published(tmp_path: Path, agent: FakeAgent) -> None:
    with stopped_publisher(tmp_path, agent, "KILL") as publisher:
        assert publisher.wait(BOUND_S) == -signal.SIGKILL
    assert names(tmp_path) == [agent.asked[1]["private"], *stems(10)]
    found = start_under_agent(tmp_path, "us", agent.open(), fresh=True).found
    assert found
    assert found.manifest.step == 20
    assert names(tmp_path) == stems(10, 20)  # what is superseded goes with the next commit
    assert write(new_writer(tmp_path, agent, group=2, keep=1), 30)
    assert names(tmp_path) == stems(30, group=2)


def test_a_publisher_that_wakes_after_it_was_superseded_touches_nothing(tmp_path: Path, agent: FakeAgent) -> None:
    """It keeps one checkpoint only, and sleeps between yes and rename while a later group supersedes that one."""
    with stopped_publisher(tmp_path, agent, "STOP") as publisher:
        os.waitid(os.P_PID, publisher.pid, os.WSTOPPED)
        assert write(new_writer(tmp_path, agent, group=2, keep=1), 30)
        assert names(tmp_path) == stems(30, group=2)
        publisher.send_signal(signal.SIGCONT)
        out, err = publisher.communicate(timeout=BOUND_S)
        assert (publisher.returncode, out) == (0, "done\n"), err
    assert "was renamed, or superseded, by a later group" in err
    assert names(tmp_path) == stems(30, group=2)
    assert start_under_agent(tmp_path, "us", agent.open(), fresh=True).found


WAIT = """
import sys
from pathlib import Path
from trainer_runtime.agent_channel import AgentChannel
from trainer_runtime.resume import StartingPoint
from trainer_runtime.writer import Content, Writer
writer = Writer(Path(sys.argv[1]), "us", 1, keep=1, start=StartingPoint(), channel=AgentChannel(int(sys.argv[2])))
writer.write(Content({}), step=1, world_size=1, metrics={})
writer.finish()
"""


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, -signal.SIGTERM), (signal.SIGINT, -signal.SIGINT)])
def test_a_wait_for_the_verdict_ends_by_a_signal(tmp_path: Path, agent: FakeAgent, number: int, code: int) -> None:
    agent.is_mute = True
    asks = threading.Event()
    agent.on_publish = lambda _asked: asks.set()
    fd = agent.theirs.fileno()
    command = [sys.executable, "-c", WAIT, str(tmp_path), str(fd)]
    with subprocess.Popen(command, pass_fds=[fd], stderr=subprocess.DEVNULL) as publisher:
        assert asks.wait(BOUND_S)
        publisher.send_signal(number)
        assert publisher.wait(BOUND_S) == code
    assert names(tmp_path) == [agent.asked[0]["private"]]


def test_the_longest_question_fits_into_a_message(agent: FakeAgent) -> None:
    """A run's name is short; one of 100 letters is more than generous."""
    run = "r" * 100
    stem = stem_of(run, 10**9, 10**12)
    many = tuple(private_name(stem) for _ in range(contract.MAX_KEEP))
    asked = CommittedCheckpoint(
        copy=StateId(run, 10**9, 10**12),
        name=stem,
        private=private_name(stem),
        manifest_sha256="0" * 64,
        kept=many[1:],
        superseded=(*many, *many),
    )
    assert agent.open().publish(asked).checkpoint == asked
    with pytest.raises(ValueError, match="at most 65536 bytes"):
        agent.open().publish(replace(asked, superseded=many * 9))


def test_lists_of_what_cannot_be_deleted_do_not_grow_without_end(
    tmp_path: Path, agent: FakeAgent, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trainer_runtime.writer.MAX_KEEP", 2)
    monkeypatch.setattr("trainer_runtime.writer.delete_superseded", lambda _path: False)
    writer = Writer(tmp_path, "us", 1, keep=1, start=StartingPoint(), channel=agent.open())
    for step in range(1, 8):
        assert write(writer, step)
    assert [len(asked["superseded"]) for asked in agent.asked] == [0, 1, 2, 3, 3, 3, 3]
