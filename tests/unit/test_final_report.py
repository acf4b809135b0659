"""The first failure of a failed job is printed on every node's console, even if etcd ends with the last node."""

from __future__ import annotations

import pytest
from reasons import FINISHED, LOST
from records import failure
from statuses import statuses

from agent.core import effects as fx
from agent.core import events as ev
from agent.core.model import ExitReport, Group, Member, Result
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
