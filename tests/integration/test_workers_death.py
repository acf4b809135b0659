"""Whatever dies, and however: no process of a worker is left, even in another session or without its parent."""

from __future__ import annotations

import os
import queue
import secrets
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from structlog.testing import capture_logs
from waiting import wait_for

from agent.core.events import Event, WorkerExited, WorkersGone
from agent.workers.launch_plan import Launch, RankCommand
from agent.workers.worker_group import WorkerGroup

DEADLINE_S = 60

FAMILY = """
sleep 1000.{token} &
setsid sleep 1000.{token} &
(setsid sh -c 'sleep 1000.{token} & exit 0')
env -i sleep 1000.{token} &
"""
"""A child, one in its own session, a daemon (forked twice), and one without the worker's environment."""
HIDDEN = "env -i setsid sleep 1000.{token} &\n"
"""In its own session and without the worker's environment: only its place in the process tree identifies it."""


class Bench:
    """One rank whose processes all have a token in their command line."""

    def __init__(self, tmp: Path) -> None:
        self.tmp = tmp
        self.token = str(10**9 + secrets.randbelow(10**9))
        self.events: queue.Queue[Event] = queue.Queue()
        self.workers = WorkerGroup(self.events.put)

    def start(self, script: str) -> None:
        argv = ("sh", "-c", script.format(token=self.token))
        log = self.tmp / "rank.log"
        self.workers.start(Launch(1, (RankCommand(0, 0, argv, os.environ, self.tmp, log, None),)))

    @property
    def guardian_pid(self) -> int:
        process = self.workers.ranks[0].process
        assert process
        return process.guardian_pid

    def exited(self) -> WorkerExited:
        event = self.events.get(timeout=DEADLINE_S)
        assert isinstance(event, WorkerExited)
        return event

    def gone(self) -> None:
        assert self.events.get(timeout=DEADLINE_S) == WorkersGone(1)

    def alive(self) -> set[int]:
        """Return the processes of the rank. Zombies have no command line, so they are not included."""
        return set(with_in_cmdline(self.token))

    def wait_alive(self, count: int) -> None:
        wait_for(lambda: len(self.alive()) == count, f"{count} processes, not {len(self.alive())}")


def with_in_cmdline(text: str) -> Iterator[int]:
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if text.encode() in path.read_bytes():
                yield int(path.parent.name)
        except (FileNotFoundError, ProcessLookupError):
            pass


def children(pid: int) -> list[str]:
    """Return the states of the direct children; Z is a zombie."""
    listed = subprocess.run(["ps", "-o", "stat=", "--ppid", str(pid)], capture_output=True, text=True, check=False)
    return listed.stdout.split()


def own_children() -> set[int]:
    """Return the children of this process, including zombies."""
    return {child.pid for child in psutil.Process().children()}


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    made = Bench(tmp_path)
    yield made
    made.workers.close()
    assert not made.alive()


def test_processes_that_a_worker_leaves_are_killed_when_it_ends(bench: Bench) -> None:
    bench.start(FAMILY + HIDDEN + "while [ ! -e go ]; do sleep 0.02; done; exit 3")
    bench.wait_alive(6)
    (bench.tmp / "go").touch()
    assert bench.exited().exit_code == 3
    bench.gone()
    assert not bench.alive()


def test_processes_left_by_a_successful_worker_are_reported(bench: Bench) -> None:
    with capture_logs() as said:
        bench.start("RANK=0; sleep 1000.{token} & exit 0")
        assert bench.exited().exit_code == 0
        bench.gone()
    (told,) = [each["event"] for each in said]
    assert "ended with code 0 and left process " in told
    # A shell that has forked may not have executed the program yet.
    assert f"sleep 1000.{bench.token}" in told
    assert ", which is killed: a rank lasts as long as" in told


def test_kill_takes_the_whole_tree(bench: Bench) -> None:
    bench.start(FAMILY + HIDDEN + "wait")
    bench.wait_alive(6)
    bench.workers.kill(1)
    assert bench.exited().signal == signal.SIGKILL
    bench.gone()
    assert not bench.alive()


def test_terminate_is_for_the_main_process_only(bench: Bench) -> None:
    bench.start("trap 'exit 5' TERM; sh -c 'trap \"\" TERM; touch ready {token}; while :; do sleep 0.01; done' & wait")
    wait_for((bench.tmp / "ready").exists, "the child to be ready")
    bench.workers.terminate(1)
    assert bench.exited().exit_code == 5
    bench.gone()
    assert not bench.alive()


