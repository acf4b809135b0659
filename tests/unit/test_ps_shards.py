"""Decisions of a shard: each push counts once, common steps wait for all workers, and workers ahead of others wait."""

from __future__ import annotations

import math
import random

import pytest
import torch

from trainer_runtime.ps.frames import ALL_DONE, PART, BrokenError, Header, MessageKind, parse_header
from trainer_runtime.ps.messages import Gradients, Push, parse_push
from trainer_runtime.ps.rules import SGD, Adam, Sum
from trainer_runtime.ps.shard import Author, Shard, ShardChange
from trainer_runtime.ps.table import TableSpec
from trainer_runtime.ps.worker_progress import ASYNC, SYNC, Mode, WorkerProgress

NOW_S = 1_800_000_000
COUNTS = TableSpec("counts", 1, Sum(), initial="zeros")
A, B, C = (Author(worker, 1) for worker in range(3))


def shard_with(mode: Mode, *authors: Author) -> Shard:
    shard = Shard(mode)
    shard.declare(COUNTS)
    for author in authors:
        shard.progress.join(author.worker)
    return shard


def push_of(step: int, *ids: int, value: float = 1.0, weight: float = 1.0) -> Push:
    """A push that adds `value` to each id."""
    return Push(step, weight, (Gradients(0, torch.tensor(ids), torch.full((len(ids), 1), value)),))


def do(shard: Shard, changes: list[ShardChange]) -> int:
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


def test_of_each_worker_only_the_newest_process_is_remembered() -> None:
    shard = shard_with(ASYNC, A)
    do(shard, shard.push(B, push_of(7, 5), NOW_S))
    for incarnation in range(1, 100):
        do(shard, shard.push(A._replace(incarnation=incarnation), push_of(1, 5), NOW_S))
    assert shard.applied == {B: 7, A._replace(incarnation=99): 1}


def test_waiting_pushes_of_an_earlier_process_are_dropped() -> None:
    shard = shard_with(SYNC, A, B)
    do(shard, shard.push(A, push_of(1, 1, value=100.0), NOW_S))
    again = A._replace(incarnation=2)
    shard.join(again)
    do(shard, shard.push(again, push_of(1, 1), NOW_S))
    assert do(shard, shard.push(B, push_of(1, 1), NOW_S)) == 1
    assert counts(shard, 1) == [1.0]


def test_a_common_step_is_the_weighted_mean_of_all_workers() -> None:
    shard = shard_with(SYNC, A, B)
    assert do(shard, shard.push(A, push_of(1, 1, 2, value=6.0, weight=3.0), NOW_S)) == 0
    assert not shard.is_answered(1)
    assert counts(shard, 1, 2, 3) == [0.0, 0.0, 0.0]
    assert do(shard, shard.push(B, push_of(1, 2, 3, value=2.0), NOW_S)) == 1
    assert shard.is_answered(1)
    assert counts(shard, 1, 2, 3) == [4.5, 5.0, 0.5]


def test_a_worker_that_leaves_is_not_waited_for_and_its_waiting_push_is_dropped() -> None:
    shard = shard_with(SYNC, A, B, C)
    do(shard, shard.push(A, push_of(1, 1), NOW_S))
    do(shard, shard.push(C, push_of(1, 1, value=100.0), NOW_S))
    assert do(shard, shard.leave(C.worker, NOW_S)) == 0
    assert do(shard, shard.push(B, push_of(1, 1), NOW_S)) == 1
    assert counts(shard, 1) == [1.0]
    do(shard, shard.push(A, push_of(2, 1), NOW_S))
    assert do(shard, shard.leave(B.worker, NOW_S)) == 1
    assert counts(shard, 1) == [2.0]


def test_a_new_worker_begins_with_the_current_step() -> None:
    shard = shard_with(SYNC, A)
    for step in (1, 2, 3):
        do(shard, shard.push(A, push_of(step, 1), NOW_S))
    assert shard.progress.join(B.worker) == 3
    assert do(shard, shard.push(A, push_of(4, 1), NOW_S)) == 0
    assert do(shard, shard.push(B, push_of(4, 1), NOW_S)) == 1
    assert shard.progress.done == 4


