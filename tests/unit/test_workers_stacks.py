"""What is read from stacks: which ranks wait for others, and where a rank is."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from waiting import wait_for

from agent.diagnose import stacks
from agent.diagnose.stacks import Dump, Frame, Stacks, StacksFile, dump_ranks, parse_faulthandler

PYTHON = "/usr/lib/python3.12"
TORCH = "/opt/venv/lib/python3.12/site-packages/torch"

DUMP = f"""Thread 0x00007faabbffd6c0 [leave-process-g] (most recent call first):
  File "{PYTHON}/threading.py", line 327 in wait
  File "{PYTHON}/threading.py", line 1002 in _bootstrap

Current thread 0x00007fa7f1049b80 [python] (most recent call first):
  File "{TORCH}/autograd/graph.py", line 979 in _engine_run_backward
  File "{TORCH}/_tensor.py", line 623 in backward
  File "/home/me/my project/train.py", line 19 in main
  File "/home/me/my project/train.py", line 40 in <module>
"""
"""As faulthandler writes it: the newest thread first, so the main thread is last."""


def frames(*paths: str) -> Stacks:
    return Stacks(tuple(Frame(path, 1, "f") for path in paths))


def test_the_main_thread_comes_first_and_its_innermost_frame() -> None:
    read = parse_faulthandler(DUMP)
    assert [frame.function for frame in read.main] == ["_engine_run_backward", "backward", "main", "<module>"]
    assert read.where == "train.py:19 in main"
    lines = read.text.splitlines()
    assert lines[0].startswith("Current thread")
    assert "_engine_run_backward" in lines[1]
    assert lines[-1].endswith("in _bootstrap")
    assert parse_faulthandler("") == Stacks()
    assert parse_faulthandler("Fatal Python error\n") == Stacks()
    assert parse_faulthandler("Current thread 0x01 (most recent call first):\n  <no Python frame>\n").main == ()


def test_a_stack_is_cut_at_4_kb() -> None:
    deep = "Current thread 0x01 (most recent call first):\n" + '  File "/home/me/train.py", line 7 in dig\n' * 1000
    assert len(parse_faulthandler(deep).text) == 4096
    assert parse_faulthandler(deep).where == "train.py:7 in dig"


@pytest.mark.parametrize(
    ("paths", "where"),
    [
        (["/home/me/train.py"], "train.py:1 in f"),
        ([f"{TORCH}/nn/modules/linear.py", "/home/me/net.py", "/home/me/train.py"], "net.py:1 in f"),
        (["/work/site-packages/../trainer_runtime/rank_messages.py", "/home/me/train.py"], "train.py:1 in f"),
        (["<frozen runpy>", "<string>"], "<string>:1 in f"),
        ([f"{PYTHON}/threading.py", f"{TORCH}/run.py"], "run.py:1 in f"),
        ([], ""),
    ],
)
def test_the_location_is_the_innermost_line_of_the_users_code(paths: list[str], where: str) -> None:
    assert frames(*paths).where == where


@pytest.mark.parametrize(
    ("state", "innermost", "doing"),
    [
        ("S", f"{TORCH}/autograd/graph.py", "waits"),
        ("R", f"{TORCH}/autograd/graph.py", "runs"),
        ("S", f"{TORCH}/distributed/distributed_c10d.py", "waits"),
        ("R", f"{TORCH}/distributed/distributed_c10d.py", "waits"),
        ("S", f"{TORCH}/nn/parallel/distributed.py", "waits"),
        ("S", f"{TORCH}/distributed/_functional_collectives.py", "waits"),
        ("R", f"{TORCH}/distributed/tensor/_dispatch.py", "runs"),
        ("S", "/opt/lib/trainer_runtime/rank_messages.py", "waits"),
        ("S", "/opt/lib/trainer_runtime/writer.py", "sleeps"),
        ("S", f"{TORCH}/nn/modules/linear.py", "sleeps"),
        ("R", "/home/me/train.py", "runs"),
        ("S", "/home/me/train.py", "sleeps"),
        ("S", "", "sleeps"),
        ("T", f"{TORCH}/autograd/graph.py", "stopped"),
        ("t", "/home/me/train.py", "stopped"),
        ("D", "/home/me/train.py", "disk"),
    ],
)
def test_the_activity_follows_from_the_kernels_state_and_the_innermost_frame(
    state: str, innermost: str, doing: str
) -> None:
    inner = [innermost] if innermost else []
    assert stacks._doing(state, frames(*inner, "/home/me/train.py") if inner else Stacks()) == doing


def test_user_code_called_by_torch_does_not_wait() -> None:
    """A model's own forward, called by DDP, and the user's backward function."""
    for outer in (f"{TORCH}/nn/parallel/distributed.py", f"{TORCH}/autograd/graph.py"):
        assert stacks._doing("S", frames("/home/me/net.py", outer, "/home/me/train.py")) == "sleeps"


def test_a_rank_is_unchanged_with_the_same_stack_and_no_processor_time() -> None:
    before = Dump("sleeps", frames("/home/me/train.py"), (5.0, 5.01), at=100.0)
    later = replace(before, cpu_s=(5.01, 5.02), at=130.0)
    assert later.is_unchanged_since(before)
    assert replace(later, cpu_s=(5.3, 5.3)).is_unchanged_since(before), "hardly any"
    assert not replace(later, cpu_s=(5.4, 5.4)).is_unchanged_since(before)
    assert not replace(later, stacks=frames("/home/me/other.py")).is_unchanged_since(before)
    assert not replace(later, doing="stopped").is_unchanged_since(before)


@pytest.fixture
def rank() -> Iterator[SimpleNamespace]:
    """The attributes that `dump_ranks` needs of a rank, with a process that handles no signal."""
    program = "import time; print(flush=True); time.sleep(1000)"
    process = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE)
    assert process.stdout is not None
    process.stdout.readline()  # otherwise it might be asleep during its start
    wait_for(lambda: stacks._stat(process.pid)[0] == "S", "it sleeps")
    made = SimpleNamespace(
        worker_pid=process.pid,
        guardian_pid=os.getpid(),
        exited=None,
        stacks=StacksFile("test"),
        page=SimpleNamespace(stacks=int(signal.SIGRTMAX), answered=0, unfinished=None),
        ask_unfinished=lambda: 1,
        process=process,
    )
    yield made
    process.kill()
    process.communicate()
    made.stacks.close()


def test_a_signal_that_would_kill_is_not_sent(rank: SimpleNamespace) -> None:
    """The control page may be wrong: the process may have executed another program since then."""
    for number in (int(signal.SIGRTMAX), int(signal.SIGKILL), 10_000):
        rank.page.stacks = number
        [seen] = dump_ranks([rank])
        assert seen.doing == "sleeps"
    assert rank.process.poll() is None


def test_a_process_that_has_ended_is_dumped_without_error(rank: SimpleNamespace) -> None:
    rank.process.kill()
    rank.process.wait()
    [seen] = dump_ranks([rank])
    assert seen.stacks == Stacks()
    rank.exited = object()
    assert [seen.doing for seen in dump_ranks([rank])] == ["exited"]


def test_py_spy_is_given_up_when_it_hangs(
    rank: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    program = tmp_path / "py-spy"
    program.write_text("#!/bin/sh\nexec sleep 1000\n")
    program.chmod(0o700)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setattr(stacks, "_PY_SPY_WITHIN_S", 0.2)
    assert stacks._read_with_py_spy([rank.worker_pid]) == {}
    wait_for(lambda: "reap-py-spy" not in {thread.name for thread in threading.enumerate()}, "it is reaped")


def test_without_py_spy_only_the_kernels_state_is_known(rank: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stacks.shutil, "which", lambda *_args, **_named: None)
    [seen] = dump_ranks([rank])
    assert (seen.doing, seen.stacks) == ("sleeps", Stacks())
