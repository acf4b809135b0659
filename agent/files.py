"""Safe opening of files in directories where others may write too: temporary, shared, or beside a script.

Opening a FIFO blocks until another process opens its other end, reading a device may never end, and a symbolic link
leads wherever its creator wanted. Without these checks, anybody who can write into such a directory could hang every
agent that looks there.
"""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path


def open_regular(path: str | bytes | Path, flags: int = os.O_RDONLY, *, dir_fd: int | None = None) -> int:
    """Open a regular file; refuse anything else.

    Args:
        path: the file.
        flags: for `os.open`. Symbolic links are followed unless `O_NOFOLLOW` is set.
        dir_fd: the directory that a relative path starts from.

    Returns:
        A file descriptor.

    Raises:
        OSError: the file cannot be opened, or is not a regular file.
    """
    fd = os.open(path, flags | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=dir_fd)
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise OSError(errno.EINVAL, "not a regular file")
    return fd


def open_private(path: str, flags: int) -> int:
    """Open a file and create it with mode 0600; for the `opener` argument of `open`."""
    return os.open(path, flags, 0o600)


def write_private(path: Path, content: bytes) -> None:
    """Write a file that only this user can read. Raises `OSError`."""
    with open(path, "wb", opener=open_private) as file:
        file.write(content)
