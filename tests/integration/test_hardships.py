"""What a machine does to an agent: a stderr that takes nothing, faults inside, odd names, a private etcd that dies."""

from __future__ import annotations

import fcntl
import os
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import IO

import psutil
import pytest
from cases import some
from integration.conftest import PATIENT
from waiting import has_ended

from agent.local_etcd.embedded import EmbeddedEtcd
from agent.rehearse.cluster import LocalNode, wait_for

PATIENCE_S = 120
AGENT = [sys.executable, "-m", "agent"]
SCRIPT = """
import os, time
print("rank", os.environ["RANK"], "trains", flush=True)
while not os.path.exists("stop"):
    time.sleep(0.01)
"""


class Agent(LocalNode):
    """One agent, alone in its job, with two ranks that train until they are told to stop."""

    def __init__(self, directory: Path, process: subprocess.Popen[bytes]) -> None:
        super().__init__("a", process, directory / "out")
        self.directory = directory

    def wait_for_training(self) -> None:
        wait_for(lambda: len(self.workers()) == 2, PATIENCE_S, f"two workers; {self.text()}")

    def wait_for_text(self, text: str) -> None:
        wait_for(lambda: text in self.text(), PATIENCE_S, f"{text!r} in {self.text()}")

    def stop_training(self) -> None:
        (self.directory / "stop").touch()


Start = Callable[..., Agent]


@pytest.fixture
def start(tmp_path: Path, etcd: EmbeddedEtcd) -> Iterator[Start]:
    """Start an agent: `start(*options, argv=…, stderr=…)`. It is killed at the end, with its workers."""
    (tmp_path / "train.py").write_text(SCRIPT)
    started: list[Agent] = []

    def begin(
        *options: str, argv: list[str] = AGENT, stderr: IO[bytes] | int = subprocess.STDOUT, cluster: bool = True
    ) -> Agent:
        where = [f"--elastic_server={etcd.endpoint}", f"--job_id={os.getpid()}-{tmp_path.name}"] if cluster else []
        with (tmp_path / "out").open("ab") as output:
            process = subprocess.Popen(
                [*argv, *where, *PATIENT, "--nproc_per_node=2", "--node_id=a", *options, "train.py"],
                cwd=tmp_path,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=stderr,
                start_new_session=True,
            )
        started.append(Agent(tmp_path, process))
        return started[-1]

    yield begin
    for agent in started:
        agent.kill()


def succeeds(agent: Agent) -> None:
    agent.wait_for_training()
    agent.stop_training()
    assert agent.wait(PATIENCE_S) == 0, agent.text()


def test_a_full_disk_under_its_stderr_does_not_end_it(start: Start) -> None:
    with Path("/dev/full").open("wb") as full:
        succeeds(start(stderr=full))


def test_a_reader_of_its_stderr_that_has_gone_does_not_end_it(start: Start) -> None:
    read, write = os.pipe()
    agent = start(stderr=write)
    os.close(write)
    os.close(read)
    succeeds(agent)


def test_a_stderr_that_nobody_reads_does_not_hold_it_up(start: Start) -> None:
    """The pipe is full before its first line; also an error at its end is not waited for for ever."""
    read, write = os.pipe()
    os.write(write, b"x" * fcntl.fcntl(write, fcntl.F_GETPIPE_SZ))
    succeeds(start(stderr=write))
    assert start("--np=0", stderr=write).wait(PATIENCE_S) == 2
    os.close(read)
    os.close(write)


@pytest.mark.parametrize("closed", some(["<&- >&- 2>&-"], of=["<&-", ">&-", "2>&-", "<&- >&- 2>&-"]))
def test_a_standard_stream_that_is_closed_is_replaced(start: Start, closed: str) -> None:
    """Else a socket, or a log, would get its number and be written to."""
    agent = start(argv=["sh", "-c", f'exec {shlex.join(AGENT)} "$@" {closed}', "sh"])
    agent.wait_for_training()
    for process in (agent.process, *agent.guardians()):
        for number in range(3):
            assert not str(Path(f"/proc/{process.pid}/fd/{number}").readlink()).startswith(("socket:", "anon_inode:"))
    succeeds(agent)


def test_a_low_limit_of_open_files_is_the_workers_and_not_the_agents(start: Start) -> None:
    """A node with many ranks needs more than what is usual; what workers may have is for the user to say."""
    agent = start(argv=["sh", "-c", f'ulimit -Sn 32; exec {shlex.join(AGENT)} "$@"', "sh"])
    agent.wait_for_training()
    limits = [psutil.Process(worker.pid).rlimit(psutil.RLIMIT_NOFILE)[0] for worker in agent.workers()]
    assert limits == [32, 32]
    succeeds(agent)


def test_a_signal_that_was_ignored_at_its_start_stays_ignored(start: Start) -> None:
    """`nohup elastic-agent …` outlives its terminal."""
    agent = start(argv=["nohup", *AGENT])
    agent.wait_for_training()
    agent.process.send_signal(signal.SIGHUP)
    (ignored,) = (
        line for line in Path(f"/proc/{agent.process.pid}/status").read_text().splitlines() if "SigIgn" in line
    )
    assert int(ignored.split()[1], 16) & 1 << (signal.SIGHUP - 1)
    succeeds(agent)
    assert "succeeded" in agent.text()


