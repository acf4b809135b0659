"""What ranks tell each other outside of collectives: over the store by which they found each other.

A collective must be begun by all ranks in the same order. What only some have to say, or what a thread says while
training goes on, goes over the board: values under names, held by the process that rank 0 met the others with. When
that is gone, so is the training.

Each connection serves one thread at a time: a thread that waits keeps the others from it.
"""

from __future__ import annotations

import os
from datetime import timedelta
from typing import TYPE_CHECKING

import torch.distributed as dist

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch._C._distributed_c10d import Store

WITHIN_S = 600.0
"""How long a connection may take, and a value that is surely coming."""

_PIECE_BYTES = 4 << 20
"""torch's store closes the connection to whoever sends it a value of more than 8 MiB."""


class NotPostedError(RuntimeError):
    """Another rank has not posted in time what it should have."""


class Board:
    """One connection to what all ranks of a group see."""

    def __init__(self, store: Store, prefix: str) -> None:
        self._store = store
        self._prefix = prefix

    def post(self, name: str, data: bytes) -> None:
        """Put something there for one other rank to take: in pieces, and then under its name how many there are."""
        starts = range(0, len(data), _PIECE_BYTES)
        for number, start in enumerate(starts):
            self._set(_piece(name, number), data[start : start + _PIECE_BYTES])
        self._set(name, str(len(starts)).encode())

    def take(self, name: str, within_s: float = WITHIN_S) -> bytes:
        """Wait for something that another rank posts, and remove it.

        Raises:
            NotPostedError: it did not come in time.
        """
        found = self.read(name, within_s)
        self.discard(name)
        return found

    def read(self, name: str, within_s: float = WITHIN_S) -> bytes:
        """Wait for something that another rank posts for all; NotPostedError if it does not come in time."""
        count = int(self._surely(name, within_s))
        return b"".join(self._store.get(self._prefix + _piece(name, number)) for number in range(count))

    def discard(self, name: str) -> bool:
        """Remove what was posted, without a wait; tell whether there was something."""
        if not self._store.check([self._prefix + name]):
            return False
        for number in range(int(self._store.get(self._prefix + name))):
            self._store.delete_key(self._prefix + _piece(name, number))
        return self._store.delete_key(self._prefix + name)

    def settle(self, name: str, proposal: str) -> str:
        """Return what all ranks go by under this name: the first proposal that was made."""
        settled = self._store.compare_set(self._prefix + name, "", proposal)
        return settled.decode()

    def settled(self, name: str, within_s: float = WITHIN_S) -> str | None:
        """Wait until something is settled under this name; None: it was not, in time."""
        found = self._await(name, within_s)
        return None if found is None else found.decode()

    def hear(self, name: str) -> str:
        """Return what rank 0 settles under this name, whenever it does: when it is gone, so is this connection."""
        while (said := self.settled(name, WITHIN_S)) is None:
            continue
        return said

    def agree(self, name: str, say: Callable[[], str]) -> str:
        """Return on all ranks what rank 0 says, which only there is asked for."""
        return self.settle(name, say()) if dist.get_rank() == 0 else self.hear(name)

    def count(self, name: str) -> int:
        """Return how many have counted here, this rank among them."""
        return self._store.add(self._prefix + name, 1)

    def _set(self, name: str, data: bytes) -> None:
        self._store.set(self._prefix + name, data)  # type: ignore[arg-type] # bytes are taken, torch's types say str

    def _surely(self, name: str, within_s: float) -> bytes:
        found = self._await(name, within_s)
        if found is None:
            raise NotPostedError(f"another rank did not post {name} within {within_s:g} s; its own output may say why")
        return found

    def _await(self, name: str, within_s: float) -> bytes | None:
        key = self._prefix + name
        try:
            self._store.wait([key], timedelta(seconds=within_s))
        except dist.DistStoreError:
            return None
        return self._store.get(key)


def _piece(name: str, number: int) -> str:
    return f"{name}/{number}"


def open_board(group: int, turn: int) -> Board:
    """Connect to the board of this group's ranks. The process group must be there.

    Args:
        group: the group's number.
        turn: which of the script's States it is for, from 1.

    Raises:
        RuntimeError: there are several ranks, and they did not meet by MASTER_ADDR and MASTER_PORT.
    """
    # A launcher that keeps one store over restarts must not show a group what an older one has left.
    prefix = f"trainer_runtime/{group}/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}/{turn}/"
    if dist.get_world_size() == 1:
        return Board(dist.HashStore(), prefix)  # type: ignore[attr-defined] # public, but missing from torch's types
    address, port = os.environ.get("MASTER_ADDR"), os.environ.get("MASTER_PORT")
    if not address or not port:
        raise RuntimeError(
            "wanted MASTER_ADDR and MASTER_PORT, by which several ranks meet, and found none; "
            "call trainer_runtime.init(), or init_process_group with its default, env://"
        )
    store = dist.TCPStore(  # type: ignore[attr-defined] # as above
        address, int(port), is_master=False, wait_for_workers=False, timeout=timedelta(seconds=WITHIN_S)
    )
    return Board(store, prefix)