def test_a_push_for_a_step_that_is_over_is_ignored_and_the_answer_says_so() -> None:
    shard = shard_with(SYNC, A)
    do(shard, shard.push(A, push_of(1, 1), NOW_S))
    assert do(shard, shard.push(B, push_of(1, 1), NOW_S)) == 0
    assert shard.is_answered(1)
    assert (shard.is_left_out(A, 1), shard.is_left_out(B, 1)) == (False, True)
    assert counts(shard, 1) == [1.0]
    assert do(shard, shard.push(A, push_of(1, 1), NOW_S)) == 0
    assert not shard.is_left_out(A, 1), "the push was sent again and is contained"


def test_workers_begin_together_and_continue_without_late_ones() -> None:
    shard = shard_with(SYNC)
    shard.expect(3, begins=True)
    assert shard.join(A) == 0
    assert do(shard, shard.push(A, push_of(1, 1), NOW_S)) == 0
    assert shard.progress.wake_at == math.inf, "no worker has waited yet"
    shard.progress.limit_wait(60.0)
    assert shard.join(B) == 0
    assert do(shard, shard.push(B, push_of(1, 1), NOW_S)) == 0
    shard.progress.limit_wait(70.0)
    assert (shard.progress.wake_at, shard.progress.overdue(59.9), shard.progress.overdue(60.0)) == (60.0, [], [2])
    assert do(shard, shard.leave(2, NOW_S)) == 1
    assert counts(shard, 1) == [1.0]
    assert shard.progress.wake_at == math.inf
    assert shard.join(C) == 1, "it begins with the current step of the others"


def test_a_worker_whose_connection_has_ended_is_waited_for_and_its_push_counts() -> None:
    shard = shard_with(SYNC, A, B)
    do(shard, shard.push(B, push_of(1, 1, value=3.0), NOW_S))
    shard.progress.disconnect(B.worker, 5.0)
    assert do(shard, shard.push(A, push_of(1, 1), NOW_S)) == 1
    assert counts(shard, 1) == [2.0]
    assert do(shard, shard.push(A, push_of(2, 1), NOW_S)) == 0, "it has a grace period to connect again"
    assert shard.join(B) == 1
    assert shard.progress.overdue(100.0) == []
    assert do(shard, shard.push(B, push_of(2, 1), NOW_S)) == 1


def test_a_successor_sends_the_push_of_an_incomplete_step_again() -> None:
    shard = shard_with(SYNC, A, B)
    do(shard, shard.push(B, push_of(1, 1, value=100.0), NOW_S))
    shard.progress.disconnect(B.worker, 5.0)
    successor = B._replace(incarnation=2)
    assert shard.join(successor) == 0
    assert do(shard, shard.push(A, push_of(1, 1), NOW_S)) == 0
    assert do(shard, shard.push(successor, push_of(1, 1), NOW_S)) == 1
    assert counts(shard, 1) == [1.0]


@pytest.mark.parametrize("leaves", [True, False])
def test_a_worker_that_has_left_or_rests_is_not_waited_for(leaves: bool) -> None:  # noqa: FBT001 - a parameter
    shard = shard_with(SYNC, A, B)
    (shard.leave if leaves else shard.rest)(B.worker, NOW_S)
    shard.progress.disconnect(B.worker, 5.0)
    assert do(shard, shard.push(A, push_of(1, 1), NOW_S)) == 1


def test_after_a_failover_a_step_waits_for_workers_that_had_made_steps() -> None:
    shard, replica = shard_with(SYNC, A, B), shard_with(SYNC)
    for author in (A, B):
        for change in shard.push(author, push_of(1, 1), NOW_S):
            replica.apply(change)
    replica.expect(3, begins=False)
    assert replica.join(A) == 1
    assert do(replica, replica.push(A, push_of(2, 1), NOW_S)) == 0
    assert replica.join(B) == 1
    assert do(replica, replica.push(B, push_of(2, 1), NOW_S)) == 1, "the third worker has never joined"


