"""A private etcd for runs on one machine, and on the command line: `python -m agent.local_etcd.embedded --port 2379`.

Prints its endpoint on a line of its own once it serves, and ends on SIGTERM or SIGINT.

It serves at a Unix socket in a directory that only its user may enter. It therefore needs no password: no other user of
the machine has access, and no file has to be kept secret. With a port it serves on loopback, where every user of the
machine has access.

If `on_given_up` is set, an etcd that ends by itself is restarted on the same port and data. The kernel kills etcd when
its parent ends, however it ends. This is bound to the *thread* that started etcd, so each start is made by a thread
that lives as long as etcd.
"""

from __future__ import annotations

import argparse
import json
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from queue import SimpleQueue
from types import TracebackType
from typing import Self
from urllib.parse import quote

from agent.endpoints import LOOPBACK, SOCKET
from agent.errors import ConfigError, ElasticAgentError, StoreUnavailable
from agent.files import write_private
from agent.local_etcd.etcd_program import (
    CLIENT_SOCKET,
    CLIENT_SOCKET_URL,
    ScratchDir,
    data_of,
    find_binary,
    log_of,
    single_member_arguments,
    start_etcd,
)
from agent.observe.log import configure, log
from agent.ports import hold_port
from agent.store.etcd import EtcdStore

_READY_WITHIN_S = 15.0
_STOP_WITHIN_S = 3.0
_POLL_S = 0.01
_RESTARTS = 5
_BACK_OFF_S = 0.1
_RETRY_MEMBER_S = 30.0
"""Pause before a member that could not be restarted is tried again; the others may continue without it."""
_RESET_RESTARTS_S = 60.0
"""An etcd that has run for this long gets all of its restarts back."""


