"""The snapshots that an agent holds in memory: what it reports, replicates, and releases."""

from __future__ import annotations

import mmap
import os
import resource
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest
from waiting import wait_for

from agent.core.events import InventoryChanged
from agent.core.records import Identity
from agent.core.saved_states import Replica, RestorePoint, StateId
from agent.links.part_receiver import NoRoomError, OutdatedPartError
from agent.links.part_sender import LargePart, PartSender
from agent.links.part_stream import PartHeader
from agent.links.snapshot_parts import SnapshotPart
from agent.workers.held_snapshots import PieceSource, SnapshotPiece
from agent.workers.replica_space import ReplicaSpace
from agent.workers.snapshot_store import RankMemory, SnapshotStore
from trainer_runtime import snapshot_page as page
from trainer_runtime.contract import ControlPage

WORLD = 4
BOUND_S = 10
LARGE_PART = b"x" * (page.LINK_PART_BYTES + 1)
NEXT = Identity("b", "i")
"""The next node, which is to hold large parts too."""


class Rank:
    """A rank process that takes snapshots."""

    def __init__(self, rank: int, *, has_common: bool) -> None:
        self.rank = rank
        self.has_common = has_common
        self.fd = page.create_memory(f"rank-{rank}")
        self.seq = 0
        self.page, page_fd = ControlPage.create(f"rank-{rank}")
        os.close(page_fd)
        self.event = os.eventfd(0, os.EFD_NONBLOCK)

    @property
    def shared(self) -> RankMemory:
        """What it shares with its agent."""
        return RankMemory(self.fd, self.event, self.page)

    def close(self) -> None:
        """End."""
        os.close(self.fd)
        os.close(self.event)

    def write(self, step: int, *, part: bytes = b"", **changed: int) -> None:
        """Take a snapshot whose bytes identify it."""
        common, part = (f"common {step}".encode() if self.has_common else b""), part or f"{self.rank} {step}".encode()
        os.ftruncate(self.fd, max(os.fstat(self.fd).st_size, page.HEADER_BYTES + 200 + 2 * len(part)))
        at = page.HEADER_BYTES + self.seq % 2 * (100 + len(part))
        with mmap.mmap(self.fd, 0) as memory:
            if not self.seq:
                page.clear_header(memory)
            self.seq += 1
            memory[at : at + len(common + part)] = common + part
            slot = page.Slot(self.seq, step, WORLD, at, len(common), step, at + len(common), len(part), step + 1)
            page.empty_slot(memory, self.seq % 2)
            page.fill_slot(memory, self.seq % 2, replace(slot, **changed))


