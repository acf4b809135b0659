"""Hooks that run around the import of a module, before the script has it.

A hook is a finder that finds what the others find, and replaces the loader's `exec_module` once.
"""

from __future__ import annotations

import gc
import os
import sys

TYPE_CHECKING = False  # every cold start pays for imports at the top
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from importlib.machinery import ModuleSpec
    from types import ModuleType
    from typing import Any

    Around = Callable[[ModuleType, Callable[[ModuleType], None]], None]


def around_import(name: str, around: Around) -> None:
    """Call `around` in place of the next import of a module, in this process only.

    Args:
        name: full name of the module.
        around: called with the module, which is still empty, and the function that loads it.
    """
    finder = _Finder(name, around)
    os.register_at_fork(after_in_child=finder.leave)
    sys.meta_path.insert(0, finder)


def pause_garbage_collection() -> None:
    """Import torch without garbage collection, which finds next to nothing and takes a quarter of the time."""
    if "torch" not in sys.modules:
        around_import("torch", _load_without_collection)


def _load_without_collection(module: ModuleType, load: Callable[[ModuleType], None]) -> None:
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        load(module)
    finally:
        if was_enabled:
            gc.enable()


class _Finder:
    """A finder that waits for the import of one module."""

    def __init__(self, name: str, around: Around) -> None:
        self._name = name
        self._around = around

    def leave(self) -> None:
        """Remove the finder."""
        if self in sys.meta_path:
            sys.meta_path.remove(self)

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return what the other finders find, and hook into the loading of the module."""
        if name != self._name:
            return None
        self.leave()
        found = (finder.find_spec(name, path, target) for finder in sys.meta_path)
        spec = next(filter(None, found), None)
        if spec is not None:
            _hook(spec, self._around)
        return spec


def _hook(spec: ModuleSpec, around: Around) -> None:
    loader: Any = spec.loader
    own = getattr(loader, "exec_module", None)
    if own is None or not hasattr(loader, "__dict__"):
        return

    def load(module: ModuleType) -> None:
        del loader.exec_module  # removes this function from the instance, so that the class's method applies again
        around(module, own)

    loader.exec_module = load