class EmbeddedEtcd:
    """Runs a private etcd inside a `with` block.

    Args:
        data_dir: directory of the data and `etcd.log`; None: a temporary directory, removed at the end.
        port: the client port on loopback, to which every user of the machine has access; 0: a free port. None: clients
            connect to a socket that only this user can reach.
        on_given_up: called on another thread, with the reason, when etcd ended by itself and could not be restarted. A
            member of a cluster is then retried after some time. None: an etcd that ends is not restarted.
        join: makes it a member of a cluster. Called before each start with an event that ends the waiting; returns the
            arguments that describe the cluster, or None if the event was set first. Such a member starts empty, and
            entering the block does not wait for it: it serves, at the address in its arguments, once a majority of the
            members runs. None: etcd is the only member.
        files: files in etcd's working directory by name, readable by this user only.
    """

    def __init__(
        self,
        data_dir: Path | None = None,
        port: int | None = None,
        on_given_up: Callable[[str], None] | None = None,
        join: Callable[[threading.Event], Sequence[str] | None] | None = None,
        files: Mapping[str, bytes] | None = None,
    ) -> None:
        self._files = files or {}
        self._join = join
        self._scratch: ScratchDir | None = None
        self._reserved_port = hold_port(LOOPBACK) if port == 0 else None
        self._port: int | None = self._reserved_port.getsockname()[1] if self._reserved_port else port
        self._data_dir = data_dir
        self._on_given_up = on_given_up
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._is_stopping = threading.Event()
        self._must_rejoin = False
        self._first_start: Future[None] = Future()
        """Done when the first start has ended: etcd serves, or it could not be started."""
        self._thread = threading.Thread(target=self._supervise, name="embedded-etcd", daemon=True)

    @property
    def endpoint(self) -> str:
        """Endpoint for clients: `host:port`, or `unix:/path` once etcd serves."""
        if self._port is not None:
            return f"{LOOPBACK}:{self._port}"
        assert self._scratch is not None  # noqa: S101 - created before etcd serves
        return socket_of(self._scratch.path)

    @property
    def pid(self) -> int | None:
        """Process id of the running etcd; None: it does not run."""
        process = self._process
        return process.pid if process is not None and process.poll() is None else None

    def stop_restarting(self) -> None:
        """Do not restart etcd any more if it ends by itself. When this returns, no start is in progress."""
        self._is_stopping.set()
        with (
            self._lock
        ):  # waits for a start in progress: an added member must be started, because the others count on it
            pass

    def rejoin_empty(self) -> None:
        """End a member of a cluster, and let it join again without data."""
        self._must_rejoin = True
        self._end_process()

    def __enter__(self) -> Self:
        """Start etcd and wait until it serves.

        Raises:
            ConfigError: etcd cannot be started on this machine.
            StoreUnavailable: etcd does not serve.
        """
        if self._is_listening():
            raise ConfigError(f"cannot start etcd at {self.endpoint}: the port is taken; choose another one")
        try:
            self._thread.start()
            self._first_start.result()
        except BaseException:
            self._stop()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Stop etcd: TERM, then KILL."""
        self._stop()

    def _is_listening(self) -> bool:
        if self._port is None:
            return self._scratch is not None and _socket_in(self._scratch.path).exists()
        with socket.socket() as probe:
            return probe.connect_ex((LOOPBACK, self._port)) == 0

    def _stop(self) -> None:
        self.stop_restarting()
        self._end_process()
        self._thread.join()
        if self._reserved_port is not None:
            self._reserved_port.close()
        if self._scratch is not None:
            self._scratch.remove()

    def _end_process(self) -> None:
        if self._process is not None and self._process.poll() is None:
            self._process.terminate()
            if not _has_ended(self._process, _STOP_WITHIN_S):
                self._process.kill()
                self._process.wait()

    # The methods below run on the thread that starts etcd, and that must live as long as etcd.

    def _supervise(self) -> None:
        restarts = 0
        while True:
            started_at = time.monotonic()
            error = self._run()
            if not self._first_start.done():
                message = f"etcd cannot be started here: {error}"
                self._first_start.set_exception(ConfigError(message) if isinstance(error, OSError) else error)
                return
            if self._is_stopping.is_set() or self._on_given_up is None:
                return
            if self._must_rejoin:
                self._must_rejoin = False
                continue
            restarts = 1 if time.monotonic() - started_at > _RESET_RESTARTS_S else restarts + 1
            if restarts > _RESTARTS:
                self._on_given_up(f"{error}; it was started again {_RESTARTS} times and ended each time")
                if self._join is None:
                    return
                self._is_stopping.wait(_RETRY_MEMBER_S)
                restarts = 0
                continue
            log.warning("starting the private etcd again", attempt=restarts, reason=str(error))
            self._is_stopping.wait(_BACK_OFF_S * 2.0**restarts)

    def _run(self) -> Exception:
        """Run etcd until it ends; return the reason as an exception."""
        try:
            return self._run_until_it_ends()
        except Exception as error:  # noqa: BLE001 - raised by `__enter__` at the first start, later logged
            self._end_process()
            return error

    def _run_until_it_ends(self) -> Exception:
        if self._scratch is None:
            self._scratch = ScratchDir()
        for name, content in self._files.items():
            write_private(self._scratch.path / name, content)
        self._data_dir = self._data_dir or self._scratch.path
        self._data_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
        binary = find_binary()
        with self._lock:
            arguments = None if self._is_stopping.is_set() else self._cluster_arguments(self._data_dir)
            if arguments is None:
                return StoreUnavailable("etcd is being stopped")
            self._process = process = start_etcd(binary, self._data_dir, arguments, self._scratch.path)
        if self._join is None:
            self._wait_until_serving(process, log_of(self._data_dir))
        if not self._first_start.done():
            self._first_start.set_result(None)
        process.wait()
        how = f"code {process.returncode}" if process.returncode >= 0 else signal.Signals(-process.returncode).name
        return StoreUnavailable(f"the private etcd ended by itself ({how}): {_end_of(log_of(self._data_dir))}")

    def _cluster_arguments(self, folder: Path) -> Sequence[str] | None:
        if self._join is None:
            assert self._scratch is not None  # noqa: S101 - created for the sockets
            _socket_in(self._scratch.path).unlink(missing_ok=True)  # left by an etcd that was killed
            return single_member_arguments(CLIENT_SOCKET_URL if self._port is None else f"http://{self.endpoint}")
        if not self._first_start.done():
            self._first_start.set_result(None)  # there may be no cluster to join yet
        shutil.rmtree(data_of(folder), ignore_errors=True)
        return self._join(self._is_stopping)

    def _wait_until_serving(self, process: subprocess.Popen[bytes], log_path: Path) -> None:
        """Wait until a linearizable read is answered: only then etcd has a leader and its data."""
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


def socket_of(folder: Path) -> str:
    """Return the endpoint of an etcd whose sockets are in this directory."""
    return SOCKET + quote(str(_socket_in(folder)), safe="/:")


def _socket_in(folder: Path) -> Path:
    return folder / CLIENT_SOCKET


def _has_ended(process: subprocess.Popen[bytes], within_s: float) -> bool:
    try:
        process.wait(within_s)
    except subprocess.TimeoutExpired:
        return False
    return True


def _end_of(log_path: Path) -> str:
    """Return the last lines of a log as one line."""
    lines = log_path.read_text(errors="replace").splitlines()[-3:]
    return " | ".join(_log_message(line)[:300] for line in lines)


def _log_message(line: str) -> str:
    """Return message and error of a line of etcd's log, which is JSON."""
    try:
        entry = json.loads(line)
    except ValueError:
        return line
    return ": ".join(str(entry[key]) for key in ("msg", "error") if key in entry)


def _is_serving(store: EtcdStore) -> bool:
    try:
        store.read(())
    except StoreUnavailable:
        return False
    return True


def main() -> int:
    """Run in the foreground until SIGTERM or SIGINT."""
    parser = argparse.ArgumentParser(prog="python -m agent.local_etcd.embedded", description="Run a private etcd.")
    port_help = "client port on loopback, open to every user of the machine; 0: a free one (default: a private socket)"
    parser.add_argument("--port", type=int, default=None, help=port_help)
    parser.add_argument("--data_dir", type=Path, default=None, help="keep the data here (default: temporary)")
    options = parser.parse_args()
    configure("etcd")
    ended: SimpleQueue[str | None] = (
        SimpleQueue()
    )  # setting an Event in a signal handler would deadlock with the wait that it interrupts
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: ended.put(None))
    with EmbeddedEtcd(options.data_dir, port=options.port, on_given_up=ended.put) as etcd:
        print(etcd.endpoint, flush=True)  # noqa: T201 - the caller waits for this line
        reason = ended.get()
    if reason is not None:
        raise StoreUnavailable(reason)
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except ElasticAgentError as problem:
        sys.stderr.write(f"error: {problem}\n")
        sys.exit(problem.exit_code)
