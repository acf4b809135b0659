"""What a server decides: each push counts once, common steps wait for all who are here, and who is ahead waits."""

from __future__ import annotations

import math
import random

import pytest
import torch

from trainer_runtime.ps.messages import Gradients, Push, parse_push
from trainer_runtime.ps.pace import ASYNC, SYNC, Mode, Pace
from trainer_runtime.ps.rules import SGD, Adam, Sum
from trainer_runtime.ps.shard import Author, Change, Shard
from trainer_runtime.ps.table import TableSpec
from trainer_runtime.ps.wire import BrokenError, Header, Kind, parse_header

NOW_S = 1_800_000_000
COUNTS = TableSpec("counts", 1, Sum(), initial="zeros")
A, B, C = (Author(worker, 1) for worker in range(3))


def shard_with(mode: Mode, *authors: Author) -> Shard:
    shard = Shard(mode)
    shard.declare(COUNTS)
    for author in authors:
        shard.pace.join(author.worker)
    return shard


def push_of(step: int, *ids: int, value: float = 1.0, weight: float = 1.0) -> Push:
    """Adds `value` to each id."""
    return Push(step, weight, (Gradients(0, torch.tensor(ids), torch.full((len(ids), 1), value)),))


def do(shard: Shard, changes: list[Change]) -> int:
    for change in changes:
        shard.apply(change)
    return len(changes)


def counts(shard: Shard, *ids: int) -> list[float]:
    values: list[float] = shard.tables[0].pull(torch.tensor(ids)).squeeze(1).tolist()
    return values


def test_a_push_that_is_sent_again_counts_once() -> None:
    shard = shard_with(ASYNC, A, B)
    assert do(shard, shard.push(A, push_of(1, 5), NOW_S)) == 1
    assert do(shard, shard.push(A, push_of(1, 5), NOW_S)) == 0
    assert do(shard, shard.push(B, push_of(1, 5), NOW_S)) == 1
    assert do(shard, shard.push(A, push_of(2, 5), NOW_S)) == 1
    assert counts(shard, 5) == [3.0]


def test_a_new_process_of_a_worker_is_another_author() -> None:
    shard = shard_with(ASYNC, A)
    do(shard, shard.push(A, push_of(1, 5), NOW_S))
    do(shard, shard.push(A._replace(incarnation=2), push_of(1, 5), NOW_S))
    assert counts(shard, 5) == [2.0]


def test_a_common_step_is_the_weighted_mean_of_all_who_are_here() -> None:
    shard = shard_with(SYNC, A, B)
    assert do(shard, shard.push(A, push_of(1, 1, 2, value=6.0, weight=3.0), NOW_S)) == 0
    assert not shard.is_answered(1)
    assert counts(shard, 1, 2, 3) == [0.0, 0.0, 0.0]
    assert do(shard, shard.push(B, push_of(1, 2, 3, value=2.0), NOW_S)) == 1
    assert shard.is_answered(1)
    assert counts(shard, 1, 2, 3) == [4.5, 5.0, 0.5]


def test_a_worker_that_leaves_is_waited_for_no_more_and_what_it_sent_of_this_step_is_dropped() -> None:
    shard = shard_with(SYNC, A, B, C)
    do(shard, shard.push(A, push_of(1, 1), NOW_S))
    do(shard, shard.push(C, push_of(1, 1, value=100.0), NOW_S))
    assert do(shard, shard.leave(C, NOW_S)) == 0
    assert do(shard, shard.push(B, push_of(1, 1), NOW_S)) == 1
    assert counts(shard, 1) == [1.0]
    do(shard, shard.push(A, push_of(2, 1), NOW_S))
    assert do(shard, shard.leave(B, NOW_S)) == 1
    assert counts(shard, 1) == [2.0]


def test_a_worker_that_comes_begins_with_the_step_that_the_others_are_at() -> None:
    shard = shard_with(SYNC, A)
    for step in (1, 2, 3):
        do(shard, shard.push(A, push_of(step, 1), NOW_S))
    assert shard.pace.join(B.worker) == 3
    assert do(shard, shard.push(A, push_of(4, 1), NOW_S)) == 0
    assert do(shard, shard.push(B, push_of(4, 1), NOW_S)) == 1
    assert shard.pace.done == 4


def test_a_push_for_a_step_that_is_over_is_left_out_and_answered() -> None:
    shard = shard_with(SYNC, A)
    do(shard, shard.push(A, push_of(1, 1), NOW_S))
    assert do(shard, shard.push(B, push_of(1, 1), NOW_S)) == 0
    assert shard.is_answered(1)
    assert (shard.stale, counts(shard, 1)) == (1, [1.0])


def test_one_that_skips_steps_holds_up_none_of_them() -> None:
    shard = shard_with(SYNC, A, B)
    do(shard, shard.push(B, push_of(4, 1), NOW_S))
    for step in (1, 2, 3):
        assert do(shard, shard.push(A, push_of(step, 1), NOW_S)) == 1
    assert do(shard, shard.push(A, push_of(4, 1), NOW_S)) == 1


def test_who_is_too_far_ahead_waits_for_the_slowest() -> None:
    pace = Pace(Mode(ahead=2))
    pace.join(0)
    pace.join(1)
    pace.note(0, 2)
    assert pace.may_go_on(2)
    pace.note(0, 3)
    assert not pace.may_go_on(3)
    pace.note(1, 1)
    assert pace.may_go_on(3)
    pace.leave(1)
    pace.note(0, 100)
    assert pace.may_go_on(100)