class Bench:
    """The snapshots of a node, and the events and replicas that they cause."""

    def __init__(self) -> None:
        self.told: list[tuple[Replica, ...]] = []
        self.handed: list[SnapshotPart] = []
        self.holds_back = False
        """No neighbour stores anything yet."""
        self.unstored: list[Callable[[], None]] = []
        """What is to be called then."""
        self.large: list[LargePart] = []
        self.ended: list[int] = []
        """Groups whose parts are not sent any more."""
        self.snapshots = SnapshotStore(
            self._post,
            self._replicate,
            cast("PartSender", SimpleNamespace(send=self.large.append, end_group=self.ended.append)),
            ReplicaSpace(directories=()),
        )
        self.ranks: list[Rank] = []

    def _replicate(self, part: SnapshotPart, on_end: Callable[[], None]) -> None:
        self.handed.append(part)
        if self.holds_back:
            self.unstored.append(on_end)
        else:
            on_end()

    def _post(self, event: InventoryChanged) -> None:
        self.told.append(event.copies)

    def begin(self, group: int, ranks: range = range(2), next_node: Identity | None = None) -> None:
        self.ranks = [Rank(rank, has_common=rank == ranks[0]) for rank in ranks]
        self.snapshots.begin(PieceSource("r", WORLD), group, {each.rank: each.shared for each in self.ranks}, next_node)

    def make_large(self, *steps: int) -> None:
        """Take snapshots with large parts."""
        for step in steps:
            for rank in self.ranks:
                rank.write(step, part=LARGE_PART)
                self.snapshots.on_snapshot(rank.rank, step, time.monotonic() - 0.5)

    def end_sending(self, step: int, *, is_held: bool) -> None:
        """All large parts of this step have arrived at the next node, or could not be sent."""
        for part in [each for each in self.large if each.header.copy.step == step]:
            self.large.remove(part)
            os.close(part.descriptor)
            part.on_end(is_held)

    def receive(self, step: int, rank: int, data: bytes = b"x" * 8, group: int = 1) -> int:
        """A neighbour sends a large part; return the inode of the memory that it is in."""
        header = PartHeader(copy=copy(group, step), world_size=WORLD, rank=rank, checksum=7, size_bytes=len(data))
        memory = self.snapshots.make_room(header)
        os.pwrite(memory, data, 0)
        inode = os.fstat(memory).st_ino
        self.snapshots.store_large(header, memory)
        return inode

    def make(self, *steps: int) -> None:
        """Take snapshots of these steps on all local ranks."""
        for step in steps:
            for rank in self.ranks:
                rank.write(step)
                self.snapshots.on_snapshot(rank.rank, step, time.monotonic())

    def end(self) -> tuple[Replica, ...]:
        """End the ranks; return the inventory that was posted."""
        for rank in self.ranks:
            rank.close()
        self.ranks = []
        self.snapshots.end()
        return self.told[-1]

    def read(self, copy: StateId) -> dict[tuple[str, int], bytes]:
        """Return what a worker gets of a snapshot, by kind and rank."""
        with self.snapshots.pieces(copy) as (pieces, fds):
            return {
                (each.kind, each.rank): os.pread(fd, each.bytes, each.at) for each, fd in zip(pieces, fds, strict=True)
            }


@pytest.fixture
def bench() -> Iterator[Bench]:
    before = open_memories()
    made = Bench()
    yield made
    for rank in made.ranks:
        rank.close()
    made.snapshots.close()
    assert not open_memories() - before, "nothing is left open"


def open_memories() -> Counter[str]:
    """Return the snapshot memories that this process has open.

    Those of other tests are closed when they are collected.
    """
    fds = (
        path for path in Path("/proc/self/fd").iterdir() if path.is_symlink()
    )  # without the descriptor of this listing
    return Counter(target for fd in fds if page.MEMORY_NAME in (target := str(fd.readlink())))


def copy(group: int, step: int) -> StateId:
    return StateId(run="r", group=group, step=step)


def held(group: int, step: int, *parts: int, has_common: bool = True) -> Replica:
    return Replica(copy=copy(group, step), world_size=WORLD, has_common=has_common, parts=parts)


def part(group: int, step: int, rank: int) -> SnapshotPart:
    return SnapshotPart(copy=copy(group, step), world_size=WORLD, rank=rank, checksum=7, data=f"{rank} {step}".encode())


def restore_point(group: int, begin: StateId | None) -> RestorePoint:
    return RestorePoint(group=group, copy=begin, lineage=(), checkpoint=None)


def test_the_newest_two_snapshots_outlive_their_ranks(bench: Bench) -> None:
    bench.begin(1)
    bench.make(5, 6, 7)
    assert bench.told == [], "nothing counts while a rank could write"
    assert bench.end() == (held(1, 6, 0, 1), held(1, 7, 0, 1))
    assert bench.read(copy(1, 7)) == {("common", 0): b"common 7", ("part", 0): b"0 7", ("part", 1): b"1 7"}


def test_a_worker_gets_the_place_and_checksum_of_each_piece(bench: Bench) -> None:
    bench.begin(1, range(1))
    bench.make(5)
    bench.snapshots.store_replica(part(1, 5, 3))
    bench.end()
    with bench.snapshots.pieces(copy(1, 5)) as (pieces, fds):
        assert pieces == [
            SnapshotPiece("common", 0, page.HEADER_BYTES, 8, 5, WORLD),
            SnapshotPiece("part", 0, page.HEADER_BYTES + 8, 3, 6, WORLD),
            SnapshotPiece("part", 3, 0, 3, 7, WORLD),
        ]
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.write(fds[0], b"x")


