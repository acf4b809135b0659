"""The code that a worker of a rehearsal runs before its script.

Python imports a module named `sitecustomize` before it runs a script. The rehearsal puts one on PYTHONPATH that calls
`begin`, so a script is recorded without a change to it. torch is not imported before the script does it: a finder
waits for this import, and the recorder installs its hooks once torch is loaded.
"""

from __future__ import annotations

import os
import sys
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from importlib.util import module_from_spec
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

RECORD_DIR = "ELASTIC_AGENT_REHEARSAL_DIR"
"""Environment variable: the directory for the records of a rehearsal's workers."""

_SITECUSTOMIZE = "from agent.rehearse.startup import begin\n\nbegin(__file__)\n"


def write_site(directory: Path) -> None:
    """Create a directory for PYTHONPATH whose `sitecustomize` calls `begin`."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "sitecustomize.py").write_text(_SITECUSTOMIZE, encoding="utf-8")


def begin(own: str) -> None:
    """Run the user's own `sitecustomize`, if any; then, in a rank's process, seed, and record once torch is imported.

    Args:
        own: path of the `sitecustomize` that calls this.
    """
    _run_user_sitecustomize(Path(own).parent)
    if RECORD_DIR in os.environ and "RANK" in os.environ:
        _seed_and_record(Path(os.environ[RECORD_DIR]), int(os.environ["RANK"]))


def _run_user_sitecustomize(own: Path) -> None:
    others = [entry for entry in sys.path if Path(entry or ".").resolve() != own.resolve()]
    spec = PathFinder.find_spec("sitecustomize", others)
    if spec is not None and spec.loader is not None:
        module = module_from_spec(spec)
        sys.modules["sitecustomize"] = module  # the one that scripts expect under this name
        spec.loader.exec_module(module)


def _seed_and_record(directory: Path, rank: int) -> None:
    from agent.rehearse.seeding import Seeding, seed_of  # noqa: PLC0415 - only ranks need it
    from trainer_runtime import contract  # noqa: PLC0415 - as above

    group = int(os.environ.get(contract.GROUP, "0"))
    seeding = Seeding(seed_of(directory, group, rank))

    def record(torch: ModuleType) -> None:
        from agent.rehearse.recorder import StepRecorder  # noqa: PLC0415 - needs torch

        seeding.seed_torch(torch)
        StepRecorder(torch, directory, rank, group, seeding).install()

    when_imported("torch", record)


def when_imported(name: str, then: Callable[[ModuleType], None]) -> None:
    """Call `then` with a module right after its first import; it must not be imported yet."""
    sys.meta_path.insert(0, _ImportWatcher(name, then))


class _ImportWatcher(MetaPathFinder):
    """Waits for the import of one module."""

    def __init__(self, name: str, then: Callable[[ModuleType], None]) -> None:
        self._name = name
        self._then = then

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Find the module as Python would without this finder, and wrap its loader."""
        if fullname != self._name:
            return None
        sys.meta_path.remove(self)
        finders = [finder.find_spec for finder in sys.meta_path if hasattr(finder, "find_spec")]
        spec = next((found for find in finders if (found := find(fullname, path, target)) is not None), None)
        if spec is not None and spec.loader is not None:
            self._follow(spec)
        return spec

    def _follow(self, spec: ModuleSpec) -> None:
        loader = spec.loader
        assert loader is not None  # noqa: S101 - checked by the caller
        load = loader.exec_module

        def load_then_call(module: ModuleType) -> None:
            load(module)
            self._then(module)

        loader.exec_module = load_then_call  # type: ignore[method-assign] # only of this module's loader
