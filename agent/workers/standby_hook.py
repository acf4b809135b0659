"""How a rank process is made to run `trainer_runtime.standby` within Python's own start, before its script.

Python imports a module named `sitecustomize`, if it finds one, before it looks at the script. A directory with ours
comes first on PYTHONPATH. It notes what the script imports, for the next standby (`standbys.py`), and holds a process
that is to stand by. For a command of which it is not sure that Python would run it, there is neither: a process
without it would run the script unasked.
"""

from __future__ import annotations

import os
import re
import socket
import sys
from dataclasses import replace
from typing import TYPE_CHECKING

from trainer_runtime import contract, standby

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

_FLAGS = re.compile(r"-[BORbdqsuv]+|-[WX].+")
"""Options of Python's that leave `sitecustomize` and PYTHONPATH alone."""
_FLAGS_WITH_VALUE = {"-W", "-X"}


def takes_hook(argv: Sequence[str]) -> bool:
    """Whether it is this Python that runs a script or a module, and would run our `sitecustomize` before it."""
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
    """What a process with the hook in it is handed down, and what it has noted.

    Args:
        order_fd: of a standby, the order that it reads; else None.
    """

    def __init__(self, order_fd: int | None) -> None:
        self._imports_fd = os.memfd_create("elastic-agent:imports", os.MFD_CLOEXEC)
        os.ftruncate(self._imports_fd, contract.IMPORTS_BYTES)
        self._pair: tuple[socket.socket, ...] = ()
        self.fds = {contract.IMPORTS_FD: self._imports_fd}
        """To be handed down, by the variable that names each."""
        self.guardian_fd: int | None = None
        """The guardian's end of the socket on which a standby waits; None: it is none."""
        if order_fd is not None:
            self._pair = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            self.guardian_fd = self._pair[0].fileno()
            self.fds |= {contract.STANDBY_FD: self._pair[1].fileno(), contract.STANDBY_ORDER_FD: order_fd}

    def environment(self, env: Mapping[str, str]) -> dict[str, str]:
        """One in which the hook runs. It puts back what is changed here."""
        return standby.with_hook(env) | {name: str(fd) for name, fd in self.fds.items()}

    def imports(self) -> standby.Imports:
        """What it has noted so far; what a script may have made of it is left out."""
        noted = standby.read_imports(self._imports_fd)
        return replace(noted, modules=tuple(filter(_is_module_name, noted.modules)))

    def let_go(self) -> None:
        """Of what others have now."""
        for end in self._pair:
            end.close()

    def close(self) -> None:
        """Let go of the rest."""
        self.let_go()
        os.close(self._imports_fd)


def _is_module_name(name: str) -> bool:
    return all(map(str.isidentifier, name.split(".")))
