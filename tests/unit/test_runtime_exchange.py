"""The ranks' parts on their way to rank 0, over a real store: complete, in order, and nothing left lying about."""

from __future__ import annotations

import threading
from datetime import timedelta
from typing import TYPE_CHECKING

import pytest
import torch
import torch.distributed as dist

from trainer_runtime import exchange, rank_messages
from trainer_runtime.exchange import Exchange
from trainer_runtime.rank_messages import NoMessageError, RankMessages

if TYPE_CHECKING:
    from collections.abc import Callable

BOUND_S = 60

KEYS = 2
"""Of a part that is not large: one piece, and how many there are."""


@pytest.fixture
def server() -> dist.TCPStore:
    return dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


@pytest.fixture
def connect(server: dist.TCPStore) -> Callable[[int], Exchange]:
    """A rank's end, in a world of 3."""

    def connected(rank: int) -> Exchange:
        store = dist.TCPStore("127.0.0.1", server.port, is_master=False, timeout=timedelta(seconds=BOUND_S))
        return Exchange(RankMessages(store, "test/"), rank, 3)

    return connected


@pytest.fixture
def ranks(connect: Callable[[int], Exchange]) -> list[Exchange]:
    return [connect(rank) for rank in range(3)]


def post(ranks: list[Exchange], step: int) -> None:
    for rank in (2, 1):
        ranks[rank].post_part((step, 0), {"rank": rank, "step": step, "w": torch.full((2,), float(rank))})
        ranks[rank]._messages._store.num_keys()  # is answered when it is there; a post is not answered


def told(parts: list[dict[str, int]]) -> list[tuple[int, int]]:
    return [(part["rank"], part["step"]) for part in parts]


def test_parts_come_in_rank_order_and_are_taken_away(ranks: list[Exchange], server: dist.TCPStore) -> None:
    empty = server.num_keys()
    post(ranks, 10)
    assert server.num_keys() == empty + 2 * KEYS
    assert told(ranks[0].collect((10, 0))) == [(1, 10), (2, 10)]
    assert server.num_keys() == empty


def test_a_part_may_be_larger_than_what_the_store_takes_at_once(ranks: list[Exchange], server: dist.TCPStore) -> None:
    """It closes the connection to whoever sends it more than 8 MiB, and that rank with it."""
    empty = server.num_keys()
    large = torch.arange((9 << 20) // 4, dtype=torch.int32)
    for step, rank in ((10, 1), (10, 2), (20, 1), (20, 2)):
        ranks[rank].post_part((step, 0), {"w": large + rank})
    found = ranks[0].collect((10, 0))
    assert [torch.equal(part["w"], large + rank) for rank, part in enumerate(found, 1)] == [True, True]
    ranks[0].skip((20, 0))
    ranks[0].skip((30, 0))
    assert server.num_keys() == empty


def test_a_rank_that_is_behind_is_waited_for(ranks: list[Exchange]) -> None:
    ranks[1].post_part((10, 0), {"rank": 1, "step": 10})
    later = threading.Timer(0.2, ranks[2].post_part, ((10, 0), {"rank": 2, "step": 10}))
    later.start()
    assert told(ranks[0].collect((10, 0))) == [(1, 10), (2, 10)]
    later.join()


def test_a_rank_that_does_not_come_is_an_error_and_the_next_attempt_needs_only_the_rest(
    ranks: list[Exchange], monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    ranks[1].post_part((10, 0), {"rank": 1, "step": 10})
    with monkeypatch.context() as patch:
        patch.setattr(exchange, "WITHIN_S", 2.0)
        patch.setattr(exchange, "WARN_AFTER_S", 1.0)
        with pytest.raises(NoMessageError, match="rank 2 has not committed it within 2 s"):
            ranks[0].collect((10, 0), "train.py:15")
    assert capfd.readouterr().err == (
        "trainer_runtime: step 10 waits to be saved: rank 2 has not committed it 1 s after rank 0. Call "
        "state.commit() on every rank; rank 0 began this save at train.py:15\n"
    )
    ranks[2].post_part((10, 0), {"rank": 2, "step": 10})
    assert told(ranks[0].collect((10, 0))) == [(1, 10), (2, 10)]
    assert told(ranks[0].collect((10, 0))) == [(1, 10), (2, 10)], "nobody hands over twice"


def test_once_the_group_is_over_nobody_is_waited_for(server: dist.TCPStore) -> None:
    """State.save() waits here: a rank that keeps its process must leave it to enter the next group."""
    over = threading.Event()
    store = dist.TCPStore("127.0.0.1", server.port, is_master=False, timeout=timedelta(seconds=BOUND_S))
    main = Exchange(RankMessages(store, "test/"), 0, 2, over.is_set)
    threading.Timer(0.2, over.set).start()
    with pytest.raises(NoMessageError, match="rank 1 has not committed it, and the group is over"):
        main.collect((10, 0))


def test_nobody_hands_over_twice_at_a_second_attempt(ranks: list[Exchange], server: dist.TCPStore) -> None:
    """Rank 0 may just be reading what there is."""
    empty = server.num_keys()
    post(ranks, 10)
    ranks[0].skip((10, 0))
    post(ranks, 10)
    assert told(ranks[0].collect((10, 0))) == [(1, 10), (2, 10)]
    post(ranks, 10)
    assert server.num_keys() == empty


def test_what_rank_0_settles_is_waited_for_however_long_that_takes(
    ranks: list[Exchange], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may be waiting for a verdict itself."""
    monkeypatch.setattr(rank_messages, "WITHIN_S", 0.05)
    later = threading.Timer(0.5, ranks[0]._messages.propose, ("place", "here"))
    later.start()
    assert ranks[1]._messages.wait_for_main("place") == "here"
    later.join()


def test_parts_of_steps_that_are_left_out_do_not_pile_up(ranks: list[Exchange], server: dist.TCPStore) -> None:
    """An outage of hours leaves out hundreds; a rank may post its part before or after rank 0 leaves it out."""
    empty = server.num_keys()
    for step in range(10, 200, 10):
        if step % 20:
            ranks[0].skip((step, 0))
            post(ranks, step)
        else:
            post(ranks, step)
            ranks[0].skip((step, 0))
        assert server.num_keys() <= empty + 4 * KEYS
    post(ranks, 200)
    assert told(ranks[0].collect((200, 0))) == [(1, 200), (2, 200)]
    assert server.num_keys() == empty


def test_what_is_not_posted_yet_is_left_out_without_a_warning(
    ranks: list[Exchange], capfd: pytest.CaptureFixture[str]
) -> None:
    """Otherwise torch prints two for every wait that ends in vain."""
    for step in (10, 20):
        ranks[0].skip((step, 0))
    assert capfd.readouterr() == ("", "")


def test_a_step_that_was_left_out_can_still_be_saved(ranks: list[Exchange], server: dist.TCPStore) -> None:
    """The last step of a training, for instance: nothing else comes after it."""
    empty = server.num_keys()
    post(ranks, 10)
    ranks[0].skip((10, 0))
    assert told(ranks[0].collect((10, 0))) == [(1, 10), (2, 10)]
    assert server.num_keys() == empty
