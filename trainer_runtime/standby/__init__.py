"""Rank processes that are started ahead: warm when they are needed, and in nothing else unlike a cold start.

A standby is the worker's very command, started early. The interpreter begins, comes to the point where it imports
`sitecustomize`, finds ours first on PYTHONPATH, and so stands still in its own start-up, before it has looked at the
script. There it imports what the script imported last time, says that it is warm, and waits. At "go" it gets its
environment and returns; the interpreter goes on and runs the script as it always does. So `sys.argv`, `sys.path`,
`__main__`, tracebacks, exit codes and child processes are Python's own, not an imitation.

| file | does |
|---|---|
| `sitecustomize.py` | the hook: undoes what let it in, records, stands by, knocks, lets the user's own in |
| `import_recorder.py` | writes down what a process imports, and from where, for the next standby |
| `waiting.py` | the talk with the guardian; "go" |
| `preloading.py`, `library_paths.py`, `environment_watch.py`, `priority.py` | imports ahead what may be, at low
priority |
| `origins.py` | where a module comes from |
| `wait_for_master.py` | asks whether rank 0 listens before torch does, which would sleep for long if it does not yet |

The hook loads these by their path and under a private name, and forgets them and all that they imported: a script
finds `sys.modules` as in any other start. They import as little as they can, for every cold start pays for it.

What a standby may not import, since a module cannot be un-imported, and what it therefore looks for:

- code that may be edited between two runs: whatever is not in the interpreter's own library directories;
- another module than the script would get: a name that is also in the script's directory or on PYTHONPATH, or that
  the script has got from elsewhere, say by a path that it inserted itself;
- a module that reads, while being imported, what is only told at "go" (the rank), or what the script itself sets first.

A standby that met one of these breaks its import off, goes on with the others, says which modules led to such imports
and ends; the next one is started without them, and without whatever is in them if they are packages. If a name
came to be shadowed only while it waited, it begins anew at "go" as a cold start, by `exec`.

What it does not see: a variable read by C code, except those that numerical libraries are known to read; a name
shadowed by a path that the script inserts for the first time after it was edited; what depends on the moment of an
import (`logging`'s relative times, the order among exit handlers of modules and script, warnings of an import).
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from trainer_runtime import contract

if TYPE_CHECKING:
    from collections.abc import Mapping

HOOK_DIR = Path(__file__).parent

FIXED = (
    "torch",
    "torch.distributed",
    "torch.nn.parallel",
    "torch.utils.data",
    "torch._dynamo",  # behind the first optimizer; brings sympy, and most of what DDP imports late
    "torch.utils.serialization.config",  # behind the first save
    "multiprocessing.popen_fork",  # these behind the first worker of a loader
    "multiprocessing.queues",
    "multiprocessing.synchronize",
    "trainer_runtime",
    "trainer_runtime.data",
    "trainer_runtime.dist",
    "trainer_runtime.integrations",
    "trainer_runtime.phases",
    "trainer_runtime.state",
)
"""What to import ahead where nothing was learnt. By measurement: what a small DDP training had loaded at its end."""


@dataclass(frozen=True)
class Imports:
    """What a script did before its first step, as far as the next standby must know."""

    modules: tuple[str, ...] = ()
    """Loaded from the interpreter's library directories, in the order in which they were ready."""
    elsewhere: tuple[str, ...] = ()
    """Names of packages that it loaded from elsewhere: never to be imported ahead."""
    variables: tuple[str, ...] = ()
    """Environment variables that changed meanwhile."""
    avoided: tuple[str, ...] = ()
    """Modules that standbys before this one have met and that may not be imported, nor what leads to them."""


def can_hook() -> bool:
    """Whether an interpreter can be led to the hook. If not, a standby would run its script unasked."""
    return os.pathsep not in str(HOOK_DIR) and (HOOK_DIR / "sitecustomize.py").is_file()


def hooked(environ: Mapping[str, str]) -> dict[str, str]:
    """Return an environment in which an interpreter comes upon the hook. It undoes this before the script runs."""
    own = environ.get("PYTHONPATH")
    path = f"{HOOK_DIR}{os.pathsep}{own}" if own else str(HOOK_DIR)  # an empty entry would be the working directory
    told = {} if own is None else {contract.STANDBY_PYTHONPATH: own}
    others = {name: value for name, value in environ.items() if name != contract.STANDBY_PYTHONPATH}
    return others | {"PYTHONPATH": path} | told


def read_imports(fd: int) -> Imports:
    """Read what was recorded so far. The process may be writing; what is there is whole lines."""
    recorded = os.pread(fd, contract.IMPORTS_BYTES, 0)
    length = int.from_bytes(recorded[:8], "little")
    lines = list(filter(None, recorded[8 : 8 + length].decode(errors="replace").splitlines()))
    return Imports(
        modules=tuple(line for line in lines if line[0] not in "!$"),
        elsewhere=tuple(line[1:] for line in lines if line[0] == "!"),
        variables=tuple(line[1:] for line in lines if line[0] == "$"),
    )