def test_ranks_that_are_a_step_apart_hold_one_copy_together(bench: Bench) -> None:
    bench.begin(1)
    bench.make(5, 6)
    bench.ranks[1].write(7)
    assert bench.end() == (held(1, 5, 0), held(1, 6, 0, 1), held(1, 7, 1, has_common=False))


def test_a_snapshot_that_was_being_written_is_none(bench: Bench) -> None:
    bench.begin(1, range(1))
    bench.make(5, 6)
    with mmap.mmap(bench.ranks[0].fd, 0) as memory:
        page.empty_slot(memory, 1)
    assert bench.end() == (held(1, 6, 0),)


def test_ranks_without_snapshots_hold_none(bench: Bench) -> None:
    bench.begin(1)
    assert bench.end() == ()
    assert bench.read(copy(1, 1)) == {}


@pytest.mark.parametrize("changed", [{"world_size": 5}, {"common_bytes": 2**62}, {"part_at": 2**62}], ids=str)
def test_invalid_headers_are_ignored(bench: Bench, changed: dict[str, int]) -> None:
    """A script may write anything there."""
    bench.begin(1, range(1))
    bench.ranks[0].write(5, **changed)
    bench.snapshots.on_snapshot(0, 5, time.monotonic())
    assert bench.end() == ()
    assert bench.handed == []


def test_each_ranks_part_is_replicated_when_it_is_taken(bench: Bench) -> None:
    bench.begin(3)
    bench.make(5)
    bench.ranks[0].write(6)  # it has not reported it yet
    assert [(each.copy, each.rank, each.data, each.checksum) for each in bench.handed] == [
        (copy(3, 5), 0, b"0 5", 6),
        (copy(3, 5), 1, b"1 5", 6),
    ]


def test_a_rank_is_told_of_its_part_when_a_neighbour_has_stored_it(bench: Bench) -> None:
    """If it replaced an older snapshot before, and its node was lost, there would be none that is complete."""
    bench.holds_back = True
    bench.begin(1, range(1))
    bench.make(5)
    assert bench.ranks[0].page.replicated == 0
    (on_end,) = bench.unstored
    on_end()
    assert bench.ranks[0].page.replicated == 5
    bench.make(7)
    bench.snapshots.end()
    bench.unstored[-1]()  # too late: the group is over


def test_a_part_that_was_overwritten_meanwhile_is_not_replicated(bench: Bench) -> None:
    bench.begin(1, range(1))
    for step in (5, 6, 7):
        bench.ranks[0].write(step)
    bench.snapshots.on_snapshot(0, 5, time.monotonic())
    assert bench.handed == []


