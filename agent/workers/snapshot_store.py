"""The snapshots that this node holds in memory: those of its own ranks, and parts that neighbours have sent.

A rank writes its snapshots to a memory that the agent has created (`trainer_runtime.snapshot_page`), so the memory
outlives the rank. Snapshots count once every process that could write there is gone. While the ranks run, only one
thing is read: the part of a new snapshot that is unique to its rank. It is small, and sent to the neighbours.

**Which snapshots are kept.** All that the ranks of the last group left, and those of older groups that the next group
may have to start from. Once the restore point of a group is settled, only that snapshot is kept of the older groups. It
is released when each local rank has taken `_SAFE_SNAPSHOTS` snapshots in the new group: no rank starts a step before
all have completed the one before, so by then every rank has taken a snapshot and had time to send it.

Memory is released on another thread (`memory_release.py`), because callers of these methods may not block.

A script can write to this memory, so its contents are checked: the world size, and the bounds of the memory.
"""

from __future__ import annotations

import mmap
import os
import threading
from collections import Counter
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from agent.core.events import InventoryChanged
from agent.core.model import Replica, StateId
from agent.links.frames import SNAPSHOT_PART_BYTES
from agent.links.snapshot_parts import SnapshotPart, add_newest
from agent.observe.log import log
from agent.workers.memory_release import MemoryRelease
from trainer_runtime.contract import MAX_DESCRIPTORS
from trainer_runtime.snapshot_page import HEADER_BYTES, MEMORY_NAME, Slot, clear_header, fill_slot, read_slots

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from agent.core.model import RestorePoint
    from agent.workers.channel import DamagedMessage

_SAFE_SNAPSHOTS = 3


@dataclass(frozen=True)
class PieceSource:
    """The run and the world size of the ranks whose snapshots are kept."""

    run: str
    world_size: int


@dataclass(frozen=True)
class SnapshotPiece:
    """A piece of a snapshot that this node holds, as it is described to a worker."""

    kind: Literal["common", "part"]
    rank: int
    at: int
    bytes: int
    sum: int
    world_size: int


@dataclass
class _Group:
    """The snapshots of one group."""

    run: str
    number: int
    world_size: int = 0
    own: dict[int, int] = field(default_factory=dict)
    """Descriptors of the local ranks' memories, by rank."""
    parts: dict[int, tuple[SnapshotPart, ...]] = field(default_factory=dict)
    """Parts that neighbours have sent, by rank."""
    damaged: set[tuple[int, str, int]] = field(default_factory=set)
    """Damaged pieces: step, kind, rank."""

    def slots_of(self, rank: int) -> list[Slot]:
        """Return the snapshots that a rank's memory describes, without those that cannot be valid."""
        size = os.fstat(self.own[rank]).st_size
        return [
            slot
            for slot in read_slots(self.own[rank])
            if slot.world_size == self.world_size
            and max(slot.common_at + slot.common_bytes, slot.part_at + slot.part_bytes) <= size
        ]

    def slots(self) -> list[tuple[int, Slot]]:
        """Return the snapshots of the local ranks, each with its rank."""
        return [(rank, slot) for rank in sorted(self.own) for slot in self.slots_of(rank)]

    def replicas(self) -> tuple[Replica, ...]:
        """Return the snapshots that this node holds, completely or in part."""
        sizes, commons, ranks = dict[int, int](), set[int](), dict[int, list[int]]()
        for step in sorted(
            {slot.step for _, slot in self.slots()} | {part.copy.step for part in self._neighbour_parts()}
        ):
            for piece, _ in self.pieces(step):
                sizes.setdefault(step, piece.world_size)
                if piece.kind == "common":
                    commons.add(step)
                else:
                    ranks.setdefault(step, []).append(piece.rank)
        return tuple(
            Replica(
                copy=StateId(run=self.run, group=self.number, step=step),
                world_size=size,
                has_common=step in commons,
                parts=tuple(sorted(ranks.get(step, [])[: MAX_DESCRIPTORS - 1])),
            )
            for step, size in sorted(sizes.items())
        )

    def keep_only(self, step: int, release: MemoryRelease) -> None:
        """Release all other snapshots."""
        slots = {rank: slot for rank, slot in self.slots() if slot.step == step}
        for rank in [*self.own]:
            if rank in slots:
                _release_all_but(self.own[rank], slots[rank], release)
            else:
                release.close_soon(self.own.pop(rank))
        self.parts = {
            rank: here for rank, parts in self.parts.items() if (here := tuple(p for p in parts if p.copy.step == step))
        }

    def close(self, release: MemoryRelease) -> None:
        """Release everything."""
        while self.own:
            release.close_soon(self.own.popitem()[1])
        self.parts.clear()

    def pieces(self, step: int) -> Iterator[tuple[SnapshotPiece, int | bytes]]:
        """Yield all pieces of a snapshot, each with its memory or its bytes."""
        return (
            (piece, source)
            for piece, source in self._pieces(step)
            if (step, piece.kind, piece.rank) not in self.damaged
        )

    def _pieces(self, step: int) -> Iterator[tuple[SnapshotPiece, int | bytes]]:
        for rank, slot in self.slots():
            if slot.step != step:
                continue
            fd = self.own[rank]
            if slot.common_bytes:
                yield (
                    SnapshotPiece("common", rank, slot.common_at, slot.common_bytes, slot.common_sum, slot.world_size),
                    fd,
                )
            yield SnapshotPiece("part", rank, slot.part_at, slot.part_bytes, slot.part_sum, slot.world_size), fd
        for part in self._neighbour_parts():
            if part.copy.step == step:
                yield SnapshotPiece("part", part.rank, 0, len(part.data), part.checksum, part.world_size), part.data

    def _neighbour_parts(self) -> list[SnapshotPart]:
        return [part for rank, parts in sorted(self.parts.items()) if rank not in self.own for part in parts]


