"""This rank's part in every save: rank 0 writes the common state, the other ranks hand over their own parts.

A checkpoint is written from a copy in host memory: from the snapshot of the step, if one is taken then. What the ranks
hold of sharded objects is written by each of them, on a thread (`capture/shard_writer.py`). Only rank 0 knows whether a
save succeeded. If one with shards did not, a later save has another number, for which all ranks hand over their parts
again.
"""

from __future__ import annotations

import io
import os
import sys
import weakref
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import TYPE_CHECKING

import torch

from trainer_runtime import contract
from trainer_runtime.capture.capturing import PLACE
from trainer_runtime.checkpoint import warn
from trainer_runtime.contents import SHARDED
from trainer_runtime.dist import world_size
from trainer_runtime.exchange import script_line
from trainer_runtime.hostcopy import is_ordinary
from trainer_runtime.manifest import stem_of
from trainer_runtime.phases import runtime_phase
from trainer_runtime.position import NOT_SAVED
from trainer_runtime.structure import take_apart
from trainer_runtime.values import finite_or_none
from trainer_runtime.writer import SAVE_ERRORS, Content, warn_not_saved

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from trainer_runtime.capture.capturing import Capturer
    from trainer_runtime.capture.shard_writer import ShardWriter
    from trainer_runtime.contents import Contents
    from trainer_runtime.exchange import Exchange
    from trainer_runtime.position import Position
    from trainer_runtime.snapshot_copy import Capture
    from trainer_runtime.writer import Completed, Writer

