"""The inbox: what it hands out, and what it may leave out. The loop and its store thread, which run either core."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest
from structlog.testing import capture_logs

from agent.core import effects as fx
from agent.core import events as ev
from agent.core.view import ClusterView
from agent.errors import RecordError, StoreUnavailable
from agent.roles.events import RoleViewChanged
from agent.roles.model import RoleView
from agent.runtime import store_client
from agent.runtime.loop import Core, Heartbeat, Inbox, SnapshotArrived, run_loop
from agent.runtime.store_client import StoreThread


def viewed(revision: int) -> ev.ViewChanged:
    return ev.ViewChanged(ClusterView(revision, is_whole=True))


def arrived(revision: int) -> SnapshotArrived[Any]:
    return SnapshotArrived(revision, lambda: viewed(revision))


def taken(*events: object) -> list[Any]:
    """What is handed out of these, up to the first tick."""
    inbox = Inbox[Any]()
    for event in events:
        inbox.put(event)
    found = []
    while not isinstance(event := inbox.get(0.0), ev.Ticked):
        found.append(event)
    return found


def test_events_come_in_their_order_and_ticks_when_there_are_none() -> None:
    first, second = ev.PortReserved(1), ev.StoreLost()
    assert taken(first, second) == [first, second]
    assert taken() == []


def test_of_views_in_a_row_only_the_last_is_handed_out() -> None:
    assert taken(arrived(3), arrived(4), arrived(4), arrived(6)) == [viewed(6)]


def test_a_view_is_not_left_out_for_one_behind_another_event() -> None:
    """What happens between two views is decided on with the first."""
    lost, port = ev.StoreLost(), ev.PortReserved(1)
    assert taken(arrived(3), lost, arrived(4), port) == [viewed(3), lost, viewed(4), port]


def test_a_snapshot_that_is_left_out_is_not_decoded_and_one_that_cannot_be_read_only_wakes_the_loop() -> None:
    def never() -> None:
        raise AssertionError

    assert taken(SnapshotArrived(3, never), arrived(4)) == [viewed(4)]
    assert taken(SnapshotArrived(3, lambda: None)) == []


def test_the_snapshot_before_one_that_cannot_be_read_is_handed_out() -> None:
    assert taken(arrived(3), arrived(4), SnapshotArrived(5, lambda: None)) == [viewed(4)]


@pytest.mark.parametrize(
    ("revisions", "handed_out"),
    [
        ([5, 2, 9], [5, 2, 9]),
        ([5, 6, 2, 3, 9], [6, 2, 9]),
        ([5, 2], [5, 2]),
    ],
)
def test_a_view_of_an_older_revision_is_seen(revisions: list[int], handed_out: list[int]) -> None:
    """Also one that a newer one follows: etcd may have lost what there was, and be past that revision again."""
    assert taken(*map(arrived, revisions)) == list(map(viewed, handed_out))


def test_every_view_of_a_parameter_server_job_is_handed_out() -> None:
    """Its core sees by a view without a spec that etcd lost data, and the next view may have the spec again."""
    events = [RoleViewChanged(RoleView(revision)) for revision in (3, 4, 4)]
    assert taken(*events) == events


def test_the_loop_acts_on_effects_in_order_up_to_the_exit_and_shows_each_state() -> None:
    ended = fx.Exit(3, "it is done")
    inbox = Inbox[Any]()
    for event in ("a", "b"):
        inbox.put(event)
    done: list[str] = []
    shown: list[str] = []

    def step(state: str, event: object, _now: float) -> tuple[str, list[Any]]:
        return f"{state}{event}", [event, f"{event} again", *([ended, "too late"] if event == "b" else [])]

    assert (
        run_loop(Core(step), "", inbox, Heartbeat(8.0), done.append, lambda state, _now: shown.append(state)) == ended
    )
    assert done == ["a", "a again", "b", "b again"]
    assert shown == ["a", "ab"]


def test_the_loop_wakes_when_its_core_wants_it_to() -> None:
    """Long before its heartbeat makes it turn."""

    def step(_state: None, event: object, _now: float) -> tuple[None, list[Any]]:
        return None, [fx.Exit(0, type(event).__name__)]

    core: Core[None, Any, Any] = Core(step, wake_at=lambda _state, now: now)
    assert run_loop(core, None, Inbox(), Heartbeat(1e6), print) == fx.Exit(0, "Ticked")


@pytest.fixture
def thread(monkeypatch: pytest.MonkeyPatch) -> Iterator[StoreThread]:
    monkeypatch.setattr(store_client, "_RETRY_S", 0.001)
    made = StoreThread()
    yield made
    made.close()


def test_a_task_is_run_again_until_the_store_takes_it_and_before_those_after_it(thread: StoreThread) -> None:
    done: list[str] = []

    def write() -> None:
        done.append("first")
        if len(done) < 3:
            raise StoreUnavailable("not now")

    later = threading.Event()
    thread.do(write)
    thread.do(later.set)
    assert later.wait(60.0)
    assert done == ["first"] * 3


def test_a_malformed_record_is_logged_once_and_does_not_end_the_thread(thread: StoreThread) -> None:
    """With the thread the agent would end, and training with it, for a record that somebody may mend."""
    tries: list[int] = []
    done = threading.Event()

    def write() -> None:
        tries.append(1)
        if len(tries) < 4:
            raise RecordError("the record at spec is malformed")

    with capture_logs() as said:
        thread.do(write)
        thread.do(done.set)
        assert done.wait(60.0)
    assert [line["event"] for line in said] == ["the record at spec is malformed"]


def test_what_is_left_at_the_end_is_run_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_client, "_RETRY_S", 60.0)
    thread = StoreThread()
    begun, tries = threading.Event(), []

    def fail(name: str) -> None:
        tries.append(name)
        begun.set()
        raise StoreUnavailable("not now")

    thread.do(lambda: fail("a"))
    thread.do(lambda: fail("b"))
    assert begun.wait(60.0)
    thread.do(lambda: fail("c"))
    thread.close()
    assert tries == ["a", "b", "c"]
