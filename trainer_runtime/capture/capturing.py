"""Capturing of this rank's State: a copy in host memory, for a snapshot, a checkpoint, or both.

The common part is what is equal on all ranks; each rank's own part has the rest, also what it holds of sharded objects.
"""

from __future__ import annotations

import atexit
import os
import weakref
from typing import TYPE_CHECKING, Any, NamedTuple

from trainer_runtime.dist import rank, world_size
from trainer_runtime.flat import Flattened, Flattener, UnknownKindError
from trainer_runtime.snapshot_copy import Capture, SnapshotCopier
from trainer_runtime.snapshot_memory import SnapshotMemory
from trainer_runtime.snapshot_page import KEPT, SLOTS
from trainer_runtime.values import as_floats

if TYPE_CHECKING:
    from collections.abc import Callable

    from trainer_runtime.contents import Contents
    from trainer_runtime.position import Position

CONTENT_VERSION = 3

PLACE = "place"
"""The key of the place of checkpoints in a snapshot. It is in no checkpoint."""


class CheckpointPlace(NamedTuple):
    """Where a run's checkpoints are, as this node sees them, and what they have that a snapshot does not."""

    directory: str
    """Absolute path, or a URL."""
    keep: int
    node: str
    """Id of the node whose own disk has the directory of rank 0; empty if all nodes see it."""
    has_hooks: bool
    """The script writes files of its own into each checkpoint."""
    aliases: list[tuple[list[str], list[str]]]
    """Further paths of tied tensors among sharded ones, and the path under which each is captured."""


class FlatState(NamedTuple):
    """A State in the form in which it is copied."""

    common: Flattened | None
    """None: another rank has it."""
    part: Flattened


class Capturer:
    """Makes one copy after another.

    Args:
        contents: the objects and values.
        pos: the position.
        seed: the seed of the training.
        has_common: whether this rank's copies have the common part.
        descriptor: descriptor of the agent's memory for snapshots; None: there are none, and copies are in memory of
            this process.
        report: called with the step of each complete snapshot, possibly on another thread.
        place: where checkpoints are, for the process that writes one from a snapshot; None: no snapshots are taken.
    """

    def __init__(
        self,
        contents: Contents,
        pos: Position,
        *,
        seed: int,
        has_common: bool,
        descriptor: int | None,
        report: Callable[[int], None],
        place: CheckpointPlace | None = None,
    ) -> None:
        self._contents = contents
        self._pos = pos
        self._seed = seed
        self._has_common = has_common
        self._place = place
        self._process = os.getpid()
        self._memory = SnapshotMemory(descriptor, rank())
        self._copier = SnapshotCopier(contents, self._memory, report)
        self._common, self._part = Flattener(), Flattener()
        self._snapshots = 0
        """Number of snapshots that were begun."""
        self.expects_saves = False
        """Checkpoints will be written from copies of this rank, which takes a slot more."""
        atexit.register(_settle_at_exit, weakref.ref(self))

    @property
    def newest(self) -> int:
        """Step of the snapshot that was completed last; 0: there is none, or it was dropped."""
        return self._memory.newest

    @property
    def is_leased(self) -> bool:
        """Whether a checkpoint is being written from a copy."""
        return self._memory.is_leased

    @property
    def is_copying(self) -> bool:
        """Whether a thread may be copying, so that training waits for it before it changes something."""
        return self._copier.is_copying

    def check(self) -> None:
        """Raise TypeError, with the name, if something could not be loaded back."""
        self._contents.read_checked()
        self._contents.parts.read_checked()
        as_floats(self._pos.metrics)

    def flatten(self) -> FlatState:
        """Return the State as it is now in the form in which it is copied.

        Raises:
            TypeError: as `check`.
        """
        try:
            common = self._common.flatten(self._read_common()) if self._has_common else None
            return FlatState(common, self._part.flatten(self._contents.read_part()))
        except UnknownKindError:
            self.check()  # raises an error with the name
            raise

    def copy(self, state: FlatState, *, is_snapshot: bool, may_defer: bool) -> Capture:
        """Copy the State; if `may_defer`, what an optimizer changes is copied by a thread, until its next step."""
        self._copier.join()
        begun = self._memory.begin(self._pos.step, world_size(), *state, is_snapshot=is_snapshot)
        capture = self._copier.copy(begun, may_defer=may_defer)
        self._snapshots += is_snapshot
        if is_snapshot and self._snapshots == 1:
            self.prepare(state, KEPT)
        elif is_snapshot and self._snapshots == KEPT + 2 and self.expects_saves:
            self.prepare(state, SLOTS)  # by now the restored snapshot was released
        if self._snapshots == 0:
            self.forget()
        return capture

    def prepare(self, state: FlatState, slots: int = 1) -> None:
        """Let a thread allocate memory for the first `slots` copies of such a State, so that none waits for it."""
        common, part = state
        self._memory.prepare((common.bytes if common is not None else 0) + part.bytes, slots)

    def forget(self) -> None:
        """Refer to no tensor: until the next checkpoint the script may replace some, and need their memory."""
        self._common, self._part = Flattener(), Flattener()
        self._memory.forget()

    def settle(self) -> None:
        """Wait until nothing is being copied. A child process that was forked has nothing to wait for."""
        if os.getpid() == self._process:
            self._copier.join()

    def close(self) -> None:
        """Wait until nothing is being copied, and make no further copies."""
        self.settle()
        self._copier.close()

    def take_waited_s(self) -> float:
        """Return the seconds that training has waited for the copying thread since the last call."""
        return self._copier.take_waited_s()

    @property
    def took_s(self) -> float:
        """Seconds from the beginning of the last snapshot until it was finished."""
        return self._copier.took_s

    def _read_common(self) -> dict[str, Any]:
        return {
            "v": CONTENT_VERSION,
            "world_size": world_size(),
            "seed": self._seed,
            "position": self._pos.read(),
            "objects": self._contents.read(),
            PLACE: None if self._place is None else self._place._asdict(),
        }


def _settle_at_exit(reference: weakref.ref[Capturer]) -> None:
    """A checkpoint that is being written waits for it, and the end of the process for the checkpoint."""
    capturer = reference()
    if capturer is not None:
        capturer.settle()
