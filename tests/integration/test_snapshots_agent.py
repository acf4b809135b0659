"""Snapshots from real workers to their agent, and to the workers of the next group.

Without torch: they are plain bytes.
"""

from __future__ import annotations

import json
import os
import queue
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest
from waiting import wait_for

from agent.core.events import (
    Event,
    InventoryChanged,
    PublishAsked,
    RanksQuiesced,
    RestorePointAsked,
    WorkerExited,
    WorkersGone,
)
from agent.core.saved_states import Checkpoint, Replica, RestorePoint, StateId
from agent.links.snapshot_parts import SnapshotPart
from agent.workers.launch_plan import Launch, RankCommand
from agent.workers.snapshot_store import PieceSource
from agent.workers.worker_group import WorkerGroup
from trainer_runtime import contract

DEADLINE_S = 60
WORLD = 3
SOURCE = PieceSource("us", WORLD)

TALK = """
import json, mmap, os, socket, sys, time
from trainer_runtime import contract, snapshot_page as page
rank = int(sys.argv[1])
agent = socket.socket(fileno=int(os.environ[contract.CHANNEL_FD]))
seq = 0
def say(**message):
    agent.send(json.dumps(message).encode())
def receive():
    answer, fds, _, _ = socket.recv_fds(agent, contract.MESSAGE_BYTES, contract.MAX_DESCRIPTORS)
    return json.loads(answer), fds
def snap(step):
    global seq
    fd = int(os.environ[contract.SNAPSHOT_FD])
    os.ftruncate(fd, 8192)
    common, part = (b"common %d" % step) * (rank == 0), b"part %d of %d" % (step, rank)
    at = page.HEADER_BYTES + seq % 2 * 100
    with mmap.mmap(fd, 0) as memory:
        if not seq:
            page.clear_header(memory)
        seq += 1
        memory[at:at + len(common + part)] = common + part
        page.empty_slot(memory, seq % 2)
        page.fill_slot(memory, seq % 2, page.Slot(seq, step, 3, at, len(common), 1, at + len(common), len(part), 2))
    say(snapshot={"step": step, "at_s": 0.5})
def read_memory():
    say(ask="restore_point")
    answer, fds = receive()
    for piece, fd in zip(answer["restore_point"]["memory"], fds, strict=True):
        print(piece["kind"], piece["rank"], piece["world_size"], os.pread(fd, piece["bytes"], piece["at"]), flush=True)
    print("read", len(fds), flush=True)
"""


class Bench:
    """Local workers that take snapshots, and the resulting events and replicas."""

    def __init__(self, tmp: Path) -> None:
        self.tmp = tmp
        self.events: queue.Queue[Event] = queue.Queue()
        self.handed: list[SnapshotPart] = []
        self.quiesced: queue.Queue[RanksQuiesced] = queue.Queue()
        self.arrivals: list[Callable[[], None]] = []
        """Functions to call once the neighbours have stored the parts."""
        self.workers = WorkerGroup(self._post, replicate=self._replicate, after_replication=self.arrivals.append)

    def _replicate(self, part: SnapshotPart, on_end: Callable[[], None]) -> None:
        self.handed.append(part)
        on_end()

    def _post(self, event: Event) -> None:
        if not isinstance(event, RestorePointAsked | RanksQuiesced):
            self.events.put(event)
        if isinstance(event, RanksQuiesced):
            self.quiesced.put(event)

    def start(self, code: str, *, group: int = 1, ranks: int = 2, source: PieceSource | None = SOURCE) -> None:
        self.workers.start(Launch(group, tuple(self._command(rank, code, source) for rank in range(ranks)), source))

    def _command(self, rank: int, code: str, source: PieceSource | None) -> RankCommand:
        return RankCommand(
            local_rank=rank,
            rank=rank,
            argv=(sys.executable, "-c", TALK + code, str(rank)),
            env=os.environ if source is None else {**os.environ, contract.SNAPSHOT_OVERHEAD: "1"},
            cwd=self.tmp,
            log_path=self.log(rank),
            console_prefix=None,
        )

    def log(self, rank: int = 0) -> Path:
        return self.tmp / f"{rank}.log"

    def text(self, rank: int = 0) -> str:
        return self.log(rank).read_text() if self.log(rank).exists() else ""

    def end(self, ranks: int = 2) -> tuple[Replica, ...]:
        """Wait until no process is left; return the inventory. No inventory is posted before."""
        for _ in range(ranks):
            assert isinstance(self.events.get(timeout=DEADLINE_S), WorkerExited), self.text()
        told = self.events.get(timeout=DEADLINE_S)
        assert isinstance(told, InventoryChanged), told
        assert isinstance(self.events.get(timeout=DEADLINE_S), WorkersGone)
        return told.copies


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    made = Bench(tmp_path)
    yield made
    made.workers.close()


