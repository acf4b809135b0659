"""Whether all nodes see the directory of the checkpoints: rank 0 puts a file there, and one rank per node looks for it.

If not, a checkpoint is on the disk of one node. The job's record then names that node, for rank 0 has to be there to
resume from it; on any other node the directory would look empty. Where there is no such record yet, training may not
begin at step 0 because the checkpoints of an older run are on another node's disk than rank 0's.
"""

from __future__ import annotations

import os
import secrets
import socket
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

from trainer_runtime import contract
from trainer_runtime.checkpoint import has_any, warn
from trainer_runtime.dist import add_up, broadcast_numbers, is_main, local_rank

if TYPE_CHECKING:
    from pathlib import Path


@dataclass(frozen=True, slots=True)
class DirectorySight:
    """What the nodes see of the directory."""

    owner: str | None = None
    """On rank 0 the node whose own disk has the directory. Empty if all nodes see it, None if there is nobody else to
    ask: this is the only node, or rank 0 cannot write there."""
    hidden: int = 0
    """Nodes that have checkpoints which rank 0 does not see."""


def look_around(directory: Path) -> DirectorySight:
    """Find out whether all nodes see the directory; a collective."""
    path, token, is_new = None, 0, False
    if is_main():
        path, token, is_new = _put(directory)
    (token,) = broadcast_numbers(token)
    is_asked = local_rank() == 0 and token != 0
    is_blind = is_asked and not _is_seen(_path(directory, token))
    nodes, blind, hidden = add_up(is_asked, is_blind, is_blind and has_any(directory))
    if path is not None:
        with suppress(OSError):  # it may be away again
            path.unlink(missing_ok=True)
            if is_new:
                # Nothing is left: one that is away for a while must not find another in its place.
                directory.rmdir()
    if nodes < 2:
        return DirectorySight()
    if blind and is_main():
        warn(
            f"{directory} is not shared: {blind} of {nodes} nodes do not see what rank 0 writes there, so the "
            "checkpoints are on the disk of its node alone, and are lost with it; give all nodes one directory"
        )
    return DirectorySight(os.environ.get(contract.NODE_ID, socket.gethostname()) if blind else "", hidden)


def _put(directory: Path) -> tuple[Path | None, int, bool]:
    """Write the file; return where, the number in its name, and whether the directory was made for it."""
    token = secrets.randbits(62) | 1
    path = _path(directory, token)
    try:
        is_new = not directory.exists()
        directory.mkdir(parents=True, exist_ok=True)
        path.touch()
    except OSError as error:
        warn(f"nothing can be written in {directory} ({error}), so whether all nodes see it is not known")
        return None, 0, False
    return path, token, is_new


def _path(directory: Path, token: int) -> Path:
    return directory / f".probe-{token:016x}"


def _is_seen(path: Path) -> bool:
    with suppress(OSError):
        return path.exists()
    return False
