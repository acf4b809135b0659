"""A working directory for a script that is rehearsed: it looks like the user's, and what is written stays in it.

Directories are made anew. Small files are copied, large ones are links: a script that replaces a file leaves the
user's own alone, but one that writes into a large file in its place does not. Checkpoints and logs of earlier runs
stay outside, or the script would resume from them.
"""

from __future__ import annotations

import shutil
from contextlib import suppress
from pathlib import Path

_COPIED_BYTES = 4 << 20
_MOST_HERE = 1000
"""A directory with more entries holds data, and is one link."""
_MOST_IN_ALL = 20_000
"""After so many entries the rest are links: the script was started above all sorts of things."""
_LEFT_OUT = {"__pycache__", "checkpoints", "log", "node_modules"}


def mirror(source: Path, target: Path) -> None:
    """Make `target`, a directory that is not there yet, look like `source`."""
    left = _MOST_IN_ALL
    places = [(source, target)]
    while places:
        here, there = places.pop()
        there.mkdir(parents=True)
        for name in _names_in(here):
            left -= 1
            original, copy = here / name, there / name
            if _is_to_be_made(original, target) and left > 0:
                places.append((original, copy))
            else:
                _copy_or_link(original, copy)


def _names_in(directory: Path) -> list[str]:
    with suppress(OSError):  # what cannot be read here, the script cannot read either
        names = (path.name for path in directory.iterdir())
        return [name for name in names if not name.startswith(".") and name not in _LEFT_OUT]
    return []


def _is_to_be_made(directory: Path, target: Path) -> bool:
    if not directory.is_dir() or directory.is_symlink() or target.resolve().is_relative_to(directory.resolve()):
        return False
    return len(_names_in(directory)) <= _MOST_HERE


def _copy_or_link(original: Path, copy: Path) -> None:
    with suppress(OSError):
        if original.is_file() and original.stat().st_size <= _COPIED_BYTES:
            shutil.copy2(original, copy)
            return
    copy.symlink_to(original.absolute())