class SnapshotStore:
    """All snapshots that the node holds. Methods may be called from any thread.

    Args:
        post: receives `InventoryChanged` when a group ends, and after each addition while no local rank runs.
        replicate: receives the part of each new snapshot that neighbours are to store; may not block.
    """

    def __init__(self, post: Callable[[InventoryChanged], None], replicate: Callable[[SnapshotPart], None]) -> None:
        self._post = post
        self._replicate = replicate
        self._lock = threading.Lock()
        self._release = MemoryRelease()
        self._groups: dict[int, _Group] = {}
        """By group number, which increases over all runs of a job."""
        self._running: _Group | None = None
        self._snapshot_counts: Counter[int] = Counter()
        """Number of snapshots that each rank of the running group has taken."""
        self._replicated_steps: dict[int, int] = {}
        """Step of the newest part that was sent to the neighbours, by rank."""
        self._keep_since_group = 0
        """Snapshots of this group and of later ones are kept."""
        self._restored_from: StateId | None = None
        """The one snapshot of an older group that is kept as well."""
        self._has_warned = False

    def begin(self, source: PieceSource, number: int, memories: Mapping[int, int]) -> None:
        """Add the memories of local ranks that are about to start, by rank. Their descriptors stay with the caller."""
        with self._lock:
            group = self._group(source.run, number)
            group.world_size = source.world_size
            group.own = {rank: os.dup(fd) for rank, fd in memories.items()}
            self._running = group
            self._snapshot_counts.clear()
            self._replicated_steps.clear()

    def end(self) -> None:
        """Count the snapshots of the running group: none of its processes is left."""
        with self._lock:
            if self._running is not None:  # otherwise its ranks take no snapshots
                self._running = None
                self._post_inventory()

    def on_snapshot(self, rank: int, step: int) -> None:
        """Handle a new snapshot of a local rank of the running group."""
        with self._lock:
            group = self._running
            if group is None or rank not in group.own:
                return
            self._snapshot_counts[rank] += 1
            if all(self._snapshot_counts[each] >= _SAFE_SNAPSHOTS for each in group.own):
                self._keep_since(group.number, None)
            part = self._read_part(group, rank, step)
            if part is not None:
                self._replicated_steps[rank] = step
        if part is not None:
            self._replicate(part)

    def has_replicated(self, step: int) -> bool:
        """Whether the neighbours were sent all parts of the local ranks' snapshots of this step."""
        with self._lock:
            group = self._running
            return group is not None and all(self._replicated_steps.get(rank) == step for rank in group.own)

    def store_replica(self, part: SnapshotPart) -> None:
        """Store a part that a neighbour has sent."""
        copy = part.copy
        with self._lock:
            if copy.group < self._keep_since_group and copy != self._restored_from:
                return
            parts = self._group(copy.run, copy.group).parts
            parts[part.rank] = add_newest(parts.get(part.rank, ()), part)
            if self._running is None:
                self._post_inventory()

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
                fd = source if isinstance(source, int) else _memory_with(source, opened)
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
        self._release.close()

    def _group(self, run: str, number: int) -> _Group:
        return self._groups.setdefault(number, _Group(run, number))

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

    def _read_part(self, group: _Group, rank: int, step: int) -> SnapshotPart | None:
        """Read the part that is unique to this rank. None: it was overwritten, or is too large."""
        slot = next((slot for slot in group.slots_of(rank) if slot.step == step), None)
        if slot is None:
            return None
        if slot.part_bytes > SNAPSHOT_PART_BYTES:
            self._warn_too_large(rank, slot.part_bytes)
            return None
        data = os.pread(group.own[rank], slot.part_bytes, slot.part_at)
        if slot not in read_slots(group.own[rank]):
            return None
        copy = StateId(run=group.run, group=group.number, step=step)
        return SnapshotPart(copy=copy, world_size=group.world_size, rank=rank, checksum=slot.part_sum, data=data)

    def _warn_too_large(self, rank: int, part_bytes: int) -> None:
        if not self._has_warned:
            self._has_warned = True
            log.warning(
                f"rank {rank} has its own part of {part_bytes} bytes in each snapshot, more than the "
                f"{SNAPSHOT_PART_BYTES} that are sent to other nodes: if this node is lost, training resumes from the "
                "last checkpoint"
            )


def _release_all_but(fd: int, kept: Slot, release: MemoryRelease) -> None:
    """Leave only this snapshot in a memory."""
    ranges = [
        (0, HEADER_BYTES),
        (kept.common_at, kept.common_at + kept.common_bytes),
        (kept.part_at, kept.part_at + kept.part_bytes),
    ]
    with mmap.mmap(fd, HEADER_BYTES) as header:  # not by `pwrite`, which would block while the memory is being freed
        clear_header(header)
        fill_slot(header, 0, kept)
    size = os.fstat(fd).st_size
    free_from = 0
    for begin, end in [*sorted(ranges), (size, size)]:
        if free_from < begin:
            release.punch_hole_soon(fd, free_from, begin)
        free_from = max(free_from, end)


def _memory_with(data: bytes, opened: ExitStack) -> int:
    fd = os.memfd_create(f"{MEMORY_NAME}:kept", os.MFD_CLOEXEC)
    opened.callback(os.close, fd)
    os.write(fd, data)
    return fd
