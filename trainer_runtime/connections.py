"""The connections of this rank's process group, and how they are broken when the group is over.

With gloo, a rank notices the death of a peer only in an operation that touches that peer; others wait for living peers
until the timeout of the group. So whoever learns that the group is over shuts its own connections down: a rank that
raises, and every rank that its agent tells so. Then each operation under way raises, here and at the other end, and
the process group can be destroyed at once (an operation under way would block that until the timeout).

The connections are the sockets that were connected while the process group was opened. Each is known by descriptor and
inode, since a descriptor that gloo has closed may be another file's now. Listening sockets are left alone: gloo aborts
the process when its own is shut down.
"""

from __future__ import annotations

import os
import select
import socket
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

_BROKEN = select.POLLRDHUP | select.POLLHUP | select.POLLERR | select.POLLNVAL


class Connections:
    """The connections of the present process group."""

    def __init__(self) -> None:
        self._inodes: dict[int, int] = {}
        """By descriptor."""

    @contextmanager
    def recorded(self) -> Iterator[None]:
        """Take the sockets that are connected within the block for those of the process group."""
        before = _connected_sockets()
        yield
        after = _connected_sockets()
        self._inodes = {fd: inode for fd, inode in after.items() if before.get(fd) != inode}

    def are_broken(self) -> bool:
        """Return whether one of them has ended, at either end."""
        poll = select.poll()
        for descriptor, inode in self._inodes.items():
            if _inode(descriptor) != inode:
                return True
            poll.register(descriptor, select.POLLRDHUP)
        return any(events & _BROKEN for _, events in poll.poll(0))

    def shut_down(self) -> None:
        """Let each operation on them fail, also those under way in other threads and at the other end."""
        for descriptor, inode in self._inodes.items():
            with suppress(OSError):
                copy = os.dup(descriptor)
                with socket.socket(fileno=copy) as connection:
                    if _inode(copy) == inode:
                        connection.shutdown(socket.SHUT_RDWR)


connections = Connections()
"""Those of this process."""


def _connected_sockets() -> dict[int, int]:
    """Return the inodes of this process's TCP sockets that are connected, by descriptor."""
    found = {}
    for link in Path("/proc/self/fd").iterdir():
        with suppress(OSError):
            if not str(link.readlink()).startswith("socket:"):
                continue
            copy = os.dup(int(link.name))
            with socket.socket(fileno=copy) as each:
                if each.family in {socket.AF_INET, socket.AF_INET6} and each.type == socket.SOCK_STREAM:
                    each.getpeername()
                    found[int(link.name)] = _inode(copy)
    return found


def _inode(descriptor: int) -> int:
    """Return the inode of a descriptor; 0 if it is closed."""
    try:
        return os.fstat(descriptor).st_ino
    except OSError:
        return 0
