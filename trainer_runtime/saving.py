"""This rank's part in every save: rank 0 writes the common state, the other ranks hand over their own parts.

All ranks together write shards, so all must know the outcome of each attempt to save a step. They begin the same
attempts, number them alike, and follow what rank 0 proposes for each: a directory, or none. An attempt that failed or
was left out before the shards were written is saved on no rank, and all ranks may try it again.
"""

from __future__ import annotations

import io
import os
import weakref
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import TYPE_CHECKING, Any

import torch

from trainer_runtime import contract
from trainer_runtime.checkpoint import warn
from trainer_runtime.contents import SHARDED
from trainer_runtime.dist import world_size
from trainer_runtime.exchange import script_line
from trainer_runtime.hostcopy import HostCopier, is_ordinary
from trainer_runtime.manifest import SHARDS, require_private_name, stem_of
from trainer_runtime.phases import runtime_phase
from trainer_runtime.position import NOT_SAVED
from trainer_runtime.structure import take_apart
from trainer_runtime.values import as_numbers
from trainer_runtime.writer import SAVE_ERRORS, warn_not_saved

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from trainer_runtime.contents import Contents
    from trainer_runtime.exchange import Exchange
    from trainer_runtime.position import Position
    from trainer_runtime.rank_messages import RankMessages
    from trainer_runtime.writer import Writer

CONTENT_VERSION = 3

_NOWHERE = "-"
"""No directory has this name. Not empty, because an empty value in the store counts as absent."""


_LARGE_BYTES = 65_536
"""Values that are tensors of this size or more are compared by identity and version, not by content."""


class _Mark:
    """Tells whether a value, a schedule, a random state or a tensor has changed since this was made."""

    def __init__(self, contents: Contents) -> None:
        self._small, large, self._versions = self._read(contents)
        self._large = [(weakref.ref(each), each._version) for each in large]  # noqa: SLF001 - no public name

    def is_of(self, contents: Contents) -> bool:
        """Return whether the state is still the same."""
        small, large, versions = self._read(contents)
        return (small, versions, len(large)) == (self._small, self._versions, len(self._large)) and all(
            was() is each and version == each._version  # noqa: SLF001 - as above
            for (was, version), each in zip(self._large, large, strict=True)
        )

    @staticmethod
    def _read(contents: Contents) -> tuple[bytes, list[torch.Tensor], list[tuple[int, int]]]:
        """Return a digest of everything small, the large tensors among the values, and where all other tensors are."""
        light = take_apart([contents.read_light(), contents.parts.read()])
        large = [each for each in light.leaves if _is_large(each)]
        packet = io.BytesIO()
        torch.save([light.containers, [each for each in light.leaves if not _is_large(each)]], packet)
        tensors = [
            each for each in take_apart(contents.read()).leaves if isinstance(each, torch.Tensor) and is_ordinary(each)
        ]
        versions = [(each.data_ptr(), each._version) for each in tensors if not each.is_inference()]  # noqa: SLF001 - as above
        return blake2b(packet.getvalue(), digest_size=16).digest(), large, versions


def _is_large(leaf: object) -> bool:
    return isinstance(leaf, torch.Tensor) and not leaf.is_inference() and leaf.nbytes >= _LARGE_BYTES


