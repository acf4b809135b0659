"""A private etcd for runs on one machine, and on the command line: `python -m agent.local_etcd.embedded --port 2379`.

Prints its endpoint on a line of its own once it serves, and ends on SIGTERM or SIGINT.

It serves at a Unix socket in a directory that only its user may enter, so it needs no password: no other user of the
machine gets in, and no file has to be kept secret. With a port it serves on loopback, where whoever is on the machine
gets in.

An etcd that ends by itself is started again, on the same port and data, if its user says whom to tell when that does
not help. The kernel kills etcd when its parent ends, however that ends. That promise is bound to the *thread* that
started it, so a thread that lives as long as etcd starts it, each time.
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

from agent.endpoints import SOCKET, hold_port
from agent.errors import ConfigError, ElasticAgentError, StoreUnavailable
from agent.files import write_private
from agent.local_etcd.etcd_program import (
    CLIENT_SOCKET,
    CLIENT_SOCKET_URL,
    alone,
    data_of,
    find_binary,
    log_of,
    start_etcd,
)
from agent.local_etcd.scratch_dir import ScratchDir
from agent.observe.log import configure, log
from agent.store.etcd import EtcdStore

_HOST = "127.0.0.1"
"""The only address that it listens on, with a port."""
_READY_WITHIN_S = 15.0
_STOP_WITHIN_S = 3.0
_POLL_S = 0.01
_RESTARTS = 5
_BACK_OFF_S = 0.1
_PATIENCE_S = 30.0
"""The others may go on without a member; it is tried again then."""
_CALM_S = 60.0
"""An etcd that has run for so long is given all of its restarts anew."""


class EmbeddedEtcd:
    """Runs a private etcd inside a `with` block.

    Args:
        data_dir: where data and `etcd.log` are kept; without one a temporary directory, removed at the end.
        port: the client port on loopback, where every user of the machine gets in; 0 takes a free one. None: clients
            come by a socket that only this user reaches.
        on_given_up: called on another thread, with the reason, when etcd ended by itself and could not be brought
            back. Without it an etcd that ends stays down; one that joins others is tried again after some time.
        join: makes it a member of several: called before each start, with an event that ends the waiting, it returns
            the arguments that say of which cluster; None if that event came first. Such a one begins empty, and is
            not waited for: it serves once most of them are there, where they say. Without it etcd is alone.
        files: what it finds in its working directory, by name, for this user alone.
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
        self._held = hold_port(_HOST) if port == 0 else None
        self._port: int | None = self._held.getsockname()[1] if self._held else port
        self._dir = data_dir
        self._on_given_up = on_given_up
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._is_stopping = threading.Event()
        self._is_to_start_over = False
        self._first: Future[None] = Future()
        """Done when the first start is: etcd serves, or it could not be started."""
        self._thread = threading.Thread(target=self._keep, name="embedded-etcd", daemon=True)

    @property
    def endpoint(self) -> str:
        """Where clients reach it: `host:port`, or `unix:/path` once it serves."""
        if self._port is not None:
            return f"{_HOST}:{self._port}"
        assert self._scratch is not None  # noqa: S101 - made before it serves
        return socket_of(self._scratch.path)

    @property
    def pid(self) -> int | None:
        """The process id of the running etcd, else None."""
        process = self._process
        return process.pid if process is not None and process.poll() is None else None

    def let_end(self) -> None:
        """Leave it ended from now on, if it ends by itself. After this nothing is started any more."""
        self._is_stopping.set()
        with self._lock:  # one that has been given a place is started yet: the others count on it
            pass

    def start_over(self) -> None:
        """Of one that joins others: end it, and have it join again, empty."""
        self._is_to_start_over = True
        self._end_process()

    def __enter__(self) -> Self:
        """Start etcd and wait until it serves.

        Raises:
            ConfigError: it cannot be started here.
            StoreUnavailable: it does not serve.
        """
        if self._is_listening():
            raise ConfigError(f"cannot start etcd at {self.endpoint}: the port is taken; choose another one")
        try:
            self._thread.start()
            self._first.result()
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
            return probe.connect_ex((_HOST, self._port)) == 0

    def _stop(self) -> None:
        self.let_end()
        self._end_process()
        self._thread.join()
        if self._held is not None:
            self._held.close()
        if self._scratch is not None:
            self._scratch.remove()

    def _end_process(self) -> None:
        if self._process is not None and self._process.poll() is None:
            self._process.terminate()
            if not _has_ended(self._process, _STOP_WITHIN_S):
                self._process.kill()
                self._process.wait()

    # Below: the thread that starts etcd, and so has to outlive it.

    def _keep(self) -> None:
        restarts = 0
        while True:
            began_at = time.monotonic()
            error = self._run()
            if not self._first.done():
                here = f"etcd cannot be started here: {error}"
                self._first.set_exception(ConfigError(here) if isinstance(error, OSError) else error)
                return
            if self._is_stopping.is_set() or self._on_given_up is None:
                return
            if self._is_to_start_over:
                self._is_to_start_over = False
                continue
            restarts = 1 if time.monotonic() - began_at > _CALM_S else restarts + 1
            if restarts > _RESTARTS:
                self._on_given_up(f"{error}; it was started again {_RESTARTS} times, which did not help")
                if self._join is None:
                    return
                self._is_stopping.wait(_PATIENCE_S)
                restarts = 0
                continue
            log.warning("starting the private etcd again", attempt=restarts, reason=str(error))
            self._is_stopping.wait(_BACK_OFF_S * 2.0**restarts)

    def _run(self) -> Exception:
        """Run etcd to its end, and return what there is to say about that."""
        try:
            return self._run_to_its_end()
        except Exception as error:  # noqa: BLE001 - the first one is raised where etcd is entered, others are told
            self._end_process()
            return error

    def _run_to_its_end(self) -> Exception:
        if self._scratch is None:
            self._scratch = ScratchDir()
        for name, content in self._files.items():
            write_private(self._scratch.path / name, content)
        self._dir = self._dir or self._scratch.path
        self._dir.mkdir(mode=0o700, parents=True, exist_ok=True)
        binary = find_binary()
        with self._lock:
            place = None if self._is_stopping.is_set() else self._find_place(self._dir)
            if place is None:
                return StoreUnavailable("etcd is being stopped")
            self._process = process = start_etcd(binary, self._dir, place, self._scratch.path)
        if self._join is None:
            self._wait_until_serving(process, log_of(self._dir))
        if not self._first.done():
            self._first.set_result(None)
        process.wait()
        how = f"code {process.returncode}" if process.returncode >= 0 else signal.Signals(-process.returncode).name
        return StoreUnavailable(f"the private etcd ended by itself ({how}): {_end_of(log_of(self._dir))}")

    def _find_place(self, folder: Path) -> Sequence[str] | None:
        if self._join is None:
            assert self._scratch is not None  # noqa: S101 - made for its sockets
            _socket_in(self._scratch.path).unlink(missing_ok=True)  # of one that was killed
            return alone(CLIENT_SOCKET_URL if self._port is None else f"http://{self.endpoint}")
        if not self._first.done():
            self._first.set_result(None)  # there may be nobody to join yet
        shutil.rmtree(data_of(folder), ignore_errors=True)
        return self._join(self._is_stopping)

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


def socket_of(folder: Path) -> str:
    """The endpoint of an etcd that keeps its sockets in this directory."""
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
    return " | ".join(_sentence(line)[:300] for line in lines)


def _sentence(line: str) -> str:
    """Return what a line of etcd's log says; the rest of its JSON is for machines."""
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
    everybody = "client port on loopback, open to every user of the machine; 0: a free one (default: a private socket)"
    parser.add_argument("--port", type=int, default=None, help=everybody)
    parser.add_argument("--data_dir", type=Path, default=None, help="keep the data here (default: temporary)")
    options = parser.parse_args()
    configure("etcd")
    ended: SimpleQueue[str | None] = SimpleQueue()  # a handler that set an Event would wait for the wait it interrupts
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: ended.put(None))
    with EmbeddedEtcd(options.data_dir, port=options.port, on_given_up=ended.put) as etcd:
        print(etcd.endpoint, flush=True)  # noqa: T201 - what the caller waits for
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
