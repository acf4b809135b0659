"""The working directory of a rehearsed script: it looks like the user's, and files that are written stay in it.

Directories are created anew. Small files are copied, large ones are links. So a script that replaces a file does not
change the user's, but one that writes into a large file in place does. Checkpoints and logs of earlier runs are left
out, because the script would resume from them.
"""

from __future__ import annotations

import shutil
from contextlib import suppress
from pathlib import Path

_MAX_COPIED_BYTES = 4 << 20
_MAX_ENTRIES = 1000
"""A directory with more entries holds data and becomes a link."""
_MAX_TOTAL_ENTRIES = 20_000
"""After this many entries the rest become links: the script was started in a directory with much else."""
_EXCLUDED = {"__pycache__", "checkpoints", "log", "node_modules"}


def make_workspace(source: Path, target: Path) -> None:
    """Create the directory `target` with copies of, or links to, the contents of `source`."""
    remaining = _MAX_TOTAL_ENTRIES
    pending = [(source, target)]
    while pending:
        here, there = pending.pop()
        there.mkdir(parents=True)
        for name in _names_in(here):
            remaining -= 1
            original, copy = here / name, there / name
            if _is_copied_directory(original, target) and remaining > 0:
                pending.append((original, copy))
            else:
                _copy_or_link(original, copy)


def _names_in(directory: Path) -> list[str]:
    with suppress(OSError):  # the script cannot read such a directory either
        names = (path.name for path in directory.iterdir())
        return [name for name in names if not name.startswith(".") and name not in _EXCLUDED]
    return []


def _is_copied_directory(directory: Path, target: Path) -> bool:
    if not directory.is_dir() or directory.is_symlink() or target.resolve().is_relative_to(directory.resolve()):
        return False
    return len(_names_in(directory)) <= _MAX_ENTRIES


def _copy_or_link(original: Path, copy: Path) -> None:
    with suppress(OSError):
        if original.is_file() and original.stat().st_size <= _MAX_COPIED_BYTES:
            shutil.copy2(original, copy)
            return
    copy.symlink_to(original.absolute())
