"""The events of a job."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from nodes import TIMING
from reasons import lost
from records import Run
from structlog.testing import capture_logs

from agent.core.model import Member, Node, Result, Spec
from agent.core.reasons import FailedWorker, NotRetried
from agent.core.records import Stored
from agent.core.saved_states import Checkpoint, StateId
from agent.core.view import ClusterView
from agent.web.events import EventLog, changes
from agent.web.hub import KnownJobState

GAVE_UP = NotRetried(first=FailedWorker(node_id="b", rank=1, exit_code=3), why="budget", restarts=3)
SPEC = Spec(run="r1", np_min=1, np_max=2, secret="s3cret", changed_by="me@here", changed_at=0.0)


def member(name: str) -> Member:
    return Member(node_id=name, incarnation="1", address="10.0.0.1", nproc=2, port=1, link=2)


def node(name: str) -> Node:
    told = {field: getattr(member(name), field) for field in Member.__struct_fields__}
    return Node(**told, host="h", pid=1, pid_started=1, timing=TIMING)


def seen(run: Run, *names: str, **told: Any) -> KnownJobState:  # noqa: ANN401 - records
    """The state of a job with these nodes and the incidents so far."""
    stored = {field: Stored(value, 1, 1) for field, value in {"spec": SPEC, **told}.items()}
    nodes = tuple(Stored(node(name), 1, 1) for name in names)
    return KnownJobState("job", ClusterView(revision=1, is_whole=True, nodes=nodes, **stored), tuple(run.incidents))


def test_the_first_state_is_reported_completely() -> None:
    told = list(changes(None, seen(Run("a", "b", nproc=2), "a", "b")))
    assert [each["event"] for each in told] == ["np", "node joined", "node joined", "group"]
    assert told[0] == {"event": "np", "np": "1:2", "changed_by": "me@here"}
    assert told[-1]["nodes"] == ["a", "b"]
    assert told[-1]["world_size"] == 4


def test_an_unchanged_state_has_no_events() -> None:
    same = seen(Run("a"), "a")
    assert list(changes(same, same)) == []


def test_the_loss_of_a_node_and_the_end_of_a_job() -> None:
    run = Run("a", "b")
    before = seen(run, "a", "b")
    kept = Checkpoint(
        copy=StateId(run="r1", group=1, step=7),
        name="n",
        private="p",
        manifest_sha256="",
        kept=(),
        superseded=(),
        size_bytes=12,
        took_s=0.5,
    )
    ended = Result(run="r1", group=2, succeeded=False, exit_code=76, reason=GAVE_UP)
    run.add("lost", 10.0, ("a",), reason=lost("b"))
    assert list(changes(before, seen(run, "a", checkpoint=kept, result=ended))) == [
        {"event": "node left", "node_id": "b"},
        {"event": "group", "group": 2, "cause": "lost", "reason": "lost b", "world_size": 1, "nodes": ["a"]},
        {"event": "checkpoint", "step": 7, "size_bytes": 12, "write_s": 0.5},
        {
            "event": "ended",
            "state": "failed",
            "reason": "rank 1 on b exited with code 3, after 3 restarts without progress",
            "exit_code": 76,
        },
    ]


def test_all_groups_between_two_states_are_reported() -> None:
    run = Run("a", "b")
    before = seen(run, "a", "b")
    for number in range(3):
        run.add("failed", 10.0 * number, ("a", "b"))
    assert [each["group"] for each in changes(before, seen(run, "a", "b"))] == [2, 3, 4]


@pytest.fixture
def written(tmp_path: Path) -> Iterator[tuple[int, Path]]:
    """Return the descriptor of a file, and its path."""
    path = tmp_path / "events"
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT)
    yield descriptor, path
    os.close(descriptor)


def test_each_line_has_time_and_job_and_no_secret(written: tuple[int, Path]) -> None:
    descriptor, path = written
    log, run = EventLog("job", descriptor, is_restart=False), Run("a")
    log.update(seen(run, "a"), run.incidents, 5.0)
    log.update(seen(run, "a"), (), 6.0)
    log.close()
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [line["event"] for line in lines] == ["np", "node joined", "group", "incident"]
    assert all((line["at"], line["job_id"], line["run"]) == (5.0, "job", "r1") for line in lines)
    assert SPEC.secret not in path.read_text()


def test_a_restarted_process_does_not_repeat_the_present_state(written: tuple[int, Path]) -> None:
    descriptor, path = written
    log, run = EventLog("job", descriptor, is_restart=True), Run("a")
    log.update(seen(run, "a"), (), 5.0)
    log.update(seen(run, "a", "b"), (), 6.0)
    log.close()
    assert [json.loads(line)["event"] for line in path.read_text().splitlines()] == ["node joined"]


def test_a_full_disk_loses_lines_and_is_logged_once() -> None:
    descriptor = os.open("/dev/full", os.O_WRONLY)
    try:
        with capture_logs() as said:
            log = EventLog("job", descriptor, is_restart=False)
            log.update(seen(Run("a"), "a"), (), 5.0)
            log.close()
        assert [each["reason"] for each in said] == ["No space left on device"]
    finally:
        os.close(descriptor)