_AFTER_ERROR_S = 5.0
"""Seconds that a rank whose script ends with an error waits until its shards are written."""

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
    capturer: Capturer
    pos: Position
    exchange: Exchange
    writer: Writer | None
    """On rank 0; None on the other ranks."""
    hooks: Sequence[Callable[[Path], object]]
    shards: ShardWriter | None
    """None: nothing is sharded."""
    _written: _Mark | None = field(default=None, init=False)
    """Of the state that was handed to the writer last."""

    @property
    def writes_copies(self) -> bool:
        """Whether checkpoints are written from copies of this rank's State; else only its own part is handed over."""
        return self.writer is not None or self.shards is not None

    @runtime_phase("save")
    def save_if_free(self, handoff: int = 0, *, capture: Capture | None = None) -> bool:
        """Begin to save. If that is not possible, print a line on stderr with the reason and return False.

        Args:
            handoff: number of the handoff that the checkpoint is made for, or 0.
            capture: the snapshot of this step, from which the checkpoint is written; None: a copy is made.
        """
        pos = self.pos
        if capture is None:
            self.capturer.settle()
        if pos.at == pos.saved:
            return True
        busy = self.writer.why_busy(may_skip=not handoff) if self.writer is not None else ""
        if busy:
            warn(f"step {pos.step} was NOT saved: step {pos.saved[0]} {busy}; later saves are tried as usual")
            self._leave_out()
            return False
        try:
            self._begin(handoff, capture)
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
        self.capturer.settle()
        if self.writer is None:
            self._begin(0)
            self.capturer.settle()
            if self.shards is not None:
                # If this rank alone fails, rank 0 does not save, and may wait for this rank to end.
                self.shards.finish(None if sys.exception() is None else _AFTER_ERROR_S)
            return
        try:
            self.writer.finish()
            if (
                only_if_changed
                and self.shards is None
                and self._written is not None
                and self._written.is_of(self.contents)
            ):
                self._leave_out()
                self.pos.saved = self.pos.at
                return
        except SAVE_ERRORS:
            if self.shards is not None and self.pos.saved == self.pos.at:
                raise  # the other ranks have no copy of their shards any more, and regard this save as done
            self._try_again()
        self._begin(0)
        self.capturer.settle()
        self.writer.finish()

    @runtime_phase("save")
    def save_for_handoff(self, number: int) -> bool:
        """Save the step at which all ranks are quiesced; return whether this rank's part succeeded.

        Waits for the disk, but for the verdict only `HANDOFF_WAIT_S`.
        """
        if not self.save_if_free(number):
            return False
        self.capturer.settle()
        if self.writer is None:
            return self.shards is None or self.shards.finish()
        self.writer.wait_for_disk()
        try:
            return self.writer.finish(float(os.environ.get(contract.HANDOFF_WAIT_S, "1")))
        except SAVE_ERRORS:  # reported when it happened
            self._try_again()
            return False

    def close(self) -> None:
        """Save nothing more: this process goes on in another group."""
        if self.writer is not None:
            self.writer.abandon()
        self.capturer.close()

    def _leave_out(self) -> None:
        """On rank 0: do not save this step, although the other ranks hand over their parts."""
        self.exchange.skip(self.pos.at)
        if self.shards is not None:
            self.shards.leave_out(self.pos.at)

    def _try_again(self) -> None:
        """Mark this step as not saved, so that it is saved again, if rank 0 can do so without the other ranks."""
        if self.shards is None:
            self.pos.saved = NOT_SAVED

    def _begin(self, handoff: int, capture: Capture | None = None) -> None:
        """Hand over the last committed step to be written, unless that was done already."""
        pos = self.pos
        if pos.at == pos.saved:
            return
        if self.writer is None:
            self.exchange.post_part(pos.at, self.contents.parts.read_checked())
            if self.shards is not None:
                self.shards.finish()  # before a copy is made, so that at most one is made for a checkpoint
                try:
                    capture = capture or self._capture()
                except Exception as error:
                    self.shards.refuse(pos.at, error)
                    raise
                self.shards.begin(pos.at, stem_of(self.run, self.group, *pos.at), capture)
        else:
            try:
                self._write(self.writer, handoff, capture)
            except Exception:
                self._leave_out()  # the others wait for what rank 0 proposes
                raise
        pos.saved = pos.at

    def _write(self, writer: Writer, handoff: int, capture: Capture | None) -> None:
        metrics = finite_or_none(self.pos.read_metrics())
        self.contents.check_outlines()
        written = _Mark(self.contents)
        content = _Captured(capture or self._capture(), self.pos.at, self.exchange, self.shards, script_line())
        if self.hooks:
            self.capturer.settle()  # they may change weights in any way, for what they write
        writer.write(
            content,
            step=self.pos.step,
            save=self.pos.save,
            world_size=world_size(),
            metrics=metrics,
            hooks=self.hooks,
            handoff=handoff,
        )
        self._written = written

    def _capture(self) -> Capture:
        """Copy the state for this checkpoint alone."""
        # At once: the script waits for the checkpoint anyway, or is rarely held up.
        return self.capturer.copy(self.capturer.flatten(), is_snapshot=False, may_defer=False)


class _Captured(Content):
    """A captured State, with the parts of the other ranks.

    Args:
        capture: the copy, leased from `prepare` to `release`.
        at: step and save.
        exchange: provides the other ranks' parts.
        shards: writes what the ranks hold of sharded objects; None: nothing is sharded.
        where: the line of the script at which the save began.
    """

    def __init__(
        self, capture: Capture, at: tuple[int, int], exchange: Exchange, shards: ShardWriter | None, where: str
    ) -> None:
        super().__init__({})
        self._capture = capture
        self._at = at
        self._exchange = exchange
        self._shards = shards
        self._where = where

    def prepare(self, private: Path) -> None:
        self._capture.lease()
        if self._shards is not None:
            self._shards.offer(self._at, private)

    def read(self, private: Path) -> Completed:
        content, part = self._capture.read()
        content.pop(PLACE)
        captured = part.pop(SHARDED, None)
        content["ranks"] = [part, *self._exchange.collect(self._at, self._where)]
        if self._shards is None:
            return content, ()
        content[SHARDED] = self._shards.objects.plain_of(captured)
        return content, self._shards.complete(self._at, private, captured)

    def require_unchanged(self) -> None:
        self._capture.require_unchanged()

    def release(self) -> None:
        self._capture.release()