def test_a_bounded_worker_waits_for_new_workers_and_after_a_failover_for_the_slowest() -> None:
    shard = shard_with(Mode(ahead=1))
    shard.expect(2, begins=True)
    for step in (1, 2):
        do(shard, shard.push(A, push_of(step, 1), NOW_S))
    assert (shard.is_answered(1), shard.is_answered(2)) == (True, False)
    assert shard.join(B) == 0
    do(shard, shard.push(B, push_of(1, 1), NOW_S))
    assert shard.is_answered(2)
    follows = shard_with(Mode(ahead=1))
    follows.applied = {**shard.applied, A._replace(incarnation=0): 9}
    follows.expect(2, begins=False)
    assert follows.progress.steps == {0: 1, 1: 1}
    do(follows, follows.push(A, push_of(3, 1), NOW_S))
    assert not follows.is_answered(3)
    do(follows, follows.leave(B.worker, NOW_S))
    assert follows.is_answered(3)


@pytest.mark.parametrize("seed", range(30))
def test_broken_connections_lose_no_pushes_of_workers_that_reconnect(seed: int) -> None:
    """Servers are lost too: each worker sends its unanswered push again to the replica that becomes the primary."""
    chance = random.Random(seed)
    shard, replica = shard_with(SYNC), shard_with(SYNC)
    shard.expect(3, begins=True)
    authors, sent = (A, B, C), dict.fromkeys((A, B, C), 1)
    here: set[Author] = set()
    for _ in range(400):
        author = chance.choice(authors)
        if author not in here:
            here.add(author)
            shard.join(author)
        if shard.is_answered(sent[author]) and chance.random() < 0.8:
            assert not shard.is_left_out(author, sent[author])
            sent[author] += 1
        for change in shard.push(author, push_of(sent[author], author.worker), NOW_S):
            assert len(change.steps) == len(authors)
            shard.apply(change)
            replica.apply(change)
        if chance.random() < 0.1:
            here.discard(author)
            shard.progress.disconnect(author.worker, 5.0)
        if chance.random() < 0.03:
            shard, replica = replica, shard_with(SYNC)
            replica.tables[0].put(shard.tables[0].changed_since(0))
            replica.applied, replica.progress.done = dict(shard.applied), shard.progress.done
            shard.expect(3, begins=not shard.applied)
            here.clear()
    assert shard.progress.done > 10
    assert counts(shard, 0, 1, 2) == pytest.approx([shard.progress.done / 3] * 3, rel=1e-4)


def test_another_run_restarts_its_passes_and_a_pass_has_one_number_of_parts() -> None:
    shard = Shard(ASYNC)
    assert shard.lease("a/data.1", 1, None, 0) == PART
    assert shard.lease("a/data.1", 1, 0, 0) == ALL_DONE
    assert shard.lease("a/data.2", 1, None, 0) == PART
    with pytest.raises(ValueError, match=r"pass 'data.1' through the data has 1 parts, not 6"):
        shard.lease("a/data.1", 6, None, 0)
    assert shard.lease("b/data.1", 1, None, 0) == PART
    assert [*shard.passes] == ["b/data.1"]


def test_a_replica_drops_the_passes_of_earlier_runs_as_its_primary_does() -> None:
    copy = Shard(ASYNC)
    copy.pass_of("a/data.1", 3).finish(1, -1)
    copy.pass_of("b/data.1", 3)
    assert [*copy.passes] == ["b/data.1"]


def test_a_worker_that_skips_steps_blocks_none_of_them() -> None:
    shard = shard_with(SYNC, A, B)
    do(shard, shard.push(B, push_of(4, 1), NOW_S))
    for step in (1, 2, 3):
        assert do(shard, shard.push(A, push_of(step, 1), NOW_S)) == 1
    assert do(shard, shard.push(A, push_of(4, 1), NOW_S)) == 1


