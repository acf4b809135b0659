"""Which files belong to libraries, and which to the user, who may edit them."""

from __future__ import annotations

import os
import sys
from importlib.machinery import BuiltinImporter, FrozenImporter, PathFinder

from .origins import TRAINER_RUNTIME, library_dirs

TYPE_CHECKING = False
if TYPE_CHECKING:
    from importlib.machinery import ModuleSpec


class LibraryPaths:
    """Distinguishes library files from the user's for this command, and finds modules that shadow a library."""

    def __init__(self) -> None:
        self._libraries = library_dirs()
        is_module = sys.argv[0] == "-m"
        script = os.path.realpath(sys.argv[0])
        self.module = sys.orig_argv[-len(sys.argv)] if is_module else ""
        """Name of the module that `python -m` runs (`sys.argv[0]` still is `-m`); empty for a script."""
        self.script = _module_file(self.module) if is_module else script
        """File of the script or module, as far as it can be found without an import."""
        self._script_dir = os.path.join(os.getcwd() if is_module else os.path.dirname(script), "")
        # A script may also be a directory or an archive; it is then on the path itself.
        itself = [] if is_module or script.endswith(".py") else [script]
        first = [] if sys.flags.safe_path else [self._script_dir, *itself]
        self._before = [*first, *self._ahead_of_libraries()]

    def _ahead_of_libraries(self) -> list[str]:
        """Return the entries of PYTHONPATH."""
        found: list[str] = []
        for entry in sys.path:
            if os.path.join(entry, "") in self._libraries:
                break
            found.append(entry)
        return found

    def is_library(self, path: str) -> bool:
        """Return whether a file belongs to a library. A script's directory may be within a library directory."""
        library = max((directory for directory in self._libraries if path.startswith(directory)), key=len, default="")
        is_neighbour = self._script_dir.startswith(library) and path.startswith(self._script_dir)
        return bool(library) and not is_neighbour

    def shadow(self, name: str) -> ModuleSpec | None:
        """Return what the script would get by this name instead of the library's package, if it is another module."""
        if BuiltinImporter.find_spec(name) or FrozenImporter.find_spec(name):
            return None
        spec = PathFinder.find_spec(name, self._before)
        return None if spec is None or spec.loader is None or _is_ours(name, spec) else spec

    def shadowed(self, names: set[str]) -> list[str]:
        """Return the packages among `names` that the script would get from elsewhere. Fast, because "go" waits."""
        near: set[str] = set()
        for entry in self._before:
            if os.path.isfile(entry):
                near |= names  # the entry is an archive
            elif os.path.isdir(entry):
                near.update(file.partition(".")[0] for file in os.listdir(entry))
        return sorted(name for name in names & near if self.shadow(name))


def _is_ours(name: str, spec: ModuleSpec) -> bool:
    return name == TRAINER_RUNTIME and os.path.dirname(spec.origin or "") == os.path.dirname(os.path.dirname(__file__))


def _module_file(name: str) -> str:
    """Return the file of a module without the import system, which would import the module's packages."""
    path = os.path.abspath(name.replace(".", "/"))
    return os.path.join(path, "__main__.py") if os.path.isdir(path) else path + ".py"
