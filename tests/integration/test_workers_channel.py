"""The channel from a real worker through its guardian to the agent: what is asked, who is answered, and when."""

from __future__ import annotations

import os
import queue
import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from structlog.testing import capture_logs
from waiting import wait_for

from agent.core.events import Event, PublishAsked, WorkerExited, WorkersGone
from agent.core.model import Checkpoint, Copy, Resume
from agent.workers.channel import Channel
from agent.workers.group import LocalWorkers
from agent.workers.launch import Launch, RankCommand

DEADLINE_S = 30

TALK = """
import json, os, socket, subprocess, sys
from trainer_runtime import channel, contract
ours = channel.open_channel()
rank = int(sys.argv[1])
def note(*words):
    print(*words, flush=True)
def wait_for(name):
    with open(name) as fifo:
        fifo.read()
note("up")
"""
"""Not `trainer_runtime.State`: importing torch takes a second."""


class Bench:
    """Local workers that talk, and the events that they post."""

    def __init__(self, tmp: Path) -> None:
        self.tmp = tmp
        self.events: queue.Queue[Event] = queue.Queue()
        self.workers = LocalWorkers(self.events.put)

    def start(self, code: str, *, ranks: int = 1, group: int = 1, **env: str) -> None:
        commands = tuple(
            RankCommand(
                local_rank=rank,
                rank=rank,
                argv=(sys.executable, "-c", TALK + code, str(rank)),
                env=os.environ | env,
                cwd=self.tmp,
                log_path=self.log(rank),
                console_prefix=None,
            )
            for rank in range(ranks)
        )
        self.workers.start(Launch(group, commands))

    def log(self, rank: int = 0) -> Path:
        return self.tmp / f"{rank}.log"

    def wait_log(self, text: str, rank: int = 0) -> None:
        wait_for(lambda: text in self.text(rank), f"{text!r} from rank {rank}; there is {self.text(rank)!r}")

    def text(self, rank: int = 0) -> str:
        return self.log(rank).read_text() if self.log(rank).exists() else ""

    def channel(self, rank: int = 0) -> Channel:
        process = self.workers._ranks[rank].process
        assert process
        return process.channel

    def asked(self) -> PublishAsked:
        event = self.events.get(timeout=DEADLINE_S)
        assert isinstance(event, PublishAsked), self.text()
        return event

    def end(self, ranks: int = 1) -> list[int | None]:
        """Wait for the end of all; return the exit codes by rank."""
        exits = [self.events.get(timeout=DEADLINE_S) for _ in range(ranks)]
        assert isinstance(self.events.get(timeout=DEADLINE_S), WorkersGone)
        codes = {event.local_rank: event.exit_code for event in exits if isinstance(event, WorkerExited)}
        return [codes[rank] for rank in range(ranks)]


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    made = Bench(tmp_path)
    yield made
    made.workers.close()


def resume_at(step: int, group: int = 1) -> Resume:
    return Resume(group=group, copy=checkpoint(step).copy, lineage=(), checkpoint=checkpoint(step, number=3, run="us"))


def checkpoint(step: int, **changed: object) -> Checkpoint:
    stem = f"us-g000001-s{step:09d}"
    made = Checkpoint(
        copy=Copy(run="us", group=1, step=step),
        name=stem,
        private=f".{stem}.00000000",
        manifest_sha256="ab",
        kept=(".us-g000001-s000000001.00000001",),
        superseded=(),
    )
    return msgspec.structs.replace(made, **changed)


ASK = "note('told', ours.ask_resume().copy.step, ours.ask_resume().checkpoint.kept)\n"


def test_an_answer_waits_for_those_who_ask_later(bench: Bench) -> None:
    bench.workers.tell_resume(resume_at(5, group=2))  # even for the start of the group
    os.mkfifo(bench.tmp / "go")
    bench.start("wait_for('go')\n" + ASK, group=2)
    bench.wait_log("up")
    bench.workers.tell_resume(resume_at(7, group=2))
    bench.workers.tell_resume(resume_at(4, group=1))  # which is over
    (bench.tmp / "go").write_text("")
    assert bench.end() == [0], bench.text()
    assert bench.text().splitlines()[1] == "told 7 ('.us-g000001-s000000001.00000001',)"


def test_those_who_ask_wait_for_the_answer(bench: Bench) -> None:
    bench.start(ASK, ranks=2)
    for rank in range(2):
        wait_for(lambda rank=rank: bench.channel(rank).asks_resume, "the question")
    bench.workers.tell_resume(resume_at(5))
    assert bench.end(2) == [0, 0], bench.text()
    assert all("told 5" in bench.text(rank) for rank in range(2))


def test_what_was_told_to_a_group_is_not_told_to_the_next(bench: Bench) -> None:
    bench.workers.tell_resume(resume_at(5, group=1))
    bench.start(ASK, group=1)
    assert bench.end() == [0]
    bench.log().unlink()
    bench.start(ASK, group=2)
    wait_for(lambda: bench.channel().asks_resume, "the question")
    bench.workers.tell_resume(resume_at(6, group=1))
    bench.workers.tell_resume(resume_at(7, group=2))
    assert bench.end() == [0]
    assert "told 7" in bench.text()


