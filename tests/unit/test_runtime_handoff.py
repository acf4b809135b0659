"""Where ranks stop for a handoff: ranks as threads, over a real store."""

from __future__ import annotations

import os
import random
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from datetime import timedelta
from typing import TYPE_CHECKING

import pytest
import torch.distributed as dist
from fake_agent import FakeAgent

from trainer_runtime.contract import ControlPage
from trainer_runtime.handoff import HandoffParticipant
from trainer_runtime.rank_messages import NoMessageError, RankMessages

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

BOUND_S = 60


@pytest.fixture(scope="module")
def server() -> dist.TCPStore:
    return dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


@pytest.fixture
def connect(server: dist.TCPStore, request: pytest.FixtureRequest) -> Callable[[], RankMessages]:
    """Each rank has a connection of its own."""

    def connected() -> RankMessages:
        store = dist.TCPStore("127.0.0.1", server.port, is_master=False, timeout=timedelta(seconds=BOUND_S))
        return RankMessages(store, f"{request.node.name}/")

    return connected


class Rank:
    """One rank's page, channel and handoffs."""

    def __init__(self, stack: ExitStack, messages: RankMessages, rank: int, world_size: int, wait_s: float) -> None:
        self.page, fd = ControlPage.create(f"rank-{rank}")
        os.close(fd)
        self.agent = FakeAgent()
        stack.callback(self.page.close)
        stack.callback(self.agent.close)
        self.handoff = HandoffParticipant(
            messages, self.page, self.agent.open(), rank=rank, world_size=world_size, wait_s=wait_s
        )


@pytest.fixture
def ranks(connect: Callable[[], RankMessages]) -> Iterator[Callable[..., list[Rank]]]:
    with ExitStack() as stack:
        yield lambda count, wait_s=BOUND_S: [Rank(stack, connect(), each, count, wait_s) for each in range(count)]


def train(rank: Rank, together: threading.Barrier, steps: int, *, wanted_at: int) -> int | None:
    """Take steps in lock-step, as collectives have it; see the request at this one; return where the ranks stopped."""
    for step in range(1, steps):
        together.wait(BOUND_S)
        if step == wanted_at:
            rank.page.handoff = 1
        if rank.page.handoff and rank.handoff.should_stop_after(step):
            return step
    return None


@pytest.mark.parametrize("seed", range(8))
def test_ranks_that_see_the_request_at_different_steps_stop_after_the_same_one(
    ranks: Callable[..., list[Rank]], seed: int
) -> None:
    chance = random.Random(seed)
    them = ranks(3, wait_s=0.3)
    together = threading.Barrier(3)
    seen = [chance.randint(1, 12) for _ in them]
    with ThreadPoolExecutor(3) as pool:
        went = [pool.submit(train, rank, together, 1000, wanted_at=at) for rank, at in zip(them, seen, strict=True)]
        stopped = {each.result(BOUND_S) for each in went}
    assert len(stopped) == 1, (seed, seen, stopped)
    assert min(seen) < (stopped.pop() or 0)


class Far:
    """A store that answers late."""

    def __init__(self, store: dist.Store, late_s: float) -> None:
        self._store, self._late_s = store, late_s

    def __getattr__(self, name: str) -> Callable[..., object]:
        def ask(*given: object) -> object:
            time.sleep(self._late_s)
            return getattr(self._store, name)(*given)

        return ask


def test_a_rank_whose_answers_take_longer_than_the_others_wait_is_waited_for_in_a_later_try(
    ranks: Callable[..., list[Rank]],
) -> None:
    them = ranks(2, wait_s=0.1)
    messages = them[1].handoff._messages
    messages._store = Far(messages._store, 0.1)  # type: ignore[assignment]
    together = threading.Barrier(2)
    with ThreadPoolExecutor(2) as pool:
        went = [pool.submit(train, rank, together, 100, wanted_at=1) for rank in them]
        stopped = {each.result(BOUND_S) for each in went}
    assert len(stopped) == 1
    assert None not in stopped


def test_a_rank_that_does_not_come_is_not_waited_for_longer(ranks: Callable[..., list[Rank]]) -> None:
    """It evaluates, for instance, while another one trains without it."""
    first, _ = ranks(2, wait_s=0.1)
    first.page.handoff = 1
    assert not any(first.handoff.should_stop_after(step) for step in range(1, 60))
    assert first.handoff._attempt > 3
    assert first.handoff._patience_s == 0.1


def test_a_rank_alone_stops_at_once(ranks: Callable[..., list[Rank]]) -> None:
    (alone,) = ranks(1)
    alone.page.handoff = 7
    assert alone.handoff.should_stop_after(41)


def test_a_rank_that_passed_the_step_does_not_keep_the_others_waiting(ranks: Callable[..., list[Rank]]) -> None:
    first, late = ranks(2)
    for rank in (first, late):
        rank.page.handoff = 1
    assert not first.handoff.should_stop_after(10)  # stop after 12
    assert not late.handoff.should_stop_after(13)  # which is over for this one
    assert not first.handoff.should_stop_after(12)  # at once, though it would wait for half a minute


