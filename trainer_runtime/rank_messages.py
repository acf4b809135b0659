"""Messages between ranks outside of collectives, in the store through which the ranks found each other.

All ranks must begin a collective in the same order. Messages that only some ranks send, or that a thread sends while
training continues, are values under names in the rank store. The process of rank 0 holds the store: when it is gone,
the training is over as well.

Each connection serves one thread at a time: a thread that waits blocks the others.

Under an agent each value is authenticated (`sealed_store.py`) with a key that only the ranks of this group are given. A
stranger who reaches the store can disturb the group, but not forge a message.
"""

from __future__ import annotations

import os
from datetime import timedelta
from typing import TYPE_CHECKING

import torch.distributed as dist

from trainer_runtime.rank_store import private_prefix, ranks_key
from trainer_runtime.sealed_store import SealedStore

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch._C._distributed_c10d import Store

WITHIN_S = 600.0
"""Seconds that connecting may take, and waiting for a value that is certain to come."""

_PIECE_BYTES = 4 << 20
"""torch's store closes the connection of a client that sends a value of more than 8 MiB."""


class NoMessageError(RuntimeError):
    """Another rank did not post a message in time."""


class RankMessages:
    """One connection to the rank store of a group.

    Args:
        store: torch's store.
        prefix: prefix of all names.
        key: key for the authentication of values; empty: values are not authenticated.

    All methods that read raise `ForgedError` if a value was not written with this key under this name.
    """

    def __init__(self, store: Store, prefix: str, key: bytes = b"") -> None:
        self._store = SealedStore(store, key) if key else store
        self._prefix = prefix

    def post(self, name: str, data: bytes) -> None:
        """Post a message for one other rank to take: first its pieces, then under its name the number of pieces."""
        starts = range(0, len(data), _PIECE_BYTES)
        for number, start in enumerate(starts):
            self._set(_piece(name, number), data[start : start + _PIECE_BYTES])
        self._set(name, str(len(starts)).encode())

    def take(self, name: str, within_s: float = WITHIN_S) -> bytes:
        """Wait for a message that another rank posts, and remove it.

        Raises:
            NoMessageError: the message did not come within `within_s` seconds.
        """
        found = self.read(name, within_s)
        self.discard(name)
        return found

    def read(self, name: str, within_s: float = WITHIN_S) -> bytes:
        """Wait for a message that another rank posts for all ranks; NoMessageError if it does not come in time."""
        count = int(self._require(name, within_s))
        return b"".join(self._get(_piece(name, number)) for number in range(count))

    def has(self, name: str) -> bool:
        """Return whether a message is there; does not wait."""
        return self._store.check([self._prefix + name])

    def discard(self, name: str) -> bool:
        """Remove a message; return whether there was one. Does not wait."""
        if not self.has(name):
            return False
        for number in range(int(self._get(name))):
            self._store.delete_key(self._prefix + _piece(name, number))
        return self._store.delete_key(self._prefix + name)

    def propose(self, name: str, proposal: str) -> str:
        """Propose a value for this name; return the value that holds for all ranks: the first proposal."""
        return self._store.compare_set(self._prefix + name, "", proposal).decode(errors="replace")

    def wait_for_proposal(self, name: str, within_s: float = WITHIN_S) -> str | None:
        """Wait until a value was proposed for this name and return it; None if there was none in time."""
        found = self._await(name, within_s)
        return None if found is None else found.decode(errors="replace")

    def wait_for_main(self, name: str) -> str:
        """Return the value that rank 0 proposes for this name. Waits without limit: the store ends with rank 0."""
        while (value := self.wait_for_proposal(name, WITHIN_S)) is None:
            continue
        return value

    def broadcast(self, name: str, get_value: Callable[[], str]) -> str:
        """Return rank 0's value on all ranks; `get_value` is called on rank 0 only."""
        return self.propose(name, get_value()) if dist.get_rank() == 0 else self.wait_for_main(name)

    def arrive(self, name: str, rank: int, world_size: int) -> bool:
        """Note that this rank has arrived; return whether all ranks have, which only the last one to arrive sees."""
        self._set(f"{name}/{rank}", b"")
        if self._store.add(self._prefix + name, 1) < world_size:  # not authenticated: only saves the check below
            return False
        keys = [f"{self._prefix}{name}/{each}" for each in range(world_size)]
        if not self.have_arrived(name, world_size):
            return False
        return not any(self._store.multi_get(keys))  # in one round trip: all others wait for this rank

    def have_arrived(self, name: str, world_size: int) -> bool:
        """Return whether all ranks have arrived. Not authenticated: a stranger can make this true."""
        return self._store.check([f"{self._prefix}{name}/{each}" for each in range(world_size)])

    def _set(self, name: str, data: bytes) -> None:
        self._store.set(self._prefix + name, data)  # type: ignore[arg-type] # torch takes bytes, its types say str

    def _get(self, name: str) -> bytes:
        return self._store.get(self._prefix + name)

    def _require(self, name: str, within_s: float) -> bytes:
        found = self._await(name, within_s)
        if found is None:
            raise NoMessageError(f"another rank did not post {name} within {within_s:g} s; its own output may say why")
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


def open_rank_messages(group: int, turn: int) -> RankMessages:
    """Connect to the rank store of this group. The process group must exist.

    Args:
        group: the group's number.
        turn: number of the State in this process that uses the connection, from 1.

    Raises:
        RuntimeError: there are several ranks, and they did not meet through MASTER_ADDR and MASTER_PORT.
    """
    # A launcher may keep one store over restarts: a group must not see the values of an older one.
    prefix = f"trainer_runtime/{group}/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}/{turn}/"
    key = ranks_key()
    if dist.get_world_size() == 1:
        return RankMessages(dist.HashStore(), prefix)  # type: ignore[attr-defined] # public, but missing from torch's types
    address, port = os.environ.get("MASTER_ADDR"), os.environ.get("MASTER_PORT")
    if not address or not port:
        raise RuntimeError(
            "wanted MASTER_ADDR and MASTER_PORT, through which several ranks meet, and found none; "
            "call trainer_runtime.init(), or init_process_group with its default, env://"
        )
    store = dist.TCPStore(  # type: ignore[attr-defined] # as above
        address, int(port), is_master=False, wait_for_workers=False, timeout=timedelta(seconds=WITHIN_S)
    )
    return RankMessages(store, private_prefix(key) + prefix, key)
