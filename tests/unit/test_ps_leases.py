"""Parts of the data: each is assigned once, parts of lost workers are assigned again, and the state stays small."""

from __future__ import annotations

import json
import random
import time

import pytest

from trainer_runtime.ps.leases import MAX_PARTS, Leases, leases_of
from trainer_runtime.ps.persistence import restore_state, state_of
from trainer_runtime.ps.shard import Shard
from trainer_runtime.ps.shard_host import MissingWorkers
from trainer_runtime.ps.worker_progress import ASYNC


@pytest.mark.parametrize("seed", range(20))
def test_the_first_free_part_is_assigned(seed: int) -> None:
    chance = random.Random(seed)
    leases = Leases(12)
    while not leases.is_over:
        worker = chance.randrange(4)
        done = {part for begin, end in leases.ranges() for part in range(begin, end)}
        free = [part for part in range(12) if part not in done and part not in leases.held]
        mine = [part for part, holder in leases.held.items() if holder == worker]
        part = leases.take(worker)
        assert part == next(iter([*mine, *free]), None)
        what = chance.random()
        if what < 0.3:
            leases.leave(worker)
        elif what < 0.8 and part is not None:
            leases.finish(part, worker)


def test_many_parts_are_assigned_quickly() -> None:
    leases = Leases(60_000)
    began = time.monotonic()
    while (part := leases.take(1)) is not None:
        leases.finish(part, 1)
    assert leases.is_over
    assert not leases.done, "a finished pass takes no memory"
    assert time.monotonic() - began < 10.0, "it takes 0.1 s, and would take minutes with a search for each part"


@pytest.mark.parametrize(
    ("done", "ranges"),
    [(set(), []), ({0}, [(0, 1)]), ({3, 1, 2}, [(1, 4)]), ({0, 2, 3, 7}, [(0, 1), (2, 4), (7, 8)])],
)
def test_finished_parts_are_written_as_ranges(done: set[int], ranges: list[tuple[int, int]]) -> None:
    leases = Leases(8)
    for part in done:
        leases.finish(part, 1)
    assert leases.ranges() == ranges
    assert leases_of(8, ranges) == leases


@pytest.mark.parametrize("done", [[[0, 9]], [[-1, 2]], [[2, 2]], [[0, 1 << 60]], [["0", "1"]], [[0]], [1], 1])
def test_invalid_ranges_are_refused(done: list[list[int]]) -> None:
    state = {"applied": [], "done": 0, "passes": {"p": [8, done]}}
    with pytest.raises(ValueError, match=r"."):
        restore_state(Shard(ASYNC), state)


def test_a_pass_has_no_more_parts_than_a_server_can_remember() -> None:
    with pytest.raises(ValueError, match="wanted a range of the"):
        leases_of(MAX_PARTS + 1, [(0, MAX_PARTS + 1)])


def test_the_state_of_finished_parts_is_small_and_can_be_restored() -> None:
    shard, copy = Shard(ASYNC), Shard(ASYNC)
    shard.passes = {f"data.{number}": leases_of(300_000, [(0, 300_000)]) for number in range(3)}
    shard.passes["data.3"] = leases_of(300_000, [(0, 1000), (2000, 2001)])
    text = json.dumps(state_of(shard))
    assert len(text) < 1000
    restore_state(copy, json.loads(text))
    assert copy.passes == shard.passes
    assert copy.passes["data.3"].take(1) == 1000


def test_missing_workers_are_logged_while_others_wait(caplog: pytest.LogCaptureFixture) -> None:
    missing = MissingWorkers(0)
    for now in (0.0, 5.0, 10.0, 12.0, 20.0):
        missing.update([1], now)
    missing.update([1, 3], 21.0)
    missing.update([1, 3], 31.0)
    missing.update([], 32.0)
    assert missing.report_at == float("inf")
    missing.update([3], 40.0)
    missing.update([3], 90.0)  # after a long interval without a waiting worker, this is a new wait
    assert [record.getMessage() for record in caplog.records] == [
        "shard 0 waits; missing: worker 1 (10 s)",
        "shard 0 waits; missing: worker 1 (20 s)",
        "shard 0 waits; missing: worker 1, worker 3 (10 s)",
    ]
