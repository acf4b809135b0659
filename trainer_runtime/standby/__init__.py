"""Rank processes that are started ahead of time: warm when they are needed, and otherwise equal to a cold start.

A standby is the worker's own command, started early. During its start-up, before it looks at the script, the
interpreter imports `sitecustomize`; it finds ours first on PYTHONPATH. There the standby imports what the script
imported last time, reports that it is warm, and waits. At "go" it gets its environment and returns, and the interpreter
continues and runs the script as it always does. So `sys.argv`, `sys.path`, `__main__`, tracebacks, exit codes and child
processes are Python's own, not an imitation.

| file | purpose |
|---|---|
| `sitecustomize.py` | the hook: removes its own traces, stands by, installs the recorder and the wait for the master, runs the user's own `sitecustomize` |
| `import_recorder.py` | records what a process imports, and from where, for the next standby |
| `waiting.py` | the communication with the guardian; "go" |
| `preloading.py`, `library_paths.py`, `environment_watch.py`, `priority.py` | import ahead what may be imported, at low priority |
| `origins.py` | where a module comes from |
| `wait_for_master.py` | waits until rank 0 listens before torch connects, since torch sleeps long after a refused connection |

The hook loads these files by their path under a private package name, and removes them and everything that they
imported from `sys.modules`: a script finds it as in any other start. They import as little as possible, because every
cold start pays for it.

A module cannot be un-imported. Therefore a standby must not import, and watches for:

- code that may be edited between two runs: everything outside of the interpreter's own library directories;
- another module than the script would get: a name that is also in the script's directory or on PYTHONPATH, or that
  the script got from elsewhere, say from a path that it inserted itself;
- a module that reads, while being imported, a variable that is only known at "go" (the rank), or that the script sets
  first;
- a module that uses CUDA while being imported: a standby would hold memory on a GPU that the running rank needs.

A standby that meets one of these aborts that import, continues with the others, reports which modules led to such
imports, and exits; the next standby is started without these modules, and without everything in them if they are
packages. If a name is shadowed only while the standby waits, it begins anew at "go" as a cold start, by `exec`.

A standby does not detect: a variable that C code reads, except those that numerical libraries are known to read; a name
that is shadowed by a path which the script inserts for the first time after it was edited; anything that depends on the
time of an import (`logging`'s relative times, the order among exit handlers of modules and script, import warnings).
"""  # noqa: E501 - a table

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from trainer_runtime import contract

if TYPE_CHECKING:
    from collections.abc import Mapping

HOOK_DIR = Path(__file__).parent

DEFAULT_MODULES = (
    "torch",
    "torch.distributed",
    "torch.nn.parallel",
    "torch.utils.data",
    "torch._dynamo",  # imported with the first optimizer; imports sympy, and most of what DDP imports late
    "torch.utils.serialization.config",  # imported with the first save
    "multiprocessing.popen_fork",  # imported, like the next two, with the first worker of a loader
    "multiprocessing.queues",
    "multiprocessing.synchronize",
    "trainer_runtime",
    "trainer_runtime.data",
    "trainer_runtime.dist",
    "trainer_runtime.integrations",
    "trainer_runtime.phases",
    "trainer_runtime.state",
)
"""Modules to import ahead if none were recorded: those that a small DDP training was measured to have loaded."""


@dataclass(frozen=True)
class Imports:
    """What a script did before its first step, as far as the next standby needs to know it."""

    modules: tuple[str, ...] = ()
    """Modules from the interpreter's library directories, in the order in which their imports ended."""
    elsewhere: tuple[str, ...] = ()
    """Names of packages that the script loaded from elsewhere, which must never be imported ahead."""
    variables: tuple[str, ...] = ()
    """Environment variables that changed meanwhile."""
    avoided: tuple[str, ...] = ()
    """Modules that earlier standbys found must not be imported ahead, and modules that import these."""


def can_hook() -> bool:
    """Return whether an interpreter can be made to load the hook. If not, a standby would run its script at once."""
    return os.pathsep not in str(HOOK_DIR) and (HOOK_DIR / "sitecustomize.py").is_file()


def with_hook(environ: Mapping[str, str]) -> dict[str, str]:
    """Return an environment in which an interpreter loads the hook, which undoes the change before the script runs."""
    own = environ.get("PYTHONPATH")
    path = f"{HOOK_DIR}{os.pathsep}{own}" if own else str(HOOK_DIR)  # an empty entry would be the working directory
    variables = {} if own is None else {contract.STANDBY_PYTHONPATH: own}
    others = {name: value for name, value in environ.items() if name != contract.STANDBY_PYTHONPATH}
    return others | {"PYTHONPATH": path} | variables


def read_imports(fd: int) -> Imports:
    """Return what was recorded so far. The process may be writing meanwhile, but the memory contains complete lines."""
    recorded = os.pread(fd, contract.IMPORTS_BYTES, 0)
    length = int.from_bytes(recorded[:8], "little")
    lines = list(filter(None, recorded[8 : 8 + length].decode(errors="replace").splitlines()))
    return Imports(
        modules=tuple(line for line in lines if line[0] not in "!$"),
        elsewhere=tuple(line[1:] for line in lines if line[0] == "!"),
        variables=tuple(line[1:] for line in lines if line[0] == "$"),
    )
