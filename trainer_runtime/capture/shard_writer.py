"""A rank's part in writing the shards of a checkpoint, while training continues.

Each rank writes from its copy of the State in host memory. Rank 0 proposes the directory, or that this save is left
out; the other ranks write on a thread once they know it, and post what they have written. Rank 0's writing thread
writes its own blocks, waits for the others, and writes the list.
"""

from __future__ import annotations

import io
import threading
import weakref
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from trainer_runtime.capture.shard_files import Entry, ShardFile, write_blocks, write_list
from trainer_runtime.checkpoint import warn
from trainer_runtime.contents import SHARDED
from trainer_runtime.manifest import SHARDS, StoredFile, require_private_name
from trainer_runtime.object_store import call_at_exit, make_directory
from trainer_runtime.sealed_store import ForgedError
from trainer_runtime.snapshot_copy import ChangedError

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from trainer_runtime.capture.blocks import Place
    from trainer_runtime.capture.gathering import Captured, TensorPath
    from trainer_runtime.capture.shards import Shards
    from trainer_runtime.rank_messages import RankMessages
    from trainer_runtime.snapshot_copy import Capture

_NOWHERE = "-"
"""No directory has this name. Not empty, because an empty value in the store counts as absent."""

_WITHIN_S = 3600.0
"""Seconds that rank 0 waits for what another rank writes, and another rank for rank 0's proposal."""

_EXIT_WITHIN_S = 10.0
"""Seconds that the end of the script waits for shards that are being written."""

At = tuple[int, int]
"""Step and save."""


class ShardWriter:
    """Writes this rank's blocks of each checkpoint.

    Args:
        objects: the sharded objects.
        directory: directory of the checkpoints.
        messages: connection to the rank store for the training thread.
        of_thread: another one, for the thread that writes.
        rank: this rank.
        world_size: number of ranks.
    """

    def __init__(
        self,
        objects: Shards,
        directory: Path,
        messages: RankMessages,
        of_thread: RankMessages,
        *,
        rank: int,
        world_size: int,
    ) -> None:
        self.objects = objects
        self._directory = directory
        self._messages = messages
        self._of_thread = of_thread
        self._rank = rank
        self._world_size = world_size
        self._places: dict[TensorPath, Place] = {}
        """Of the blocks to write."""
        self._paths: list[TensorPath] = []
        self._thread: threading.Thread | None = None
        self._is_written = True
        call_at_exit(directory, partial(_finish_at_exit, weakref.ref(self)))

    def begin(self, at: At, stem: str, capture: Capture) -> None:
        """On ranks other than 0: write this rank's blocks, on a thread, where rank 0 proposes. `finish` comes first.

        Args:
            at: step and save.
            stem: final name of the checkpoint.
            capture: the copy to write from.
        """
        self._choose()
        capture.lease()
        self._thread = threading.Thread(
            target=self._write_for_main, args=(at, stem, capture), name="shards", daemon=True
        )
        self._thread.start()

    def refuse(self, at: At, error: Exception) -> None:
        """On ranks other than 0: tell rank 0 that this rank has no copy to write from."""
        self._messages.post(_name(at, self._rank), _encode(f"{type(error).__name__}: {error}"))

    def finish(self, within_s: float | None = None) -> bool:
        """Wait until the thread has written; return whether it has."""
        if self._thread is not None:
            self._thread.join(within_s)
        return self._is_written

    def finish_at_exit(self) -> None:
        """Wait a moment for the last shards, so that a script that ends right after a save does not lose them."""
        self.finish(_EXIT_WITHIN_S)
        if self._thread is not None and self._thread.is_alive():
            warn(f"the script ends, but its last shards were not written within {_EXIT_WITHIN_S:g} s")

    def offer(self, at: At, private: Path) -> None:
        """On rank 0: choose the blocks to write, and propose a checkpoint's directory to the others.

        Raises:
            OSError: the directory cannot be made; or another one holds, which a stranger has proposed.
        """
        self._choose()
        make_directory(private / SHARDS)
        try:
            held = self._messages.propose(_name(at), private.name)
        except ForgedError as error:
            raise OSError(str(error)) from error
        if held == _NOWHERE:
            raise OSError("this step was left out before, and the other ranks have no copy of their shards any more")
        if held != private.name:  # without an agent values are not authenticated
            raise OSError(
                f"the ranks' store has {held!r} in place of {private.name!r} as the directory of the shards; make "
                "MASTER_PORT reachable from the job's machines only"
            )

    def leave_out(self, at: At) -> None:
        """On rank 0: let the others write nothing for this save, unless a directory was proposed already."""
        with suppress(ForgedError):  # then the others write nothing either
            self._messages.propose(_name(at), _NOWHERE)

    def complete(self, at: At, private: Path, captured: Captured) -> tuple[StoredFile, ...]:
        """On rank 0's writing thread: write this rank's blocks and the list; return the files of all ranks.

        Args:
            at: step and save.
            private: directory of the checkpoint.
            captured: what this rank held at the commit.

        Raises:
            NoMessageError: a rank did not post what it has written.
            OSError: a rank could not write, or the blocks do not make up all tensors.
        """
        outcomes = [_outcome_of(lambda: self._write(private / SHARDS, captured))]
        outcomes += [self._take(at, rank) for rank in range(self._world_size) if rank != self._rank]
        for rank, outcome in enumerate(outcomes):
            if isinstance(outcome, str):
                raise OSError(f"shards could not be written: rank {rank}: {outcome}")
        files = [outcome for outcome in outcomes if isinstance(outcome, ShardFile)]
        return write_list(private / SHARDS, files, self.objects.aliases())

    def _choose(self) -> None:
        self._places = self.objects.places_to_write(self._rank, self._world_size)
        self._paths = self.objects.paths()

    def _write(self, shard_dir: Path, captured: Captured) -> ShardFile:
        blocks = {path: (place, self.objects.pick(captured, path)) for path, place in self._places.items()}
        return write_blocks(shard_dir, self._rank, blocks, self._paths)

    def _write_for_main(self, at: At, stem: str, capture: Capture) -> None:
        """On the thread of a rank other than 0."""
        self._is_written = False
        try:
            name = self._of_thread.wait_for_proposal(_name(at), _WITHIN_S)
            if name is None or name == _NOWHERE:
                return
            try:
                require_private_name(name, stem)
            except ValueError as error:
                warn(f"{error} from the ranks' store; make MASTER_PORT reachable from the job's machines only")
                return
            outcome = _outcome_of(lambda: self._write_unchanged(self._directory / name / SHARDS, capture))
            self._of_thread.post(_name(at, self._rank), _encode(outcome))
            self._is_written = isinstance(outcome, ShardFile)
        except Exception as error:  # noqa: BLE001 - rank 0 is gone, or the store is damaged: the group ends anyway
            warn(f"the shards of step {at[0]} were not written: {type(error).__name__}: {error}")
        finally:
            capture.release()

    def _write_unchanged(self, shard_dir: Path, capture: Capture) -> ShardFile:
        _, part = capture.read()
        written = self._write(shard_dir, part[SHARDED])
        capture.require_unchanged()
        return written

    def _take(self, at: At, rank: int) -> ShardFile | str:
        return _decode(self._of_thread.take(_name(at, rank), _WITHIN_S), rank)


