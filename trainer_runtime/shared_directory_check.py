"""Check whether all nodes see the checkpoint directory: rank 0 creates a file, and one rank per node looks for it.

If they do not, each checkpoint is on the disk of one node. The job's record then names that node, because rank 0 must
run there to resume from it; on any other node the directory looks empty. If there is no such record yet, training must
not begin at step 0 because the checkpoints of an older run are on the disk of another node than rank 0's.
"""

from __future__ import annotations

import os
import secrets
import socket
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from trainer_runtime import contract
from trainer_runtime.checkpoint import has_any, warn
from trainer_runtime.dist import broadcast_numbers, is_main, local_rank, sum_over_ranks
from trainer_runtime.object_store import is_remote


@dataclass(frozen=True, slots=True)
class DirectorySight:
    """Which nodes see the directory."""

    owner: str | None = None
    """On rank 0: id of the node whose own disk has the directory. Empty if all nodes see it. None if that is unknown:
    this is the only node, or rank 0 cannot write there."""
    hidden: int = 0
    """Number of nodes with checkpoints that rank 0 does not see."""


def check_shared_directory(directory: Path) -> DirectorySight:
    """Check whether all nodes see the directory; a collective."""
    if is_remote(directory):
        return DirectorySight("")
    path, token, new = None, 0, list[Path]()
    if is_main():
        try:
            path, token, new = _put(directory)
        except OSError as error:
            warn(f"nothing can be written in {directory} ({error}), so it is unknown whether all nodes see it")
    (token,) = broadcast_numbers(token)
    is_asked = local_rank() == 0 and token != 0
    is_blind = is_asked and not _is_seen(_path(directory, token))
    nodes, blind, hidden = sum_over_ranks(is_asked, is_blind, is_blind and has_any(directory))
    if path is not None:
        _remove(path, new)
    if nodes < 2:
        return DirectorySight()
    if blind and is_main():
        warn(
            f"{directory} is not shared: {blind} of {nodes} nodes do not see what rank 0 writes there, so the "
            "checkpoints are on the disk of its node alone, and are lost with it; give all nodes one directory"
        )
    return DirectorySight(os.environ.get(contract.NODE_ID, socket.gethostname()) if blind else "", hidden)


def require_writable(directory: Path) -> None:
    """Raise OSError if no file can be created in the directory. Nothing is left there."""
    path, _, new = _put(directory)
    _remove(path, new)


def _put(directory: Path) -> tuple[Path, int, list[Path]]:
    """Create the file; return its path, the number in its name, and the directories that were created for it."""
    token = secrets.randbits(62) | 1
    path = _path(directory, token)
    new = [each for each in (directory, *directory.parents) if not each.exists()]
    directory.mkdir(parents=True, exist_ok=True)
    path.touch()
    return path, token, new


def _remove(path: Path, new: list[Path]) -> None:
    """Leave nothing behind: if a mount is only away for a while, no other directory may take its place."""
    with suppress(OSError):  # the directory may be unmounted again
        path.unlink(missing_ok=True)
        for each in new:  # the innermost first
            each.rmdir()


def _path(directory: Path, token: int) -> Path:
    return directory / f".probe-{token:016x}"


def _is_seen(path: Path) -> bool:
    with suppress(OSError):
        return path.exists()
    return False
