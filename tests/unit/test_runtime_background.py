"""Writing while training goes on: what is written does not change, memory is bounded, and no error is lost."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch
from fake_agent import FakeAgent, start_without_agent

import trainer_runtime as tr
from trainer_runtime import writer
from trainer_runtime.manifest import stem_of
from trainer_runtime.resume import StartingPoint
from trainer_runtime.writer import Content, Writer

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

BOUND_S = 120.0


@pytest.fixture(autouse=True)
def _start(monkeypatch: pytest.MonkeyPatch) -> None:
    """Begin without an agent's variables."""
    start_without_agent(monkeypatch)


class Disk:
    """A disk that hangs until it is allowed to continue."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.goes = threading.Event()
        self.is_asked = threading.Event()
        self.written = 0
        self._write: Callable[..., Any] = writer.write_state
        monkeypatch.setattr(writer, "write_state", self._write_later)

    def _write_later(self, place: Path, content: dict[str, Any]) -> Any:  # noqa: ANN401 - passed on
        self.is_asked.set()
        assert self.goes.wait(BOUND_S)
        self.written += 1
        return self._write(place, content)


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Iterator[Disk]:
    slow = Disk(monkeypatch)
    yield slow
    slow.goes.set()


def load(directory: Path, stem: str) -> dict[str, Any]:
    content: dict[str, Any] = torch.load(directory / stem / "state.pt", weights_only=True)
    return content


def test_training_goes_on_while_a_checkpoint_is_written_and_does_not_change_it(tmp_path: Path, disk: Disk) -> None:
    model = torch.nn.Linear(1, 1, bias=False)
    history: list[int] = []
    state = tr.State(checkpoint_dir=tmp_path, save_every=2, model=model, history=history)
    state.restore()
    for step in range(1, 4):
        with torch.no_grad():
            model.weight.fill_(step)
        history.append(step)
        state.commit()
        assert disk.is_asked.is_set() == (step > 1) or disk.is_asked.wait(BOUND_S)
    disk.goes.set()
    state.save()
    saved = load(tmp_path, stem_of("local", 1, 2))
    assert (saved["objects"]["model"]["weight"].item(), saved["objects"]["history"]) == (2, [1, 2])


def test_the_next_save_waits_for_the_disk(tmp_path: Path, disk: Disk) -> None:
    """So there is one copy at most, however slow the disk is."""
    state = tr.State(checkpoint_dir=tmp_path, save_every=1, best=0.0)
    state.restore()
    state.commit()
    assert disk.is_asked.wait(BOUND_S)
    training = threading.Thread(target=state.commit)
    training.start()
    training.join(0.2)
    assert training.is_alive()
    assert disk.written == 0
    disk.goes.set()
    training.join(BOUND_S)
    assert not training.is_alive()
    state.save()
    assert disk.written == 2


def test_the_copy_is_released_while_the_verdict_is_awaited(tmp_path: Path) -> None:
    """An outage of etcd may take an hour."""
    agent, is_back = FakeAgent(), threading.Event()
    agent.on_publish = lambda _asked: is_back.wait(BOUND_S)
    released: list[bool] = []

    class Leased(Content):
        def release(self) -> None:
            released.append(True)

    ours = Writer(tmp_path, "us", 1, keep=2, start=StartingPoint(), channel=agent.open())
    ours.write(Leased({"w": torch.ones(3)}), step=1, world_size=1, metrics={})
    assert ours.why_busy(may_skip=True)
    assert released == [True]
    is_back.set()
    assert ours.finish()
    agent.close()


def test_a_verdict_that_is_late_already_is_not_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The moment that it may take counts from the question, not from the next save."""
    now, agent, is_back = [1000.0], FakeAgent(), threading.Event()
    monkeypatch.setattr(writer, "time", SimpleNamespace(monotonic=lambda: now[0], time=time.time))
    monkeypatch.setattr(writer, "_VERDICT_WAIT_S", BOUND_S)
    agent.on_publish = lambda _asked: is_back.wait(BOUND_S)
    ours = Writer(tmp_path, "us", 1, keep=2, start=StartingPoint(), channel=agent.open())
    ours.write(Content({}), step=1, world_size=1, metrics={})
    ours.wait_for_disk()
    now[0] += BOUND_S
    began = time.monotonic()
    assert ours.why_busy(may_skip=True)
    assert ours.why_busy(may_skip=True)
    assert time.monotonic() - began < BOUND_S / 2
    is_back.set()
    assert ours.finish()
    agent.close()