def test_a_part_that_is_overwritten_while_it_is_read_is_not_replicated(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    def read_slowly(fd: int, size: int, at: int) -> bytes:
        for step in (6, 7):
            bench.ranks[0].write(step)
        return pread(fd, size, at)

    pread = os.pread
    bench.begin(1, range(1))
    bench.ranks[0].write(5)
    monkeypatch.setattr("agent.workers.snapshot_store.os.pread", read_slowly)
    monkeypatch.setattr("trainer_runtime.snapshot_page.os", SimpleNamespace(pread=pread))
    bench.snapshots.on_snapshot(0, 5, time.monotonic())
    assert bench.handed == []


def test_a_large_part_goes_to_the_next_node_and_its_rank_is_told_when_it_is_there(bench: Bench) -> None:
    bench.begin(1, range(1), NEXT)
    bench.make_large(5)
    (sent,) = bench.large
    assert (sent.receiver, sent.header.size_bytes, sent.header.copy) == (NEXT, len(LARGE_PART), copy(1, 5))
    assert os.pread(sent.descriptor, len(LARGE_PART), sent.at) == LARGE_PART
    assert sent.is_intact()
    assert bench.ranks[0].page.replicated == 0, "it waits"
    bench.end_sending(5, is_held=True)
    assert bench.ranks[0].page.replicated == 5
    assert bench.ranks[0].page.replicating_us >= 500_000
    assert os.eventfd_read(bench.ranks[0].event) == 1
    assert bench.handed == []
    assert bench.end() == (held(1, 5, 0),)


@pytest.mark.parametrize("next_node", [None, Identity("b", "i")])
def test_a_rank_does_not_wait_for_a_part_that_nobody_can_have(bench: Bench, next_node: Identity | None) -> None:
    bench.begin(1, range(1), next_node)
    bench.make_large(5)
    assert bool(bench.large) == (next_node is not None)
    bench.end_sending(5, is_held=False)
    assert bench.ranks[0].page.replicated == 5


def test_a_part_that_was_replaced_while_it_is_sent_is_known_to_be(bench: Bench) -> None:
    bench.begin(1, range(1), NEXT)
    bench.make_large(5, 6)
    first = bench.large[0]
    assert first.is_intact()
    bench.ranks[0].write(7, part=LARGE_PART)
    assert not first.is_intact()
    for step in (5, 6):
        bench.end_sending(step, is_held=False)


@pytest.mark.parametrize("is_large", [False, True])
def test_once_all_parts_of_a_step_are_sent_it_is_said_who_has_them(bench: Bench, *, is_large: bool) -> None:
    told: list[bool] = []

    def note(*, is_with_next_only: bool) -> None:
        told.append(is_with_next_only)

    bench.begin(1, next_node=NEXT)
    (bench.make_large if is_large else bench.make)(5)
    bench.snapshots.when_sent(5, note)
    bench.end_sending(5, is_held=True)
    assert told == [is_large]
    (bench.make_large if is_large else bench.make)(6)
    bench.snapshots.when_sent(7, note)
    bench.end_sending(6, is_held=True)
    assert len(told) == 1, "parts of another step do not count"


def test_a_large_part_that_could_not_be_sent_is_not_said_to_be_there(bench: Bench) -> None:
    told: list[bool] = []
    bench.begin(1, range(1), NEXT)
    bench.make_large(5)
    bench.snapshots.when_sent(5, lambda *, is_with_next_only: told.append(is_with_next_only))
    bench.end_sending(5, is_held=False)
    assert told == []


def test_the_newest_two_large_parts_of_a_rank_are_kept_and_a_third_gets_the_memory_of_the_oldest(bench: Bench) -> None:
    bench.begin(1, range(1))
    bench.make(5, 6, 7)
    memories = [bench.receive(step, 3, f"part {step}".encode()) for step in (5, 6, 7)]
    assert memories[2] == memories[0] != memories[1]
    assert bench.end() == (held(1, 6, 0, 3), held(1, 7, 0, 3))
    assert bench.read(copy(1, 7))["part", 3] == b"part 7"


def test_while_a_third_large_part_is_on_its_way_the_oldest_does_not_count(bench: Bench) -> None:
    bench.begin(1, range(1))
    for step in (5, 6):
        bench.receive(step, 3)
    bench.end()
    header = PartHeader(copy=copy(1, 7), world_size=WORLD, rank=3, checksum=7, size_bytes=8)
    memory = bench.snapshots.make_room(header)
    assert bench.told[-1] == (held(1, 6, 3, has_common=False),)
    bench.snapshots.give_back(memory)
    assert bench.told[-1] == (held(1, 6, 3, has_common=False),)


def test_a_part_that_is_sent_again_takes_the_place_of_itself(bench: Bench) -> None:
    """Its receipt was lost; the one before it may still be needed."""
    bench.begin(1, range(1))
    for step in (3, 5, 7, 7):
        bench.receive(step, 3)
    bench.make(5, 7)
    assert bench.end() == (held(1, 5, 0, 3), held(1, 7, 0, 3))


def test_a_third_part_that_is_much_larger_needs_free_memory(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    bench.begin(1, range(1))
    for step in (5, 6):
        bench.receive(step, 3)
    monkeypatch.setattr("agent.workers.replica_space.free_memory", lambda: 3 << 20)
    header = PartHeader(copy=copy(1, 7), world_size=WORLD, rank=3, checksum=7, size_bytes=2**62)
    with pytest.raises(NoRoomError, match="it has 3 MiB"):
        bench.snapshots.make_room(header)


def test_a_part_for_which_memory_cannot_grow_is_refused_with_the_reason(bench: Bench) -> None:
    bench.begin(1, range(1))
    header = PartHeader(copy=copy(1, 7), world_size=WORLD, rank=3, checksum=7, size_bytes=2 << 20)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, before[1]))
    try:
        with pytest.raises(NoRoomError, match=r"its space for a copy cannot grow: .* File too large"):
            bench.snapshots.make_room(header)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_when_the_ranks_have_ended_their_parts_are_sent_no_more(bench: Bench) -> None:
    bench.begin(2, range(1), NEXT)
    bench.make_large(5)
    bench.end_sending(5, is_held=True)
    bench.end()
    assert bench.ended == [2]


