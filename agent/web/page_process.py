"""The process that serves the page and writes events, from the agent's side: start, restart, end.

`StartMessage` is what the agent sends to it on standard input, so that secrets are neither in arguments nor in
environment variables.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager, suppress
from importlib.util import find_spec
from pathlib import Path

import msgspec

import agent
from agent.children import at_parents_end
from agent.config import AgentConfig
from agent.errors import ConfigError
from agent.observe.log import log
from agent.store.access import Credentials
from agent.web.address import listen, url
from trainer_runtime.tls import TlsFiles

_RESTART_DELAY_S = 1.0
_MAX_RESTART_DELAY_S = 60.0
_END_WITHIN_S = 3.0
_EVENTS_WITHIN_S = 30.0
"""Longer, since the last event must be written, and on a busy machine the process with its low priority is slow."""


class StartMessage(msgspec.Struct, frozen=True, kw_only=True):
    """What the process needs to know."""

    listener: int | None
    """Inherited descriptor of the listening socket. None: no page is served."""
    events: int | None
    """Inherited descriptor of the event file. None: no events are written."""
    endpoints: tuple[str, ...]
    credentials: Credentials
    job_id: str
    node_id: str
    """The agent's node id as configured. The agent registers under another one if an agent on this machine has it."""
    since: float
    """Wall clock, seconds since 1970: incidents that were over before are not counted, sent or written."""
    is_restart: bool
    """Whether an earlier process has already written events of the present state."""
    tls: TlsFiles | None = None
    """The page's certificate. None: the page is served without TLS."""
    token: str | None
    """The page's token. None: the token that is derived from the job's secret."""


def encode(message: StartMessage) -> bytes:
    """Encode the message as one line."""
    return msgspec.json.encode(message) + b"\n"


def decode(line: bytes) -> StartMessage:
    """Decode the line that `encode` made."""
    return msgspec.json.decode(line, type=StartMessage)


@contextmanager
def watched(config: AgentConfig, environ: Mapping[str, str]) -> Iterator[str]:
    """Run the process until the end of the block, if a page or events are configured.

    Yields:
        The address of the page. Empty: no page is served.

    Raises:
        ConfigError: the address cannot be listened on, the event file cannot be written, or packages are missing.
    """
    if config.http is None and config.events is None:
        yield ""
        return
    missing = [name for name in ("starlette", "uvicorn", "prometheus_client") if find_spec(name) is None]
    if missing:
        raise ConfigError(f"--http and --events need packages that are missing: pip install {' '.join(missing)}")
    with ExitStack() as opened:
        listener = opened.enter_context(closing(listen(config.http.host, config.http.port))) if config.http else None
        address = url(listener, config.node.address, is_encrypted=config.tls is not None) if listener else ""
        if address:
            scheme = "https://" if config.credentials.tls else ""
            server = ",".join(f"{scheme}{endpoint}" for endpoint in config.endpoints)
            options = f"--elastic_server={server} --job_id={config.job.job_id}"
            log.info(f"web page: {address}; `elastic-agent page {options}` prints the token")
        events = _open_events(config.events) if config.events else None
        if events is not None:
            opened.callback(os.close, events)
        message = StartMessage(
            listener=listener.fileno() if listener else None,
            events=events,
            endpoints=config.endpoints,
            credentials=config.credentials,
            job_id=config.job.job_id,
            node_id=config.node.node_id,
            tls=config.tls,
            token=config.http.token if config.http else None,
            since=time.time(),
            is_restart=False,
        )
        opened.enter_context(closing(_PageProcess(message, environ)))
        yield address


def _open_events(path: str) -> int:
    """Open the event file for appending; `-` is standard output. Raises `ConfigError`."""
    try:
        return os.dup(1) if path == "-" else os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise ConfigError(f"--events={path} cannot be written: {error.strerror}") from None


class _PageProcess:
    def __init__(self, message: StartMessage, environ: Mapping[str, str]) -> None:
        self._message = message
        paths = [*filter(None, [environ.get("PYTHONPATH")]), str(Path(agent.__file__).parents[1])]
        self._environ = {**environ, "PYTHONPATH": os.pathsep.join(paths)}
        self._is_closed = threading.Event()
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._thread = threading.Thread(target=self._run, name="web page", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End the process."""
        self._is_closed.set()
        self._close_stdin()
        self._thread.join(_END_WITHIN_S if self._message.events is None else _EVENTS_WITHIN_S)
        with self._lock:
            if self._process is not None:
                self._process.kill()
        self._thread.join()

    def _run(self) -> None:
        delay_s = _RESTART_DELAY_S
        while not self._is_closed.is_set():
            began_at = time.monotonic()
            outcome = self._run_once()
            if self._is_closed.is_set():
                return
            delay_s = _RESTART_DELAY_S if time.monotonic() - began_at > _MAX_RESTART_DELAY_S else delay_s
            log.warning(f"the process that watches the job {outcome}; restarting it in {delay_s:g} s")
            self._message = msgspec.structs.replace(self._message, since=time.time(), is_restart=True)
            self._is_closed.wait(delay_s)
            delay_s = min(2 * delay_s, _MAX_RESTART_DELAY_S)

    def _run_once(self) -> str:
        """Run a process until it ends, and return how it ended."""
        try:
            with self._lock:
                if self._is_closed.is_set():
                    return ""
                self._process = process = self._start()
        except OSError as error:
            return f"cannot be started ({error.strerror})"
        code = process.wait()
        self._close_stdin()
        return f"has ended with code {code}"

    def _close_stdin(self) -> None:
        """Close the process's standard input, which ends the process."""
        with self._lock:
            if self._process is not None and self._process.stdin is not None:
                with suppress(OSError):  # the process ended before it had read its start message
                    self._process.stdin.close()

    def _start(self) -> subprocess.Popen[bytes]:
        # -P: modules in the user's working directory must not shadow ours.
        argv = [sys.executable, "-P", "-m", "agent.web"]
        inherited = [each for each in (self._message.listener, self._message.events) if each is not None]
        process = subprocess.Popen(
            argv,
            stdin=subprocess.PIPE,
            pass_fds=inherited,
            env=self._environ,
            preexec_fn=at_parents_end(signal.SIGCONT),  # noqa: PLW1509 - takes effect before the program starts
        )
        assert process.stdin is not None  # noqa: S101 - asked for above
        with suppress(OSError):  # it has ended already
            process.stdin.write(encode(self._message))
            process.stdin.flush()
        return process
