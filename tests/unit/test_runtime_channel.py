"""The worker's end of the channel: what it takes for an answer, and what ends its wait."""

from __future__ import annotations

import fcntl
import json
import os
import resource
import signal
import socket
import subprocess
import sys
import threading
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import pytest
from fake_agent import FakeAgent

from trainer_runtime import agent_channel, contract
from trainer_runtime.agent_channel import AgentChannel, AgentGoneError, ChannelError
from trainer_runtime.manifest import private_name, stem_of
from trainer_runtime.record import CommittedCheckpoint, StateId

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

BOUND_S = 60
COPY = {"run": "us", "group": 1, "step": 10, "save": 0}
NO = {"verdict": {"copy": COPY, "checkpoint": None, "reason": "because"}}


def asked(step: int = 10) -> CommittedCheckpoint:
    stem = stem_of("us", 1, step)
    return CommittedCheckpoint(
        copy=StateId("us", 1, step), name=stem, private=private_name(stem), manifest_sha256="", kept=(), superseded=()
    )


@pytest.fixture
def ends() -> Iterator[tuple[socket.socket, AgentChannel]]:
    """An agent's end, to put answers into beforehand, and the worker's."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    made = AgentChannel(theirs.detach())
    with ours, made._sock:
        yield ours, made


@contextmanager
def once_asked(ours: AgentChannel, action: Callable[[], object]) -> Iterator[None]:
    """Do something on another thread as soon as the worker waits for an answer."""

    def wait() -> None:
        give_up_at = time.monotonic() + BOUND_S
        while not ours._unanswered and time.monotonic() < give_up_at:
            time.sleep(0.001)
        action()

    thread = threading.Thread(target=wait)
    thread.start()
    yield
    thread.join()


def committed(**changed: object) -> dict[str, Any]:
    record = {
        "v": 1,
        "copy": COPY,
        "name": stem_of("us", 1, 10),
        "private": f".{stem_of('us', 1, 10)}.00000000",
        "manifest_sha256": "",
        "kept": [],
        "superseded": [],
        "is_rollback": False,
        "handoff": 0,
        "node": "",
        "number": 3,
    }
    return record | changed


@pytest.mark.parametrize(
    "answer",
    [
        b"\xff",
        b"[]",
        b"{}",
        json.dumps(NO).encode(),
        b'{"restore_point": {"copy": {"run": "us", "group": 1}, "checkpoint": null}}',
        b'{"restore_point": {"copy": {"run": "us", "group": 1, "step": "10", "save": 0}, "checkpoint": null}}',
        *(
            json.dumps({"restore_point": {"copy": COPY, "checkpoint": committed(**changed)}}).encode()
            for changed in (
                {"name": "../x"},
                {"name": stem_of("us", 1, 11)},
                {"private": "../x"},
                {"kept": ["../x"]},
                {"superseded": [".them-g000001-s000000001.00000000"]},
                {"superseded": None},
            )
        ),
    ],
)
def test_what_is_no_answer_is_an_error(ends: tuple[socket.socket, AgentChannel], answer: bytes) -> None:
    """It comes from an agent of another version, and may name what is to be deleted."""
    ends[0].send(answer)
    with pytest.raises(ChannelError, match="install the same elastic-agent"):
        ends[1].ask_restore_point()


def test_other_keys_in_an_answer_are_ignored(ends: tuple[socket.socket, AgentChannel]) -> None:
    ends[0].send(
        json.dumps({"restore_point": {"copy": COPY, "new": 1, "checkpoint": committed(new=1)}, "new": 1}).encode()
    )
    told = ends[1].ask_restore_point()
    assert told.copy == StateId("us", 1, 10)
    assert told.checkpoint
    assert told.checkpoint.copy == told.copy


LEAVE = b'{"leave": true}'


def test_a_rank_that_is_answered_in_time_leaves(ends: tuple[socket.socket, AgentChannel]) -> None:
    ends[0].send(LEAVE)
    assert ends[1].ask_leave(BOUND_S)
    assert json.loads(ends[0].recv(contract.MESSAGE_BYTES)) == {"ask": "leave"}


@pytest.fixture
def many_files() -> Iterator[None]:
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit[1], limit[1]))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, limit)


@pytest.mark.usefixtures("many_files")
def test_a_channel_may_have_a_high_number() -> None:
    """As it has beside many ranks."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs:
        made = AgentChannel(fcntl.fcntl(theirs, fcntl.F_DUPFD_CLOEXEC, 1024))
        with made._sock:
            assert not made.ask_leave(0.01)
            ours.send(LEAVE)
            assert made.ask_leave(BOUND_S)


def test_a_rank_without_an_answer_continues_and_a_late_answer_confuses_no_later_question(
    ends: tuple[socket.socket, AgentChannel],
) -> None:
    assert not ends[1].ask_leave(0.01)
    ends[0].send(LEAVE)
    ends[0].send(json.dumps({"restore_point": {"copy": None, "checkpoint": None}}).encode())
    assert ends[1].ask_restore_point().copy is None


def test_whether_to_leave_is_not_asked_while_a_checkpoint_waits_for_its_verdict(
    ends: tuple[socket.socket, AgentChannel],
) -> None:
    with ends[1]._lock:
        assert not ends[1].ask_leave(0.01)
    ends[0].setblocking(False)
    with pytest.raises(BlockingIOError):
        ends[0].recv(contract.MESSAGE_BYTES)


def test_an_unreadable_checkpoint_is_described_in_a_sentence_of_bounded_length(
    ends: tuple[socket.socket, AgentChannel],
) -> None:
    ends[1].report_unreadable("x" * 10**6)
    assert json.loads(ends[0].recv(contract.MESSAGE_BYTES)) == {"unreadable": "x" * 1000}


