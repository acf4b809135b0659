"""Detects which environment variables a module reads while it is being imported.

Variables that are only known at "go" must not be read earlier. A module that lists the whole environment has read all
of them, unless it is known to keep nothing of what it read.
"""

from __future__ import annotations

import os
import re
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from types import FrameType
    from typing import Any

_KEEP_NOTHING = {
    "ctypes.util",  # passes it to `ldconfig` and the compiler
    "tqdm.utils",  # looks for names that begin with TQDM_; torch.hub imports it
    "uuid",  # passes it to `ip` and similar commands
}
_ASSIGNED = re.compile(r"""\benviron\[\s*["'](\w+)["']\s*\]\s*=(?!=)""")
_DEFAULTED = re.compile(r"""\benviron\.setdefault\(\s*["'](\w+)["']""")
_STDLIB_WRAPPERS = {"os", "_collections_abc", "collections.abc"}
_READ_BY_C_CODE = ("GOMP_", "KMP_", "MKL_", "OMP_", "OPENBLAS_", "PYTORCH_", "TORCH_")
_READ_LATE = "TORCH_NCCL_"
_READERS_IN_C = ("numpy", "torch")
# torch stores the directory that it chose under this name, and chooses again if it is missing. Scripts set it, too.
_MEMOS = {b"TORCHINDUCTOR_CACHE_DIR"}


class _Watched(dict[bytes, bytes]):
    """The environment's data, with the methods by which `os.environ` and `os.environb` read it."""

    def __init__(self, contents: dict[bytes, bytes], on_read: Callable[[bytes | None], None]) -> None:
        super().__init__(contents)
        self._on_read = on_read

    def __getitem__(self, name: bytes) -> bytes:
        self._on_read(name)
        return super().__getitem__(name)

    def __iter__(self) -> Iterator[bytes]:
        self._on_read(None)
        return super().__iter__()

    def items(self) -> Any:  # noqa: ANN401
        self._on_read(None)
        return super().items()


class EnvironmentWatch:
    """Replaces the environment's data while modules are imported."""

    def __init__(self, watched: set[str], by_script: set[str], on_taint: Callable[[list[str]], None]) -> None:
        self._watched = {os.fsencode(name) for name in watched}
        """Variables that are only known at "go"."""
        self._by_script = {os.fsencode(name) for name in by_script}
        """Variables that changed while the script ran last, or that it seems to set, unless modules change them."""
        self._on_taint = on_taint
        self._contents: dict[bytes, bytes] = os.environ._data  # type: ignore[attr-defined]  # noqa: SLF001
        self._before = dict(self._contents)
        self._seen = _Watched(self._contents, self._on_read)
        self._readers: dict[bytes, list[str]] = {}
        """Modules that read variables which the script may have set."""

    def __enter__(self) -> None:
        _set_contents(self._seen)

    def __exit__(self, *_error: object) -> None:
        self._contents.clear()
        self._contents.update(dict.items(self._seen))
        _set_contents(self._contents)

    def changes(self) -> dict[bytes, bytes | None]:
        """Return what the modules changed; None: removed. It is an effect of their import, so it is kept at "go"."""
        return {name: self._before.get(name) if name in _MEMOS else value for name, value in self._changed().items()}

    def judge(self) -> list[str]:
        """After all imports: return the modules that led to a read of a variable which the script would set first."""
        readers: list[str] = []
        for name in sorted(self._by_script - self._changed().keys()):
            text = os.fsdecode(name)
            if name in self._readers:
                readers += self._readers[name]
            elif text.startswith(_READ_BY_C_CODE) and not text.startswith(_READ_LATE):
                readers += [reader for reader in _READERS_IN_C if reader in sys.modules]
        return readers

    def _changed(self) -> dict[bytes, bytes | None]:
        now = dict(dict.items(self._seen))  # does not count as a read
        return {
            name: now.get(name) for name in now.keys() | self._before.keys() if now.get(name) != self._before.get(name)
        }

    def _on_read(self, name: bytes | None) -> None:
        """Handle a read of one variable, or of all (None)."""
        frame = sys._getframe(2)  # noqa: SLF001 - the reader of the variable
        if name in self._watched or (name is None and _reader(frame) not in _KEEP_NOTHING):
            self._on_taint(importing_modules(frame))
        elif name in self._by_script:
            self._readers.setdefault(name, importing_modules(frame))


def variables_set_in(script: str) -> set[str]:
    """Return the names of variables that this file seems to set, for a script that was never recorded."""
    try:
        with open(script, encoding="utf-8", errors="replace") as file:
            text = file.read()
    except OSError:
        return set()
    defaults = {name for name in _DEFAULTED.findall(text) if name not in os.environ}
    return defaults.union(_ASSIGNED.findall(text))


def importing_modules(frame: FrameType | None) -> list[str]:
    """Return the names of the modules whose import led to this frame, innermost first."""
    names = []
    while frame is not None and (name := str(frame.f_globals.get("__name__"))) != "sitecustomize":
        if frame.f_code.co_name == "<module>":
            names.append(name)
        frame = frame.f_back
    return names


def _reader(frame: FrameType | None) -> str:
    while frame is not None and frame.f_globals.get("__name__") in _STDLIB_WRAPPERS:
        frame = frame.f_back
    return "" if frame is None else str(frame.f_globals.get("__name__"))


def _set_contents(contents: dict[bytes, bytes]) -> None:
    os.environ._data = contents  # type: ignore[attr-defined]  # noqa: SLF001 - no public way to detect a read
    os.environb._data = contents  # type: ignore[attr-defined]  # noqa: SLF001