PUBLISH = """
from trainer_runtime.record import Checkpoint, Copy
stem = f"us-g000001-s{10 + rank:09d}"
asked = Checkpoint(copy=Copy("us", 1, 10 + rank), name=stem, private=f".{stem}.00000000", manifest_sha256="ab",
                   kept=(".us-g000001-s000000001.00000001",), superseded=())
verdict = ours.publish(asked)
note("verdict", verdict.checkpoint == asked, verdict.reason)
"""


def test_a_question_is_posted_and_its_verdict_goes_to_the_one_who_asked(bench: Bench) -> None:
    bench.start(PUBLISH, ranks=2)
    events = sorted((bench.asked() for _ in range(2)), key=lambda event: event.checkpoint.copy.step)
    assert events == [PublishAsked(1, checkpoint(10)), PublishAsked(1, checkpoint(11))]
    bench.workers.tell_verdict(1, checkpoint(12).copy, None, "nobody asked")
    bench.workers.tell_verdict(2, checkpoint(10).copy, None, "another group")
    bench.workers.tell_verdict(1, checkpoint(11).copy, None, "too late")
    for _ in range(2):
        bench.workers.tell_verdict(1, checkpoint(10).copy, checkpoint(10, number=1, run="us"), "")
    assert bench.end(2) == [0, 0], bench.text()
    assert "verdict True \n" in bench.text(0)
    assert "verdict False too late\n" in bench.text(1)


GARBAGE = """
for packet in (b"hello", b"\\xff", b"[]", b"{}", b'{"ask": "money"}', b'{"ask": "resume", "more": 1}',
               b'{"publish": {"copy": {"run": "us", "group": 1, "step": "10"}}}',
               b'{"ask": "resume"}' + b" " * contract.MESSAGE_BYTES):
    ours._sock.send(packet)
"""


def test_garbage_is_a_line_each_and_ignored(bench: Bench) -> None:
    with capture_logs() as said:
        bench.start(GARBAGE + ASK)
        wait_for(lambda: bench.channel().asks_resume, "the question after the garbage")
    assert [line["log_level"] for line in said] == ["warning"] * 8
    assert all("rank 0 sent what is no message to the agent" in line["event"] for line in said)
    assert all(len(line["event"]) < 300 for line in said)
    bench.workers.tell_resume(resume_at(5))
    assert bench.end() == [0], bench.text()


FLOOD = """
while rank == 0:
    ours._sock.send(b'{"ask": "resume"}')
"""


def test_a_worker_that_asks_without_end_and_reads_nothing_stops_nobody(bench: Bench) -> None:
    bench.workers.tell_resume(resume_at(5))
    bench.start(FLOOD + ASK, ranks=2)
    event = bench.events.get(timeout=DEADLINE_S)
    assert isinstance(event, WorkerExited)
    assert (event.local_rank, event.exit_code) == (1, 0)
    bench.workers.kill(1)
    assert bench.events.get(timeout=DEADLINE_S).local_rank == 0  # type: ignore[union-attr]


GRANDCHILD = """
fd = ours._sock.fileno()
look = [sys.executable, "-c", f"import os; os.fstat({fd})"]
note("grandchild", subprocess.run(look, close_fds=False, stderr=subprocess.DEVNULL).returncode)
"""


def test_programs_that_a_worker_starts_do_not_inherit_it(bench: Bench) -> None:
    bench.start(GRANDCHILD)
    assert bench.end() == [0]
    assert "grandchild 1" in bench.text()


def test_a_worker_sees_the_agents_end_close(bench: Bench) -> None:
    """Nobody else holds it: not the guardian, nor that of another rank."""
    bench.start("try:\n    ours.ask_resume()\nexcept channel.AgentGoneError as error:\n    note(error)\n", ranks=2)
    for rank in range(2):
        wait_for(lambda rank=rank: bench.channel(rank).asks_resume, "the question")
        bench.channel(rank).close()
        bench.wait_log("the agent has ended", rank)
    assert bench.end(2) == [0, 0]


def test_the_agent_sees_a_workers_end_close_and_takes_no_harm(bench: Bench) -> None:
    os.mkfifo(bench.tmp / "go")
    bench.start("ours._sock.close()\nwait_for('go')\n")
    wait_for(lambda: bench.channel() not in bench.workers._selector.get_map() and "up" in bench.text(), "the end")
    bench.workers.tell_resume(resume_at(5))
    (bench.tmp / "go").write_text("")
    assert bench.end() == [0]


def test_a_worker_that_waits_can_be_terminated(bench: Bench) -> None:
    bench.start(PUBLISH)
    bench.asked()
    bench.workers.terminate(1)
    event = bench.events.get(timeout=DEADLINE_S)
    assert isinstance(event, WorkerExited)
    assert event.signal == 15


def test_the_descriptor_is_a_packet_socket_of_its_own_for_each_rank(bench: Bench) -> None:
    bench.start(
        "note(ours._sock.type == socket.SOCK_SEQPACKET, os.readlink(f'/proc/self/fd/{ours._sock.fileno()}'))", ranks=2
    )
    assert bench.end(2) == [0, 0]
    told = [bench.text(rank).splitlines()[1].split() for rank in range(2)]
    assert [kind for kind, _ in told] == ["True", "True"]
    assert told[0][1] != told[1][1]