def test_a_wait_for_the_verdict_may_be_bounded(tmp_path: Path) -> None:
    agent, is_back = FakeAgent(), threading.Event()
    agent.on_publish = lambda _asked: is_back.wait(BOUND_S)
    ours = Writer(tmp_path, "us", 1, keep=2, start=StartingPoint(), channel=agent.open(), node="node-b")
    ours.write(Content({}), step=1, world_size=1, metrics={}, handoff=3)
    ours.wait_for_disk()
    assert not ours.finish(within_s=0.05)
    is_back.set()
    assert ours.finish(within_s=BOUND_S)
    assert (agent.asked[0]["handoff"], agent.asked[0]["node"]) == (3, "node-b")
    agent.close()


def test_an_error_in_the_background_is_reported_at_once_and_raised_to_the_waiting_caller(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*_args: object) -> None:
        raise OSError(30, "Read-only file system")

    ours = Writer(tmp_path, "us", 1, keep=2, start=StartingPoint())
    with monkeypatch.context() as patch:
        patch.setattr(writer, "write_state", fail)
        ours.write(Content({}), step=7, world_size=1, metrics={})
        ours.wait_for_disk()
        assert capsys.readouterr().err == (
            f"trainer_runtime: step 7 was NOT saved in {tmp_path}: [Errno 30] Read-only file system; what was "
            "saved before is kept, and later saves are tried as usual\n"
        )
        with pytest.raises(OSError, match="Read-only"):
            ours.finish()
    ours.write(Content({}), step=8, world_size=1, metrics={})
    assert ours.finish()
    assert [path.name for path in tmp_path.iterdir()] == [stem_of("us", 1, 8)]


def test_a_fault_of_the_program_is_not_taken_for_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_args: object) -> None:
        raise ZeroDivisionError

    state = tr.State(checkpoint_dir=tmp_path, save_every=1, best=0.0)
    state.restore()
    monkeypatch.setattr(writer, "write_state", fail)
    state.commit()
    with pytest.raises(ZeroDivisionError):
        state.commit()


def test_hooks_see_the_step_that_is_saved(tmp_path: Path, disk: Disk) -> None:
    """They look at live objects, so they run before training goes on."""
    state = tr.State(checkpoint_dir=tmp_path, save_every=1, best=0.0)
    state.on_save(lambda path: (path / "best").write_text(str(state.best)))
    state.restore()
    state.best = 1.0
    state.commit()
    state.best = 2.0
    disk.goes.set()
    state.save()
    assert (tmp_path / stem_of("local", 1, 1) / "extra" / "best").read_text() == "1.0"


def test_a_checkpoint_is_loaded_without_this_package(tmp_path: Path) -> None:
    """In a notebook, say."""
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Sequential(torch.nn.Linear(2, 1)))
    state = tr.State(checkpoint_dir=tmp_path, model=model, chance=torch.Generator(), best=0.5)
    state.restore()
    state.commit()
    state.save()
    check = (
        "import sys, torch\n"
        "saved = torch.load(sys.argv[1], weights_only=True)\n"
        "net = torch.nn.Sequential(torch.nn.Linear(2, 1))\n"
        "net.load_state_dict(saved['objects']['model'])\n"
        "print(saved['objects']['best'], saved['position']['step'], saved['world_size'], len(saved['ranks']))\n"
        "print(net[0].weight.flatten().tolist(), 'trainer_runtime' in sys.modules)\n"
    )
    path = tmp_path / stem_of("local", 1, 1) / "state.pt"
    done = subprocess.run([sys.executable, "-c", check, path], check=True, capture_output=True, text=True)
    assert done.stdout.splitlines() == ["0.5 1 1 1", f"{model.module[0].weight.flatten().tolist()} False"]


ENDS = """
import sys, time, torch
import trainer_runtime as tr
from trainer_runtime import writer
write = writer.write_state
def write_slowly(*args):
    time.sleep(0.5)
    return write(*args)
writer.write_state = write_slowly
writer._EXIT_WITHIN_S = 60.0  # on a busy machine it takes longer than half a second
tr.init()
state = tr.State(checkpoint_dir=sys.argv[1], save_every=1, best=0.0)
state.restore()
state.commit()
sys.exit(5)
"""


def test_a_script_that_ends_has_not_lost_what_is_being_written(tmp_path: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "RANK"}
    done = subprocess.run(
        [sys.executable, "-c", ENDS, tmp_path], env=environment, check=False, capture_output=True, timeout=BOUND_S
    )
    assert (done.returncode, done.stderr) == (5, b"")
    assert [path.name for path in tmp_path.iterdir()] == [stem_of("local", 1, 1)]
