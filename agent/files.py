"""Opening files in directories where others may write too: temporary ones, shared ones, those beside a script.

Opening a FIFO waits until somebody opens its other end, reading a device may never end, and a link leads wherever its
maker wanted. So whoever can write into such a directory could hang every agent that looks there.
"""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path


def open_regular(path: str | bytes | Path, flags: int = os.O_RDONLY, *, dir_fd: int | None = None) -> int:
    """Open a regular file, and nothing else.

    Args:
        path: of the file.
        flags: for `os.open`. `O_NOFOLLOW` among them refuses links, which are followed otherwise.
        dir_fd: the directory that a relative path begins at.

    Returns:
        A descriptor.

    Raises:
        OSError: it cannot be opened, or is no regular file.
    """
    fd = os.open(path, flags | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=dir_fd)
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise OSError(errno.EINVAL, "not a regular file")
    return fd


def for_the_user_alone(path: str, flags: int) -> int:
    """An `opener`: a file that it makes can be read and written by nobody else."""
    return os.open(path, flags, 0o600)


def write_private(path: Path, content: bytes) -> None:
    """Write a file that nobody else can read. Raises `OSError`."""
    with open(path, "wb", opener=for_the_user_alone) as file:
        file.write(content)
