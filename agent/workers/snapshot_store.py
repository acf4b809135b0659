"""The snapshots that this node holds in memory: those of its own ranks, and parts that neighbours have sent.

A rank writes its snapshots to a memory that the agent has created (`trainer_runtime.snapshot_page`), so the memory
outlives the rank. Snapshots count once every process that could write there is gone. While the ranks run, only one
thing is read: the part of a new snapshot that is unique to its rank. It is sent to the neighbours; if it is large, to
the next node only. The rank's control page shows when it was sent.

**Which snapshots are kept.** All that the ranks of the last group left, and those of older groups that the next group
may have to start from. Once the restore point of a group is settled, only that snapshot is kept of the older groups. It
is released when each local rank has taken `_SAFE_SNAPSHOTS` snapshots in the new group: no rank starts a step before
all have completed the one before, so by then every rank has taken a snapshot and had time to send it.

Memory is released on another thread (`memory_release.py`), because callers of these methods may not block.

A script can write to this memory, so its contents are checked: the world size, and the bounds of the memory.
"""

from __future__ import annotations

import os
import threading
import time
from collections import Counter
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Protocol

from agent.core.events import InventoryChanged
from agent.core.saved_states import StateId
from agent.links.part_receiver import OutdatedPartError
from agent.links.part_sender import LargePart, PartSender
from agent.links.part_stream import PartHeader
from agent.links.snapshot_parts import SnapshotPart
from agent.workers.held_snapshots import HeldGroup, NeighbourPart, PieceSource, SnapshotPiece, memory_with
from agent.workers.memory_release import MemoryRelease
from agent.workers.replica_space import ReplicaSpace, SnapshotUse
from trainer_runtime.contract import MAX_DESCRIPTORS
from trainer_runtime.snapshot_page import LINK_PART_BYTES, read_slots

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from agent.core.records import Identity
    from agent.core.saved_states import RestorePoint
    from agent.workers.channel import DamagedMessage
    from trainer_runtime.contract import ControlPage

_SAFE_SNAPSHOTS = 3


@dataclass(frozen=True)
class RankMemory:
    """What a rank and its agent share for snapshots."""

    descriptor: int
    """Of the memory for the snapshots."""
    replicated_event: int
    """Eventfd that signals a change of `replicated` on the page."""
    page: ControlPage


class _OnSent(Protocol):
    def __call__(self, *, is_with_next_only: bool) -> None: ...