@pytest.mark.parametrize("seed", range(30))
def test_however_pushes_are_lost_and_sent_again_each_counts_once(seed: int) -> None:
    """Workers repeat what was not answered; a server is lost, and its copy takes its place."""
    chance = random.Random(seed)
    shard, replica = shard_with(ASYNC), shard_with(ASYNC)
    sent = dict.fromkeys((A, B, C), 0)
    done = dict.fromkeys((A, B, C), 0)
    for _ in range(300):
        author = chance.choice((A, B, C))
        if sent[author] == done[author]:
            sent[author] += 1
        for change in shard.push(author, push_of(sent[author], author.worker, 9), NOW_S):
            shard.apply(change)
            replica.apply(change)
        if chance.random() < 0.7:  # it is answered
            done[author] = sent[author]
        if chance.random() < 0.05:  # the server is lost after that, or before
            shard, replica = replica, shard_with(ASYNC)
            replica.tables[0].put(shard.tables[0].changed_since(0))
            replica.applied = dict(shard.applied)
    assert counts(shard, 0, 1, 2, 9) == [*map(float, sent.values()), float(sum(sent.values()))]


def test_changes_in_the_same_order_make_the_same_rows() -> None:
    """Ids that are rare and have no row yet included: who decides has counted them."""
    spec = TableSpec("t", 4, Adam(0.1), admit_after=3)
    one, other = Shard(ASYNC), Shard(ASYNC)
    one.declare(spec)
    other.declare(spec)
    for step in range(1, 40):
        torch.manual_seed(step)
        ids = torch.randint(0, 30, (10,)).unique()
        for change in one.push(A, Push(step, 1.0, (Gradients(0, ids, torch.randn(len(ids), 4)),)), NOW_S):
            one.apply(change)
            other.apply(change)
    everything = torch.arange(30)
    assert len(one.tables[0])
    assert torch.equal(one.tables[0].pull(everything), other.tables[0].pull(everything))


def test_a_table_that_is_declared_otherwise_is_refused() -> None:
    shard = shard_with(ASYNC)
    assert shard.declare(COUNTS) == 0
    with pytest.raises(ValueError, match="table 'counts' was declared as"):
        shard.declare(TableSpec("counts", 2, SGD(0.1)))


def test_a_push_says_its_learning_rate_and_a_table_with_another_one_is_the_same() -> None:
    shard = Shard(ASYNC)
    shard.declare(TableSpec("t", 1, SGD(1.0), initial="zeros"))
    assert shard.declare(TableSpec("t", 1, SGD(0.1), initial="zeros")) == 0, "a worker that was started again later"
    ids, ones = torch.tensor([1]), torch.ones(1, 1)
    for step, lr in enumerate((None, 0.5, 0.25), 1):
        do(shard, shard.push(A, Push(step, 1.0, (Gradients(0, ids, ones, lr),)), NOW_S))
    assert counts(shard, 1) == [-1.75]


def test_values_begin_rows_that_are_not_there_and_no_others() -> None:
    shard = shard_with(ASYNC)
    values = Gradients(0, torch.tensor([1, 2]), torch.tensor([[10.0], [20.0]]))
    do(shard, shard.push(A, push_of(1, 2), NOW_S))
    do(shard, [Change((), (values,), NOW_S, begins=True)] * 2)
    assert counts(shard, 1, 2) == [10.0, 1.0]


# On the wire


@pytest.mark.parametrize("dims", [(), (1,), (3,), (1, 4, 3)])
def test_a_push_is_read_as_it_was_written(dims: tuple[int, ...]) -> None:
    parts = tuple(
        Gradients(table, torch.arange(5 * table, 5 * table + 3), torch.randn(3, dim), 0.1 * table or None)
        for table, dim in enumerate(dims)
    )
    pushed = Push(7, 0.5, (*parts, Gradients(len(dims), torch.empty(0, dtype=torch.int64), torch.empty(0, 2))))
    data = bytearray(b"".join(bytes(piece) for piece in pushed.body()))
    read = parse_push(data, len(pushed.parts), (*dims, 2).__getitem__)
    assert (read.step, read.weight) == (7, 0.5)
    for one, other in zip(read.parts, pushed.parts, strict=True):
        assert (one.table, one.lr) == (other.table, other.lr)
        assert torch.equal(one.ids, other.ids)
        assert torch.equal(one.values, other.values)
    for length in range(0, len(data), 4):
        with pytest.raises(BrokenError):
            parse_push(data[:length], len(pushed.parts), (*dims, 2).__getitem__)


@pytest.mark.parametrize(
    ("pushed", "why"),
    [
        (push_of(1, 2, 1), "ids must grow"),
        (push_of(1, 1, 1), "ids must grow"),
        (push_of(1, -(1 << 63)), "none of"),
        (push_of(1, 1, weight=math.nan), "weight nan"),
        (push_of(1, 1, weight=-1.0), "weight -1.0"),
    ],
)
def test_a_push_that_makes_no_sense_breaks_the_connection(pushed: Push, why: str) -> None:
    with pytest.raises(BrokenError, match=why):
        parse_push(bytearray(b"".join(bytes(piece) for piece in pushed.body())), 1, lambda _: 1)


def test_a_header_that_was_damaged_is_known() -> None:
    header = Header(Kind.PUSH, 3, 4, 5, 6, 7)
    packed = header.pack()
    assert parse_header(packed) == header
    for place in range(len(packed)):
        with pytest.raises(BrokenError):
            parse_header(packed[:place] + bytes([packed[place] ^ 1]) + packed[place + 1 :])
