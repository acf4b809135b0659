"""The inbox: what it hands out, and what it may leave out."""

from __future__ import annotations

import pytest

from agent.core import effects as fx
from agent.core import events as ev
from agent.core.model import ClusterView
from agent.runtime.loop import Inbox


def viewed(revision: int) -> ev.ViewChanged:
    return ev.ViewChanged(ClusterView(revision, is_whole=True))


def taken(*events: ev.Event) -> list[ev.Event | fx.Exit]:
    """What is handed out of these, up to the first tick."""
    inbox = Inbox()
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
    assert taken(viewed(3), viewed(4), viewed(4), viewed(6)) == [viewed(6)]


def test_a_view_is_not_left_out_for_one_behind_another_event() -> None:
    """What happens between two views is decided on with the first."""
    lost = ev.StoreLost()
    events = [viewed(3), lost, viewed(4), ev.PortReserved(1)]
    assert taken(*events) == events


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
    assert taken(*map(viewed, revisions)) == list(map(viewed, handed_out))
