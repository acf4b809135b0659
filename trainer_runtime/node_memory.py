"""Memory that the other processes of a node can map: they open it as a file of this process."""

from __future__ import annotations

import mmap
import os
import secrets
from contextlib import suppress
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path

from trainer_runtime import contract

_NAME = "trainer_runtime:"
_NUMBER_BYTES = 7
"""Size of a node's key and of a memory's number, which are to fit into signed numbers of 64 bits."""


@dataclass(frozen=True, slots=True)
class NodeMemory:
    """Bytes in memory."""

    data: mmap.mmap | memoryview
    """Not to be changed: other processes may map the same memory."""
    descriptor: int = -1
    """Descriptor of the memory; negative if it has none, so that other processes cannot map it."""
    number: int = 0
    """A number that is in the memory's name, and in no other's; 0 if it has no descriptor."""

    def close(self) -> None:
        """Close the descriptor; the bytes stay mapped."""
        if self.descriptor >= 0:
            os.close(self.descriptor)


def allocate(size: int) -> NodeMemory:
    """Return memory that other processes can map, or memory of this process where that is limited (`ulimit -f`)."""
    number = int.from_bytes(secrets.token_bytes(_NUMBER_BYTES)) + 1
    with suppress(OSError):
        descriptor = os.memfd_create(f"{_NAME}{number}", os.MFD_CLOEXEC)
        try:
            os.ftruncate(descriptor, size)
            return NodeMemory(mmap.mmap(descriptor, size), descriptor, number)
        except OSError:
            os.close(descriptor)
    return NodeMemory(mmap.mmap(-1, size))


def open_of(process: int, number: int, size: int) -> NodeMemory | None:
    """Map the memory of this number that a process has; None if that is impossible.

    It is found by its name, because a number of a process may mean another one where `/proc` is another namespace's.
    """
    with suppress(OSError, ValueError):
        for entry in Path(f"/proc/{process}/fd").iterdir() if number else ():
            if not f"{entry.readlink()}".startswith(f"/memfd:{_NAME}{number} "):
                continue
            descriptor = os.open(entry, os.O_RDONLY | os.O_CLOEXEC)
            try:
                return NodeMemory(mmap.mmap(descriptor, size, access=mmap.ACCESS_COPY), descriptor, number)
            except BaseException:
                os.close(descriptor)
                raise
    return None


def node_key() -> int:
    """Return a number that only processes share which see each other's files below /proc."""
    with suppress(OSError):
        return _key_of_namespace()
    return int.from_bytes(secrets.token_bytes(_NUMBER_BYTES))  # not all of /proc is there: shared with nobody


def _key_of_namespace() -> int:
    boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii")
    parts = boot, f"{Path('/proc/self/ns/pid').readlink()}", f"{os.geteuid()}", os.environ.get(contract.NODE_ID, "")
    return int.from_bytes(blake2b("\0".join(parts).encode(), digest_size=_NUMBER_BYTES).digest())
