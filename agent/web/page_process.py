"""The agent's end of the process that watches the job: started, started again should it end, ended with the agent."""

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
from agent.config import AgentConfig
from agent.errors import ConfigError
from agent.observe.log import log
from agent.runtime.children import at_parents_end
from agent.web.address import listen, url
from agent.web.start_message import StartMessage, encode

_AGAIN_S = 1.0
_AGAIN_AT_MOST_S = 60.0
_END_WITHIN_S = 3.0
_EVENTS_WITHIN_S = 30.0
"""The last event is promised, and on a busy machine this process, which has a low priority, comes to it late."""


@contextmanager
def watched(config: AgentConfig, environ: Mapping[str, str]) -> Iterator[str]:
    """Have the job watched until the end of the block, as far as that is asked for.

    Gives the address of the page; empty: there is none.

    Raises:
        ConfigError: it cannot be served there, events cannot be written, or what is needed is not installed.
    """
    if config.http is None and config.events is None:
        yield ""
        return
    missing = [name for name in ("starlette", "uvicorn", "prometheus_client") if find_spec(name) is None]
    if missing:
        raise ConfigError(f"--http and --events need {', '.join(missing)}: pip install 'elastic-agent[web]'")
    with ExitStack() as opened:
        listener = opened.enter_context(closing(listen(config.http.host, config.http.port))) if config.http else None
        address = url(listener, config.node.address, is_encrypted=config.tls is not None) if listener else ""
        if address:
            scheme = "https://" if config.credentials.tls else ""
            server = ",".join(f"{scheme}{endpoint}" for endpoint in config.endpoints)
            which = f"--elastic_server={server} --job_id={config.job.job_id}"
            log.info(f"its web page is at {address}; `elastic-agent page {which}` tells the token")
        events = _appended(config.events) if config.events else None
        if events is not None:
            opened.callback(os.close, events)
        orders = StartMessage(
            listener=listener.fileno() if listener else None,
            events=events,
            endpoints=config.endpoints,
            credentials=config.credentials,
            job_id=config.job.job_id,
            node_id=config.node.node_id,
            tls=config.tls,
            token=config.http.token if config.http else None,
            since=time.time(),
            is_again=False,
        )
        opened.enter_context(closing(_PageProcess(orders, environ)))
        yield address


def _appended(path: str) -> int:
    """A descriptor of the file that events go to; `-`: standard output. Raises `ConfigError`."""
    try:
        return os.dup(1) if path == "-" else os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise ConfigError(f"--events={path} cannot be written: {error.strerror}") from None


class _PageProcess:
    def __init__(self, orders: StartMessage, environ: Mapping[str, str]) -> None:
        self._orders = orders
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
        self._hang_up()
        self._thread.join(_END_WITHIN_S if self._orders.events is None else _EVENTS_WITHIN_S)
        with self._lock:
            if self._process is not None:
                self._process.kill()
        self._thread.join()

    def _run(self) -> None:
        pause_s = _AGAIN_S
        while not self._is_closed.is_set():
            began_at = time.monotonic()
            why = self._run_once()
            if self._is_closed.is_set():
                return
            pause_s = _AGAIN_S if time.monotonic() - began_at > _AGAIN_AT_MOST_S else pause_s
            log.warning(f"the process that watches the job {why}; another follows in {pause_s:g} s")
            self._orders = msgspec.structs.replace(self._orders, since=time.time(), is_again=True)
            self._is_closed.wait(pause_s)
            pause_s = min(2 * pause_s, _AGAIN_AT_MOST_S)

    def _run_once(self) -> str:
        """Have a process run to its end, and tell what became of it."""
        try:
            with self._lock:
                if self._is_closed.is_set():
                    return ""
                self._process = process = self._start()
        except OSError as error:
            return f"cannot be started ({error.strerror})"
        code = process.wait()
        self._hang_up()
        return f"has ended with code {code}"

    def _hang_up(self) -> None:
        """Say that nothing more will be said."""
        with self._lock:
            if self._process is not None and self._process.stdin is not None:
                with suppress(OSError):  # it has ended before it has read its orders
                    self._process.stdin.close()

    def _start(self) -> subprocess.Popen[bytes]:
        # -P: what lies in the working directory, the user's, must not be taken for a module of ours.
        argv = [sys.executable, "-P", "-m", "agent.web"]
        inherited = [each for each in (self._orders.listener, self._orders.events) if each is not None]
        process = subprocess.Popen(
            argv,
            stdin=subprocess.PIPE,
            pass_fds=inherited,
            env=self._environ,
            preexec_fn=at_parents_end(signal.SIGCONT),  # noqa: PLW1509 - from its first moment on
        )
        assert process.stdin is not None  # noqa: S101 - asked for above
        with suppress(OSError):  # it has ended already
            process.stdin.write(encode(self._orders))
            process.stdin.flush()
        return process