def test_a_large_part_of_an_older_group_is_not_taken(bench: Bench) -> None:
    bench.begin(2)
    bench.snapshots.on_restore_point(restore_point(2, copy(1, 5)))
    with pytest.raises(OutdatedPartError):
        bench.receive(4, 3)
    bench.receive(5, 3)
    header = PartHeader(copy=copy(2, 7), world_size=WORLD, rank=3, checksum=7, size_bytes=8)
    memory = bench.snapshots.make_room(header)
    bench.snapshots.on_restore_point(restore_point(3, None))
    bench.snapshots.store_large(header, memory)
    assert bench.end() == ()


def test_a_large_part_for_which_there_is_no_memory_is_not_taken(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("agent.workers.replica_space.free_memory", lambda: 3 << 20)
    header = PartHeader(copy=copy(1, 5), world_size=WORLD, rank=3, checksum=7, size_bytes=4 << 20)
    with pytest.raises(NoRoomError, match="it has 3 MiB of free memory, and a copy takes 4"):
        bench.snapshots.make_room(header)


def test_the_parts_of_neighbours_make_a_copy_whole(bench: Bench) -> None:
    bench.begin(1)
    bench.make(5, 6)
    for rank in (2, 3):
        for step in (4, 5, 6):
            bench.snapshots.store_replica(part(1, step, rank))
    assert bench.end() == (held(1, 5, 0, 1, 2, 3), held(1, 6, 0, 1, 2, 3))
    assert bench.read(copy(1, 6))["part", 3] == b"3 6"


def test_a_part_that_arrives_after_the_ranks_ended_changes_the_inventory(bench: Bench) -> None:
    bench.begin(1)
    bench.make(5)
    bench.end()
    bench.snapshots.store_replica(part(1, 5, 2))
    assert bench.told[-1] == (held(1, 5, 0, 1, 2),)


def test_a_group_without_snapshots_keeps_the_one_it_was_restored_from(bench: Bench) -> None:
    bench.begin(1)
    bench.make(5, 6)
    bench.snapshots.store_replica(part(1, 5, 2))
    bench.end()
    bench.begin(2)
    bench.snapshots.on_restore_point(restore_point(2, copy(1, 5)))
    assert bench.read(copy(1, 5)) == {
        ("common", 0): b"common 5",
        ("part", 0): b"0 5",
        ("part", 1): b"1 5",
        ("part", 2): b"2 5",
    }
    assert bench.end() == (held(1, 5, 0, 1, 2),)


LARGE = 10 << 20


def used(bench: Bench, group: int) -> int:
    return sum(os.fstat(fd).st_blocks * 512 for fd in bench.snapshots._groups[group].own.values())


def test_the_memory_of_snapshots_that_are_not_restored_is_freed(bench: Bench) -> None:
    bench.begin(1, range(1))
    for step in (5, 6):
        bench.ranks[0].write(step, part=bytes([step]) * LARGE)
    bench.end()
    assert used(bench, 1) >= 2 * LARGE
    bench.begin(2)
    bench.snapshots.on_restore_point(restore_point(2, copy(1, 5)))
    wait_for(lambda: used(bench, 1) < LARGE + (1 << 20), "the other one's memory is given back")
    assert used(bench, 1) > LARGE
    assert bench.read(copy(1, 5))["part", 0] == bytes([5]) * LARGE


def test_freeing_memory_blocks_no_caller(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """Freeing gigabytes takes seconds, in which a lease could not be renewed."""
    for group in (1, 2):
        bench.begin(group, range(1))
        for step in (5, 6):
            bench.ranks[0].write(step, part=bytes([group]) * LARGE)
        bench.end()
    is_free, close, begun = threading.Event(), os.close, copy(2, 5)
    slow = {fd for group in bench.snapshots._groups.values() for fd in group.own.values()}

    def close_slowly(fd: int) -> None:
        assert fd not in slow or is_free.wait(BOUND_S), "somebody waits for it"
        close(fd)

    monkeypatch.setattr(os, "close", close_slowly)
    bench.snapshots.on_restore_point(restore_point(3, begun))
    assert used(bench, 2) >= 2 * LARGE, "the rest of it comes after what is slow"
    assert bench.read(begun)["part", 0] == bytes([2]) * LARGE
    bench.begin(3)
    bench.make(7, 8, 9)
    assert bench.read(begun) == {}, "it was let go of, too"
    is_free.set()
    assert bench.end() == (held(3, 8, 0, 1), held(3, 9, 0, 1))


def test_older_snapshots_are_released_once_the_restore_point_is_settled(bench: Bench) -> None:
    bench.begin(1)
    bench.make(5)
    bench.end()
    bench.begin(2)
    bench.make(6)
    assert bench.end() == (held(1, 5, 0, 1), held(2, 6, 0, 1)), "not all ranks may have made the second"
    bench.begin(3)
    bench.snapshots.on_restore_point(restore_point(3, copy(2, 6)))
    assert bench.end() == (held(2, 6, 0, 1),)


def test_a_late_part_of_the_restored_snapshot_is_kept(bench: Bench) -> None:
    bench.begin(1)
    bench.make(5)
    bench.end()
    bench.begin(2)
    bench.snapshots.on_restore_point(restore_point(2, copy(1, 5)))
    bench.snapshots.store_replica(part(1, 5, 2))
    assert bench.end() == (held(1, 5, 0, 1, 2),)


def test_a_local_ranks_part_from_a_neighbour_is_not_counted_twice(bench: Bench) -> None:
    bench.begin(1)
    bench.make(5)
    bench.snapshots.store_replica(part(1, 5, 1))
    assert bench.end() == (held(1, 5, 0, 1),)
    assert bench.read(copy(1, 5))["part", 1] == b"1 5"


def test_a_group_that_starts_from_a_checkpoint_keeps_no_older_snapshot(bench: Bench) -> None:
    bench.begin(1)
    bench.make(5)
    bench.end()
    bench.begin(2)
    bench.snapshots.on_restore_point(restore_point(2, copy(1, 3)))
    bench.snapshots.store_replica(part(1, 5, 2))
    assert bench.end() == ()


def test_the_restored_snapshot_is_released_after_three_new_ones_of_each_rank(bench: Bench) -> None:
    bench.begin(1)
    bench.make(5)
    bench.end()
    bench.begin(2)
    bench.snapshots.on_restore_point(restore_point(2, copy(1, 5)))
    bench.make(6, 7)
    bench.ranks[0].write(8)
    bench.snapshots.on_snapshot(0, 8, time.monotonic())
    assert bench.read(copy(1, 5)) != {}, "another rank may have made one only, and that may not be with its neighbours"
    bench.ranks[1].write(8)
    bench.snapshots.on_snapshot(1, 8, time.monotonic())
    assert bench.read(copy(1, 5)) == {}
    bench.snapshots.store_replica(part(1, 5, 2))
    assert bench.end() == (held(2, 7, 0, 1), held(2, 8, 0, 1))


def test_a_part_of_a_group_that_has_not_started_here_is_kept(bench: Bench) -> None:
    bench.snapshots.store_replica(part(1, 1, 3))
    bench.begin(1)
    bench.make(1)
    assert bench.end() == (held(1, 1, 0, 1, 3),)


def test_no_more_pieces_are_offered_than_descriptors_fit_into_a_message(bench: Bench) -> None:
    bench.begin(1, range(1))
    bench.make(5)
    for rank in range(1, 400):
        bench.snapshots.store_replica(SnapshotPart(copy=copy(1, 5), world_size=400, rank=rank, checksum=0, data=b""))
    (told,) = bench.end()
    assert len(told.parts) == 252
    assert told.parts[0] == 0
    with bench.snapshots.pieces(copy(1, 5)) as (pieces, fds):
        assert len(pieces) == len(fds) == 253
        assert {piece.rank for piece in pieces} == set(told.parts)
