"""A rank's part in every save: rank 0 writes what is common, the others hand over what is theirs.

Shards are written by all ranks together, so all must know of each attempt at a step what becomes of it: they begin the
same attempts, number them alike, and go by what rank 0 settles for each, a place or none. What failed, or was left out,
before the shards were written is saved on no rank, and all may try it again.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from trainer_runtime import contract
from trainer_runtime.checkpoint import warn
from trainer_runtime.dist import world_size
from trainer_runtime.exchange import script_line
from trainer_runtime.hostcopy import HostCopier
from trainer_runtime.manifest import SHARDS, require_private_name, stem_of
from trainer_runtime.phases import own_phase
from trainer_runtime.position import NOT_SAVED
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
"""No directory has this name. Not empty: that would count as not settled."""


@dataclass(slots=True)
class Saver:
    """Saves the last committed step, on every rank at the same steps."""

    directory: Path
    run: str
    """With the group part of the checkpoints' names."""
    group: int
    contents: Contents
    pos: Position
    exchange: Exchange
    writer: Writer | None
    """On rank 0."""
    hooks: Sequence[Callable[[Path], object]]
    seed: int
    board: RankMessages | None
    """To agree on where shards are written; None: nothing is sharded."""
    _attempt: tuple[tuple[int, int], int] = field(default=((0, 0), 0), init=False)
    """What was tried last, by step and save, and how often."""

    def check(self) -> None:
        """Raise TypeError, naming it, if there is something that could not be loaded back."""
        self.contents.read_checked()
        self.contents.parts.read_checked()
        as_numbers(self.pos.metrics)

    @own_phase("save")
    def save_if_free(self, handoff: int = 0) -> bool:
        """Begin to save; what keeps that from being done is said in a line on stderr, and makes this false."""
        pos = self.pos
        if pos.at == pos.saved:
            return True
        if self.writer is not None and self.writer.is_busy():
            warn(
                f"step {pos.step} was NOT saved: step {pos.saved[0]} still waits to be committed, for the agent "
                "cannot reach etcd; the next save is due as usual"
            )
            self.exchange.leave_out(pos.at)
            self._count_attempt()
            self._settle_place(_NOWHERE)
            return False
        try:
            self._begin(handoff)
        except OSError as error:
            # A full or absent disk must not stop the training; the older checkpoints are still there.
            warn_not_saved(pos.step, self.directory, error)
            return False
        return True

    @own_phase("save")
    def save(self) -> None:
        """Save and wait for it; `State.save` says what it raises."""
        if self.writer is None:
            self._begin(0)
            return
        try:
            self.writer.finish()
        except SAVE_ERRORS:
            if self.board is not None and self.pos.saved == self.pos.at:
                raise  # the others have written their shards of this step, and think that it is saved
            self._try_again()
        self._begin(0)
        self.writer.finish()

    @own_phase("save")
    def save_for_handoff(self, number: int) -> bool:
        """Save a step at which all ranks stand still; tell whether this rank's part worked.

        Waits for the disk, and for a verdict only a moment.
        """
        if not self.save_if_free(number):
            return False
        if self.writer is None:
            return True
        self.writer.wait_for_disk()
        try:
            return self.writer.finish(float(os.environ.get(contract.HANDOFF_WAIT_S, "1")))
        except SAVE_ERRORS:  # told when it happened
            self._try_again()
            return False

    def _try_again(self) -> None:
        """If it was this step that failed, save it once more: where rank 0 can do so without the others."""
        if self.board is None:
            self.pos.saved = NOT_SAVED

    def _begin(self, handoff: int) -> None:
        """Hand over the last committed step to be written, unless that was done already."""
        pos = self.pos
        if pos.at == pos.saved:
            return
        self._count_attempt()
        part = self.contents.parts.read_checked()
        if self.writer is None:
            self.exchange.hand_over(pos.at, part)
            if not self._shard_along():
                return
        else:
            self._write(self.writer, part, handoff)
        pos.saved = pos.at

    def _write(self, writer: Writer, part: dict[str, Any], handoff: int) -> None:
        at = self.pos.at
        self.contents.read_checked()
        where = script_line()
        copied = HostCopier().copy({**self.common(), "ranks": [part]})
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
            self.exchange.leave_out(at)
            self._settle_place(_NOWHERE)
            raise

    def _shard(self, private: Path) -> dict[str, Any]:
        """On rank 0: write the shards, together with the other ranks."""
        if self.contents.shards is None:
            return {}
        self._require_place(self._settle_place(private.name))
        return {"sharded": HostCopier().copy(self.contents.shards.write(private / SHARDS))}

    def _shard_along(self) -> bool:
        """On the other ranks: write them where rank 0 says, if there are any; False: it says nowhere."""
        if self.board is None or self.contents.shards is None:
            return True
        name = self.board.hear(self._place())
        if name == _NOWHERE:
            return False
        try:
            self._require_place(name)
        except OSError as error:
            warn_not_saved(self.pos.step, self.directory, error)
            return False
        self.contents.shards.write(self.directory / name / SHARDS)
        return True

    def _settle_place(self, name: str) -> str:
        """On rank 0: propose where the shards of this attempt are written; return what is settled."""
        return self.board.settle(self._place(), name) if self.board is not None else name

    def _require_place(self, name: str) -> None:
        """Check what is settled, by one rule on all ranks, so that all begin to write or none does.

        torch's store asks for no secret: whoever reaches it may have settled this before rank 0. A name of this very
        checkpoint with another token is no directory, and writing there fails on all ranks.

        Raises:
            OSError: it is not a private name of this checkpoint.
        """
        try:
            require_private_name(name, stem_of(self.run, self.group, *self.pos.at))
        except ValueError as error:
            raise OSError(
                f"{error} from the ranks' store; let nobody but the job's machines reach MASTER_PORT"
            ) from None

    def _count_attempt(self) -> None:
        at, number = self._attempt
        self._attempt = self.pos.at, number + 1 if at == self.pos.at else 1

    def _place(self) -> str:
        (step, save), number = self._attempt
        return f"shards/{step}/{save}/{number}"

    def common(self) -> dict[str, Any]:
        """Return what is equal on all ranks, as it is now."""
        return {
            "v": CONTENT_VERSION,
            "world_size": world_size(),
            "seed": self.seed,
            "position": self.pos.read(),
            "objects": self.contents.read(),
        }
