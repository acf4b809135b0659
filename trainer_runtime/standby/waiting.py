"""A standby's talk with its guardian, and "go".

| from | packet | means |
|---|---|---|
| standby | `{"warm": {"rss_bytes", "took_s", "left_out": {name: reason}}}` | it waits; once |
| standby | `{"tainted": [name, ...]}` | these may not be imported ahead; it ends once it has told of all |
| guardian | `go` | the order has been written again: take its environment, and run |

The order, a memory file, is JSON. A standby reads of it `standby`: `modules` to import; `watched`, names of variables
that are only told at "go"; what was recorded, `elsewhere` and `variables`; and what others were tainted by, `avoided`
(all but the first two may be absent). At "go" it reads `env`, whole, its strings being bytes read as Latin-1, and
`stdin`: a file that is to be its standard input, or null if that stays as it is. If the guardian's end of the socket
closes, the standby ends.
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
"""So many are told at once; with their reasons they fit into a packet."""
_OURS = ("ELASTIC_AGENT_STANDBY_", "ELASTIC_AGENT_IMPORTS_FD")


def stand_by(sock: int, order_fd: int, recorder: ImportRecorder) -> None:
    """Import ahead, wait for "go", and become what a cold start would be; ends the process if there is no "go"."""
    began = time.monotonic()
    for fd in (sock, order_fd):
        os.set_inheritable(fd, False)  # a program that a module starts must not hold the socket open

    def tell_tainted(names: list[str]) -> None:
        for first in range(0, len(names), _NAMES):
            os.write(sock, dumps({"tainted": names[first : first + _NAMES]}).encode())

    order = _read(order_fd)["standby"]
    preloader = Preloader(LibraryPaths(), order, tell_tainted)
    with low_priority():
        changes = preloader.run(order["modules"])
    shadowed = preloader.shadowed()
    tell_tainted(shadowed)
    if shadowed or preloader.tainted:
        os._exit(0)
    recorder.note_loaded()
    left_out = dict(list(preloader.left_out.items())[:_NAMES])
    warm = {"rss_bytes": _rss_bytes(), "took_s": time.monotonic() - began, "left_out": left_out}
    os.write(sock, dumps({"warm": warm}).encode())
    if not _is_told(sock):
        os._exit(0)
    told = _read(order_fd)
    env = _environment(told["env"])
    if told["stdin"] is not None:
        _redirect_stdin(told["stdin"].encode("latin-1"))
    os.close(sock)
    os.close(order_fd)
    sys.path_importer_cache.clear()  # directories may have changed within a tick of the file system's clock
    if preloader.shadowed():
        os.execve(sys.executable, sys.orig_argv, env)  # noqa: S606 - the same command again, as a cold start
    _take_on({**dict.fromkeys(map(os.fsencode, order["watched"])), **env, **changes})
    _note_entered()


def _is_told(sock: int) -> bool:
    try:
        return os.read(sock, 16) == b"go"
    except OSError:
        return False


def _read(order_fd: int) -> dict[str, Any]:
    size = os.fstat(order_fd).st_size
    order: dict[str, Any] = loads(os.pread(order_fd, size, 0))
    return order


def _redirect_stdin(path: bytes) -> None:
    """Another rank than this one reads what the agent is given."""
    fd = os.open(path, os.O_RDONLY)
    os.dup2(fd, 0)
    os.close(fd)


def _environment(told: dict[str, str]) -> dict[bytes, bytes]:
    """Return what the order says, but for what let us in: PYTHONPATH is the user's own, as it is by now."""
    env = {name: value for name, value in told.items() if not name.startswith(_OURS)}
    env.pop("PYTHONPATH", None)
    own = {b"PYTHONPATH": os.environb[b"PYTHONPATH"]} if "PYTHONPATH" in os.environ else {}
    return {name.encode("latin-1"): value.encode("latin-1") for name, value in env.items()} | own


def _take_on(env: dict[bytes, bytes | None]) -> None:
    """Make this the environment; None: not set. What else there is, the interpreter has set in its start."""
    for name, value in env.items():
        if value is None:
            os.environb.pop(name, None)
        else:
            os.environb[name] = value


def _note_entered() -> None:
    """The way to the first step begins now, whatever was imported before."""
    milestones = sys.modules.get("trainer_runtime.milestones")
    if milestones is not None:
        milestones.reached.entered = milestones.boot_time()


def _rss_bytes() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * resource.getpagesize()
