"""A standby's communication with its guardian, and "go".

| from | packet | meaning |
|---|---|---|
| standby | `{"warm": {"rss_bytes", "took_s", "left_out": {name: reason}}}` | it is ready and waits; sent once |
| standby | `{"tainted": [name, ...]}` | these must not be imported ahead; it exits once it has reported all |
| guardian | `go` | the order was written again: take its environment, and run |

The order is JSON in a memory file. When it starts, a standby reads the field `standby`: `modules` to import; `watched`,
names of variables that are only known at "go"; `elsewhere` and `variables`, from the recorded imports; and `avoided`,
the names that tainted earlier standbys. All but the first two may be absent. At "go" it reads `env`, the complete
environment, whose strings are bytes decoded as Latin-1, and `stdin`: a file to use as standard input, or null to leave
that as it is. If the guardian closes its end of the socket, the standby exits.
"""

from __future__ import annotations

import os
import resource
import sys
import time
from json import dumps, loads

from .library_paths import LibraryPaths
from .preloading import Preloader
from .priority import low_priority

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from .import_recorder import ImportRecorder

_NAMES = 100
"""Names in one packet; with their reasons they fit into it."""
_OURS = ("ELASTIC_AGENT_STANDBY_", "ELASTIC_AGENT_IMPORTS_FD")


def stand_by(sock: int, order_fd: int, recorder: ImportRecorder) -> None:
    """Import ahead, wait for "go", and become what a cold start would be; exits the process if there is no "go"."""
    began = time.monotonic()
    for fd in (sock, order_fd):
        os.set_inheritable(fd, False)  # a program that a module starts must not keep the socket open

    def report_tainted(names: list[str]) -> None:
        for first in range(0, len(names), _NAMES):
            os.write(sock, dumps({"tainted": names[first : first + _NAMES]}).encode())

    order = _read(order_fd)["standby"]
    preloader = Preloader(LibraryPaths(), order, report_tainted)
    with low_priority():
        changes = preloader.run(order["modules"])
    shadowed = preloader.shadowed()
    report_tainted(shadowed)
    if shadowed or preloader.tainted:
        os._exit(0)
    recorder.note_loaded()
    left_out = dict(list(preloader.left_out.items())[:_NAMES])
    warm = {"rss_bytes": _rss_bytes(), "took_s": time.monotonic() - began, "left_out": left_out}
    os.write(sock, dumps({"warm": warm}).encode())
    if not _wait_for_go(sock):
        os._exit(0)
    final_order = _read(order_fd)
    env = _environment(final_order["env"])
    if final_order["stdin"] is not None:
        _redirect_stdin(final_order["stdin"].encode("latin-1"))
    os.close(sock)
    os.close(order_fd)
    sys.path_importer_cache.clear()  # directories may have changed within one tick of the file system's clock
    if preloader.shadowed():
        os.execve(sys.executable, sys.orig_argv, env)  # noqa: S606 - the same command again, as a cold start
    _set_environment({**dict.fromkeys(map(os.fsencode, order["watched"])), **env, **changes})
    _note_entered()


def _wait_for_go(sock: int) -> bool:
    try:
        return os.read(sock, 16) == b"go"
    except OSError:
        return False


def _read(order_fd: int) -> dict[str, Any]:
    size = os.fstat(order_fd).st_size
    order: dict[str, Any] = loads(os.pread(order_fd, size, 0))
    return order


def _redirect_stdin(path: bytes) -> None:
    """Use this file as standard input: another rank reads the agent's."""
    fd = os.open(path, os.O_RDONLY)
    os.dup2(fd, 0)
    os.close(fd)


def _environment(order_env: dict[str, str]) -> dict[bytes, bytes]:
    """Return the order's environment without the hook's variables; PYTHONPATH is the user's own, as set by now."""
    env = {name: value for name, value in order_env.items() if not name.startswith(_OURS)}
    env.pop("PYTHONPATH", None)
    own = {b"PYTHONPATH": os.environb[b"PYTHONPATH"]} if "PYTHONPATH" in os.environ else {}
    return {name.encode("latin-1"): value.encode("latin-1") for name, value in env.items()} | own


def _set_environment(env: dict[bytes, bytes | None]) -> None:
    """Set these variables; None: remove. Other variables were set by the interpreter during start-up and stay."""
    for name, value in env.items():
        if value is None:
            os.environb.pop(name, None)
        else:
            os.environb[name] = value


def _note_entered() -> None:
    """Set the first milestone to now, because the modules were imported before the start of the group."""
    channel = sys.modules.get("trainer_runtime.agent_channel")
    if channel is not None:
        channel.milestones.entered = channel.boot_time()


def _rss_bytes() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * resource.getpagesize()
