"""Checks before the start: the working directory, the loopback interface, and the limits of this process.

Limits are those that the kernel enforces on each process (`ulimit`). The minimum values are what the agent uses itself,
and the etcd that it may bring. Below them each would fail later, with a message that does not name the limit.
"""

from __future__ import annotations

import errno
import os
import resource
import socket
import subprocess
from collections.abc import Callable

from agent.errors import ConfigError

_UNLIMITED = resource.RLIM_INFINITY
_MIB = 1 << 20
_FILE_BYTES = 2 * _MIB
"""Size of the memory that the agent shares with a rank, which the kernel counts as a file."""
_ETCD_FILE_BYTES = 128 * _MIB
"""etcd allocates 64 MiB for each segment of its log."""
_FILES, _FILES_A_RANK = 24, 16
_ETCD_FILES = 256
"""etcd reserves 150 for itself."""
_ADDRESS_BYTES = 512 * _MIB
_ETCD_ADDRESS_BYTES = 12 << 30
"""etcd reserves 10 GiB of address space for its data."""

_OF_ERRNO = {
    errno.EMFILE: (resource.RLIMIT_NOFILE, "open files", "ulimit -n"),
    errno.EFBIG: (resource.RLIMIT_FSIZE, "the size of a file", "ulimit -f"),
    errno.ENOMEM: (resource.RLIMIT_AS, "address space", "ulimit -v"),
    errno.EAGAIN: (resource.RLIMIT_NPROC, "processes and threads", "ulimit -u"),
}


def require_directory() -> None:
    """Raise `ConfigError` if the working directory has been removed."""
    try:
        os.getcwd()  # noqa: PTH109 - only to see whether it exists
    except FileNotFoundError:
        raise ConfigError("the working directory has been removed: change to one that is there") from None


def require_loopback() -> None:
    """Raise `ConfigError` if the loopback interface is down, as in a new network namespace."""
    try:
        with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname(), 5.0):
            pass
    except OSError as error:
        raise ConfigError(
            f"127.0.0.1 cannot be reached ({error.strerror or error}), by which an agent reaches its own etcd and "
            "ranks: ip link set lo up"
        ) from None


def require_room(
    nproc: int, *, brings_etcd: bool, limit: Callable[[int], tuple[int, int]] = resource.getrlimit
) -> None:
    """Raise `ConfigError` that names the limit if one is too low for an agent with this number of ranks.

    Args:
        nproc: ranks on this node.
        brings_etcd: whether the agent starts etcd, which inherits the limits.
        limit: returns the soft and the hard limit of a resource.
    """
    processes = "the agent and the etcd that it brings" if brings_etcd else "the agent"
    least_files = _FILES + _FILES_A_RANK * nproc
    if brings_etcd:
        least_files = max(_ETCD_FILES, least_files)
    least_bytes = {
        resource.RLIMIT_FSIZE: _ETCD_FILE_BYTES if brings_etcd else _FILE_BYTES,
        resource.RLIMIT_AS: _ETCD_ADDRESS_BYTES if brings_etcd else _ADDRESS_BYTES,
    }
    for which, what, how in _OF_ERRNO.values():
        soft, hard = limit(which)
        if (
            which == resource.RLIMIT_NOFILE and hard != _UNLIMITED and hard < least_files
        ):  # the agent raises the soft limit itself
            raise ConfigError(
                f"the limit of {what} is {hard}; {processes} need{'' if brings_etcd else 's'} {least_files}: {how} "
                f"{least_files} or more, before the start"
            )
        if which in least_bytes and soft != _UNLIMITED and soft < least_bytes[which]:
            raise ConfigError(
                f"the limit of {what} is {_size(soft)}; {processes} need{'' if brings_etcd else 's'} "
                f"{_size(least_bytes[which])}, and the script more: {how} unlimited, before the start"
            )


def limit_behind(error: BaseException) -> str:
    """Which limit caused an unexpected error, and what to do. Empty: no limit did."""
    number = error.errno if isinstance(error, OSError) else None
    if isinstance(error, MemoryError):
        number = errno.ENOMEM
    if isinstance(error, RuntimeError) and "can't start new thread" in str(error):
        number = errno.ENOMEM if resource.getrlimit(resource.RLIMIT_AS)[0] != _UNLIMITED else errno.EAGAIN
    if number == errno.EAGAIN and isinstance(error, OSError) and not _is_of_fork(error):
        number = None
    found = _OF_ERRNO.get(number or 0)
    if found is None:
        return ""
    which, what, how = found
    soft, _ = resource.getrlimit(which)
    if soft == _UNLIMITED:
        return ""
    value = _size(soft) if which in {resource.RLIMIT_FSIZE, resource.RLIMIT_AS} else str(soft)
    return f"the limit of {what} is {value}, which the agent has reached ({error}): raise it ({how}) before the start"


def _is_of_fork(error: OSError) -> bool:
    """Whether the error was raised when a process was started. A full pipe and a locked file have the same errno."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    return trace is not None and trace.tb_frame.f_globals.get("__name__") == subprocess.__name__


def _size(size_bytes: int) -> str:
    if size_bytes >= 1 << 30:
        return f"{size_bytes / (1 << 30):.4g} GiB"
    return f"{size_bytes / _MIB:.4g} MiB" if size_bytes >= _MIB else f"{size_bytes} bytes"