def copy(group: int, step: int) -> StateId:
    return StateId(run="us", group=group, step=step)


def held(group: int, step: int, *parts: int) -> Replica:
    return Replica(copy=copy(group, step), world_size=WORLD, has_common=True, parts=parts)


def restore_point(group: int, begin: StateId, committed: StateId | None = None) -> RestorePoint:
    checkpoint = committed and Checkpoint(
        copy=committed, name="us", private="", manifest_sha256="ab", kept=(), superseded=()
    )
    return RestorePoint(group=group, copy=begin, lineage=(begin,), checkpoint=checkpoint)


def kill_in_training(bench: Bench, *steps: int) -> tuple[Replica, ...]:
    """Kill ranks that have taken snapshots of these steps; return the inventory."""
    bench.start(f"[snap(step) for step in {steps}]\ntime.sleep(1000)")
    last = {(rank, steps[-1]) for rank in (0, 1)}  # an earlier one may have been overwritten before it was read
    wait_for(
        lambda: last <= {(each.rank, each.copy.step) for each in bench.handed},
        f"the last parts of both; {bench.text(0)} {bench.text(1)}",
        DEADLINE_S,
    )
    bench.workers.kill(1)
    return bench.end()


def test_snapshots_of_killed_ranks_are_given_to_the_next_group(bench: Bench) -> None:
    assert kill_in_training(bench, 4, 5, 6) == (held(1, 5, 0, 1), held(1, 6, 0, 1))
    bench.workers.snapshots.store_replica(
        SnapshotPart(copy=copy(1, 6), world_size=WORLD, rank=2, checksum=3, data=b"from a neighbour")
    )
    assert isinstance(bench.events.get(timeout=DEADLINE_S), InventoryChanged)
    bench.start("rank or read_memory()", group=2)
    bench.workers.send_restore_point(restore_point(2, copy(1, 6), committed=copy(1, 3)))
    assert bench.end() == (held(1, 6, 0, 1, 2),), "the second made none"
    assert bench.text().splitlines() == [
        "common 0 3 b'common 6'",
        "part 0 3 b'part 6 of 0'",
        "part 1 3 b'part 6 of 1'",
        "part 2 3 b'from a neighbour'",
        "read 4",
    ]


