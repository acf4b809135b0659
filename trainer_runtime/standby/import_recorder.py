"""Records what a process imports, so that the next standby can import it ahead.

The record is in shared memory, because the agent may read it at any time: a length in bytes (unsigned 64-bit,
little-endian), then lines of that total length. A line is the name of a module that was loaded from the interpreter's
libraries; with `!` before it, of a package from elsewhere; with `$`, of an environment variable that changed.

Only modules that were loaded are recorded: big packages merely look for a hundred others. An import asks the finders
when it begins and reports nothing when it ends, so each name is checked when the next import begins. The very last
imports may be missed.
"""

from __future__ import annotations

import _thread
import mmap
import os
import sys

from .origins import TRAINER_RUNTIME, library_dirs, location

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence
    from importlib.machinery import ModuleSpec

_HEADER_BYTES = 8
_HOOKS = {"sitecustomize", "usercustomize"}


class ImportRecorder:
    """A finder that finds nothing: it notes which imports began and which modules were loaded."""

    def __init__(self, memory: mmap.mmap | None) -> None:
        self._memory = memory
        self._used = 0
        self._is_stopped = False
        self._asked: list[str] = []
        """Names whose import has begun, innermost last."""
        self._noted: set[str] = set()
        self._libraries = library_dirs()
        self._environ: dict[bytes, bytes] = {}
        self._lock = _thread.allocate_lock()

    @classmethod
    def of(cls, fd: str | None) -> ImportRecorder:
        """Create a recorder for the memory file with this descriptor, which is closed; None: record nothing."""
        if fd is None:
            return cls(None)
        memory = mmap.mmap(int(fd), 0)
        os.close(int(fd))
        return cls(memory)

    def start(self) -> None:
        """Record what is loaded from now on, in this process only."""
        if self._memory is None:
            return
        self._environ = dict(_environ())
        os.register_at_fork(after_in_child=self.stop)
        sys.meta_path.insert(0, self)

    def stop(self) -> None:
        """Stop recording."""
        self._is_stopped = True  # keep the mapping: its descriptor's number may by now belong to another file
        if self in sys.meta_path:
            sys.meta_path.remove(self)

    def note_loaded(self) -> None:
        """Record all modules that are loaded already."""
        for name in tuple(sys.modules):
            self._note(name)

    def find_spec(self, name: str, path: Sequence[str] | None = None, target: object = None) -> None:
        """Note the import that begins; called by the import system. Finds nothing."""
        del path, target
        # Non-blocking: a signal handler may import too, while this method runs.
        if self._lock.acquire(blocking=False):
            try:
                self._look_back()
                self._asked.append(name)
            except Exception:  # noqa: BLE001 - recording must not make an import fail
                self.stop()
            finally:
                self._lock.release()

    def _look_back(self) -> None:
        if self._environ != _environ():
            self._note_variables()
        while self._asked:
            name = self._asked[-1]
            if getattr(_spec(name), "_initializing", False):
                return  # and so do the imports before it
            self._asked.pop()
            self._note(name)

    def _note(self, name: str) -> None:
        """Record a module, if one of this name is loaded and its origin is known."""
        spec = _spec(name)
        if spec is None or name in self._noted or name in _HOOKS:
            return
        self._noted.add(name)
        top = name.partition(".")[0]
        where = location(spec)
        if not where or where.startswith(self._libraries) or top == TRAINER_RUNTIME:
            self._write(name)
        elif top == name:
            self._write("!" + name)

    def _note_variables(self) -> None:
        now = dict(_environ())
        changed = {name for name in self._environ.keys() | now.keys() if self._environ.get(name) != now.get(name)}
        self._environ = now
        for name in sorted(os.fsdecode(name) for name in changed):
            if name not in self._noted:
                self._noted.add(name)
                self._write("$" + name)

    def _write(self, line: str) -> None:
        data = line.encode() + b"\n"
        at = _HEADER_BYTES + self._used
        if self._memory is None or self._is_stopped or at + len(data) > len(self._memory) or data.count(b"\n") > 1:
            return
        self._memory[at : at + len(data)] = data
        self._used += len(data)
        self._memory[:_HEADER_BYTES] = self._used.to_bytes(_HEADER_BYTES, "little")  # last: readers see complete lines


def _environ() -> dict[bytes, bytes]:
    data: dict[bytes, bytes] = os.environ._data  # type: ignore[attr-defined]  # noqa: SLF001 - avoids a copy
    return data


def _spec(name: str) -> ModuleSpec | None:
    """Return the spec of a loaded module. Reads `__dict__`, since an attribute of a lazy module may start an import."""
    return getattr(sys.modules.get(name), "__dict__", {}).get("__spec__")
