"""Makes a rank process run `trainer_runtime.standby` during the start of Python, before its script.

Python imports a module named `sitecustomize`, if there is one, before it reads the script. A directory with this
project's `sitecustomize` is put first on PYTHONPATH. The hook records what the script imports, for the next standby
(`standbys.py`), and holds a standby before its script. It is used only for commands for which Python surely runs it:
without the hook, a standby would run the script unasked.
"""

from __future__ import annotations

import os
import re
import site
import socket
import sys
import sysconfig
from dataclasses import replace
from functools import cache
from typing import TYPE_CHECKING

from trainer_runtime import contract, standby

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

_FLAGS = re.compile(r"-[BORbdqsuv]+|-[WX].+")
"""Python options that disable neither `sitecustomize` nor PYTHONPATH."""
_FLAGS_WITH_VALUE = {"-W", "-X"}


def takes_hook(argv: Sequence[str]) -> bool:
    """Whether the command is this Python with a script or a module, so that the hook runs first."""
    program, *rest = argv
    if program != sys.executable or not standby.can_hook():
        return False
    words = iter(rest)
    for word in words:
        if word in _FLAGS_WITH_VALUE:
            next(words, None)
        elif not _FLAGS.fullmatch(word):
            return word == "-m" or not word.startswith("-")
    return False


class StandbyHook:
    """The descriptors that a process with the hook inherits, and the imports that it records.

    Args:
        order_fd: the start order that a standby reads. None: the process is no standby.
    """

    def __init__(self, order_fd: int | None) -> None:
        self._imports_fd = os.memfd_create("elastic-agent:imports", os.MFD_CLOEXEC)
        os.ftruncate(self._imports_fd, contract.IMPORTS_BYTES)
        self._pair: tuple[socket.socket, ...] = ()
        self.fds = {contract.IMPORTS_FD: self._imports_fd}
        """Descriptors to inherit, by the variable that names each."""
        self.guardian_fd: int | None = None
        """The guardian's end of the socket on which a standby waits. None: the process is no standby."""
        if order_fd is not None:
            self._pair = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            self.guardian_fd = self._pair[0].fileno()
            self.fds |= {contract.STANDBY_FD: self._pair[1].fileno(), contract.STANDBY_ORDER_FD: order_fd}

    def environment(self, env: Mapping[str, str]) -> dict[str, str]:
        """Return an environment in which the hook runs. The hook restores the variables that are changed here."""
        return standby.with_hook(env) | {name: str(fd) for name, fd in self.fds.items()}

    def imports(self) -> standby.Imports:
        """Return the imports recorded so far, without invalid names: a script may have overwritten them."""
        noted = standby.read_imports(self._imports_fd)
        return replace(noted, modules=tuple(filter(_is_module_name, noted.modules)))

    def close_inherited(self) -> None:
        """Close the descriptors that the child processes have inherited."""
        for end in self._pair:
            end.close()

    def close(self) -> None:
        """Close all descriptors."""
        self.close_inherited()
        os.close(self._imports_fd)


def _is_module_name(name: str) -> bool:
    return all(map(str.isidentifier, name.split(".")))


def installation_state() -> tuple[tuple[str, int, int], ...]:
    """Return a value that changes when Python packages are installed or removed."""
    return tuple((path, *_state_of(path)) for path in (sys.executable, *_package_dirs()))


@cache
def _package_dirs() -> list[str]:
    return sorted({sysconfig.get_path("purelib"), sysconfig.get_path("platlib"), site.getusersitepackages()})


def _state_of(path: str) -> tuple[int, int]:
    try:
        status = os.stat(path)  # noqa: PTH116 - the path is a string
    except OSError:
        return 0, 0
    return status.st_ino, status.st_mtime_ns
