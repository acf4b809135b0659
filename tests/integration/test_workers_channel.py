"""The channel from a real worker through its guardian to the agent: the questions, the answers, and when they come."""

from __future__ import annotations

import os
import queue
import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from structlog.testing import capture_logs
from waiting import has_ended, wait_for

from agent.core.events import Event, PublishAsked, RanksStarted, RestorePointAsked, WorkerExited, WorkersGone
from agent.core.saved_states import Checkpoint, RestorePoint, StateId
from agent.workers.channel import Channel
from agent.workers.launch_plan import Launch, RankCommand
from agent.workers.process import RankProcess
from agent.workers.worker_group import WorkerGroup

DEADLINE_S = 60

TALK = """
import json, os, socket, subprocess, sys, time
from trainer_runtime import agent_channel, contract
ours = agent_channel.open_channel()
rank = int(sys.argv[1])
def note(*words):
    print(*words, flush=True)
def wait_for(name):
    with open(name) as fifo:
        fifo.read()
note("up")
"""
"""Does not use `trainer_runtime.State`: importing torch takes a second."""


class Bench:
    """Local workers that use the channel, and the events that they post."""

    def __init__(self, tmp: Path) -> None:
        self.tmp = tmp
        self.events: queue.Queue[Event] = queue.Queue()
        self.resumed: list[int] = []
        """Groups whose ranks were reported to have asked for their restore point."""
        self.workers = WorkerGroup(self._post)

    def _post(self, event: Event) -> None:
        if isinstance(event, RestorePointAsked):
            self.resumed.append(event.group)
        else:
            self.events.put(event)

    def start(self, code: str, *, ranks: int = 1, group: int = 1, is_file: bool = False, **env: str) -> None:
        """Start ranks. With `is_file`, the imports of their script are recorded."""
        script = self.tmp / "script.py"
        script.write_text(TALK + code)
        how = (str(script),) if is_file else ("-c", TALK + code)
        commands = tuple(
            RankCommand(
                local_rank=rank,
                rank=rank,
                argv=(sys.executable, *how, str(rank)),
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

    def process(self, rank: int = 0) -> RankProcess:
        process = self.workers.ranks[rank].process
        assert process
        return process

    def channel(self, rank: int = 0) -> Channel:
        return self.process(rank).channel

    def asked(self) -> PublishAsked:
        event = self.events.get(timeout=DEADLINE_S)
        assert isinstance(event, PublishAsked), self.text()
        return event

    def exits(self, ranks: int = 1) -> list[WorkerExited]:
        """Wait until all have ended; return the reports by rank."""
        exits = [self.events.get(timeout=DEADLINE_S) for _ in range(ranks)]
        assert isinstance(self.events.get(timeout=DEADLINE_S), WorkersGone)
        return sorted((event for event in exits if isinstance(event, WorkerExited)), key=lambda event: event.local_rank)

    def end(self, ranks: int = 1) -> list[int | None]:
        """Wait until all have ended; return the exit codes by rank."""
        return [event.exit_code for event in self.exits(ranks)]


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    made = Bench(tmp_path)
    yield made
    made.workers.close()


def resume_at(step: int, group: int = 1) -> RestorePoint:
    return RestorePoint(
        group=group, copy=checkpoint(step).copy, lineage=(), checkpoint=checkpoint(step, number=3, run="us")
    )


def checkpoint(step: int, **changed: object) -> Checkpoint:
    stem = f"us-g000001-s{step:09d}"
    made = Checkpoint(
        copy=StateId(run="us", group=1, step=step),
        name=stem,
        private=f".{stem}.00000000",
        manifest_sha256="ab",
        kept=(".us-g000001-s000000001.00000001",),
        superseded=(),
    )
    return msgspec.structs.replace(made, **changed)


ASK = "note('told', ours.ask_restore_point().copy.step, ours.ask_restore_point().checkpoint.kept)\n"


def test_an_answer_is_kept_for_ranks_that_ask_later(bench: Bench) -> None:
    bench.workers.send_restore_point(resume_at(5, group=2))  # even before the group starts
    os.mkfifo(bench.tmp / "go")
    bench.start("wait_for('go')\n" + ASK, group=2)
    bench.wait_log("up")
    bench.workers.send_restore_point(resume_at(7, group=2))
    bench.workers.send_restore_point(resume_at(4, group=1))  # a group that is over
    (bench.tmp / "go").write_text("")
    assert bench.end() == [0], bench.text()
    assert bench.text().splitlines()[1] == "told 7 ('.us-g000001-s000000001.00000001',)"


def test_ranks_that_ask_wait_for_the_answer(bench: Bench) -> None:
    bench.start(ASK, ranks=2)
    for rank in range(2):
        wait_for(lambda rank=rank: bench.channel(rank).awaits_restore_point, "the question")
    bench.workers.send_restore_point(resume_at(5))
    assert bench.end(2) == [0, 0], bench.text()
    assert all("told 5" in bench.text(rank) for rank in range(2))


def test_the_first_question_of_a_group_is_posted_once(bench: Bench) -> None:
    """Such a script commits, so its group can be handed off. A script that never asks is not reported."""
    bench.workers.send_restore_point(resume_at(5, group=1))
    bench.start(ASK, ranks=2)
    assert bench.end(2) == [0, 0], bench.text()
    bench.start("", ranks=2, group=2)
    assert bench.end(2) == [0, 0], bench.text()
    bench.workers.send_restore_point(resume_at(5, group=3))
    bench.start(ASK + ASK, group=3)
    assert bench.end() == [0], bench.text()
    assert bench.resumed == [1, 3]


def test_an_answer_to_one_group_is_not_given_to_the_next(bench: Bench) -> None:
    bench.workers.send_restore_point(resume_at(5, group=1))
    bench.start(ASK, group=1)
    assert bench.end() == [0]
    bench.log().unlink()
    bench.start(ASK, group=2)
    wait_for(lambda: bench.channel().awaits_restore_point, "the question")
    bench.workers.send_restore_point(resume_at(6, group=1))
    bench.workers.send_restore_point(resume_at(7, group=2))
    assert bench.end() == [0]
    assert "told 7" in bench.text()


PUBLISH = """
from trainer_runtime.record import CommittedCheckpoint, StateId
stem = f"us-g000001-s{10 + rank:09d}"
copy = StateId("us", 1, 10 + rank)
asked = CommittedCheckpoint(copy=copy, name=stem, private=f".{stem}.00000000", manifest_sha256="ab",
                   kept=(".us-g000001-s000000001.00000001",), superseded=(), handoff=rank, node=rank * "b")
verdict = ours.publish(asked)
note("verdict", verdict.checkpoint == asked, verdict.reason)
"""


def test_a_publish_request_is_posted_and_its_answer_goes_to_the_rank_that_asked(bench: Bench) -> None:
    bench.start(PUBLISH, ranks=2)
    events = sorted((bench.asked() for _ in range(2)), key=lambda event: event.checkpoint.copy.step)
    assert events == [PublishAsked(1, checkpoint(10)), PublishAsked(1, checkpoint(11, handoff=1, node="b"))]
    bench.workers.send_publish_answer(1, checkpoint(12).copy, None, "nobody asked")
    bench.workers.send_publish_answer(2, checkpoint(10).copy, None, "another group")
    bench.workers.send_publish_answer(1, checkpoint(11).copy, None, "too late")
    for _ in range(2):
        bench.workers.send_publish_answer(1, checkpoint(10).copy, checkpoint(10, number=1, run="us"), "")
    assert bench.end(2) == [0, 0], bench.text()
    assert "verdict True \n" in bench.text(0)
    assert "verdict False too late\n" in bench.text(1)


GARBAGE = """
for packet in (b"hello", b"\\xff", b"[]", b"{}", b'{"ask": "money"}', b'{"ask": "restore_point", "more": 1}',
               b'{"ask": "leave", "unreadable": "twice"}', b'{"unreadable": 7}',
               b'{"publish": {"copy": {"run": "us", "group": 1, "step": "10"}}}',
               b'{"ask": "restore_point"}' + b" " * contract.MESSAGE_BYTES):
    ours._sock.send(packet)
"""


def test_invalid_messages_are_logged_and_ignored(bench: Bench) -> None:
    with capture_logs() as said:
        bench.start(GARBAGE + ASK)
        wait_for(lambda: bench.channel().awaits_restore_point, "the question after the garbage")
    assert [line["log_level"] for line in said] == ["warning"] * 10
    assert all("rank 0 sent an invalid message to the agent" in line["event"] for line in said)
    assert all(len(line["event"]) < 300 for line in said)
    bench.workers.send_restore_point(resume_at(5))
    assert bench.end() == [0], bench.text()


FLOOD = """
while rank == 0:
    ours._sock.send(b'{"ask": "restore_point"}')
"""


def test_a_worker_that_floods_the_channel_blocks_no_other(bench: Bench) -> None:
    bench.workers.send_restore_point(resume_at(5))
    bench.start(FLOOD + ASK, ranks=2)
    event = bench.events.get(timeout=DEADLINE_S)
    assert isinstance(event, WorkerExited)
    assert (event.local_rank, event.exit_code) == (1, 0)
    bench.workers.kill(1)
    assert bench.events.get(timeout=DEADLINE_S).local_rank == 0  # type: ignore[union-attr]


UNREADABLE = """
if rank == 1:
    for _ in range(4):
        ours._sock.send(b'{"ask": "restore_point"}')
    ours.report_unreadable("cannot read\\n/x/y:  No such file" + 2000 * "!")
    sys.exit(1)
"""


def test_a_state_that_a_rank_could_not_read_is_reported_with_its_exit(bench: Bench) -> None:
    """In one line, for that rank alone, and of bounded length."""
    bench.start(UNREADABLE, ranks=2)
    exits = bench.exits(2)
    assert [event.exit_code for event in exits] == [0, 1], bench.text(1)
    assert exits[0].unreadable == ""
    assert exits[1].unreadable.startswith("cannot read /x/y: No such file!!!")
    assert len(exits[1].unreadable) <= 1000


@pytest.mark.parametrize("is_end_first", [False, True])
def test_the_last_message_of_a_rank_is_read_although_its_end_is_seen_with_it(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, *, is_end_first: bool
) -> None:
    """Whatever order the system reports them in."""
    select = bench.workers._reactor._selector.select
    monkeypatch.setattr(
        bench.workers._reactor._selector,
        "select",
        lambda *wait: sorted(select(*wait), key=lambda seen: isinstance(seen[0].fileobj, Channel) == is_end_first),
    )
    os.mkfifo(bench.tmp / "go")
    bench.start("rank += 1; wait_for('go')\n" + UNREADABLE)
    bench.wait_log("up")
    guardian = bench.process().guardian_pid
    with bench.workers._lock:  # the watching thread is blocked at the first message
        (bench.tmp / "go").write_text("")
        wait_for(lambda: has_ended(guardian), "the rank's end")
    (event,) = bench.exits()
    assert event.unreadable.startswith("cannot read")


BEGAN = """
if rank:
    wait_for("go")
ours.report_first_step(5)
if rank:
    wait_for("end")
"""


def test_the_first_step_is_posted_although_the_first_rank_has_ended(bench: Bench) -> None:
    """The record of its imports is closed with it."""
    for name in ("go", "end"):
        os.mkfifo(bench.tmp / name)
    bench.start(BEGAN, ranks=2, is_file=True)
    first = bench.events.get(timeout=DEADLINE_S)
    assert isinstance(first, WorkerExited), bench.text()
    assert (first.local_rank, first.exit_code) == (0, 0), bench.text()
    wait_for(lambda: bench.process().fileno() == -1, "all of it is let go of")
    (bench.tmp / "go").write_text("")
    began = bench.events.get(timeout=DEADLINE_S)
    assert isinstance(began, RanksStarted), began
    assert began.step == 5
    (bench.tmp / "end").write_text("")
    assert bench.end() == [0]


STAND = """
page = contract.ControlPage(int(os.environ[contract.CONTROL_FD]))
def stand(number):
    while page.handoff < number:
        time.sleep(0.005)
    page.quiesced = number
def leave():
    note("told to leave", bool(ours.ask_leave(30)))
    sys.exit(contract.EXIT_RESTART)
def train():
    time.sleep(1000)
"""
LEFT, TERMINATED = (101, None), (None, 15)


def ends(bench: Bench, ranks: int = 1) -> list[tuple[int | None, int | None]]:
    return [(event.exit_code, event.signal) for event in bench.exits(ranks)]


def test_a_quiesced_rank_that_asks_may_leave_when_its_group_is_over(bench: Bench) -> None:
    bench.start(STAND + "stand(3); leave()", ranks=2)
    bench.workers.request_handoff(1, 3)
    for rank in range(2):
        wait_for(lambda rank=rank: bench.channel(rank).awaits_leave_answer, "the question")
    bench.workers.terminate(2)
    bench.workers.terminate(1)
    assert ends(bench, 2) == [LEFT, LEFT], bench.text()
    assert "told to leave True" in bench.text()


def test_a_quiesced_rank_may_leave_as_soon_as_it_asks(bench: Bench) -> None:
    """Its group is over while it still saves: no SIGTERM in the middle of a save."""
    os.mkfifo(bench.tmp / "saved")
    bench.start(STAND + "stand(1); wait_for('saved'); leave()")
    bench.workers.request_handoff(1, 1)
    wait_for(lambda: bench.process().page.quiesced == 1, "the stop")
    for _ in range(2):
        bench.workers.terminate(1)
    (bench.tmp / "saved").write_text("")
    assert ends(bench) == [LEFT], bench.text()


def test_a_rank_that_trains_on_instead_of_asking_is_terminated(bench: Bench) -> None:
    """Its save failed after it was seen quiesced."""
    os.mkfifo(bench.tmp / "failed")
    bench.start(STAND + "stand(1); wait_for('failed'); page.quiesced = 0; train()")
    bench.workers.request_handoff(1, 1)
    wait_for(lambda: bench.process().page.quiesced == 1, "the stop")
    bench.workers.terminate(1)
    (bench.tmp / "failed").write_text("")
    assert ends(bench) == [TERMINATED]


def test_a_rank_that_continues_just_as_it_is_answered_to_leave_is_terminated(bench: Bench) -> None:
    """It had waited long enough, and does not read the answer."""
    os.mkfifo(bench.tmp / "late")
    bench.start(STAND + "stand(1); ours._send({'ask': 'leave'}); wait_for('late'); page.quiesced = 0; train()")
    bench.workers.request_handoff(1, 1)
    wait_for(lambda: bench.channel().awaits_leave_answer, "the question")
    bench.workers.terminate(1)
    wait_for(lambda: not bench.channel().awaits_leave_answer, "the answer")
    (bench.tmp / "late").write_text("")
    assert ends(bench) == [TERMINATED]


def test_a_rank_that_waited_long_enough_trains_on_and_is_terminated_like_any_other(bench: Bench) -> None:
    """Its question has no answer; its control page shows that it trains."""
    bench.start(
        STAND + "stand(1); note('left', bool(ours.ask_leave(0.01))); page.quiesced = 0; note('trains'); train()"
    )
    bench.workers.request_handoff(1, 1)
    bench.wait_log("trains")
    bench.workers.terminate(1)
    assert ends(bench) == [TERMINATED]
    assert "left False" in bench.text()


def test_a_rank_that_trained_on_can_be_handed_off_later(bench: Bench) -> None:
    bench.workers.send_restore_point(resume_at(5))
    bench.start(STAND + "stand(1); ours.ask_leave(0.01); page.quiesced = 0\n" + ASK + "stand(2); leave()")
    bench.workers.request_handoff(1, 1)
    bench.wait_log("told 5")
    bench.workers.request_handoff(1, 2)
    wait_for(lambda: bench.channel().awaits_leave_answer, "the question")
    bench.workers.terminate(1)
    assert ends(bench) == [LEFT], bench.text()


def test_only_ranks_that_are_quiesced_for_the_requested_handoff_get_no_sigterm(bench: Bench) -> None:
    """One trains, one is quiesced for no handoff, one for an earlier handoff, and one for this one."""
    bench.start(STAND + "page.quiesced = rank; note('stands'); leave() if rank == 3 else train()", ranks=4)
    bench.workers.request_handoff(1, 3)
    for rank in range(4):
        bench.wait_log("stands", rank)
    bench.workers.terminate(1)
    assert ends(bench, 4) == [TERMINATED, TERMINATED, TERMINATED, LEFT]


def test_a_quiesced_rank_is_killed_like_any_other(bench: Bench) -> None:
    bench.start(STAND + "stand(1); note('stands'); train()")
    bench.workers.request_handoff(1, 1)
    bench.wait_log("stands")
    bench.workers.terminate(1)
    bench.workers.kill(1)
    assert ends(bench) == [(None, 9)]


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
    bench.start(
        "try:\n    ours.ask_restore_point()\nexcept agent_channel.AgentGoneError as error:\n    note(error)\n", ranks=2
    )
    for rank in range(2):
        wait_for(lambda rank=rank: bench.channel(rank).awaits_restore_point, "the question")
        bench.channel(rank).close()
        bench.wait_log("the agent has exited", rank)
    assert bench.end(2) == [0, 0]


def test_the_agent_survives_that_a_worker_closes_its_end(bench: Bench) -> None:
    os.mkfifo(bench.tmp / "go")
    bench.start("ours._sock.close()\nwait_for('go')\n")
    wait_for(
        lambda: bench.channel() not in bench.workers._reactor._selector.get_map() and "up" in bench.text(), "the end"
    )
    bench.workers.send_restore_point(resume_at(5))
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