FAULT = """
import pathlib, sys, threading, time

def fail_later(*arguments):
    if pathlib.Path("fail").exists():
        raise ZeroDivisionError("nobody foresaw this")
    return original(*arguments)

def wait_and_fail():
    while True:
        fail_later()
        time.sleep(0.01)

{place}
from agent.cli.command_line import main
main(sys.argv[1:])
"""
PLACES = {
    "store": "from agent.store.job_writer import JobWriter\noriginal, JobWriter.run = JobWriter.run, fail_later",
    "workers": "from agent.workers.process_watcher import ProcessWatcher as Watcher\n"
    "original, Watcher._take_packets = Watcher._take_packets, fail_later",
    "another": "original = lambda: None\nthreading.Thread(target=wait_and_fail, name='another', daemon=True).start()",
}


@pytest.mark.parametrize("place", some(["store"], of=PLACES))
def test_a_thread_that_ends_by_an_error_ends_the_agent_and_its_workers(start: Start, place: str) -> None:
    """An agent that does half of its work, and renews its lease, would hold its place for ever."""
    agent = start(argv=[sys.executable, "-c", FAULT.format(place=PLACES[place])])
    agent.wait_for_training()
    family, worker = agent.descendants(), agent.workers()[0]
    (agent.directory / "fail").touch()
    with suppress(psutil.NoSuchProcess):  # the agent may have ended by now
        worker.kill()
    assert agent.wait(PATIENCE_S) == 1, agent.text()
    assert all(has_ended(process.pid) for process in family)
    assert "ZeroDivisionError: nobody foresaw this\n" in agent.text()
    last = agent.text().splitlines()[-1]
    assert f"error: internal error in the thread {place}: ZeroDivisionError(" in last


def test_an_error_in_the_loop_ends_the_agent_and_its_workers(start: Start) -> None:
    place = "import agent.runtime.loop\noriginal, agent.runtime.loop.step = agent.runtime.loop.step, fail_later"
    agent = start(argv=[sys.executable, "-c", FAULT.format(place=place)])
    agent.wait_for_training()
    family = agent.descendants()
    (agent.directory / "fail").touch()
    assert agent.wait(PATIENCE_S) == 1, agent.text()
    assert all(has_ended(process.pid) for process in family)
    assert "ZeroDivisionError: nobody foresaw this\n" in agent.text()


def test_a_log_path_that_is_no_text_can_be_warned_of(start: Start, tmp_path: Path) -> None:
    """Its directory cannot be made: training goes on without the logs."""
    odd = tmp_path / os.fsdecode(b"caf\xe9")
    odd.write_text("a file where the directory should be")
    agent = start(f"--log_dir={odd}")
    agent.wait_for_text("training goes on without all of the log")
    assert r"caf\xe9" in agent.text()
    succeeds(agent)


def private_etcd(agent: Agent) -> psutil.Process | None:
    for child in psutil.Process(agent.process.pid).children():
        with suppress(psutil.NoSuchProcess):  # it has just been reaped
            if child.name() == "etcd":
                return child
    return None


def test_a_private_etcd_that_dies_is_brought_back(start: Start) -> None:
    """Training goes on, and ends with its result."""
    agent = start("--standalone", cluster=False)
    agent.wait_for_training()
    before = agent.workers()
    first = private_etcd(agent)
    assert first is not None
    first.kill()
    second = wait_for(lambda: (found := private_etcd(agent)) and found != first and found, PATIENCE_S, "another etcd")
    agent.wait_for_text("starting the private etcd again attempt=1")
    assert agent.workers() == before
    succeeds(agent)
    assert has_ended(second.pid)
    assert "succeeded" in agent.text()


def test_a_directory_that_is_replaced_is_begun_in_anew(start: Start, tmp_path: Path) -> None:
    """By another release of the script, say. The next group begins in what is there now."""
    agent = start()
    agent.wait_for_training()
    away = tmp_path.rename(tmp_path.with_name("away"))
    tmp_path.mkdir()
    (tmp_path / "train.py").write_text(SCRIPT)
    (away / "out").rename(tmp_path / "out")
    shutil.rmtree(away)
    before = {worker.pid for worker in agent.workers()}
    agent.kill_worker()
    wait_for(lambda: not before & {worker.pid for worker in agent.workers()}, PATIENCE_S, f"an end; {agent.text()}")
    succeeds(agent)


def test_a_private_etcd_that_cannot_be_brought_back_ends_the_agent(start: Start) -> None:
    """With code 69, and a line that says it."""
    program = (
        "from agent.local_etcd import embedded; embedded._RESTARTS = 0\nfrom agent.cli.command_line import main; main()"
    )
    agent = start("--standalone", argv=[sys.executable, "-c", program], cluster=False)
    agent.wait_for_training()
    family = agent.descendants()
    etcd = private_etcd(agent)
    assert etcd is not None
    etcd.kill()
    assert agent.wait(PATIENCE_S) == 69, agent.text()
    assert "error: the private etcd ended by itself (SIGKILL)" in agent.text().splitlines()[-1]
    assert all(has_ended(process.pid) for process in family)


def test_a_node_may_go_by_a_name(start: Start) -> None:
    """It stays a name. On loopback it is no matter for a warning as long as etcd is there too."""
    agent = start("--address=localhost")
    succeeds(agent)
    assert "warning" not in agent.text()
