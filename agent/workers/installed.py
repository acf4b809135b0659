"""Whether Python, or what is installed for it, is still as it was when a process was started."""

from __future__ import annotations

import os
import site
import sys
import sysconfig
from functools import cache


def installed() -> tuple[tuple[str, int, int], ...]:
    """What shows it: equal as long as nothing has been installed or removed."""
    return tuple((path, *_state_of(path)) for path in (sys.executable, *_package_dirs()))


@cache
def _package_dirs() -> list[str]:
    return sorted({sysconfig.get_path("purelib"), sysconfig.get_path("platlib"), site.getusersitepackages()})


def _state_of(path: str) -> tuple[int, int]:
    try:
        status = os.stat(path)  # noqa: PTH116 - of a string
    except OSError:
        return 0, 0
    return status.st_ino, status.st_mtime_ns