class SnapshotStore:
    """All snapshots that the node holds. Methods may be called from any thread.

    Args:
        post: receives `InventoryChanged` when a group ends, and after each change while no local rank runs.
        replicate: receives the part of each new snapshot that neighbours are to store, and what to call once one has
            stored it or none is expected to; may not block.
        part_sender: sends each such part that is large. None: these are not sent.
        space: provides space for the large parts that neighbours send.
    """

    def __init__(
        self,
        post: Callable[[InventoryChanged], None],
        replicate: Callable[[SnapshotPart, Callable[[], None]], None],
        part_sender: PartSender | None = None,
        space: ReplicaSpace | None = None,
    ) -> None:
        self._post = post
        self._replicate = replicate
        self._part_sender = part_sender
        self._space = space or ReplicaSpace()
        self._lock = threading.Lock()
        self._release = MemoryRelease()
        self._groups: dict[int, HeldGroup] = {}
        """By group number, which increases over all runs of a job."""
        self._running: HeldGroup | None = None
        self._snapshot_counts: Counter[int] = Counter()
        """Number of snapshots that each rank of the running group has taken."""
        self._ranks: dict[int, RankMemory] = {}
        """What is shared with the ranks of the running group."""
        self._next_node: Identity | None = None
        """The agent that is to hold their large parts. None: there is no other."""
        self._sent: dict[int, tuple[int, bool]] = {}
        """Step of the newest part that a neighbour has stored, by rank, and whether it is large."""
        self._took_s: dict[int, float] = {}
        """Seconds from the last snapshot of each rank until its part was sent."""
        self._on_sent: tuple[int, _OnSent] | None = None
        """What to call once all parts of this step are sent."""
        self._keep_since_group = 0
        """Snapshots of this group and of later ones are kept."""
        self._restored_from: StateId | None = None
        """The one snapshot of an older group that is kept as well."""

    def begin(
        self,
        source: PieceSource,
        number: int,
        memories: Mapping[int, RankMemory],
        next_node: Identity | None = None,
    ) -> None:
        """Add the memories of local ranks that are about to start, by rank. Their descriptors stay with the caller.

        Args:
            source: the run and the world size of these ranks.
            number: of their group.
            memories: of the ranks, by rank.
            next_node: the agent that is to hold their large parts too. None: there is no other.
        """
        with self._lock:
            group = self._group(source.run, number)
            group.world_size = source.world_size
            group.own = {rank: os.dup(memory.descriptor) for rank, memory in memories.items()}
            self._running = group
            self._forget_ranks()
            self._ranks = {
                rank: RankMemory(group.own[rank], os.dup(memory.replicated_event), memory.page)
                for rank, memory in memories.items()
            }
            self._next_node = next_node
            self._snapshot_counts.clear()
            self._sent.clear()
            self._took_s.clear()

    def end(self) -> None:
        """Count the snapshots of the running group: none of its processes is left."""
        with self._lock:
            if self._running is not None:  # otherwise its ranks take no snapshots
                if self._part_sender is not None:
                    self._part_sender.end_group(self._running.number)
                self._running, self._on_sent = None, None
                self._forget_ranks()
                self._post_inventory()

    def on_snapshot(self, rank: int, step: int, at_s: float) -> None:
        """Handle a new snapshot of a local rank of the running group.

        Args:
            rank: the rank.
            step: the step of the snapshot.
            at_s: when it was complete, on the monotonic clock.
        """
        with self._lock:
            group = self._running
            if group is None or rank not in group.own:
                return
            self._snapshot_counts[rank] += 1
            if all(self._snapshot_counts[each] >= _SAFE_SNAPSHOTS for each in group.own):
                self._keep_since(group.number, None)
            part = self._read_part(group, rank, step, at_s)
            if part is None:
                self._tell(rank, step, time.monotonic() - at_s)
        if isinstance(part, SnapshotPart):
            self._replicate(part, partial(self._on_end, group, rank, step, at_s, is_large=False, is_held=True))
        elif part is not None and self._part_sender is not None:
            self._part_sender.send(part)

    def when_sent(self, step: int, then: _OnSent) -> None:
        """Call `then` once the neighbours were sent all parts of the local ranks' snapshots of this step.

        `is_with_next_only`: some parts are large, and only the next node has these. `then` is not called if the group
        ends before, or if `when_sent` is called again.
        """
        with self._lock:
            self._on_sent = step, then
            ready = self._take_on_sent()
        if ready is not None:
            ready()

    def store_replica(self, part: SnapshotPart) -> None:
        """Store a part that a neighbour has sent."""
        copy = part.copy
        with self._lock:
            if self._is_outdated(copy):
                return
            kept = NeighbourPart(copy, part.world_size, part.rank, part.checksum, len(part.data), part.data)
            self._add(kept)

    def make_room(self, header: PartHeader) -> int:
        """Return the descriptor of a memory or file for a large part that a neighbour is about to send.

        Of each rank, the newest two parts are kept. A third one may be on its way only once the first two have arrived
        everywhere, so it gets the memory of the oldest.

        Raises:
            NoRoomError: there is too little memory, and too little space on disk.
            OutdatedPartError: the part is of an older group.
        """
        copy = header.copy
        with self._lock:
            if self._is_outdated(copy):
                raise OutdatedPartError
            group = self._group(copy.run, copy.group)
            memory = group.make_room(header.rank, copy.step)
            now = sum(each.used_bytes() for each in self._groups.values())
            use = SnapshotUse(now, group.expected_bytes(header.size_bytes))
            if memory is not None and self._running is None:
                self._post_inventory()
        return self._space.open(copy.group, header.size_bytes, memory, use, self._release)

    def store_large(self, header: PartHeader, descriptor: int) -> None:
        """Store a large part that a neighbour has sent into this memory or file."""
        part = NeighbourPart(
            header.copy, header.world_size, header.rank, header.checksum, header.size_bytes, descriptor
        )
        with self._lock:
            if self._is_outdated(header.copy):
                part.drop(self._release)
            else:
                self._add(part)

    def give_back(self, descriptor: int) -> None:
        """Release a memory or file into which no part was sent."""
        self._release.close_soon(descriptor)

    def mark_damaged(self, damaged: DamagedMessage) -> None:
        """Never offer this piece of the restored snapshot again: a rank found it damaged."""
        with self._lock:
            copy = self._restored_from
            if copy is not None and copy.group in self._groups:
                self._groups[copy.group].damaged.add((copy.step, damaged.kind, damaged.rank))

    def on_restore_point(self, restore_point: RestorePoint) -> None:
        """Keep only the restored snapshot of older groups: the restore point of the running group is settled."""
        with self._lock:
            self._keep_since(restore_point.group, restore_point.copy)

    @contextmanager
    def pieces(self, copy: StateId | None) -> Iterator[tuple[list[SnapshotPiece], list[int]]]:
        """Yield all pieces of a snapshot, and a read-only descriptor for each."""
        with self._lock, ExitStack() as opened:
            group = self._groups.get(copy.group) if copy is not None else None
            pieces, fds = list[SnapshotPiece](), list[int]()
            for piece, source in group.pieces(copy.step) if copy is not None and group is not None else ():
                fd = source if isinstance(source, int) else memory_with(source, opened)
                fds.append(os.open(f"/proc/self/fd/{fd}", os.O_RDONLY | os.O_CLOEXEC))
                opened.callback(os.close, fds[-1])
                pieces.append(piece)
            yield pieces[:MAX_DESCRIPTORS], fds[:MAX_DESCRIPTORS]

    def close(self) -> None:
        """Release everything, and return when the memory is free."""
        with self._lock:
            for group in self._groups.values():
                group.close(self._release)
            self._groups.clear()
            self._running, self._on_sent = None, None
            self._forget_ranks()
        self._release.close()

    def _is_outdated(self, copy: StateId) -> bool:
        return copy.group < self._keep_since_group and copy != self._restored_from

    def _add(self, part: NeighbourPart) -> None:
        self._group(part.copy.run, part.copy.group).add(part, self._release)
        if self._running is None:
            self._post_inventory()

    def _forget_ranks(self) -> None:
        while self._ranks:
            os.close(self._ranks.popitem()[1].replicated_event)

    def _tell(self, rank: int, step: int, took_s: float) -> None:
        """Tell a rank that this agent is done with its part of this step. The caller holds the lock."""
        self._took_s[rank] = took_s
        shared = self._ranks[rank]
        # All ranks wait for the one whose part takes longest.
        shared.page.replicating_us = int(1e6 * max(self._took_s.values()))
        shared.page.replicated = max(shared.page.replicated, step)
        os.eventfd_write(shared.replicated_event, 1)

    def _on_end(self, group: HeldGroup, rank: int, step: int, at_s: float, *, is_large: bool, is_held: bool) -> None:
        """Handle the end of a transfer: to one of the neighbours, or of a large part to the next node."""
        with self._lock:
            if self._running is not group:
                return
            if is_held:
                self._sent[rank] = step, is_large
            self._tell(rank, step, time.monotonic() - at_s if is_held else 0.0)
            ready = self._take_on_sent()
        if ready is not None:
            ready()

    def _take_on_sent(self) -> Callable[[], None] | None:
        """Return what is to be called now that parts were sent. The caller holds the lock."""
        if self._on_sent is None or self._running is None:
            return None
        step, then = self._on_sent
        sent = [self._sent.get(rank, (0, False)) for rank in self._running.own]
        if any(of_step != step for of_step, _ in sent):
            return None
        self._on_sent = None
        return partial(then, is_with_next_only=any(is_large for _, is_large in sent))

    def _group(self, run: str, number: int) -> HeldGroup:
        return self._groups.setdefault(number, HeldGroup(run, number))

    def _post_inventory(self) -> None:
        held = (copy for _, group in sorted(self._groups.items()) for copy in group.replicas())
        self._post(InventoryChanged(tuple(held)))

    def _keep_since(self, number: int, restored_from: StateId | None) -> None:
        self._keep_since_group, self._restored_from = number, restored_from
        for older in [each for each in self._groups if each < number]:
            if restored_from is not None and older == restored_from.group:
                self._groups[older].keep_only(restored_from.step, self._release)
            else:
                self._groups.pop(older).close(self._release)

    def _read_part(self, group: HeldGroup, rank: int, step: int, at_s: float) -> SnapshotPart | LargePart | None:
        """Return this rank's part: with its bytes if it is small. None: it was replaced, or there is no next node."""
        slot = next((slot for slot in group.slots_of(rank) if slot.step == step), None)
        if slot is None:
            return None
        copy = StateId(run=group.run, group=group.number, step=step)
        if slot.part_bytes > LINK_PART_BYTES:
            if self._next_node is None or self._part_sender is None:
                return None
            header = PartHeader(
                copy=copy, world_size=group.world_size, rank=rank, checksum=slot.part_sum, size_bytes=slot.part_bytes
            )
            memory = os.dup(group.own[rank])
            return LargePart(
                header,
                self._next_node,
                memory,
                slot.part_at,
                is_intact=lambda: slot in read_slots(memory),
                on_end=lambda is_held: self._on_end(group, rank, step, at_s, is_large=True, is_held=is_held),
            )
        data = os.pread(group.own[rank], slot.part_bytes, slot.part_at)
        if slot not in read_slots(group.own[rank]):
            return None
        return SnapshotPart(copy=copy, world_size=group.world_size, rank=rank, checksum=slot.part_sum, data=data)