def test_a_verdict_on_another_checkpoint_is_an_error(ends: tuple[socket.socket, AgentChannel]) -> None:
    ends[0].send(json.dumps(NO).encode())
    with pytest.raises(ChannelError, match="wanted a verdict on"):
        ends[1].publish(asked(11))
    ends[0].send(json.dumps({"verdict": {"copy": COPY, "checkpoint": committed(), "reason": ""}}).encode())
    with pytest.raises(ChannelError, match="wanted a verdict on"):
        ends[1].publish(asked(10))  # equal to that but for the token


def test_where_to_resume_is_asked_once(ends: tuple[socket.socket, AgentChannel]) -> None:
    ends[0].send(b'{"restore_point": {"copy": null, "checkpoint": null}}')
    assert ends[1].ask_restore_point() == ends[1].ask_restore_point()
    assert ends[0].recv(100) == b'{"ask": "restore_point"}'


def test_the_end_of_the_agent_ends_the_wait() -> None:
    agent = FakeAgent()
    agent.is_mute = True
    agent.on_publish = lambda _asked: agent.end()
    ours = agent.open()
    with pytest.raises(AgentGoneError):
        ours.publish(asked())
    with pytest.raises(AgentGoneError):
        ours.ask_restore_point()
    agent.close()


def test_an_agent_that_ended_with_a_question_unread_has_ended(ends: tuple[socket.socket, AgentChannel]) -> None:
    """The kernel then says "connection reset" instead of "end"."""
    agent, ours = ends
    with once_asked(ours, agent.close), pytest.raises(AgentGoneError):
        ours.ask_restore_point()


def test_an_interrupted_wait_does_not_mix_up_the_answers(ends: tuple[socket.socket, AgentChannel]) -> None:
    """A handler raises, the script catches it and saves once more."""
    agent, ours = ends

    def interrupt(_number: int, _frame: object) -> None:
        raise KeyboardInterrupt

    main = threading.get_ident()
    before = signal.signal(signal.SIGUSR1, interrupt)
    with once_asked(ours, lambda: signal.pthread_kill(main, signal.SIGUSR1)), pytest.raises(KeyboardInterrupt):
        ours.publish(asked(10))
    signal.signal(signal.SIGUSR1, before)
    for step in (10, 20):
        verdict = {"copy": COPY | {"step": step}, "checkpoint": None, "reason": str(step)}
        agent.send(json.dumps({"verdict": verdict}).encode())
    assert ours.publish(asked(20)).reason == "20"


def test_it_is_taken_up_once_and_not_passed_on(monkeypatch: pytest.MonkeyPatch) -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    agent_channel._open_once.cache_clear()
    with ours:
        descriptor = theirs.detach()
        os.set_inheritable(descriptor, True)
        monkeypatch.setenv(contract.CHANNEL_FD, str(descriptor))
        taken = agent_channel.open_channel()
        assert taken
        assert agent_channel.open_channel() is taken
        look = [sys.executable, "-c", f"import os; os.fstat({descriptor})"]
        assert subprocess.run(look, close_fds=False, stderr=subprocess.DEVNULL, check=False).returncode == 1
        taken._sock.close()
    agent_channel._open_once.cache_clear()


def test_without_an_agent_there_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(contract.CHANNEL_FD, raising=False)
    assert agent_channel.open_channel() is None


def test_a_process_that_the_agent_did_not_start_gets_an_error_that_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(contract.CHANNEL_FD, "1000")
    with pytest.raises(RuntimeError, match="only the process that the agent started can use it"):
        agent_channel.open_channel()


def test_a_report_of_a_snapshot_does_not_block(ends: tuple[socket.socket, AgentChannel]) -> None:
    """Neither for an agent that has no time to listen, nor for one that is gone."""
    agent, ours = ends
    for step in range(10_000):
        ours.report_snapshot(step)
    told = json.loads(agent.recv(contract.MESSAGE_BYTES))["snapshot"]
    assert (told["step"], set(told)) == (0, {"step", "at_s"})
    agent.close()
    ours.report_snapshot(10_000)


def test_pieces_in_memory_come_with_their_descriptors(ends: tuple[socket.socket, AgentChannel]) -> None:
    agent, ours = ends
    piece = {"kind": "part", "rank": 3, "at": 4096, "bytes": 64, "sum": 5, "world_size": 4}
    told = {"restore_point": {"copy": COPY, "checkpoint": None, "memory": [piece]}}
    memory = os.memfd_create("test")
    os.write(memory, b"held")
    socket.send_fds(agent, [json.dumps(told).encode()], [memory])
    os.close(memory)
    resume = ours.ask_restore_point()
    assert resume.is_in_memory
    (held,) = resume.memory
    assert (held.rank, held.is_common, os.pread(held.descriptor, 9, 0)) == (3, False, b"held")
    assert not os.get_inheritable(held.descriptor)
    ours.release_restored_snapshot()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(held.descriptor)


def test_pieces_without_their_descriptors_are_no_answer(ends: tuple[socket.socket, AgentChannel]) -> None:
    agent, ours = ends
    piece = {"kind": "common", "rank": 0, "at": 4096, "bytes": 64, "sum": 5, "world_size": 1}
    told = {"restore_point": {"copy": COPY, "checkpoint": None, "memory": [piece]}}
    agent.send(json.dumps(told).encode())
    with pytest.raises(ChannelError, match="the restore point"):
        ours.ask_restore_point()