@dataclass(slots=True)
class Saver:
    """Saves the last committed step; all ranks do so at the same steps."""

    directory: Path
    run: str
    """Part of the checkpoints' names, like the group."""
    group: int
    contents: Contents
    pos: Position
    exchange: Exchange
    writer: Writer | None
    """On rank 0; None on the other ranks."""
    hooks: Sequence[Callable[[Path], object]]
    seed: int
    messages: RankMessages | None
    """For the agreement on where shards are written; None: nothing is sharded."""
    _attempt: tuple[tuple[int, int], int] = field(default=((0, 0), 0), init=False)
    """The last attempt: its step and save, and the number of attempts at these."""
    _written: _Mark | None = field(default=None, init=False)
    """Of the state that was handed to the writer last."""

    def check(self) -> None:
        """Raise TypeError, with the name, if something could not be loaded back."""
        self.contents.read_checked()
        self.contents.parts.read_checked()
        as_numbers(self.pos.metrics)

    @runtime_phase("save")
    def save_if_free(self, handoff: int = 0) -> bool:
        """Begin to save. If that is not possible, print a line on stderr with the reason and return False."""
        pos = self.pos
        if pos.at == pos.saved:
            return True
        if self.writer is not None and self.writer.is_busy():
            warn(
                f"step {pos.step} was NOT saved: step {pos.saved[0]} still waits to be committed, because the agent "
                "cannot reach etcd, or cannot read a record of the job there; the next save is due as usual"
            )
            self._leave_out()
            return False
        try:
            self._begin(handoff)
        except OSError as error:
            # A full or missing disk must not stop the training; the older checkpoints are still there.
            warn_not_saved(pos.step, self.directory, error)
            return False
        return True

    @runtime_phase("save")
    def save(self, *, only_if_changed: bool = False) -> None:
        """Save and wait until it is done; raises as `State.save`.

        Args:
            only_if_changed: this step was saved before with another `save`. Leave it at that if nothing has changed;
                rank 0 decides, and the others hand over their parts in any case.
        """
        if self.writer is None:
            self._begin(0)
            return
        try:
            self.writer.finish()
            if (
                only_if_changed
                and self.messages is None
                and self._written is not None
                and self._written.is_of(self.contents)
            ):
                self._leave_out()
                self.pos.saved = self.pos.at
                return
        except SAVE_ERRORS:
            if self.messages is not None and self.pos.saved == self.pos.at:
                raise  # the other ranks have written their shards of this step and regard it as saved
            self._try_again()
        self._begin(0)
        self.writer.finish()

    @runtime_phase("save")
    def save_for_handoff(self, number: int) -> bool:
        """Save the step at which all ranks are quiesced; return whether this rank's part succeeded.

        Waits for the disk, but for the verdict only `HANDOFF_WAIT_S`.
        """
        if not self.save_if_free(number):
            return False
        if self.writer is None:
            return True
        self.writer.wait_for_disk()
        try:
            return self.writer.finish(float(os.environ.get(contract.HANDOFF_WAIT_S, "1")))
        except SAVE_ERRORS:  # reported when it happened
            self._try_again()
            return False

    def _leave_out(self) -> None:
        """On rank 0: do not save this step, although the other ranks hand over their parts."""
        self.exchange.skip(self.pos.at)
        self._count_attempt()
        self._propose_shard_dir(_NOWHERE)

    def _try_again(self) -> None:
        """Mark this step as not saved, so that it is saved again, if rank 0 can do so without the other ranks."""
        if self.messages is None:
            self.pos.saved = NOT_SAVED

    def _begin(self, handoff: int) -> None:
        """Hand over the last committed step to be written, unless that was done already."""
        pos = self.pos
        if pos.at == pos.saved:
            return
        self._count_attempt()
        part = self.contents.parts.read_checked()
        if self.writer is None:
            self.exchange.post_part(pos.at, part)
            if not self._write_shards_with_main():
                return
        else:
            self._write(self.writer, part, handoff)
        pos.saved = pos.at

    def _write(self, writer: Writer, part: dict[str, Any], handoff: int) -> None:
        at = self.pos.at
        self.contents.read_checked()
        where = script_line()
        copied = HostCopier().copy({**self.common(), "ranks": [part]})
        self._written = _Mark(self.contents)
        own = copied["ranks"]
        try:
            writer.write(
                copied,
                step=self.pos.step,
                save=self.pos.save,
                world_size=world_size(),
                metrics=as_numbers(self.pos.metrics),
                hooks=self.hooks,
                handoff=handoff,
                shard=self._shard,
                complete=lambda: {"ranks": own + self.exchange.collect(at, where)},
            )
        except OSError:
            self.exchange.skip(at)
            self._propose_shard_dir(_NOWHERE)
            raise

    def _shard(self, private: Path) -> dict[str, Any]:
        """On rank 0: write the shards, together with the other ranks."""
        if self.contents.shards is None:
            return {}
        self._check_shard_dir(self._propose_shard_dir(private.name))
        return {SHARDED: HostCopier().copy(self.contents.shards.write(private / SHARDS))}

    def _write_shards_with_main(self) -> bool:
        """On ranks other than 0: write the shards where rank 0 proposes; False if rank 0 does not save this step."""
        if self.messages is None or self.contents.shards is None:
            return True
        name = self.messages.wait_for_main(self._shard_dir_name())
        if name == _NOWHERE:
            return False
        try:
            self._check_shard_dir(name)
        except OSError as error:
            warn_not_saved(self.pos.step, self.directory, error)
            return False
        self.contents.shards.write(self.directory / name / SHARDS)
        return True

    def _propose_shard_dir(self, name: str) -> str:
        """On rank 0: propose the directory for the shards of this attempt; return the one that holds for all ranks."""
        return self.messages.propose(self._shard_dir_name(), name) if self.messages is not None else name

    def _check_shard_dir(self, name: str) -> None:
        """Check the agreed directory by the same rule on all ranks, so that all begin to write or none does.

        Without a key, torch's store accepts values from anybody who reaches it, possibly before rank 0's. A private
        name of this very checkpoint with another token is no existing directory, and writing there fails on all ranks.

        Raises:
            OSError: the name is not a private name of this checkpoint.
        """
        try:
            require_private_name(name, stem_of(self.run, self.group, *self.pos.at))
        except ValueError as error:
            raise OSError(
                f"{error} from the ranks' store; make MASTER_PORT reachable from the job's machines only"
            ) from None

    def _count_attempt(self) -> None:
        at, number = self._attempt
        self._attempt = self.pos.at, number + 1 if at == self.pos.at else 1

    def _shard_dir_name(self) -> str:
        (step, save), number = self._attempt
        return f"shards/{step}/{save}/{number}"

    def common(self) -> dict[str, Any]:
        """Return the state that is equal on all ranks, as it is now."""
        return {
            "v": CONTENT_VERSION,
            "world_size": world_size(),
            "seed": self.seed,
            "position": self.pos.read(),
            "objects": self.contents.read(),
        }
