"""Where a module comes from. Separate from `library_paths.py`, because every cold start reads this file."""

from __future__ import annotations

import os
import site

TYPE_CHECKING = False
if TYPE_CHECKING:
    from importlib.machinery import ModuleSpec

TRAINER_RUNTIME = "trainer_runtime"
"""Our own package, which counts as a library wherever it is installed."""


def library_dirs() -> tuple[str, ...]:
    """Return the directories of the interpreter and of installed packages, each with a slash at its end."""
    # The same as those of `sysconfig`, whose import takes long.
    dirs = [os.path.dirname(os.__file__), *site.getsitepackages(), site.USER_SITE or ""]
    return tuple(os.path.join(directory, "") for directory in dict.fromkeys(dirs) if directory)


def parents(name: str) -> list[str]:
    """Return the packages that contain a module, outermost first, and the module: the order of their import."""
    parts = name.split(".")
    return [".".join(parts[: count + 1]) for count in range(len(parts))]


def location(spec: ModuleSpec) -> str:
    """Return the file of a module, or the directory of a package without one; empty for a built-in module."""
    if spec.has_location:
        return spec.origin or ""
    return next((os.path.join(path, "") for path in spec.submodule_search_locations or ()), "")
