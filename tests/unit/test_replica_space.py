"""Where the large parts that a neighbour sends are kept, if memory is short, and if the disk is short too."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
from structlog.testing import capture_logs

from agent.links.part_receiver import NoRoomError
from agent.workers import replica_space
from agent.workers.memory_release import MemoryRelease
from agent.workers.replica_space import ReplicaSpace, SnapshotUse, is_in_memory

MIB = 1 << 20
PLENTY = 1 << 40
LITTLE = SnapshotUse(now=0, expected=8 * MIB)


class Places:
    """Spaces of a node with a certain amount of free memory, and their file descriptors."""

    def __init__(self, directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.directory = directory
        self.release = MemoryRelease()
        self.free = PLENTY
        self._opened: list[int] = []
        monkeypatch.setattr(replica_space, "free_memory", lambda: self.free)

    def space(self, limit_bytes: int | None = None, directory: Path | None = None) -> ReplicaSpace:
        return ReplicaSpace(limit_bytes, (str(directory or self.directory),))

    def open(self, space: ReplicaSpace, size: int, old: int | None = None, use: SnapshotUse = LITTLE) -> int:
        return self.open_of(1, space, size, old, use)

    def open_of(
        self, group: int, space: ReplicaSpace, size: int, old: int | None = None, use: SnapshotUse = LITTLE
    ) -> int:
        found = space.open(group, size, old, use, self.release)
        self._opened.append(found)
        assert os.fstat(found).st_size == size
        return found

    def close(self) -> None:
        self.release.close()
        for descriptor in {*self._opened}:
            try:
                os.close(descriptor)
            except OSError:
                continue  # it was released


@pytest.fixture
def places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Places]:
    made = Places(tmp_path, monkeypatch)
    yield made
    made.close()


def test_a_copy_is_in_memory_if_there_is_enough(places: Places) -> None:
    with capture_logs() as logs:
        assert is_in_memory(places.open(places.space(), 2 * MIB))
    assert logs == []


def test_a_copy_for_which_memory_is_short_is_in_a_file_without_a_name(places: Places) -> None:
    places.free, space = MIB, places.space()
    with capture_logs() as logs:
        copies = [places.open(space, 2 * MIB) for _ in range(2)]
    assert not any(map(is_in_memory, copies))
    assert [os.fstat(copy).st_nlink for copy in copies] == [0, 0]
    assert all(512 * os.fstat(copy).st_blocks >= 2 * MIB for copy in copies), "its blocks are reserved"
    assert [*places.directory.iterdir()] == []
    (line,) = [each["event"] for each in logs]
    assert line == (
        f"copies of another node's snapshots are kept on disk, in {places.directory}: "
        "it has 1 MiB of free memory, and a copy takes 2"
    )


def test_copies_beyond_the_limit_are_on_disk(places: Places) -> None:
    """`--snapshot_memory`: this node's own snapshots come first."""
    with capture_logs() as logs:
        assert is_in_memory(places.open(places.space(8 * MIB), 2 * MIB))
        assert not is_in_memory(places.open(places.space(7 * MIB), 2 * MIB))
    assert "its snapshots and copies would take 8 MiB of memory, and may take 7" in logs[0]["event"]


def test_without_a_limit_snapshots_and_copies_may_take_half_of_what_was_free_before(places: Places) -> None:
    places.free = 10 * MIB
    assert not is_in_memory(places.open(places.space(), 2 * MIB))
    assert is_in_memory(places.open(places.space(), 2 * MIB, use=SnapshotUse(now=6 * MIB, expected=8 * MIB)))


def test_once_memory_was_short_the_further_copies_of_a_group_are_on_disk(places: Places) -> None:
    """A later group may be smaller. Where copies are is logged when it changes."""
    places.free, space = MIB, places.space()
    with capture_logs() as logs:
        places.open(space, 2 * MIB)
        places.free = PLENTY
        assert not is_in_memory(places.open(space, 2 * MIB))
        assert is_in_memory(places.open_of(2, space, 2 * MIB))
    assert [each["event"].partition(", in ")[0] for each in logs] == [
        "copies of another node's snapshots are kept on disk",
        "copies of another node's snapshots are kept in memory again",
    ]


def test_a_space_is_used_again_and_grows_where_it_is(places: Places) -> None:
    space = places.space()
    memory = places.open(space, 2 * MIB)
    assert places.open(space, 3 * MIB, memory) == memory
    places.free = 0
    assert places.open(space, MIB, memory) == memory, "what is there already needs no free memory"
    file = places.open(space, 2 * MIB)
    assert places.open(space, 4 * MIB, file) == file
    assert 512 * os.fstat(file).st_blocks >= 4 * MIB
    inode = os.fstat(memory).st_ino
    assert os.fstat(places.open(space, 2 * MIB, memory)).st_ino != inode, "a memory that cannot grow is replaced"


def test_if_the_disk_is_short_too_a_copy_is_refused_with_both_reasons(
    places: Places, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It leaves as much free as it takes."""
    places.free = MIB
    monkeypatch.setattr(replica_space.os, "statvfs", lambda _: SimpleNamespace(f_bavail=3, f_frsize=MIB))
    with capture_logs() as logs, pytest.raises(NoRoomError) as error:
        places.open(places.space(), 2 * MIB)
    assert str(error.value) == (
        f"it has 1 MiB of free memory, and a copy takes 2; on disk, {places.directory} has 3 MiB free, "
        "of which half may be used"
    )
    assert logs == [], "the other node reports it"


def test_a_file_that_cannot_grow_is_released(places: Places) -> None:
    places.free, space = 0, places.space()
    file = places.open(space, MIB)
    with pytest.raises(NoRoomError, match="its space for a copy cannot grow: "):
        places.open(space, 1 << 62, file)
    places.release.close()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(file)
    places.release = MemoryRelease()


@pytest.mark.parametrize("directory", ["/dev/shm", "/no/such/directory"])
def test_a_directory_that_is_in_memory_or_missing_is_no_disk(places: Places, directory: str) -> None:
    places.free = 0
    with pytest.raises(NoRoomError, match=f"none of {directory} is on a disk: set TMPDIR to one that is"):
        places.open(places.space(directory=Path(directory)), MIB)