def _outcome_of(write: Callable[[], ShardFile]) -> ShardFile | str:
    """Write; return the file, or why that failed, for which rank 0 waits whatever it was."""
    try:
        return write()
    except (OSError, ChangedError) as error:
        return str(error)
    except Exception as error:  # noqa: BLE001 - as above
        return f"{type(error).__name__}: {error}"


def _encode(outcome: ShardFile | str) -> bytes:
    packet = io.BytesIO()
    sent: Any = outcome
    if not isinstance(outcome, str):
        sent = [outcome.name, outcome.bytes, outcome.sha256, [tuple(each) for each in outcome.entries], outcome.paths]
    torch.save(sent, packet)
    return packet.getvalue()


def _decode(packet: bytes, rank: int) -> ShardFile | str:
    """Read another rank's message.

    Raises:
        OSError: the file has another name than that of this rank.
    """
    received = torch.load(io.BytesIO(packet), weights_only=True)
    if isinstance(received, str):
        return received
    name, size, sha256, entries, paths = received
    if name != f"__{rank}_0.distcp":
        raise OSError(f"wanted the shards of rank {rank}, got the file name {name!r}")
    return ShardFile(name, size, sha256, [Entry(*entry) for entry in entries], paths)


def _name(at: At, rank: int | None = None) -> str:
    name = f"shards/{at[0]}/{at[1]}"
    return name if rank is None else f"{name}/{rank}"


def _finish_at_exit(reference: weakref.ref[ShardWriter]) -> None:
    writer = reference()
    if writer is not None:
        writer.finish_at_exit()