def test_a_worker_that_asks_does_not_wait_until_memory_is_freed(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    kill_in_training(bench, 5)
    slow = set(bench.workers.snapshots._groups[1].own.values())
    is_free, close = threading.Event(), os.close

    def close_slowly(fd: int) -> None:
        assert fd not in slow or is_free.wait(DEADLINE_S), "somebody waits for it"
        close(fd)

    monkeypatch.setattr(os, "close", close_slowly)
    bench.start("read_memory()", group=2)
    bench.workers.send_restore_point(restore_point(2, copy(0, 3)))
    assert bench.end() == ()
    assert bench.text() == "read 0\n"
    is_free.set()


def test_each_rank_of_a_node_may_ask(bench: Bench) -> None:
    kill_in_training(bench, 5)
    bench.start("read_memory()", group=2)
    bench.workers.send_restore_point(restore_point(2, copy(1, 5)))
    bench.end()
    assert "read 3" in bench.text(0)
    assert bench.text(0) == bench.text(1)


def test_no_memory_is_offered_if_the_group_starts_from_the_committed_checkpoint(bench: Bench) -> None:
    kill_in_training(bench, 5)
    bench.start("read_memory()", group=2)
    bench.workers.send_restore_point(restore_point(2, copy(1, 5), committed=copy(1, 5)))
    bench.end()
    assert bench.text() == "read 0\n"


def test_only_the_restored_snapshot_is_offered(bench: Bench) -> None:
    kill_in_training(bench, 5, 6)
    bench.start("read_memory()", group=2)
    bench.workers.send_restore_point(restore_point(2, StateId(run="us", group=1, step=4)))
    assert bench.end() == ()
    assert bench.text() == "read 0\n"


def test_a_piece_that_a_rank_finds_damaged_is_no_longer_held(bench: Bench) -> None:
    """A snapshot that all ranks find damaged is then incomplete, so no further group starts from it."""
    kill_in_training(bench, 5)
    bench.start("say(ask='restore_point'); receive(); say(damaged={'kind': 'common', 'rank': 0})", group=2)
    bench.workers.send_restore_point(restore_point(2, copy(1, 5)))
    assert bench.end() == (msgspec.structs.replace(held(1, 5, 0, 1), has_common=False),)
    bench.start(
        "rank or say(ask='restore_point'); "
        "rank or print([piece['kind'] for piece in receive()[0]['restore_point']['memory']])",
        group=3,
    )
    bench.workers.send_restore_point(restore_point(3, copy(1, 5)))
    bench.end()
    assert bench.text() == "['part', 'part']\n"


def test_parts_of_new_snapshots_are_replicated_while_ranks_train(bench: Bench) -> None:
    kill_in_training(bench, 4, 5)
    found = {(each.rank, each.copy.step): each.data for each in bench.handed}
    assert found[1, 5] == b"part 5 of 1"
    assert {each.checksum for each in bench.handed} == {2}
    assert {each.world_size for each in bench.handed} == {WORLD}


def test_a_snapshot_may_be_reported_while_a_question_is_open(bench: Bench) -> None:
    question = {
        "copy": {"run": "us", "group": 1, "step": 1},
        "name": "n",
        "private": "p",
        "manifest_sha256": "ab",
        "kept": [],
        "superseded": [],
        "is_rollback": False,
        "handoff": 0,
        "node": "",
        "size_bytes": 1,
        "took_s": 0.1,
        "at": 0.0,
    }
    bench.start(f"say(publish=json.loads({json.dumps(question)!r}))\nsnap(5)\nprint(receive())", ranks=1)
    assert isinstance(bench.events.get(timeout=DEADLINE_S), PublishAsked)
    wait_for(lambda: bench.handed != [], f"a part; {bench.text()}", DEADLINE_S)
    bench.workers.send_publish_answer(1, copy(1, 1), None, "no")
    assert bench.end(ranks=1) == (held(1, 5, 0),)
    assert "'reason': 'no'" in bench.text()


def test_where_no_snapshots_are_taken_there_is_no_memory_for_them(bench: Bench) -> None:
    bench.start("print(contract.SNAPSHOT_FD in os.environ)", ranks=1, source=None)
    assert isinstance(bench.events.get(timeout=DEADLINE_S), WorkerExited), bench.text()
    assert isinstance(bench.events.get(timeout=DEADLINE_S), WorkersGone), "and nothing is told of any"
    assert bench.text() == "False\n"


def test_a_rank_that_exits_with_0_leaves_its_snapshots_too(bench: Bench) -> None:
    bench.start("snap(5)")
    assert bench.end() == (held(1, 5, 0, 1),)


STAND = "snap(5 + rank // 2); say(quiesced={'handoff': 3, 'step': 5 + rank // 2}); time.sleep(1000)"


def test_quiesced_ranks_are_posted_once_all_are_and_again_when_their_parts_are_replicated(
    bench: Bench,
) -> None:
    bench.start(STAND)
    assert bench.quiesced.get(timeout=DEADLINE_S) == RanksQuiesced(1, 3, 5, is_shared=False)
    wait_for(lambda: bench.arrivals, "the parts are handed over")
    assert bench.quiesced.empty()
    bench.arrivals[0]()
    assert bench.quiesced.get(timeout=DEADLINE_S) == RanksQuiesced(1, 3, 5, is_shared=True)


@pytest.mark.parametrize("word", ["{'handoff': 3, 'step': 5}", "{'handoff': 4, 'step': 5}"])
def test_ranks_quiesced_at_other_steps_or_handoffs_are_not_posted(bench: Bench, word: str) -> None:
    """The third rank is at another step, or is quiesced for another handoff."""
    last = word if "4" in word else "{'handoff': 3, 'step': 6}"
    bench.start(
        f"snap(5); say(quiesced={last} if rank == 2 else {{'handoff': 3, 'step': 5}}); "
        "say(snapshot={'step': 9, 'at_s': 0.5})",
        ranks=3,
    )
    bench.end(3)
    assert bench.quiesced.empty()


def test_replication_is_not_awaited_without_a_part(bench: Bench) -> None:
    """The step is not that of the snapshot."""
    bench.start("snap(5); say(quiesced={'handoff': 3, 'step': 6}); time.sleep(1000)")
    assert bench.quiesced.get(timeout=DEADLINE_S) == RanksQuiesced(1, 3, 6, is_shared=False)
    assert not bench.arrivals
