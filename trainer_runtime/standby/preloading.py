"""Imports ahead what the script is going to import, and nothing that may not be (see the package's own words)."""

from __future__ import annotations

import importlib
import os
import sys
from importlib.util import find_spec

from .origins import TRAINER_RUNTIME, location
from .watching import EnvironmentWatch, importing, set_in

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from importlib.machinery import ModuleSpec

    from .places import Places

_HOOKS = {"sitecustomize", "usercustomize"}
_REASON_CHARS = 200


class Preloader:
    """Imports modules under watch. It is the first finder meanwhile."""

    def __init__(self, places: Places, order: dict[str, list[str]], on_taint: Callable[[list[str]], None]) -> None:
        self._places = places
        self._tell_taint = on_taint
        self._elsewhere = {*order.get("elsewhere", ()), places.module.partition(".")[0]} - {""}
        self._current = ""
        self._before = frozenset(sys.modules)
        self._known = set(self._before)
        self.left_out: dict[str, str] = {}
        """Names that were not imported, or broke, with the reason."""
        by_script = {*order.get("variables", ()), *set_in(places.script)}
        self._watch = EnvironmentWatch(set(order["watched"]), by_script, self._taint)

    def run(self, names: Sequence[str]) -> dict[bytes, bytes | None]:
        """Import what may be imported; return what this changed in the environment."""
        sys.meta_path.insert(0, self)
        try:
            with self._watch, _MainFile():
                for name in names:
                    if name not in sys.modules and name not in _HOOKS:
                        self._current = name
                        self._import(name)
                self._current = ""
                self._watch.judge()
                return self._watch.changes()
        finally:
            sys.meta_path.remove(self)

    def find_spec(self, name: str, path: Sequence[str] | None = None, target: object = None) -> None:
        """Called at the beginning of each import; looks only whether it may be."""
        del target
        if path is None and (name in self._elsewhere or self._places.shadow(name)):
            self._taint(importing(sys._getframe(1)))  # noqa: SLF001 - whoever imports it leads to it

    def shadowed(self) -> list[str]:
        """Return packages that were imported here and that the script would now get from elsewhere."""
        return self._places.shadowed({name.partition(".")[0] for name in sys.modules.keys() - self._before})

    def _import(self, name: str) -> None:
        try:
            if not self._is_library(name.partition(".")[0]):
                self.left_out[name] = "the script has it from elsewhere than the interpreter's libraries"
                return
            importlib.import_module(name)
        except BaseException as error:  # a module may also raise SystemExit
            if isinstance(error, KeyboardInterrupt):
                raise
            self.left_out[name] = f"{type(error).__name__}: {error}"[:_REASON_CHARS]
        self._look_for_strays()

    def _is_library(self, top: str) -> bool:
        """Whether a package that was asked for is one; also where there is none of this name."""
        if top in self._elsewhere or (top not in sys.modules and self._places.shadow(top)):
            return False
        spec = None if top in sys.modules else find_spec(top)
        return spec is None or self._may_load(top, spec)

    def _look_for_strays(self) -> None:
        """What a library imported in its turn may lie anywhere."""
        for name in set(sys.modules) - self._known:
            self._known.add(name)
            spec = getattr(sys.modules.get(name), "__dict__", {}).get("__spec__")
            if spec is not None and not self._may_load(name, spec):
                self._taint([name])

    def _may_load(self, name: str, spec: ModuleSpec) -> bool:
        where = location(spec)
        return not where or name.partition(".")[0] == TRAINER_RUNTIME or self._places.is_library(where)

    def _taint(self, names: list[str]) -> None:
        self._tell_taint([name for name in dict.fromkeys([*names, self._current]) if name])


class _MainFile:
    """What `__main__` will say of its file: some modules take its absence for an interactive session."""

    def __enter__(self) -> None:
        if sys.argv[0] != "-m":
            vars(sys.modules["__main__"])["__file__"] = os.path.abspath(sys.argv[0])

    def __exit__(self, *_error: object) -> None:
        vars(sys.modules["__main__"]).pop("__file__", None)  # the interpreter sets it, if it is not there yet
