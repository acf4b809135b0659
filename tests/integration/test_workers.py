"""Real rank processes: how they start, end, are stopped, and how their output is handled."""

from __future__ import annotations

import os
import queue
import re
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs
from waiting import wait_for

from agent.core.events import Event, WorkerExited, WorkersGone
from agent.workers import process
from agent.workers.launch_plan import Launch, RankCommand
from agent.workers.worker_group import WorkerGroup
from trainer_runtime import contract

DEADLINE_S = 60


class Bench:
    """Local workers and the events that they post."""

    def __init__(self, tmp: Path) -> None:
        self.tmp = tmp
        self.events: queue.Queue[Event] = queue.Queue()
        self.workers = WorkerGroup(self.events.put)

    def log(self, group: int = 1, rank: int = 0) -> Path:
        return self.tmp / "logs" / f"{group}-{rank}.log"

    def command(self, rank: int, *argv: str, group: int = 1, **changed: object) -> RankCommand:
        made = {
            "local_rank": rank,
            "rank": rank,
            "argv": argv,
            "env": dict(os.environ),
            "cwd": self.tmp,
            "log_path": self.log(group, rank),
            "console_prefix": None,
        }
        return RankCommand(**made | changed)  # type: ignore[arg-type]

    def start(self, *scripts: str, group: int = 1, **changed: object) -> None:
        commands = [
            self.command(rank, "/bin/sh", "-c", script, group=group, **changed) for rank, script in enumerate(scripts)
        ]
        self.workers.start(Launch(group, tuple(commands)))

    def exited(self) -> WorkerExited:
        event = self.events.get(timeout=DEADLINE_S)
        assert isinstance(event, WorkerExited)
        return event

    def gone(self) -> WorkersGone:
        event = self.events.get(timeout=DEADLINE_S)
        assert isinstance(event, WorkersGone)
        return event

    def wait_log(self, text: str, group: int = 1, rank: int = 0) -> None:
        path = self.log(group, rank)
        wait_for(lambda: path.exists() and text in path.read_text(), f"{text!r} in {path}")


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    made = Bench(tmp_path)
    yield made
    made.workers.close()


@pytest.mark.parametrize(
    ("script", "exit_code", "number"),
    [
        ("exit 0", 0, None),
        ("exit 3", 3, None),
        ("kill -KILL $$", None, signal.SIGKILL),
        ("kill -SEGV $$", None, signal.SIGSEGV),
        ("kill -TERM $$", None, signal.SIGTERM),
        ("kill -INT $$", None, signal.SIGINT),
        ("kill -PIPE $$", None, signal.SIGPIPE),
    ],
)
def test_an_exit_is_reported_with_its_code_or_signal(
    bench: Bench, script: str, exit_code: int | None, number: int | None
) -> None:
    bench.start(script)
    event = bench.exited()
    assert (event.group, event.local_rank, event.exit_code, event.signal) == (1, 0, exit_code, number)
    assert abs(event.at - time.time()) < DEADLINE_S
    assert bench.gone() == WorkersGone(1)


def test_the_tail_is_the_last_lines_of_stderr(bench: Bench) -> None:
    bench.start("echo out; seq 1 30 >&2; printf 'bar 1\\rbar 2\\rbar 3\\nlast words' >&2; exit 1")
    tail = bench.exited().stderr_tail
    assert tail.splitlines() == [*map(str, range(13, 31)), "bar 3", "last words"]


def test_the_step_comes_from_the_control_page(bench: Bench) -> None:
    code = (
        "import os, sys; from trainer_runtime import contract\n"
        "page = contract.ControlPage(int(os.environ[contract.CONTROL_FD]))\n"
        "assert page.version == contract.PAGE_VERSION; page.step = 7"
    )
    bench.workers.start(Launch(1, (bench.command(0, sys.executable, "-c", code, cwd=Path.cwd()),)))
    event = bench.exited()
    assert (event.exit_code, event.step, bench.workers.live_ranks()[1][0].step) == (0, 7, 7), event.stderr_tail