def test_a_worker_too_far_ahead_waits_for_the_slowest() -> None:
    progress = WorkerProgress(Mode(ahead=2))
    progress.join(0)
    progress.join(1)
    progress.record_step(0, 2)
    assert progress.may_continue(2)
    progress.record_step(0, 3)
    assert not progress.may_continue(3)
    progress.record_step(1, 1)
    assert progress.may_continue(3)
    progress.leave(1)
    progress.record_step(0, 100)
    assert progress.may_continue(100)


@pytest.mark.parametrize("seed", range(30))
def test_however_pushes_are_lost_and_sent_again_each_counts_once(seed: int) -> None:
    """Workers repeat unanswered pushes; a server is lost, and its replica becomes the primary."""
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
        if chance.random() < 0.7:  # the push is answered
            done[author] = sent[author]
        if chance.random() < 0.05:  # the server is lost before or after the answer
            shard, replica = replica, shard_with(ASYNC)
            replica.tables[0].put(shard.tables[0].changed_since(0))
            replica.applied = dict(shard.applied)
    assert counts(shard, 0, 1, 2, 9) == [*map(float, sent.values()), float(sum(sent.values()))]


def test_changes_in_the_same_order_make_the_same_rows() -> None:
    """Including ids that are too rare to have a row: the primary has counted them."""
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


def test_a_table_that_is_declared_differently_is_refused() -> None:
    shard = shard_with(ASYNC)
    assert shard.declare(COUNTS) == 0
    with pytest.raises(ValueError, match="table 'counts' was declared as"):
        shard.declare(TableSpec("counts", 2, SGD(0.1)))


def test_a_push_sets_its_learning_rate_and_a_table_with_another_one_is_the_same() -> None:
    shard = Shard(ASYNC)
    shard.declare(TableSpec("t", 1, SGD(1.0), initial="zeros"))
    assert shard.declare(TableSpec("t", 1, SGD(0.1), initial="zeros")) == 0, "as of a worker that was restarted later"
    ids, ones = torch.tensor([1]), torch.ones(1, 1)
    for step, lr in enumerate((None, 0.5, 0.25), 1):
        do(shard, shard.push(A, Push(step, 1.0, (Gradients(0, ids, ones, lr),)), NOW_S))
    assert counts(shard, 1) == [-1.75]


def test_initial_values_are_set_only_for_missing_rows() -> None:
    shard = shard_with(ASYNC)
    values = Gradients(0, torch.tensor([1, 2]), torch.tensor([[10.0], [20.0]]))
    do(shard, shard.push(A, push_of(1, 2), NOW_S))
    do(shard, [ShardChange((), (values,), NOW_S, initializes=True)] * 2)
    assert counts(shard, 1, 2) == [10.0, 1.0]


# Messages


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
        (push_of(1, 2, 1), "wanted sorted, distinct ids"),
        (push_of(1, 1, 1), "wanted sorted, distinct ids"),
        (push_of(1, -(1 << 63)), "other than"),
        (push_of(1, 1, weight=math.nan), "weight nan"),
        (push_of(1, 1, weight=-1.0), "weight -1.0"),
    ],
)
def test_an_invalid_push_is_refused(pushed: Push, why: str) -> None:
    with pytest.raises(BrokenError, match=why):
        parse_push(bytearray(b"".join(bytes(piece) for piece in pushed.body())), 1, lambda _: 1)


def test_a_damaged_header_is_detected() -> None:
    header = Header(MessageKind.PUSH, 3, 4, 5, 6)
    packed = header.pack()
    assert parse_header(packed) == header
    for place in range(len(packed)):
        with pytest.raises(BrokenError):
            parse_header(packed[:place] + bytes([packed[place] ^ 1]) + packed[place + 1 :])