def test_without_the_others_a_rank_goes_on_and_then_stops_with_them_later(ranks: Callable[..., list[Rank]]) -> None:
    first, other = ranks(2, wait_s=0.05)
    first.page.handoff = other.page.handoff = 1
    assert not first.handoff.should_stop_after(1)
    assert not first.handoff.should_stop_after(3)  # alone there
    assert not other.handoff.should_stop_after(3)
    first.handoff._wait_s = other.handoff._wait_s = BOUND_S
    with ThreadPoolExecutor(2) as pool:
        together = threading.Barrier(2)
        went = [pool.submit(go_on, rank, together, 4) for rank in (first, other)]
        assert len({each.result(BOUND_S) for each in went}) == 1


def go_on(rank: Rank, together: threading.Barrier, step: int) -> int:
    while True:
        together.wait(BOUND_S)
        if rank.handoff.should_stop_after(step):
            return step
        step += 1


def save_and_wait(rank: Rank, save: Callable[[int], bool]) -> bool:
    """No snapshot is asked for."""
    return rank.handoff.save_and_wait(5, lambda _step: pytest.fail("a snapshot"), save)


def test_all_leave_once_it_is_saved_and_their_agents_say_so(ranks: Callable[..., list[Rank]]) -> None:
    them = ranks(2)
    saved: list[int] = []

    def save(number: int) -> bool:
        saved.append(number)
        return True

    with ThreadPoolExecutor(2) as pool:
        assert all(pool.map(lambda rank: save_and_wait(rank, save), them))
    assert len(saved) == 2


def test_a_rank_without_an_answer_to_leave_continues_training(ranks: Callable[..., list[Rank]]) -> None:
    (alone,) = ranks(1, wait_s=0.05)
    alone.agent.is_over = False
    alone.page.handoff = 1
    assert alone.handoff.should_stop_after(5)
    assert not save_and_wait(alone, lambda _number: True)
    assert alone.page.quiesced == 0


def test_if_saving_fails_nobody_leaves(ranks: Callable[..., list[Rank]]) -> None:
    them = ranks(2)
    with ThreadPoolExecutor(2) as pool:
        left = list(pool.map(lambda rank: save_and_wait(rank, lambda _number: rank is not them[0]), them))
    assert left == [None, None]
    assert [rank.page.quiesced for rank in them] == [0, 0]


def test_if_rank_0_takes_too_long_to_save_nobody_leaves(
    ranks: Callable[..., list[Rank]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The others train on, and it does so with them though it has saved in the end."""
    main, other = ranks(2, wait_s=0.05)
    monkeypatch.setattr(other.handoff._messages, "wait_for_proposal", lambda _name, _within_s=0.0: None)
    assert not save_and_wait(other, lambda _number: True)
    assert not save_and_wait(main, lambda _number: True)
    assert [rank.page.quiesced for rank in (main, other)] == [0, 0]


def test_a_rank_is_seen_to_stand_still_while_it_saves(ranks: Callable[..., list[Rank]]) -> None:
    """Its group may be over before it asks, and SIGTERM would cut it short."""
    (alone,) = ranks(1)
    alone.page.handoff = 4
    assert alone.handoff.should_stop_after(5)
    seen: list[int] = []
    assert save_and_wait(alone, lambda _number: not seen.append(alone.page.quiesced))
    assert [*seen, alone.page.quiesced] == [4, 4]


@pytest.mark.parametrize("has_failed", [None, 0, 1])
def test_where_snapshots_are_enough_a_checkpoint_is_saved_only_if_a_rank_takes_none(
    ranks: Callable[..., list[Rank]], has_failed: int | None
) -> None:
    them = ranks(2)
    snapped: list[int] = []
    saved: list[int] = []

    def snap(rank: Rank, step: int) -> bool:
        snapped.append(step)
        return has_failed is None or rank is not them[has_failed]

    def leave(rank: Rank) -> bool:
        rank.page.in_memory = 1
        rank.page.handoff = rank.handoff._number = 3
        return rank.handoff.save_and_wait(7, lambda step: snap(rank, step), lambda number: not saved.append(number))

    with ThreadPoolExecutor(2) as pool:
        assert all(pool.map(leave, them))
    assert snapped == [7, 7]
    assert saved == ([] if has_failed is None else [3, 3])
    assert [rank.agent.quiesced for rank in them] == ([[(3, 7)]] * 2 if has_failed is None else [[], []])


def test_if_a_rank_takes_no_snapshot_in_time_a_checkpoint_is_saved(ranks: Callable[..., list[Rank]]) -> None:
    """It has not seen that one would do."""
    them = ranks(2, wait_s=0.2)
    them[0].page.in_memory = 1
    saved: list[int] = []
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda rank: rank.handoff.save_and_wait(7, lambda _: True, lambda n: not saved.append(n)), them))
    assert (len(saved), [rank.agent.quiesced for rank in them]) == (2, [[], []])


def test_what_is_posted_is_taken_once(connect: Callable[[], RankMessages]) -> None:
    one, other = connect(), connect()
    one.post("part", b"\x00\xff")
    assert other.take("part", BOUND_S) == b"\x00\xff"
    with pytest.raises(NoMessageError, match="did not post part within"):
        other.take("part", 0.01)


def test_the_first_proposal_is_what_all_go_by(connect: Callable[[], RankMessages]) -> None:
    one, other = connect(), connect()
    assert other.wait_for_proposal("step", 0.01) is None
    assert [one.propose("step", "5"), other.propose("step", "6"), other.wait_for_proposal("step", BOUND_S)] == ["5"] * 3
    assert [one.arrive("here", 0, 2), other.arrive("here", 1, 2)] == [False, True]
