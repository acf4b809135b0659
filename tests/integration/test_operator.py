"""The operator's commands on live jobs of three agents: the effect of each, and the answers to mistakes.

The questions are asked on a real terminal (a pseudo-terminal), and the etcd is a real one.
"""

from __future__ import annotations

import json
import os
import pty
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from integration.conftest import PATIENCE_S, Job, open_store
from waiting import freeze, wait_for

from agent.observe.status import JobStatus, job_status
from agent.operate.jobs import follow_job
from agent.rehearse.cluster import read_trace
from agent.store.keys import JobKeys

PLAIN = """
import os, time
while not os.path.exists("stop"):
    time.sleep(0.01)
"""


@dataclass(frozen=True)
class Answer:
    """The output of a command, and its exit code."""

    code: int
    out: str
    err: str

    @property
    def data(self) -> Any:  # noqa: ANN401 - what JSON holds
        return json.loads(self.out)


def argv_of(job: Job, command: str, *arguments: str) -> list[str]:
    where = [f"--elastic_server={job.server}", f"--job_id={job.job_id}"]
    return [sys.executable, "-m", "agent", command, *where, *arguments]


def ask(job: Job, command: str, *arguments: str) -> Answer:
    """Run a command without a terminal."""
    done = subprocess.run(
        argv_of(job, command, *arguments),
        cwd=job.directory,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    return Answer(done.returncode, done.stdout, done.stderr)


@contextmanager
def at_a_terminal(job: Job, command: str, *arguments: str) -> Iterator[tuple[subprocess.Popen[bytes], int]]:
    """Run a command on a terminal; what is written to the descriptor is the keyboard input."""
    ours, its_own = pty.openpty()
    process = subprocess.Popen(
        argv_of(job, command, *arguments),
        cwd=job.directory,
        stdin=its_own,
        stdout=its_own,
        stderr=its_own,
        start_new_session=True,
        env={**os.environ, "TERM": "xterm", "COLUMNS": "120"},
    )
    os.close(its_own)
    try:
        yield process, ours
    finally:
        process.kill()
        process.wait()
        os.close(ours)


def read_until(terminal: int, wanted: str) -> str:
    """Read the terminal's output up to the wanted text."""
    shown, give_up_at = "", time.monotonic() + PATIENCE_S
    while wanted not in shown:
        ready, _, _ = select.select([terminal], [], [], max(0.0, give_up_at - time.monotonic()))
        assert ready, f"{wanted!r} is not in {shown!r}"
        shown += os.read(terminal, 65536).decode(errors="replace")
    return shown


def wait_until(job: Job, what: str, holds: Callable[[JobStatus], bool], within_s: float = PATIENCE_S) -> JobStatus:
    """Follow the job until a condition holds for its status, and return the status."""
    store, give_up_at = open_store(job.server), time.monotonic() + within_s
    try:
        with follow_job(store, JobKeys(job.job_id)) as follower:
            while (view := follower.next(max(0.0, give_up_at - time.monotonic()))) is not None:
                status = job_status(job.job_id, view) if view.spec is not None else None
                if status is not None and holds(status):
                    return status
    finally:
        store.close()
    raise AssertionError(f"not within {within_s:g} s: {what}; {job.log_text()}")


def wait_for_ranks(job: Job, world_size: int) -> None:
    wait_until(job, f"a world of {world_size}", lambda status: status.world_size == world_size)


def wait_for_group(job: Job, number: int) -> None:
    wait_until(job, f"group {number}", lambda status: status.group == number)


def wait_for_members(job: Job, *names: str) -> JobStatus:
    """Wait until these nodes train, all of them beyond their first step."""

    def holds(status: JobStatus) -> bool:
        members = {node.node_id for node in status.nodes if node.ranks}
        return members == set(names) and status.state == "training" and "first step" in status.incident

    return wait_until(job, f"the first step of a group of {names}", holds, 2 * PATIENCE_S)


@pytest.fixture
def three(job: Callable[..., Job]) -> Job:
    """A job that commits its steps, on three nodes, past its first step."""
    live = job("--settle=60")  # all three at once
    live.epochs, live.step_time_s = 1000, 0.01
    for name in "abc":
        live.join(name, "2:3")
    wait_for_members(live, *"abc")
    return live


@contextmanager
def watched(job: Job) -> Iterator[tuple[subprocess.Popen[bytes], Path]]:
    """A program that follows the job's status, and the file with its output."""
    said = job.directory / "watched"
    environ = {**os.environ, "PYTHONFAULTHANDLER": "1"}
    with said.open("wb") as file:
        watching = subprocess.Popen(
            argv_of(job, "status", "--watch", "--json"), cwd=job.directory, stdout=file, env=environ
        )
    try:
        wait_for(said.read_text, "its first line", PATIENCE_S)
        yield watching, said
    finally:
        watching.send_signal(signal.SIGABRT)  # if it still runs, it prints where it hangs
        watching.wait()


@pytest.mark.long("integration/test_command_line.py, test_handoffs.py: each order by itself")
@pytest.mark.timeout(1200)
def test_a_day_of_an_operator(three: Job) -> None:
    """Every command on one job, each with its effect; no step is lost or replayed."""
    with watched(three) as (watching, said):
        exclude_and_include(three)
        restart_after_a_pause(three)
        drain(three)
        stop(three)
        assert watching.wait(PATIENCE_S) == 0, "it ends with the job"
    seen = [json.loads(line) for line in said.read_text().splitlines()]
    assert all(one != other for one, other in pairwise(seen)), "only changes are shown"
    assert (seen[0]["state"], seen[-1]["state"]) == ("training", "stopped")

    incidents = ask(three, "history", "--json").data
    assert [incident["cause"] for incident in incidents] == ["start", "drain", "join", "restart", "drain"]
    assert all(incident["replayed_steps"] == 0 for incident in incidents)
    told = ask(three, "explain", "5", "--json").data["sentences"]
    assert "No longer in the group: b." in told, told
    steps = [line.step for line in read_trace(three.trace)]
    assert len(set(steps)) == len(steps), "no step is done twice"
    # The example prints a step after its commit, and the last commit before the restart did not return.
    assert steps[-1] - len(steps) == 1, "no step is left out"
    assert ask(three, "reset", "-y").code == 0


def exclude_and_include(job: Job) -> None:
    assert ask(job, "exclude", "c", "--json").data["excluded"] == ["c"]
    status = wait_for_members(job, "a", "b")
    assert (status.excluded, status.cause) == (["c"], "drain: c was excluded by an operator")
    assert [node.note for node in status.nodes if node.node_id == "c"] == ["excluded"]
    assert job.nodes["c"].process.poll() is None, "its agent stays"
    assert ask(job, "include", "c").out == f"job {job.job_id}: c: included again\n"
    assert wait_for_members(job, *"abc").excluded == []


def restart_after_a_pause(job: Job) -> None:
    """Requested while the job is paused, done once it is resumed."""
    group = job.status()["group"]
    assert ask(job, "pause").code == 0
    refused = ask(job, "drain", "a")
    assert (refused.code, "is paused by" in refused.err, "resume it first" in refused.err) == (2, True, True), refused
    restart = ask(job, "restart", "--yes", "--json")
    assert (restart.data["group"], "takes effect once it is resumed" in restart.data["message"]) == (group, True), (
        restart
    )
    status = job.status()
    assert (status["group"], "paused by" in status["reason"], status["paused_by"] != "") == (group, True, True), status
    assert ask(job, "resume", "--json").data["paused_by"] == ""
    wait_for_group(job, group + 1)
    assert wait_for_members(job, *"abc").cause == "restart: an operator asked for a restart"


def drain(job: Job) -> None:
    gone = ask(job, "drain", "b", f"--wait={PATIENCE_S - 30}", "--json")  # it prints the result before it is killed
    assert (gone.code, gone.data["nodes"], gone.data["is_gone"]) == (0, ["b"], True), gone
    assert job.nodes["b"].wait(PATIENCE_S) == 0
    wait_for_members(job, "a", "c")


def stop(job: Job) -> None:
    stopped = ask(job, "stop", f"--wait={PATIENCE_S - 30}", "--yes", "--json")
    assert (stopped.code, stopped.data["has_ended"]) == (0, True), stopped
    assert [job.nodes[name].wait(PATIENCE_S) for name in "ac"] == [0, 0]
    status = job.status()
    assert (status["state"], status["exit_code"], status["stopped_by"] != "") == ("stopped", 0, True)
    kept = sorted(path.name for path in (job.directory / "checkpoints").rglob("*-g*-s*") if path.is_dir())
    assert kept, "what it has saved can be found without etcd's record of it"
    assert not any(name.startswith(".") for name in kept), kept


@pytest.mark.long("integration/test_incidents.py")
def test_a_failure_is_in_the_history_and_explained(three: Job) -> None:
    """A rank is killed: the table and the explanation name the rank, the node and the signal."""
    status = wait_for_members(three, *"abc")
    rank = next(node.ranks[0] for node in status.nodes if node.node_id == "b")
    killed = f"rank {rank} on b was killed by SIGKILL"
    three.nodes["b"].kill_worker()
    wait_for_group(three, 3)  # the others go on, and its node comes back
    wait_for_members(three, *"abc")
    table = ask(three, "history").out
    assert killed in table
    sentences = ask(three, "explain", "2").out
    assert f"\nFirst failure: {killed}.\n" in sentences
    assert "\nIt took " in sentences
    newest = ask(three, "explain").out
    assert "\nThe last failure or loss led to group 2: elastic-agent explain 2\n" in f"{newest}\n"
    line = f"elastic-agent[{status.leader}] group 2 after "
    says = three.nodes[status.leader or ""]
    wait_for(
        lambda: any(line in text and killed in text for text in says.text().splitlines()),
        f"the leader to say it; {three.log_text()}",
    )


@pytest.fixture
def plain(job: Callable[..., Job]) -> Iterator[Job]:
    """A job that only waits, on three nodes."""
    live = job("--settle=60")  # all three at once
    script = live.directory / "plain.py"
    script.write_text(PLAIN)
    for name in "abc":
        live.start(name, "2:3", [str(script)])
    wait_for_ranks(live, 3)
    yield live
    (live.directory / "stop").touch()
    live.finish()


MISTAKES = [
    (("drain",), "Missing argument 'NODE…'"),
    (("drain", "x"), "has no node 'x'; its nodes: a, b, c"),
    (("drain", "a", "x", "y"), "has no node 'x' and no 'y'; its nodes: a, b, c"),
    (("drain", "a", "--wait=soon"), "'soon' is not a valid float"),
    (("drain", "a", "b"), "needs 2 nodes to train, and without a and b has 1 node left"),
    (("drain", "a", "b"), "standard input is no terminal, so confirm with --yes"),
    (("exclude", "x"), "never had a node 'x'; known nodes: a, b, c"),
    (("exclude", "a", "b", "c"), "has none left: it will stop training and wait for others"),
    (("include", "a"), "does not exclude 'a'; excluded: none"),
    (("restart",), "confirm with --yes"),
    (("stop",), "confirm with --yes"),
    (("reset", "--yes"), "is running: stop it first"),
    (("explain", "9"), "has no record of group 9; recorded groups: 1"),
    (("explain", "first"), "'first' is not a valid int"),
    (("scale",), "scale needs the new number of nodes"),
]


@pytest.mark.long("test_a_mistake_is_one_clear_line_and_the_right_code in integration/test_command_line.py")
def test_a_mistake_is_one_clear_line_and_changes_nothing(plain: Job) -> None:
    wrong = []
    for (command, *arguments), words in MISTAKES:
        answer = ask(plain, command, *arguments)
        is_one_line = answer.err.startswith("elastic-agent: error: ") and answer.err.count("\n") == 1
        if (answer.code, answer.out) != (2, "") or words not in answer.err or not is_one_line:
            wrong.append((command, arguments, answer))
    assert not wrong
    status = plain.status()
    assert (status["group"], status["excluded"], [node["note"] for node in status["nodes"]]) == (1, [], [""] * 3)


@pytest.mark.long("no other test")
def test_an_order_that_takes_too_long_says_so_and_is_not_taken_back(plain: Job) -> None:
    """A drain that its agent receives too late: code 75; the node still leaves."""
    agent = plain.nodes["c"].process
    freeze(agent.pid)
    answer = ask(plain, "drain", "c", "--wait=0.5")
    agent.send_signal(signal.SIGCONT)
    assert (answer.code, "c had not left after 0.5 s" in answer.err) == (75, True), answer
    assert plain.nodes["c"].wait(PATIENCE_S) == 0
    wait_for_ranks(plain, 2)
    again = plain.start("c", "2:3", [str(plain.directory / "plain.py")])
    wait_for_ranks(plain, 3)
    assert again.process.poll() is None, "it was not asked to leave"
    ask(plain, "scale", "--np=2:4")
    assert '"drained":[]' in raw_spec(plain), "who has left is forgotten at the next change"


def raw_spec(job: Job) -> str:
    """Return the record in etcd."""
    code = (
        "import sys; from agent.store.etcd import EtcdStore; from agent.store.api import KeyRange\n"
        "store = EtcdStore([sys.argv[1]]); print(store.read([KeyRange(sys.argv[2])]).items[0].value.decode())\n"
        "store.close()"
    )
    argv = [sys.executable, "-c", code, job.server, f"/elastic-agent/{job.job_id}/shared/spec"]
    return subprocess.run(argv, capture_output=True, text=True, check=True).stdout


def test_at_a_terminal_a_question_is_asked_before_anything_is_disturbed(plain: Job) -> None:
    with at_a_terminal(plain, "restart") as (process, terminal):
        read_until(terminal, f"Restart all workers of job {plain.job_id} (3 ranks on 3 nodes)? [y/N]: ")
        os.write(terminal, b"n\n")
        read_until(terminal, "nothing was changed")
        assert process.wait(PATIENCE_S) == 1
    assert plain.status()["group"] == 1
    with at_a_terminal(plain, "restart") as (process, terminal):
        read_until(terminal, "[y/N]: ")
        os.write(terminal, b"y\n")
        read_until(terminal, "will be replaced by a new group of the same nodes")
        assert process.wait(PATIENCE_S) == 0
    wait_for_group(plain, 2)


def test_status_is_redrawn_at_a_terminal_until_it_is_interrupted(plain: Job) -> None:
    with at_a_terminal(plain, "status", "--watch") as (process, terminal):
        read_until(terminal, "running on 3 nodes")
        assert ask(plain, "pause").code == 0
        read_until(terminal, "paused by")
        assert ask(plain, "resume").code == 0
        read_until(terminal, "running on 3 nodes")
        process.send_signal(signal.SIGINT)
        assert "Traceback" not in read_until(terminal, "\x1b[?25h"), "the cursor is shown again"
        assert process.wait(PATIENCE_S) == 130


def test_json_is_printed_by_every_command(plain: Job) -> None:
    """Commands that change something print the same three fields, and fields of their own."""
    for command, *arguments in (
        ("scale", "--np=1:3"),
        ("pause",),
        ("resume",),
        ("exclude", "c"),
        ("include", "c"),
        ("restart", "--yes"),
    ):
        data = ask(plain, command, *arguments, "--json").data
        assert (data["job_id"], data["command"], data["message"] != "") == (plain.job_id, command, True), data
    assert ask(plain, "status", "--json").data["np"] == "1:3"
    assert isinstance(ask(plain, "history", "--json").data, list)
    assert ask(plain, "explain", "--json").data["incident"]["group"] >= 1