def test_a_worker_gets_its_environment_directory_and_nothing_else(bench: Bench) -> None:
    big = {f"BIG_{n}": "x" * 100_000 for n in range(4)}  # more than a packet holds
    odd = {"ODD": os.fsdecode(b"\xff\xfe caf\xc3\xa9")}
    env = {"PATH": os.environ["PATH"], "A": "1", **big, **odd}
    bench.start("pwd; env | cut -c1-40; ls /proc/self/fd; cat", env=env)  # cat ends: standard input is empty
    assert bench.exited().exit_code == 0
    bench.gone()
    lines = bench.log().read_bytes().splitlines()
    assert lines[0] == os.fsencode(bench.tmp)
    assert {b"A=1", b"BIG_3=" + b"x" * 34, b"ODD=\xff\xfe caf\xc3\xa9"} <= set(lines)
    names = {line.partition(b"=")[0].decode() for line in lines if b"=" in line}
    assert names - {*env, "PWD", "_", "OLDPWD", "SHLVL"} == {
        contract.CONTROL_FD,
        contract.CHANNEL_FD,
        contract.STACKS_FD,
        contract.OVER_FD,
        process.GUARDIAN_MARK,
    }
    known = "0, 1, 2, the control page, the channel, the stacks, the event of a group's end, and ls's own"
    assert len([line for line in lines if line.isdigit()]) == 8, known


def test_the_kernel_would_kill_the_rank_before_the_agent(bench: Bench) -> None:
    bench.start("cat /proc/self/oom_score_adj")
    bench.exited()
    bench.gone()
    own = int(Path("/proc/self/oom_score_adj").read_text())
    assert int(bench.log().read_text()) == min(1000, own + 300)


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        ({"argv": ("no-such-program",)}, "cannot run no-such-program: No such file or directory"),
        ({"argv": ("/etc/passwd",)}, "cannot run /etc/passwd: Permission denied"),
        ({"cwd": Path("/no/such/place")}, "cannot enter the directory /no/such/place: No such file"),
    ],
)
def test_a_command_that_cannot_be_started_ends_with_127_and_the_reason(
    bench: Bench, changed: dict[str, Any], why: str
) -> None:
    bench.workers.start(Launch(1, (bench.command(0, "true", **changed),)))
    event = bench.exited()
    assert (event.exit_code, event.signal) == (127, None)
    assert why in event.stderr_tail
    bench.gone()


def test_a_guardian_that_cannot_be_spawned_is_an_exit_not_an_exception(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "executable", "/no/such/python")
    bench.start("exit 0", "exit 0")
    for _ in range(2):
        event = bench.exited()
        assert event.exit_code == 127
        assert "/no/such/python" in event.error
    bench.gone()
    monkeypatch.undo()
    bench.start("exit 0", group=2)
    assert bench.exited().exit_code == 0


def test_eight_ranks_end_one_by_one_and_are_gone_once(bench: Bench) -> None:
    for group in (1, 2):
        bench.start(*(f"exit {rank}" for rank in range(8)), group=group)
        exits = [bench.exited() for _ in range(8)]
        assert sorted((event.local_rank, event.exit_code) for event in exits) == [(n, n) for n in range(8)]
        assert bench.gone() == WorkersGone(group)
    assert bench.events.empty()


def test_groups_leave_no_descriptors_behind(bench: Bench) -> None:
    def open_fds() -> int:
        return len(list(Path("/proc/self/fd").iterdir()))

    before = open_fds()
    for group in range(1, 5):
        bench.start("exit 0", "exit 0", group=group)
        bench.exited()
        bench.exited()
        bench.gone()
        # One descriptor per control page remains: the pages stay readable until the next start.
        wait_for(lambda: open_fds() <= before + 2, "the guardians to be reaped")


def test_no_group_starts_while_an_older_one_lives(bench: Bench) -> None:
    bench.start("exit 0", "sleep 1000")
    bench.exited()
    with pytest.raises(RuntimeError, match="workers of group 1 are alive"):
        bench.start("exit 0", group=2)
    bench.workers.kill(1)
    bench.exited()
    bench.gone()
    bench.start("exit 4", group=2)
    assert bench.exited().exit_code == 4
    assert bench.gone().group == 2


def test_terminate_lets_a_worker_handle_sigterm(bench: Bench) -> None:
    bench.start("trap 'exit 5' TERM; echo ready; while :; do sleep 0.01; done")
    bench.wait_log("ready")
    bench.workers.terminate(1)
    assert bench.exited().exit_code == 5


