"""How the ranks' parts of a checkpoint come to rank 0, which writes it.

Each rank posts its part when a save falls due, and goes on. Rank 0's writing thread takes them. No rank waits for
another, and no collective is used, so that a save can be written while training goes on.
"""

from __future__ import annotations

import io
import time
from typing import TYPE_CHECKING, Any

import torch

from trainer_runtime.position import NOT_SAVED

if TYPE_CHECKING:
    from trainer_runtime.board import Board

WITHIN_S = 60.0
"""How far a rank may be behind rank 0 when a checkpoint is written."""

_MOMENT_S = 0.001
"""For what is there or not, once the time is up."""


class Exchange:
    """One rank's end.

    Args:
        board: a connection that nothing else uses, for on rank 0 a thread waits at it.
        rank: this rank.
        world_size: number of ranks.
    """

    def __init__(self, board: Board, rank: int, world_size: int) -> None:
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

    def collect(self, at: tuple[int, int]) -> list[dict[str, Any]]:
        """On rank 0: wait for the other ranks' parts; return them in rank order.

        Raises:
            NotPostedError: a rank did not hand over its part in time.
        """
        if self._at != at:
            self._at, self._taken = at, {}
        give_up_at = time.monotonic() + WITHIN_S
        for rank in self._others:
            if rank not in self._taken:
                within_s = max(_MOMENT_S, give_up_at - time.monotonic())
                packet = self._board.take(_name(at, rank), within_s)
                self._taken[rank] = torch.load(io.BytesIO(packet), weights_only=True)
        # A rank hands over in the order of steps: what was left out before this one is there by now, or never will be.
        self._clear_away(at)
        self._unwanted.clear()
        return [self._taken[rank] for rank in self._others]

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


def _name(at: tuple[int, int], rank: int) -> str:
    step, save = at
    return f"part/{step}/{save}/{rank}"
