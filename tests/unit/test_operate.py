"""Changing a job's spec and following a job, on a store in this process."""

from __future__ import annotations

import io
import sys

import msgspec
import pytest
from nodes import NODE
from reasons import FINISHED

from agent.core.model import Result, Spec
from agent.core.records import Identity
from agent.errors import ConfigError
from agent.operate.jobs import Follower, follow_job
from agent.operate.prompts import AnswerDeclined, confirm
from agent.store.api import KeyRange, Put
from agent.store.keys import JobKeys, encode, view_of
from agent.store.memory import MemoryStore
from agent.store.spec import SpecView, change_spec

KEYS = JobKeys("job")
DONE = Result(run="r", group=1, succeeded=True, exit_code=0, reason=FINISHED)
SPEC = Spec(run="r", np_min=2, np_max=3, secret="s", changed_by="test", changed_at=0.0)


@pytest.fixture
def store() -> MemoryStore:
    made = MemoryStore()
    made.transact([], [Put(KEYS.spec, encode(SPEC)), Put(KEYS.node("a"), encode(NODE))])
    return made


def test_a_change_records_its_author_and_leaves_other_fields_unchanged(store: MemoryStore) -> None:
    old, new, _ = change_spec(store, KEYS, lambda _seen: {"np_max": 5})
    assert old == SPEC
    assert (new.revision, new.np_max, "@" in new.changed_by, new.changed_at > 0.0) == (2, 5, True, True)
    stamped = msgspec.structs.replace(SPEC, np_max=5, revision=2, changed_by=new.changed_by, changed_at=new.changed_at)
    assert new == stamped


def test_a_change_without_effect_is_not_written(store: MemoryStore) -> None:
    before = store.read(()).revision
    old, new, _ = change_spec(store, KEYS, lambda _seen: {"np_max": 3})
    assert old == new == SPEC
    assert store.read(()).revision == before


def test_a_job_that_ends_during_the_change_is_not_changed(store: MemoryStore) -> None:
    def end(_seen: SpecView) -> dict[str, int]:
        store.transact([], [Put(KEYS.result, encode(DONE))])
        return {"np_max": 5}

    with pytest.raises(ConfigError, match="has ended"):
        change_spec(store, KEYS, end)
    assert [item.value for item in store.read((KeyRange(KEYS.spec),)).items] == [encode(SPEC)]


def test_two_concurrent_changes_are_both_applied(store: MemoryStore) -> None:
    """The second write fails its compare, and the edit is applied to the result of the first."""
    seen: list[tuple[str, ...]] = []

    def exclude_b(view: SpecView) -> dict[str, tuple[str, ...]]:
        if not seen:  # a concurrent change
            change_spec(store, KEYS, lambda _seen: {"excluded": ("a",)})
        seen.append(view.spec.excluded)
        return {"excluded": (*view.spec.excluded, "b")}

    _, new, _ = change_spec(store, KEYS, exclude_b)
    assert seen == [(), ("a",)]
    assert (new.excluded, new.revision) == (("a", "b"), 3)


def test_agents_that_have_left_are_forgotten_with_the_next_change(store: MemoryStore) -> None:
    here, gone = Identity("a", "i1"), Identity("a", "i0")
    change_spec(store, KEYS, lambda _seen: {"drained": (gone, here)})
    _, new, _ = change_spec(store, KEYS, lambda _seen: {"np_max": 4})
    assert new.drained == (here,)


def test_a_job_that_has_ended_is_not_changed(store: MemoryStore) -> None:
    store.transact([], [Put(KEYS.result, encode(DONE))])
    with pytest.raises(ConfigError, match="'job' has ended"):
        change_spec(store, KEYS, lambda _seen: {"np_max": 4})


def test_a_follower_sees_the_job_change(store: MemoryStore) -> None:
    with follow_job(store, KEYS) as follower:
        first = follower.next(60.0)
        assert first is not None
        assert first.spec is not None
        assert first.spec.value == SPEC
        for np_max in (4, 5, 6):
            change_spec(store, KEYS, lambda _seen, np_max=np_max: {"np_max": np_max})
        newest = first
        while newest.spec is not None and newest.spec.value.np_max < 6:
            found = follower.next(60.0)
            assert found is not None
            assert found.revision > newest.revision
            newest = found
        assert follower.next(0.0) is None


def test_outdated_views_are_skipped(store: MemoryStore) -> None:
    follower = Follower(store, KEYS.whole(), lambda snapshot: view_of(snapshot, KEYS, is_whole=True))
    for np_max in (4, 5):
        change_spec(store, KEYS, lambda _seen, np_max=np_max: {"np_max": np_max})
        follower._arrived.put(store.read(KEYS.whole()))
    newest = follower.next(0.0)
    assert newest is not None
    assert newest.spec is not None
    assert newest.spec.value.np_max == 5
    assert follower.next(0.0) is None


def test_the_yes_option_answers_the_question() -> None:
    confirm("Do it?", is_agreed=True)


def test_the_yes_option_is_named_if_there_is_no_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("y\n"))
    with pytest.raises(
        ConfigError, match=r"Do it\? Nothing was changed: standard input is no terminal, so confirm with --yes"
    ):
        confirm("Do it?", is_agreed=False)


@pytest.mark.parametrize(("typed", "is_done"), [("y\n", True), ("n\n", False), ("\n", False)])
def test_only_an_explicit_yes_confirms(typed: str, is_done: bool, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: FBT001
    terminal = io.StringIO(typed)
    monkeypatch.setattr(terminal, "isatty", lambda: True, raising=False)
    monkeypatch.setattr(sys, "stdin", terminal)
    if is_done:
        confirm("Do it?", is_agreed=False)
    else:
        with pytest.raises(AnswerDeclined, match="nothing was changed"):
            confirm("Do it?", is_agreed=False)
