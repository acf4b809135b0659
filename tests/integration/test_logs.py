"""`elastic-agent logs` on real jobs whose nodes have separate log directories, or share one."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
from integration.conftest import PATIENCE_S, Job
from waiting import freeze, wait_for

from agent.local_etcd.embedded import EmbeddedEtcd

TALK = Path(__file__).with_name("talk.py")
LINE = re.compile(r"\[rank (\d) (\w) group (\d)\] (.*)\n")

PATIENT = ("--detect_within=60", "--settle=60")
"""All nodes that start together join the first group, and all that remain join the later ones."""
FOLLOW = """
import faulthandler
faulthandler.dump_traceback_later(90)
from agent.operate import logs as log_command
log_command._END_WITHIN_S = 60.0
from agent.cli.command_line import main
main()
"""
"""Waits for the last output of stopped agents as long as a test may take, and prints where it hangs."""

MakeJob = Callable[..., "Talks"]


class Talks(Job):
    """A job whose ranks print lines. Each node has its own log directory, unless one is given."""

    @property
    def command(self) -> list[str]:
        return [str(TALK), str(self.directory)]

    def own(self, name: str) -> Path:
        return self.directory / f"logs-{name}"

    def begin(self, names: str, np: str, *, log_dir: str = "") -> None:
        """Start these nodes, and wait until every rank has printed something."""
        for name in names:
            self.join(name, np, f"--log_dir={log_dir or self.own(name)}")
        self.wait_for_lines(self.group + 1, len(names))

    def wait_for_lines(self, group: int, ranks: int) -> None:
        self.group = group
        wait_for(
            lambda: sum(path.stat().st_size > 0 for path in self.log_files(group)) >= ranks,
            f"lines of {ranks} ranks in group {group}; {self.log_text()}",
            PATIENCE_S,
        )

    def log_files(self, group: int) -> list[Path]:
        return sorted(self.directory.rglob(f"group-{group:06d}/*.log"))

    def logs(self, *options: str, code: int = 0) -> subprocess.CompletedProcess[str]:
        """Run the command."""
        done = subprocess.run(
            [*self._logs, *options], cwd=self.directory, capture_output=True, text=True, timeout=PATIENCE_S, check=False
        )
        assert done.returncode == code, f"{done.stdout[-2000:]} {done.stderr}"
        assert "Traceback" not in done.stderr
        return done

    @contextmanager
    def follow(self, *options: str) -> Iterator[tuple[subprocess.Popen[bytes], Path]]:
        """Follow the logs; return the process, and the file with its output."""
        shown = self.directory / "followed"
        with shown.open("wb") as out:
            argv = [sys.executable, "-c", FOLLOW, "logs", *self._job_options(), "--follow", *options]
            process = subprocess.Popen(argv, cwd=self.directory, stdout=out)
        try:
            yield process, shown
        finally:
            process.kill()
            process.wait()

    @property
    def _logs(self) -> list[str]:
        return [sys.executable, "-m", "agent", "logs", *self._job_options()]

    def tell_to(self, do: str) -> None:
        (self.directory / do).touch()


@pytest.fixture
def talks(etcd: EmbeddedEtcd, tmp_path: Path) -> Iterator[MakeJob]:
    """Create a job whose ranks print lines."""
    with ExitStack() as stack:
        yield lambda: stack.enter_context(Talks(tmp_path, etcd.endpoint, f"{os.getpid()}-{tmp_path.name}", PATIENT))


def _lines(shown: str) -> dict[tuple[int, str, int], list[str]]:
    """Return the output of each rank of each group; every line names its rank."""
    found: dict[tuple[int, str, int], list[str]] = {}
    for line in shown.splitlines(keepends=True):
        match = LINE.fullmatch(line)
        assert match is not None, line
        found.setdefault((int(match[1]), match[2], int(match[3])), []).append(match[4])
    return found


def test_logs_come_from_the_nodes_that_they_lie_on(talks: MakeJob) -> None:
    """All ranks; one rank byte by byte; the last lines; JSON; and errors in one line."""
    job = talks()
    job.begin("ab", "2")
    everything = _lines(job.logs().stdout)
    assert sorted((rank, group) for rank, _, group in everything) == [(0, 1), (1, 1)]
    assert {node for _, node, _ in everything} == {"a", "b"}
    assert all(lines[0] == "line 1" for lines in everything.values())
    ((file,),) = [list(job.own(node).rglob("*.log")) for rank, node, _ in everything if rank == 0]
    shown = job.logs("--rank=0").stdout
    assert shown
    assert file.read_text().startswith(shown)
    found = json.loads(job.logs("--rank=1", "--lines=1", "--json").stdout)
    assert (found["rank"], found["group"], found["line"][:5]) == (1, 1, "line ")
    assert "no rank 2: its ranks are 0 to 1" in job.logs("--rank=2", code=2).stderr
    assert "no group 2 in this run" in job.logs("--group=2", "--follow", code=2).stderr

    freeze(job.nodes["b"].process.pid)  # only the agent, which then does not answer
    partly = job.logs()
    assert {node for _, node, _ in _lines(partly.stdout)} == {"a"}
    assert "b cannot provide it (no answer within 5 s)" in partly.stderr
    job.nodes["b"].process.send_signal(signal.SIGCONT)


def test_for_a_node_that_is_gone_the_place_of_its_log_is_shown(talks: MakeJob) -> None:
    job = talks()
    job.begin("abc", "2:3")
    job.nodes["c"].kill()
    job.wait_for_lines(2, 2)
    found = job.logs("--group=1")
    assert {node for _, node, _ in _lines(found.stdout)} == {"a", "b"}
    (line,) = found.stderr.splitlines()
    assert re.search(r"no log of rank \d in group 1: c is gone; the log was there, in .*/group-000001", line)
    seen_here = job.logs("--group=1", f"--log_dir={job.own('c')}")
    assert {node for _, node, _ in _lines(seen_here.stdout)} == {"a", "b", "c"}
    assert seen_here.stderr == ""


def test_a_shared_directory_has_the_logs_of_nodes_that_are_gone_and_none_is_shown_twice(
    talks: MakeJob,
) -> None:
    job = talks()
    job.begin("ab", "1:2", log_dir=str(job.directory / "shared"))
    job.nodes["b"].kill()
    job.wait_for_lines(2, 1)
    found = _lines(job.logs("--group=1").stdout)
    assert sorted(node for _, node, _ in found) == ["a", "b"]
    for lines in found.values():
        assert [line for line in lines if line.startswith("line")] == [f"line {n}" for n in range(1, len(lines) + 1)]


def test_following_goes_on_over_a_restart_to_the_last_word(talks: MakeJob) -> None:
    """No line is shown twice or missing, including lines written just before the agents leave."""
    job = talks()
    job.begin("ab", "2")
    with job.follow("--lines=1000") as (follower, shown):
        wait_for(lambda: len(_whole(shown)) > 10, "lines", PATIENCE_S)
        job.tell_to("crash-1")
        job.wait_for_lines(2, 2)
        # By rank: a node may be gone a second after its last line, and with it the source of the log.
        wait_for(lambda: shown.read_text().count(" group 2] line 1\n") == 2, "lines of the next group", PATIENCE_S)
        job.tell_to("finish")
        try:
            assert follower.wait(PATIENCE_S) == 0
        except subprocess.TimeoutExpired:
            pytest.fail(f"it still follows; of the agents: {job.log_text()}")
        job.finish()
        found = _lines(shown.read_text())
    assert len(found) == 4
    for (rank, node, group), lines in found.items():
        (file,) = job.own(node).rglob(f"group-00000{group}/rank-0000{rank}.*.log")
        assert lines == file.read_text().splitlines()
        assert (lines[-1] == "the last word") == (group == 2)

    gone = job.logs(code=2).stderr
    assert len(gone.splitlines()) == 1
    assert "a is gone" in gone
    assert "name it with --log_dir" in gone
    assert job.logs("--rank=0", "-n1", *_where_rank(job, 0)).stdout == "the last word\n"


def _whole(shown: Path) -> list[str]:
    return [line for line in shown.read_text().splitlines(keepends=True) if line.endswith("\n")]


def _where_rank(job: Talks, rank: int) -> list[str]:
    """Return the directory that has a rank's log."""
    (file,) = (file for file in job.log_files(2) if file.name.startswith(f"rank-0000{rank}."))
    return [f"--log_dir={file.parents[3]}"]
