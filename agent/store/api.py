"""The operations of etcd that the agent relies on, and the guarantees of every implementation.

Two implementations exist: `etcd.py` and, for tests, `memory.py`. `tests/contract/` runs one test suite over both.
Guarantees:

- **One order.** Every write gets a revision from one counter of the whole store. A transaction is one revision.
- **read** is linearizable and returns all ranges at one revision.
- **transact** is atomic. After `StoreUnavailable` the transaction may or may not have been applied: read before
  deciding anything. `LeaseGone`, for a write under a lease that no longer exists, means that it was not applied. One
  transaction writes a key at most once (otherwise `ValueError`).
- **watch** yields every change after the given revision, in order, each exactly once, and never only part of the
  events that one revision has for one range. It raises `Compacted` when that revision is compacted and
  `StoreUnavailable` when the connection is lost. A caller with one range subscribes again from the last revision that
  it received. Events of several ranges are not ordered relative to each other while the watch catches up, so a caller
  with several ranges reads everything again before it subscribes again.
- A key written under a lease is deleted when the lease ends. `refresh` returns 0.0 once a lease is gone; this means
  that the agent lost its membership, and is not an error.
- Every call returns within its deadline, also while the store is frozen.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol, Self

import msgspec


@dataclass(frozen=True)
class KeyRange:
    """One key, or all keys that begin with a prefix."""

    key: str
    is_prefix: bool = False

    def contains(self, key: str) -> bool:
        """Whether the key lies in this range."""
        return key.startswith(self.key) if self.is_prefix else key == self.key


class KeyValue(msgspec.Struct, frozen=True, gc=False):
    """A key with its value and its revisions."""

    key: str
    value: bytes
    create_revision: int
    mod_revision: int
    lease_id: int
    """0: no lease."""


@dataclass(frozen=True)
class Snapshot:
    """The result of one linearizable read."""

    revision: int
    by_key: Mapping[str, KeyValue]
    own_revision: int = 0
    """It also includes what this client itself wrote up to this revision."""

    @classmethod
    def of(cls, revision: int, items: Iterable[KeyValue], own_revision: int = 0) -> Self:
        """Return a snapshot of these items."""
        return cls(revision, {item.key: item for item in items}, own_revision)

    @cached_property
    def items(self) -> tuple[KeyValue, ...]:
        """Sorted by key."""
        return tuple(self.by_key[key] for key in sorted(self.by_key))


@dataclass(frozen=True)
class KeyChange:
    """One event of a watch: the key's new state, or its deletion."""

    key: str
    item: KeyValue | None
    """None: the key was deleted."""
    revision: int
    """Revision of the write or of the deletion."""


@dataclass(frozen=True)
class ChangeBatch:
    """Events in order, and the highest revision up to which they are complete."""

    revision: int
    changes: tuple[KeyChange, ...]


@dataclass(frozen=True)
class Compare:
    """A condition of a transaction: the key's revision (0: the key does not exist)."""

    key: str
    create_revision: int | None = None
    mod_revision: int | None = None


@dataclass(frozen=True)
class Put:
    """Write a key, under a lease if one is given."""

    key: str
    value: bytes
    lease_id: int = 0


@dataclass(frozen=True)
class Delete:
    """Delete a key, or all keys with a prefix."""

    key: str
    is_prefix: bool = False


@dataclass(frozen=True)
class TransactionResult:
    """Whether the compares held, and so the writes were applied; and the store's revision afterwards."""

    succeeded: bool
    revision: int


@dataclass(frozen=True)
class Lease:
    """A lease as granted: the store may grant a longer one than requested."""

    lease_id: int
    ttl_s: float


class Watch(Protocol):
    """A running subscription. Iterating blocks; `cancel` from another thread ends the iteration."""

    def __iter__(self) -> Iterator[ChangeBatch]:
        """Yield batches until cancelled. Raises `Compacted` or `StoreUnavailable`."""
        ...

    def cancel(self) -> None:
        """End the iteration, from any thread."""
        ...


class Store(Protocol):
    """A client of the store; the module's docstring lists the guarantees. Every method may raise `StoreUnavailable`."""

    def read(self, ranges: Sequence[KeyRange]) -> Snapshot:
        """Read all ranges at one revision."""
        ...

    def transact(self, compares: Sequence[Compare], writes: Sequence[Put | Delete]) -> TransactionResult:
        """Apply all writes if all compares hold, else none."""
        ...

    def grant(self, ttl_s: float) -> Lease:
        """Grant a lease of at least `ttl_s` seconds."""
        ...

    def refresh(self, lease_id: int) -> float:
        """Renew a lease; return its length in seconds, 0.0 if it is gone.

        A client that receives no answers, or is not permitted to read the current state, renews nothing.
        """
        ...

    def revoke(self, lease_id: int) -> None:
        """End a lease now and delete its keys. Does nothing if the lease is already gone."""
        ...

    def watch(self, ranges: Sequence[KeyRange], after_revision: int) -> Watch:
        """Subscribe to all changes of the ranges with a revision above `after_revision`."""
        ...

    def close(self) -> None:
        """Release connections. Running watches end."""
        ...
