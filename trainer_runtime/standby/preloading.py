"""Imports ahead what the script is going to import, except what must not be (see the package's docstring)."""

from __future__ import annotations

import gc
import importlib
import os
import sys
from contextlib import suppress
from importlib.machinery import PathFinder
from importlib.util import find_spec

from .environment_watch import EnvironmentWatch, importing_modules, variables_set_in
from .origins import TRAINER_RUNTIME, location, parents

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from importlib.machinery import ModuleSpec
    from typing import NoReturn

    from .library_paths import LibraryPaths

_HOOKS = {"sitecustomize", "usercustomize"}
_REASON_CHARS = 200


class _TaintedError(BaseException):
    """Aborts an import that is not allowed. A BaseException, so that libraries do not catch it."""


class Preloader:
    """Imports modules under observation, as the first finder meanwhile.

    An import that is not allowed is aborted at once. The others continue, although this process can no longer become a
    rank: they find everything else that leads to a forbidden import, so that all of it is known after one attempt.
    """

    def __init__(
        self, paths: LibraryPaths, order: dict[str, list[str]], report_taint: Callable[[list[str]], None]
    ) -> None:
        self._paths = paths
        self._report_taint = report_taint
        self._elsewhere = set(order.get("elsewhere", ()))
        self._avoided = set(order.get("avoided", ()))
        self._itself = {paths.module, f"{paths.module}.__main__"} if paths.module else set()
        """Names of the module that `python -m` runs: it runs as `__main__`, not as an imported module."""
        self._current = ""
        self._has_cuda = _has_cuda()
        self._before = frozenset(sys.modules)
        self._known = set(self._before)
        self.left_out: dict[str, str] = {}
        """Names that were not imported, or failed, with the reason. A package stands for everything in it."""
        self.tainted: set[str] = set()
        """Names that must not be imported, and those that import them. If there are any, this process exits."""
        by_script = {*order.get("variables", ()), *variables_set_in(paths.script)}
        self._watch = EnvironmentWatch(set(order["watched"]), by_script, self._taint)

    def run(self, names: Sequence[str]) -> dict[bytes, bytes | None]:
        """Import what is allowed of these modules; return what that changed in the environment."""
        sys.meta_path.insert(0, self)
        gc.disable()  # imports leave little garbage, and looking for it takes a quarter of the time of torch's import
        try:
            with self._watch, _MainFile():
                for name in names:
                    if name not in sys.modules and name not in _HOOKS | self._itself and not self._is_excluded(name):
                        self._current = name
                        with suppress(_TaintedError):
                            self._import(name)
                self._current = ""
                self._note_taint(self._watch.judge())
                return self._watch.changes()
        finally:
            gc.freeze()  # nor is this looked at again in each full collection, and once more when the rank exits
            gc.enable()
            sys.meta_path.remove(self)

    def find_spec(self, name: str, path: Sequence[str] | None = None, target: object = None) -> None:
        """Check whether the import that begins is allowed; called by the import system. Finds nothing."""
        del target
        is_strange = path is None and (name in self._elsewhere or self._paths.shadow(name))
        if is_strange or name in self._avoided or (name in self._itself and not _is_package(name, path)):
            self._taint(importing_modules(sys._getframe(1)))  # noqa: SLF001 - the modules that import it

    def shadowed(self) -> list[str]:
        """Return packages that were imported here and that the script would now get from elsewhere."""
        return self._paths.shadowed({name.partition(".")[0] for name in sys.modules.keys() - self._before})

    def _import(self, name: str) -> None:
        try:
            if not self._is_library(top := name.partition(".")[0]):
                self.left_out[top] = "it is the script's own, or not from the interpreter's libraries"
                return
            importlib.import_module(name)
        except BaseException as error:  # a module may also raise SystemExit
            if isinstance(error, (KeyboardInterrupt, _TaintedError)):
                raise
            failed = next((parent for parent in parents(name) if parent not in sys.modules), name)
            self.left_out[failed] = f"{type(error).__name__}: {error}"[:_REASON_CHARS]
        if _has_cuda() and not self._has_cuda:
            self._has_cuda = True
            self._taint([name])
        self._look_for_strays()

    def _is_excluded(self, name: str) -> bool:
        """Return whether the module, or a package that contains it, was left out or tainted already."""
        return any(each in self.tainted or each in self.left_out for each in parents(name))

    def _is_library(self, top: str) -> bool:
        """Return whether a requested package is a library; also true if there is no package of this name."""
        if top in self._elsewhere or (top not in sys.modules and self._paths.shadow(top)):
            return False
        spec = None if top in sys.modules else find_spec(top)
        return spec is None or self._may_load(top, spec)

    def _look_for_strays(self) -> None:
        """Find modules outside of the library directories that a library has imported."""
        for name in set(sys.modules) - self._known:
            self._known.add(name)
            spec = getattr(sys.modules.get(name), "__dict__", {}).get("__spec__")
            if spec is not None and not self._may_load(name, spec):
                self._taint([name])

    def _may_load(self, name: str, spec: ModuleSpec) -> bool:
        where = location(spec)
        return not where or name.partition(".")[0] == TRAINER_RUNTIME or self._paths.is_library(where)

    def _taint(self, names: list[str]) -> NoReturn:
        self._note_taint([*names, self._current])
        raise _TaintedError

    def _note_taint(self, names: list[str]) -> None:
        """Report at once, because importing an aborted module once more may crash."""
        new = [name for name in dict.fromkeys(names) if name not in self.tainted]
        self.tainted.update(new)
        if new:
            self._report_taint(new)


def _has_cuda() -> bool:
    """Return whether CUDA was initialized by torch: then this process holds memory on a GPU that a rank uses."""
    is_initialized = getattr(getattr(sys.modules.get("torch"), "cuda", None), "is_initialized", None)
    return is_initialized is not None and bool(is_initialized())


def _is_package(name: str, path: Sequence[str] | None) -> bool:
    spec = PathFinder.find_spec(name, path)
    return spec is not None and spec.submodule_search_locations is not None


class _MainFile:
    """Gives `__main__` its `__file__`, because some modules take its absence for an interactive session."""

    def __enter__(self) -> None:
        if sys.argv[0] != "-m":
            vars(sys.modules["__main__"])["__file__"] = os.path.abspath(sys.argv[0])

    def __exit__(self, *_error: object) -> None:
        vars(sys.modules["__main__"]).pop("__file__", None)  # the interpreter sets it only if it is not there yet