def test_a_tree_that_keeps_forking_is_killed_too(bench: Bench) -> None:
    """Each process of the chain lives for a moment, and leaves the next one as an orphan."""
    chain = "i=0; while [ $i -lt 5 ]; do i=$((i+1)); sleep 0.01; done; sh chain.sh {token} & exit 0"
    (bench.tmp / "chain.sh").write_text(chain.format(token=bench.token))
    bench.start("sh chain.sh {token} & sh chain.sh {token} & sh chain.sh {token} & sleep 0.2; exit 0")
    assert bench.exited().exit_code == 0
    bench.gone()
    assert not bench.alive()


def test_orphans_that_end_while_the_worker_runs_are_reaped(bench: Bench) -> None:
    bench.start("for i in 1 2 3 4 5; do (sh -c 'true {token} & exit 0'); done; touch done; sleep 1000")
    wait_for((bench.tmp / "done").exists, "the worker to have made its orphans")
    wait_for(lambda: [state[0] for state in children(bench.guardian_pid)] == ["S"], "no zombie to be left")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT])
def test_the_guardian_ignores_signals_that_a_terminal_or_manager_sends_to_all(bench: Bench, number: int) -> None:
    bench.start("echo {token}; while [ ! -e go ]; do sleep 0.02; done; exit 8")
    bench.wait_alive(1)
    os.kill(bench.guardian_pid, number)
    (bench.tmp / "go").touch()
    assert bench.exited().exit_code == 8


def test_when_the_guardian_is_killed_the_agent_kills_what_it_guarded(bench: Bench) -> None:
    innocent = subprocess.Popen(["sleep", "1000"], start_new_session=True)
    before = own_children()
    bench.start(FAMILY + "wait")
    bench.wait_alive(5)
    os.kill(bench.guardian_pid, signal.SIGKILL)
    event = bench.exited()
    assert (event.exit_code, event.signal) == (None, signal.SIGKILL)
    assert "guardian" in event.stderr_tail
    bench.gone()
    assert not bench.alive()
    assert innocent.poll() is None, "a child of the agent's own was taken for an orphan"
    innocent.kill()
    innocent.wait()
    assert not own_children() - before, "no zombie is left"


def test_a_guardian_that_is_killed_right_away_is_an_exit_too(bench: Bench) -> None:
    bench.start(FAMILY + "wait")
    os.kill(bench.guardian_pid, signal.SIGKILL)
    assert bench.exited().signal == signal.SIGKILL
    bench.gone()
    assert not bench.alive()


AGENT = """
import os, sys, threading
from pathlib import Path
from agent.workers.worker_group import WorkerGroup
from agent.workers.launch_plan import Launch, RankCommand
tmp = Path(os.environ["TEST_DIR"])
argv = ("sh", "-c", os.environ["TEST_SCRIPT"])
workers = WorkerGroup(lambda event: None)
workers.start(Launch(1, tuple(
    RankCommand(rank, rank, argv, os.environ, tmp, tmp / f"{rank}.log", None) for rank in range(2)
)))
threading.Event().wait()
"""


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGSEGV])
def test_when_the_agent_dies_nothing_of_its_workers_lives_on(bench: Bench, number: int) -> None:
    script = (FAMILY + HIDDEN + "trap '' TERM HUP INT; wait").format(token=bench.token)
    env = {**os.environ, "TEST_DIR": str(bench.tmp), "TEST_SCRIPT": script}
    agent = subprocess.Popen([sys.executable, "-c", AGENT], env=env)
    bench.wait_alive(12)
    agent.send_signal(number)
    assert agent.wait(DEADLINE_S) == -number
    wait_for(lambda: not bench.alive(), "the workers and their descendants to die")


def test_when_the_agent_dies_before_the_worker_was_started_none_is(bench: Bench) -> None:
    """The guardian was spawned, but never got its order: it ends by itself."""
    code = AGENT.replace("workers.start", "RankProcess.start = lambda self: os._exit(4)\nworkers.start")
    code = "from agent.workers.process import RankProcess\n" + code
    env = {**os.environ, "TEST_DIR": str(bench.tmp), "TEST_SCRIPT": f"touch started; sleep 1000.{bench.token}"}
    agent = subprocess.run([sys.executable, "-c", code], env=env, timeout=DEADLINE_S, check=False)
    assert agent.returncode == 4
    wait_for(lambda: not list(with_in_cmdline(f"guardian.py\0{bench.token}")), "the guardian to end")
    assert not bench.alive()
    assert not (bench.tmp / "started").exists()


def test_close_kills_everything_and_returns_when_it_is_gone(bench: Bench) -> None:
    bench.start(FAMILY + HIDDEN + "trap '' TERM; wait")
    bench.wait_alive(6)
    bench.workers.close()
    assert not bench.alive()
    assert bench.exited().signal == signal.SIGKILL
    bench.gone()
    bench.workers = WorkerGroup(bench.events.put)
