"""What this node holds of the training in memory: snapshots of its own ranks, and parts that neighbours handed over.

A rank puts its snapshots into a memory that this agent made (`trainer_runtime.snapshot_page`), and which therefore
outlives it. They count once every process that could write there is gone. While ranks run only one thing is read: the
small part of a new snapshot that its rank alone has, which is handed over to the neighbours.

What is kept. Of the group that ran last whatever its ranks left, and of those before it what the next group may have to
begin from. As soon as it is said where a group begins, that copy alone is kept of those before; and that goes when each
local rank has made `_SAFE` snapshots in the new group. No rank begins a step before all have done with the one before,
so then all have made one, and had time to hand it over.

What is let go of is given back by another thread (`memory_release.py`): these methods are called by those who may not
wait.

Memory that a script can write to is believed only where it fits: the size of the world, and the bounds of the memory.
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

_SAFE = 3


@dataclass(frozen=True)
class PieceSource:
    """The ranks whose snapshots are kept."""

    run: str
    world_size: int


@dataclass(frozen=True)
class SnapshotPiece:
    """One part of a copy that is held here, as a worker is told of it."""

    kind: Literal["common", "part"]
    rank: int
    at: int
    bytes: int
    sum: int
    world_size: int


@dataclass
class _Group:
    """What is held of one group."""

    run: str
    number: int
    world_size: int = 0
    own: dict[int, int] = field(default_factory=dict)
    """The memories of local ranks, by rank: their descriptors."""
    parts: dict[int, tuple[SnapshotPart, ...]] = field(default_factory=dict)
    """What neighbours handed over, by rank."""
    damaged: set[tuple[int, str, int]] = field(default_factory=set)
    """Pieces that are not what they should be: the step, the kind, the rank."""

    def slots_of(self, rank: int) -> list[Slot]:
        """What its memory tells of snapshots, where that can be."""
        size = os.fstat(self.own[rank]).st_size
        return [
            slot
            for slot in read_slots(self.own[rank])
            if slot.world_size == self.world_size
            and max(slot.common_at + slot.common_bytes, slot.part_at + slot.part_bytes) <= size
        ]

    def slots(self) -> list[tuple[int, Slot]]:
        """The snapshots of local ranks, each with its rank."""
        return [(rank, slot) for rank in sorted(self.own) for slot in self.slots_of(rank)]

    def held(self) -> tuple[Replica, ...]:
        """The copies that all this makes, or makes parts of."""
        sizes, commons, ranks = dict[int, int](), set[int](), dict[int, list[int]]()
        for step in sorted({slot.step for _, slot in self.slots()} | {part.copy.step for part in self._others()}):
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

    def keep_only(self, step: int, freeing: MemoryRelease) -> None:
        """Let go of all other copies."""
        with_it = {rank: slot for rank, slot in self.slots() if slot.step == step}
        for rank in [*self.own]:
            if rank in with_it:
                _free_the_rest(self.own[rank], with_it[rank], freeing)
            else:
                freeing.close_soon(self.own.pop(rank))
        self.parts = {
            rank: here for rank, parts in self.parts.items() if (here := tuple(p for p in parts if p.copy.step == step))
        }

    def close(self, freeing: MemoryRelease) -> None:
        """Let go of everything."""
        while self.own:
            freeing.close_soon(self.own.popitem()[1])
        self.parts.clear()

    def pieces(self, step: int) -> Iterator[tuple[SnapshotPiece, int | bytes]]:
        """All that is held of a copy, and in which memory, or the bytes themselves."""
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
        for part in self._others():
            if part.copy.step == step:
                yield SnapshotPiece("part", part.rank, 0, len(part.data), part.checksum, part.world_size), part.data

    def _others(self) -> list[SnapshotPart]:
        return [part for rank, parts in sorted(self.parts.items()) if rank not in self.own for part in parts]


class SnapshotStore:
    """All of it. Methods may be called from any thread.

    Args:
        post: given `InventoryChanged` when no local rank runs, at its end and whenever something is added.
        hand_over: given each part of a local rank's new snapshot; may not block.
    """

    def __init__(self, post: Callable[[InventoryChanged], None], hand_over: Callable[[SnapshotPart], None]) -> None:
        self._post = post
        self._hand_over = hand_over
        self._lock = threading.Lock()
        self._freeing = MemoryRelease()
        self._groups: dict[int, _Group] = {}
        """By number, which grows over all runs of a job."""
        self._running: _Group | None = None
        self._made: Counter[int] = Counter()
        """Snapshots of the running group, by rank."""
        self._handed_over: dict[int, int] = {}
        """The step of the newest that was handed over, by rank."""
        self._since = 0
        """The group of which, and of what follows it, everything is kept."""
        self._begun_from: StateId | None = None
        """The one copy of those before that is kept too."""
        self._has_warned = False

    def begin(self, source: PieceSource, number: int, memories: Mapping[int, int]) -> None:
        """Local ranks of this group are about to start, with these memories, by rank. The descriptors stay theirs."""
        with self._lock:
            group = self._group(source.run, number)
            group.world_size = source.world_size
            group.own = {rank: os.dup(fd) for rank, fd in memories.items()}
            self._running = group
            self._made.clear()
            self._handed_over.clear()

    def end(self) -> None:
        """Nothing of the local ranks is left."""
        with self._lock:
            if self._running is not None:  # else they made none
                self._running = None
                self._tell()

    def take(self, rank: int, step: int) -> None:
        """A local rank of the running group has made a snapshot of this step."""
        with self._lock:
            group = self._running
            if group is None or rank not in group.own:
                return
            self._made[rank] += 1
            if all(self._made[each] >= _SAFE for each in group.own):
                self._keep_since(group.number, None)
            part = self._read(group, rank, step)
            if part is not None:
                self._handed_over[rank] = step
        if part is not None:
            self._hand_over(part)

    def has_handed_over(self, step: int) -> bool:
        """Whether the neighbours were given all that they are to keep of local ranks' snapshots of this step."""
        with self._lock:
            group = self._running
            return group is not None and all(self._handed_over.get(rank) == step for rank in group.own)

    def keep(self, part: SnapshotPart) -> None:
        """A neighbour has handed this over."""
        copy = part.copy
        with self._lock:
            if copy.group < self._since and copy != self._begun_from:
                return
            parts = self._group(copy.run, copy.group).parts
            parts[part.rank] = add_newest(parts.get(part.rank, ()), part)
            if self._running is None:
                self._tell()

    def disown(self, damaged: DamagedMessage) -> None:
        """A rank could not read this of the copy that the running group begins from: no group is given it again."""
        with self._lock:
            copy = self._begun_from
            if copy is not None and copy.group in self._groups:
                self._groups[copy.group].damaged.add((copy.step, damaged.kind, damaged.rank))

    def note_resume(self, resume: RestorePoint) -> None:
        """It is said where the running group begins."""
        with self._lock:
            self._keep_since(resume.group, resume.copy)

    @contextmanager
    def pieces(self, copy: StateId | None) -> Iterator[tuple[list[SnapshotPiece], list[int]]]:
        """All that is held of a copy, and for each piece a descriptor by which it can only be read."""
        with self._lock, ExitStack() as opened:
            group = self._groups.get(copy.group) if copy is not None else None
            pieces, fds = list[SnapshotPiece](), list[int]()
            for piece, source in group.pieces(copy.step) if copy is not None and group is not None else ():
                fd = source if isinstance(source, int) else _memory_of(source, opened)
                fds.append(os.open(f"/proc/self/fd/{fd}", os.O_RDONLY | os.O_CLOEXEC))
                opened.callback(os.close, fds[-1])
                pieces.append(piece)
            yield pieces[:MAX_DESCRIPTORS], fds[:MAX_DESCRIPTORS]

    def close(self) -> None:
        """Let go of everything, and return when it is given back."""
        with self._lock:
            for group in self._groups.values():
                group.close(self._freeing)
            self._groups.clear()
        self._freeing.close()

    def _group(self, run: str, number: int) -> _Group:
        return self._groups.setdefault(number, _Group(run, number))

    def _tell(self) -> None:
        held = (copy for _, group in sorted(self._groups.items()) for copy in group.held())
        self._post(InventoryChanged(tuple(held)))

    def _keep_since(self, number: int, begun_from: StateId | None) -> None:
        self._since, self._begun_from = number, begun_from
        for older in [each for each in self._groups if each < number]:
            if begun_from is not None and older == begun_from.group:
                self._groups[older].keep_only(begun_from.step, self._freeing)
            else:
                self._groups.pop(older).close(self._freeing)

    def _read(self, group: _Group, rank: int, step: int) -> SnapshotPart | None:
        """What this rank alone has of the snapshot; None: it has been overwritten, or is too large."""
        slot = next((slot for slot in group.slots_of(rank) if slot.step == step), None)
        if slot is None:
            return None
        if slot.part_bytes > SNAPSHOT_PART_BYTES:
            self._warn(rank, slot.part_bytes)
            return None
        data = os.pread(group.own[rank], slot.part_bytes, slot.part_at)
        if slot not in read_slots(group.own[rank]):
            return None
        copy = StateId(run=group.run, group=group.number, step=step)
        return SnapshotPart(copy=copy, world_size=group.world_size, rank=rank, checksum=slot.part_sum, data=data)

    def _warn(self, rank: int, part_bytes: int) -> None:
        if not self._has_warned:
            self._has_warned = True
            log.warning(
                f"rank {rank} alone has {part_bytes} bytes of each snapshot, more than the {SNAPSHOT_PART_BYTES} that "
                "are handed over to other nodes: if this node is lost, training resumes from the last checkpoint"
            )


def _free_the_rest(fd: int, kept: Slot, freeing: MemoryRelease) -> None:
    """Leave nothing in a memory but this snapshot."""
    ranges = [
        (0, HEADER_BYTES),
        (kept.common_at, kept.common_at + kept.common_bytes),
        (kept.part_at, kept.part_at + kept.part_bytes),
    ]
    with mmap.mmap(fd, HEADER_BYTES) as header:  # not by `pwrite`, which would wait while the memory is emptied
        clear_header(header)
        fill_slot(header, 0, kept)
    size = os.fstat(fd).st_size
    free_from = 0
    for begin, end in [*sorted(ranges), (size, size)]:
        if free_from < begin:
            freeing.empty_soon(fd, free_from, begin)
        free_from = max(free_from, end)


def _memory_of(data: bytes, opened: ExitStack) -> int:
    fd = os.memfd_create(f"{MEMORY_NAME}:kept", os.MFD_CLOEXEC)
    opened.callback(os.close, fd)
    os.write(fd, data)
    return fd
