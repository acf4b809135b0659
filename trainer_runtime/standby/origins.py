"""Where a module comes from. Apart from `library_paths.py`, for every cold start reads this one."""

from __future__ import annotations

import os
import site

TYPE_CHECKING = False
if TYPE_CHECKING:
    from importlib.machinery import ModuleSpec

TRAINER_RUNTIME = "trainer_runtime"
"""Ours, wherever it is installed."""


def library_dirs() -> tuple[str, ...]:
    """Directories of the interpreter and of what was installed into it, each with a slash at its end."""
    # As `sysconfig` has them, which would take long to import.
    dirs = [os.path.dirname(os.__file__), *site.getsitepackages(), site.USER_SITE or ""]
    return tuple(os.path.join(directory, "") for directory in dict.fromkeys(dirs) if directory)


def parents(name: str) -> list[str]:
    """Packages that a module is in, outermost first, and itself: they are imported in this order."""
    parts = name.split(".")
    return [".".join(parts[: count + 1]) for count in range(len(parts))]


def location(spec: ModuleSpec) -> str:
    """File of a module, or a directory of a package that has none; empty for one that is built into the interpreter."""
    if spec.has_location:
        return spec.origin or ""
    return next((os.path.join(path, "") for path in spec.submodule_search_locations or ()), "")
