"""How the ranks' parts of a checkpoint come to rank 0, which writes it.

Each rank posts its part when a save falls due, and goes on. Rank 0's writing thread takes them. No rank waits for
another, and no collective is used, so that a save can be written while training goes on.
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
    from trainer_runtime.rank_messages import RankMessages

WITHIN_S = 60.0
"""How far a rank may be behind rank 0 when a checkpoint is written."""

WARN_AFTER_S = 5.0
"""A script in which one rank commits, and another does not, would wait `WITHIN_S` at each save."""

_POLL_SHARE = 0.1
_POLL_MAX_S = 0.05
_NOT_SCRIPT = (str(Path(__file__).parent), f"{contextlib.__file__}")


class Exchange:
    """One rank's end.

    Args:
        board: a connection that nothing else uses, for on rank 0 a thread waits at it.
        rank: this rank.
        world_size: number of ranks.
    """

    def __init__(self, board: RankMessages, rank: int, world_size: int) -> None:
        self._board = board
        self._rank = rank
        self._others = range(1, world_size)
        self._at = NOT_SAVED
        """What was handed over last, or collected, by step and save."""
        self._taken: dict[int, dict[str, Any]] = {}
        """Of that one. Kept for a second attempt at it: the others do not hand over twice."""
        self._unwanted: set[tuple[tuple[int, int], int]] = set()
        """((step, save), rank) of parts that may be on the board, or may still come."""

    def hand_over(self, at: tuple[int, int], part: dict[str, Any]) -> None:
        """On the other ranks: give rank 0 this rank's part; at another attempt it has it already.

        Args:
            at: step and save, as in what follows.
            part: what is this rank's own.
        """
        if self._at == at:
            return
        self._at = at
        packet = io.BytesIO()
        torch.save(part, packet)
        self._board.post(_name(at, self._rank), packet.getvalue())

    def collect(self, at: tuple[int, int], where: str = "") -> list[dict[str, Any]]:
        """On rank 0: wait for the other ranks' parts; return them in rank order.

        Args:
            at: see `hand_over`.
            where: the line of the script that committed it on this rank.

        Raises:
            NotPostedError: a rank did not hand over its part in time.
        """
        if self._at != at:
            self._at, self._taken = at, {}
        self._wait_for_all(at, where)
        for rank in self._others:
            if rank not in self._taken:
                packet = self._board.take(_name(at, rank))
                self._taken[rank] = torch.load(io.BytesIO(packet), weights_only=True)
        # A rank hands over in the order of steps: what was left out before this one is there by now, or never will be.
        self._clear_away(at)
        self._unwanted.clear()
        return [self._taken[rank] for rank in self._others]

    def _wait_for_all(self, at: tuple[int, int], where: str) -> None:
        """Until all parts are there: by looking, since torch prints lines of its own when a wait ends in vain."""
        began_at = time.monotonic()
        has_warned = False
        while late := [rank for rank in self._others if not (rank in self._taken or self._board.has(_name(at, rank)))]:
            waited_s = time.monotonic() - began_at
            who = f"rank {late[0]} has" if len(late) == 1 else f"ranks {', '.join(map(str, late[:8]))} have"
            if waited_s >= WITHIN_S:
                raise NoMessageError(f"{who} not committed it within {WITHIN_S:g} s")
            if waited_s >= WARN_AFTER_S and not has_warned:
                has_warned = True
                here = f", which rank {self._rank} does at {where}" if where else ""
                warn(
                    f"step {at[0]} waits to be saved: {who} not committed it {WARN_AFTER_S:g} s after rank "
                    f"{self._rank}. Call state.commit(){here}, on every rank"
                )
            time.sleep(min(_POLL_MAX_S, _POLL_SHARE * waited_s))

    def leave_out(self, at: tuple[int, int]) -> None:
        """On rank 0: this is not saved, so what is handed over of it is not wanted.

        It is taken away by the next call of this or of `collect`, as the other ranks may come to the step later. So
        nothing piles up where many steps are left out.
        """
        self._clear_away(at)
        self._unwanted |= {(at, rank) for rank in self._others}

    def _clear_away(self, before: tuple[int, int]) -> None:
        for at, rank in sorted(self._unwanted):
            if at < before and self._board.discard(_name(at, rank)):
                self._unwanted.remove((at, rank))


def script_line() -> str:
    """Return `train.py:15`: the line of the script that has called the runtime, or a function that a library calls."""
    frame = sys._getframe()  # noqa: SLF001 - who called is what this is about
    while frame.f_code.co_filename.startswith(_NOT_SCRIPT) and frame.f_back is not None:
        frame = frame.f_back
    return f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"


def _name(at: tuple[int, int], rank: int) -> str:
    step, save = at
    return f"part/{step}/{save}/{rank}"
