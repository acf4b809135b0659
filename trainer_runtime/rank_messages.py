"""What ranks tell each other outside of collectives: over the store by which they found each other.

A collective must be begun by all ranks in the same order. What only some have to say, or what a thread says while
training goes on, goes over the board: values under names, held by the process that rank 0 met the others with. When
that is gone, so is the training.

Each connection serves one thread at a time: a thread that waits keeps the others from it.

Under an agent each value has a code that follows from it, its name, and a key which only the ranks of this group were
given (RFC 2104, HMAC): a stranger who reaches the store can disturb the group, and no more.
"""

from __future__ import annotations

import hashlib
import hmac
import os
from datetime import timedelta
from typing import TYPE_CHECKING

import torch.distributed as dist

from trainer_runtime.rank_store import private_prefix, ranks_key

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch._C._distributed_c10d import Store

WITHIN_S = 600.0
"""How long a connection may take, and a value that is surely coming."""

_CODE_BYTES = hashlib.sha256().digest_size

_PIECE_BYTES = 4 << 20
"""torch's store closes the connection to whoever sends it a value of more than 8 MiB."""


class ForgedError(RuntimeError):
    """Something that is not from a rank of this group is in their store."""


class NoMessageError(RuntimeError):
    """Another rank has not posted in time what it should have."""


class RankMessages:
    """One connection to what all ranks of a group see.

    Args:
        store: torch's.
        prefix: of all names.
        key: what values are authenticated with; empty: they are not.

    All methods that read raise `ForgedError` if what they find was not written with this key under this name.
    """

    def __init__(self, store: Store, prefix: str, key: bytes = b"") -> None:
        self._store = store
        self._prefix = prefix
        self._key = key

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
        return b"".join(self._get(_piece(name, number)) for number in range(count))

    def has(self, name: str) -> bool:
        """Tell whether something is there that another rank posts, without a wait."""
        return self._store.check([self._prefix + name])

    def discard(self, name: str) -> bool:
        """Remove what was posted, without a wait; tell whether there was something."""
        if not self.has(name):
            return False
        for number in range(int(self._get(name))):
            self._store.delete_key(self._prefix + _piece(name, number))
        return self._store.delete_key(self._prefix + name)

    def settle(self, name: str, proposal: str) -> str:
        """Return what all ranks go by under this name: the first proposal that was made."""
        sealed = self._code(name, proposal.encode()).hex() + proposal
        return self._unsealed(name, self._store.compare_set(self._prefix + name, "", sealed))

    def settled(self, name: str, within_s: float = WITHIN_S) -> str | None:
        """Wait until something is settled under this name; None: it was not, in time."""
        found = self._await(name, within_s)
        return None if found is None else self._unsealed(name, found)

    def hear(self, name: str) -> str:
        """Return what rank 0 settles under this name, whenever it does: when it is gone, so is this connection."""
        while (said := self.settled(name, WITHIN_S)) is None:
            continue
        return said

    def agree(self, name: str, say: Callable[[], str]) -> str:
        """Return on all ranks what rank 0 says, which only there is asked for."""
        return self.settle(name, say()) if dist.get_rank() == 0 else self.hear(name)

    def have_all_come(self, name: str, rank: int, world_size: int) -> bool:
        """Say that this rank has come here; tell whether all have, which the last one is told."""
        self._set(f"{name}/{rank}", b"")
        if self._store.add(self._prefix + name, 1) < world_size:  # anybody can add to it: it only saves the look
            return False
        places = [f"{name}/{each}" for each in range(world_size)]
        return self._store.check([self._prefix + each for each in places]) and not any(map(self._get, places))

    def _set(self, name: str, data: bytes) -> None:
        sealed = self._code(name, data) + data
        self._store.set(self._prefix + name, sealed)  # type: ignore[arg-type] # bytes are taken, torch's types say str

    def _get(self, name: str) -> bytes:
        return self._opened(name, self._store.get(self._prefix + name))

    def _code(self, name: str, data: bytes) -> bytes:
        told = (self._prefix + name).encode() + b"\0"
        return hmac.digest(self._key, told + data, hashlib.sha256) if self._key else b""

    def _opened(self, name: str, sealed: bytes) -> bytes:
        size = _CODE_BYTES if self._key else 0
        data = sealed[size:]
        if not hmac.compare_digest(sealed[:size], self._code(name, data)):
            raise ForgedError(f"what is under {name} in the ranks' store is not from a rank of this group")
        return data

    def _unsealed(self, name: str, sealed: bytes) -> str:
        """Return what was settled: text, as the store compares nothing else, with its code in hexadecimal."""
        size = 2 * _CODE_BYTES if self._key else 0
        try:
            code = bytes.fromhex(sealed[:size].decode())
        except ValueError:
            code = b""
        return self._opened(name, code + sealed[size:]).decode(errors="replace")

    def _surely(self, name: str, within_s: float) -> bytes:
        found = self._await(name, within_s)
        if found is None:
            raise NoMessageError(f"another rank did not post {name} within {within_s:g} s; its own output may say why")
        return self._opened(name, found)

    def _await(self, name: str, within_s: float) -> bytes | None:
        key = self._prefix + name
        try:
            self._store.wait([key], timedelta(seconds=within_s))
        except dist.DistStoreError:
            return None
        return self._store.get(key)


def _piece(name: str, number: int) -> str:
    return f"{name}/{number}"


def open_board(group: int, turn: int) -> RankMessages:
    """Connect to the board of this group's ranks. The process group must be there.

    Args:
        group: the group's number.
        turn: which of the script's States it is for, from 1.

    Raises:
        RuntimeError: there are several ranks, and they did not meet by MASTER_ADDR and MASTER_PORT.
    """
    # A launcher that keeps one store over restarts must not show a group what an older one has left.
    prefix = f"trainer_runtime/{group}/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}/{turn}/"
    key = ranks_key()
    if dist.get_world_size() == 1:
        return RankMessages(dist.HashStore(), prefix)  # type: ignore[attr-defined] # public, but missing from torch's types
    address, port = os.environ.get("MASTER_ADDR"), os.environ.get("MASTER_PORT")
    if not address or not port:
        raise RuntimeError(
            "wanted MASTER_ADDR and MASTER_PORT, by which several ranks meet, and found none; "
            "call trainer_runtime.init(), or init_process_group with its default, env://"
        )
    store = dist.TCPStore(  # type: ignore[attr-defined] # as above
        address, int(port), is_master=False, wait_for_workers=False, timeout=timedelta(seconds=WITHIN_S)
    )
    return RankMessages(store, private_prefix(key) + prefix, key)