def test_a_worker_that_does_not_use_handoffs_is_terminated_at_once(bench: Bench) -> None:
    """Also if a handoff was requested: only a worker that reports that it is quiesced is waited for."""
    bench.start("echo ready; exec sleep 1000")
    bench.wait_log("ready")
    bench.workers.request_handoff(1, 1)
    bench.workers.terminate(1)
    assert bench.exited().signal == signal.SIGTERM


def test_sigterm_is_sent_once(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """However often it is requested, and whatever wakes the thread: many scripts give up at a second SIGTERM."""
    bench.start("exec sleep 1000")
    rank = bench.workers.ranks[0].process
    assert rank
    sent: list[bytes] = []
    monkeypatch.setattr(rank, "_send", sent.append)
    for _ in range(3):
        assert not rank.ask_to_end(), "nothing more is to be done"
    monkeypatch.undo()
    assert sent == [b"T"]


def test_a_terminate_right_after_the_start_is_not_lost(bench: Bench) -> None:
    bench.start("sleep 1000")
    bench.workers.terminate(1)
    assert bench.exited().signal == signal.SIGTERM


def test_kill_ends_a_worker_that_ignores_terminate(bench: Bench) -> None:
    bench.start("trap '' TERM; echo ready; while :; do sleep 0.01; done")
    bench.wait_log("ready")
    bench.workers.terminate(1)
    bench.wait_log("ready")
    bench.workers.kill(1)
    bench.workers.kill(1)
    assert bench.exited().signal == signal.SIGKILL
    bench.gone()


def test_orders_for_another_group_are_ignored(bench: Bench) -> None:
    bench.start("read line; exit 6", group=2)
    bench.workers.terminate(1)
    bench.workers.kill(3)
    assert bench.exited().exit_code == 6
    bench.workers.kill(2)
    bench.gone()


def test_a_grandchild_that_holds_the_output_open_delays_nothing(bench: Bench) -> None:
    bench.start("sleep 1000 & echo words; exit 7")
    event = bench.exited()
    assert event.exit_code == 7
    bench.gone()
    assert time.time() - event.at < DEADLINE_S / 2
    assert bench.log().read_text() == "words\n"


def test_a_log_is_complete_and_appended_to(bench: Bench) -> None:
    bench.log().parent.mkdir()
    bench.log().write_text("older\n")
    bench.start("seq 1 100000; echo error >&2")
    assert bench.exited().stderr_tail == "error\n"
    bench.gone()
    assert sorted(bench.log().read_text().split()) == sorted(["older", *map(str, range(1, 100_001)), "error"])


def test_the_page_counts_what_a_worker_writes(bench: Bench) -> None:
    """Output of both streams is counted while the worker runs: a script that prints does not hang."""
    os.mkfifo(bench.tmp / "fifo")
    bench.start("printf 12345; printf 678 >&2; read line < fifo; printf 9")
    rank = bench.workers.ranks[0].process
    assert rank
    wait_for(lambda: rank.page.output == 8, "the first output to be counted")
    (bench.tmp / "fifo").write_text("go\n")
    bench.exited()
    bench.gone()
    assert rank.page.output == 9


@pytest.mark.parametrize("log", [Path("/dev/full"), Path("/proc/no/such/place.log")])
def test_training_goes_on_without_a_log_that_cannot_be_written(bench: Bench, log: Path) -> None:
    with capture_logs() as said:
        bench.start("seq 1 50000; echo error >&2", log_path=log)
        event = bench.exited()
        bench.gone()
    assert (event.exit_code, event.stderr_tail) == (0, "error\n")
    assert len(said) == 1
    assert str(log) in said[0]["event"]


def test_a_gap_in_the_log_is_marked(bench: Bench) -> None:
    place = bench.log().parent
    place.write_text("a file where the directory should be")
    os.mkfifo(bench.tmp / "fifo")
    bench.start("echo lost; read line < fifo; echo kept")
    place.unlink()
    (bench.tmp / "fifo").write_text("go\n")
    bench.exited()
    bench.gone()
    assert re.fullmatch(r"(lost\n|\n\[elastic-agent: \d+ bytes could not be .*\]\n)kept\n", bench.log().read_text())
