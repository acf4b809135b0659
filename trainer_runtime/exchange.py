"""Transfer of the ranks' own parts of a checkpoint to rank 0, which writes it.

Each rank posts its part to the rank store when a save is due, and continues. Rank 0's writing thread collects the
parts. No rank waits for another and no collective is used, so a save is written while training continues.
"""

from __future__ import annotations

import contextlib
import io
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from trainer_runtime.checkpoint import warn
from trainer_runtime.position import NOT_SAVED
from trainer_runtime.rank_messages import NoMessageError

if TYPE_CHECKING:
    from collections.abc import Callable

    from trainer_runtime.rank_messages import RankMessages

WITHIN_S = 60.0
"""Seconds that a rank may be behind rank 0 when a checkpoint is written."""

WARN_AFTER_S = 5.0
"""Seconds after which a missing part is reported. If one rank of a script commits and another does not, every save
would wait for `WITHIN_S`."""

_POLL_SHARE = 0.1
_POLL_MAX_S = 0.05
_NOT_SCRIPT = (str(Path(__file__).parent), f"{contextlib.__file__}")


class Exchange:
    """This rank's end of the transfer.

    Args:
        messages: a connection for this object alone: on rank 0 a thread waits on it.
        rank: this rank.
        world_size: number of ranks.
        is_over: whether the group is known to be over, so that nobody hands over anything any more.
    """

    def __init__(
        self, messages: RankMessages, rank: int, world_size: int, is_over: Callable[[], bool] = lambda: False
    ) -> None:
        self._messages = messages
        self._is_over = is_over
        self._rank = rank
        self._others = range(1, world_size)
        self._at = NOT_SAVED
        """Step and save of the part that was handed over, or collected, last."""
        self._taken: dict[int, dict[str, Any]] = {}
        """Parts of that save by rank, kept for a second attempt: the other ranks do not hand over twice."""
        self._unwanted: set[tuple[tuple[int, int], int]] = set()
        """((step, save), rank) of parts that are not needed, and may be in the store or still arrive there."""

    def post_part(self, at: tuple[int, int], part: dict[str, Any]) -> None:
        """On ranks other than 0: post this rank's part. Does nothing at a second attempt of the same save.

        Args:
            at: step and save.
            part: this rank's own part.
        """
        if self._at == at:
            return
        self._at = at
        packet = io.BytesIO()
        torch.save(part, packet)
        self._messages.post(_name(at, self._rank), packet.getvalue())

    def collect(self, at: tuple[int, int], where: str = "") -> list[dict[str, Any]]:
        """On rank 0: wait for the other ranks' parts; return them in rank order.

        Args:
            at: step and save.
            where: the line of the script at which this rank began the save, for the warning.

        Raises:
            NoMessageError: a rank did not hand over its part within `WITHIN_S`, or before the group was over.
        """
        if self._at != at:
            self._at, self._taken = at, {}
        self._wait_for_all(at, where)
        for rank in self._others:
            if rank not in self._taken:
                packet = self._messages.take(_name(at, rank))
                self._taken[rank] = torch.load(io.BytesIO(packet), weights_only=True)
        # A rank posts in the order of steps: a part that was left out before this one is there by now, or never comes.
        self._clear_away(at)
        self._unwanted.clear()
        return [self._taken[rank] for rank in self._others]

    def _wait_for_all(self, at: tuple[int, int], where: str) -> None:
        """Poll until all parts are there. Not by a wait of torch's store, which prints lines when it times out."""
        began_at = time.monotonic()
        has_warned = False
        while missing := [
            rank for rank in self._others if not (rank in self._taken or self._messages.has(_name(at, rank)))
        ]:
            waited_s = time.monotonic() - began_at
            which = f"rank {missing[0]} has" if len(missing) == 1 else f"ranks {', '.join(map(str, missing[:8]))} have"
            if self._is_over():
                raise NoMessageError(f"{which} not committed it, and the group is over")
            if waited_s >= WITHIN_S:
                raise NoMessageError(f"{which} not committed it within {WITHIN_S:g} s")
            if waited_s >= WARN_AFTER_S and not has_warned:
                has_warned = True
                here = f"; rank {self._rank} began this save at {where}" if where else ""
                warn(
                    f"step {at[0]} waits to be saved: {which} not committed it {WARN_AFTER_S:g} s after rank "
                    f"{self._rank}. Call state.commit() on every rank{here}"
                )
            time.sleep(min(_POLL_MAX_S, _POLL_SHARE * waited_s))

    def skip(self, at: tuple[int, int]) -> None:
        """On rank 0: note that this step is not saved, so that its parts are discarded.

        A later call of this method or of `collect` discards them, as the other ranks may reach the step later. So
        parts do not accumulate where many steps are left out.
        """
        self._clear_away(at)
        self._unwanted |= {(at, rank) for rank in self._others}

    def _clear_away(self, before: tuple[int, int]) -> None:
        for at, rank in sorted(self._unwanted):
            if at < before and self._messages.discard(_name(at, rank)):
                self._unwanted.remove((at, rank))


def script_line() -> str:
    """Return the innermost caller outside of this package, as `train.py:15`: a line of the script or of a library."""
    frame = sys._getframe()  # noqa: SLF001 - the caller's line is the result
    while frame.f_code.co_filename.startswith(_NOT_SCRIPT) and frame.f_back is not None:
        frame = frame.f_back
    return f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"


def _name(at: tuple[int, int], rank: int) -> str:
    step, save = at
    return f"part/{step}/{save}/{rank}"
