"""Detection of the files that a script reads at its start and of those that it overwrites in place.

A file that is both is a checkpoint that a kill in the middle of a write destroys. To test what the script does then,
the gate may name such a file: the next process that opens it for writing is killed, and leaves it empty.
"""

from __future__ import annotations

import functools
import os
import signal
import sys
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from agent.rehearse.step_gate import KILLED_IN_WRITE

if TYPE_CHECKING:
    from collections.abc import Callable

_CODE_SUFFIXES = (".py", ".pyc")
_MIN_BYTES = 512
"""Smaller files hold a name or a number, are written in a moment, and are ignored."""


class OverwriteMonitor:
    """Records which files a process reads and overwrites.

    Args:
        directory: of the records.
        kill_path: returns the file at which to kill the process, or an empty string.
    """

    def __init__(self, directory: Path, kill_path: Callable[[], str]) -> None:
        self._directory = directory
        self._kill_path = kill_path
        self._base = os.path.realpath(Path.cwd())
        self.read: dict[str, None] = {}
        """Files that were opened for reading, in order, as paths relative to the working directory."""
        self.overwritten: dict[str, None] = {}
        """Files that were not empty when they were opened for writing, in order."""

    def watch(self, torch: Any) -> None:  # noqa: ANN401 - this package does not import torch
        """Record files that are opened from now on. `torch.save` is wrapped: it opens paths without an audit event."""
        save = torch.save

        @functools.wraps(save)
        def save_and_note(obj: object, f: Any, *args: Any, **kwargs: Any) -> None:  # noqa: ANN401 - torch's
            if isinstance(f, (str, os.PathLike)):
                self._note_write(os.fspath(f))
            save(obj, f, *args, **kwargs)

        torch.save = save_and_note
        sys.addaudithook(self._audit)

    def _audit(self, event: str, args: tuple[Any, ...]) -> None:
        if event != "open":
            return
        with suppress(Exception):  # an exception would reach the script
            path, mode, _ = args
            if not isinstance(path, (str, os.PathLike)) or not isinstance(mode, str):
                return
            if mode.startswith("r"):
                self._note_read(os.fspath(path))
            elif mode.startswith("w"):
                self._note_write(os.fspath(path))

    def _note_read(self, path: str) -> None:
        name = self._relative_path(path)
        if name and not name.endswith(_CODE_SUFFIXES):
            self.read[name] = None

    def _note_write(self, path: str) -> None:
        name = self._relative_path(path)
        with suppress(OSError):
            if not name or Path(path).stat().st_size < _MIN_BYTES:
                return
            self.overwritten[name] = None
            if name == self._kill_path():
                self._kill_self(path)

    def _kill_self(self, path: str) -> None:
        """Kill this process as if right after the file was opened; once in a job."""
        with suppress(FileExistsError):
            (self._directory / KILLED_IN_WRITE).touch(exist_ok=False)
            os.truncate(path, 0)
            os.kill(os.getpid(), signal.SIGKILL)

    def _relative_path(self, path: str) -> str:
        """Return the path relative to the working directory; empty for files outside of it."""
        base, resolved = f"{self._base}{os.sep}", os.path.realpath(path)
        return resolved.removeprefix(base) if resolved.startswith(base) else ""
