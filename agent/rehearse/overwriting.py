"""Sees which files a script reads at its start, and which it overwrites in place.

A file that is both is a checkpoint that a kill in the middle of a write leaves without its content. To see what a
script does then, the gate may name such a file: the process that opens it for writing next is killed, when it is empty.
"""

from __future__ import annotations

import functools
import os
import signal
import sys
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from agent.rehearse.step_gate import TORN

if TYPE_CHECKING:
    from collections.abc import Callable

_CODE = (".py", ".pyc")
_SMALLEST = 512
"""Bytes. A smaller file has a name or a number in it, and is written in one moment."""


class Overwriting:
    """Follows the files of a process.

    Args:
        directory: of the records; its gate may name a file to be killed at.
        torn: returns the file that the gate names, or an empty string.
    """

    def __init__(self, directory: Path, torn: Callable[[], str]) -> None:
        self._directory = directory
        self._torn = torn
        self._base = os.path.realpath(Path.cwd())
        self.read: dict[str, None] = {}
        """Files that were opened for reading, in order, as paths from the working directory."""
        self.overwritten: dict[str, None] = {}
        """Files that were opened for writing though they had a content, in order."""

    def watch(self, torch: Any) -> None:  # noqa: ANN401 - this package does not import torch
        """Follow what is opened from now on. torch.save opens a path that it is given outside Python."""
        save = torch.save

        @functools.wraps(save)
        def save_and_note(obj: object, f: Any, *args: Any, **kwargs: Any) -> None:  # noqa: ANN401 - torch's
            if isinstance(f, (str, os.PathLike)):
                self._note_write(os.fspath(f))
            save(obj, f, *args, **kwargs)

        torch.save = save_and_note
        sys.addaudithook(self._hear)

    def _hear(self, event: str, args: tuple[Any, ...]) -> None:
        if event != "open":
            return
        with suppress(Exception):  # it would reach the script
            path, mode, _ = args
            if not isinstance(path, (str, os.PathLike)) or not isinstance(mode, str):
                return
            if mode.startswith("r"):
                self._note_read(os.fspath(path))
            elif mode.startswith("w"):
                self._note_write(os.fspath(path))

    def _note_read(self, path: str) -> None:
        name = self._named(path)
        if name and not name.endswith(_CODE):
            self.read[name] = None

    def _note_write(self, path: str) -> None:
        name = self._named(path)
        with suppress(OSError):
            if not name or Path(path).stat().st_size < _SMALLEST:
                return
            self.overwritten[name] = None
            if name == self._torn():
                self._die(path)

    def _die(self, path: str) -> None:
        """As if killed right after the file was opened; once in a job."""
        with suppress(FileExistsError):
            (self._directory / TORN).touch(exist_ok=False)
            os.truncate(path, 0)
            os.kill(os.getpid(), signal.SIGKILL)

    def _named(self, path: str) -> str:
        """The path from the working directory; empty for files outside, which are not the rehearsal's own."""
        base, whole = f"{self._base}{os.sep}", os.path.realpath(path)
        return whole.removeprefix(base) if whole.startswith(base) else ""
