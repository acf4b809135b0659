"""The first failure of a failed job is printed on every node's console, even if etcd ends with the last node."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from reasons import FINISHED, LOST
from records import Run, ended, failure
from statuses import statuses

from agent.core import effects as fx
from agent.core import events as ev
from agent.core.failures import ExitReport
from agent.core.model import Group, Member, Result
from agent.observe.stderr import standard_error
from agent.runtime.final_report import FinalReport
from agent.store.api import Delete, Put
from agent.store.keys import JobKeys, encode
from agent.store.memory import MemoryStore

KEYS = JobKeys("job")


@pytest.fixture
def store() -> MemoryStore:
    """Return the store of a job whose only rank has failed."""
    member = Member(node_id="a", incarnation="1", address="127.0.0.1", nproc=1, port=1, link=1)
    group = Group(run="r", number=1, members=(member,), cause="start", reason=LOST, restarts=0, step=0, reached=1)
    told = failure(0, tail="ValueError: what it was")
    report = ExitReport(node_id="a", incarnation="1", group=1, step=0, failure=told)
    (status,) = statuses(report)
    result = Result(run="r", group=1, succeeded=False, exit_code=1, reason=FINISHED)
    store = MemoryStore()
    records = {KEYS.group: group, KEYS.status(status): status, KEYS.result: result}
    store.transact([], [Put(key, encode(record)) for key, record in records.items()])
    return store


def test_it_is_read_before_the_node_leaves(store: MemoryStore, capfd: pytest.CaptureFixture[str]) -> None:
    final_report = FinalReport(store, KEYS)

    def leave(effect: fx.StoreEffect) -> ev.WriteAnswered:
        store.transact([], [Delete(KEYS.prefix, is_prefix=True)])
        return ev.WriteAnswered(effect, ev.Outcome.DONE)

    final_report.before_leaving(leave)(fx.Deregister())
    final_report.print()
    standard_error().flush()
    assert "ValueError: what it was" in capfd.readouterr().err


def test_output_that_the_console_has_shown_is_not_repeated(
    store: MemoryStore, capfd: pytest.CaptureFixture[str]
) -> None:
    FinalReport(store, KEYS, lambda node_id, failed: (node_id, failed.rank) == ("a", 0)).print()
    standard_error().flush()
    assert capfd.readouterr().err == ""


def test_the_failure_is_read_by_a_node_that_leaves_abruptly(
    store: MemoryStore, capfd: pytest.CaptureFixture[str]
) -> None:
    FinalReport(store, KEYS).print()
    standard_error().flush()
    assert "ValueError: what it was" in capfd.readouterr().err


@pytest.mark.parametrize("is_incident_written", [False, True])
def test_a_job_ends_with_a_group_without_members(
    store: MemoryStore,
    capfd: pytest.CaptureFixture[str],
    is_incident_written: bool,  # noqa: FBT001 - a case
) -> None:
    last = Group(run="r", number=2, members=(), cause="failed", reason=LOST, restarts=1, step=0, reached=1)
    writes: list[Put | Delete] = [Put(KEYS.group, encode(last))]
    if is_incident_written:
        run = Run("a")
        incident = run.add("failed", 5.0, (), ended=(ended("a", 0, tail="ValueError: what it was"), ended("a", 1)))
        writes += [Put(KEYS.incident(2), encode(incident)), Delete(KEYS.statuses(1), is_prefix=True)]
    store.transact([], writes)
    FinalReport(store, KEYS).print()
    standard_error().flush()
    assert "ValueError: what it was" in capfd.readouterr().err


def test_the_failure_is_left_where_torchrun_leaves_it(store: MemoryStore, tmp_path: Path) -> None:
    FinalReport(store, KEYS, lambda *_: True, str(tmp_path / "error.json")).print()
    written = json.loads((tmp_path / "error.json").read_text())
    message = {
        "message": "rank 0 on a exited with code 1",
        "extraInfo": {"py_callstack": "ValueError: what it was", "timestamp": "0"},
    }
    assert written == {"message": message, "errorCode": 1}
    FinalReport(store, KEYS, lambda *_: True, str(tmp_path / "missing" / "error.json")).print()
