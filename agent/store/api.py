"""What the store promises: the few operations of etcd that the agent stands on.

Two implementations keep these promises: `etcd.py` and, for tests, `memory.py`; `tests/contract/` runs one suite
over both. Guarantees:

- **One order.** Every write gets a revision from one counter of the whole store. A transaction is one revision.
- **read** is linearizable and returns all ranges at one revision.
- **transact** is atomic. `StoreUnavailable` means that it is not known whether it landed: read before deciding. But
  `LeaseGone`, for a write under a lease that is gone, means that it did not. One transaction writes a key once
  (`ValueError` if not).
- **watch** yields every change after the revision given, in order, each once, never a part of a revision's
  events for one range. It raises `Compacted` when that revision is gone, `StoreUnavailable` when the connection
  is; a caller with one range subscribes again from the last revision that it saw. Between several ranges there is
  no order while the watch catches up, so a caller with several reads everything again before it resumes.
- A key written with a lease is deleted when the lease ends. `refresh` returns 0.0 once a lease is gone; that is
  lost membership, not an error.
- Every call returns within its deadline, also when the store is frozen.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True)
class KeyRange:
    """One key, or all keys that begin with a prefix."""

    key: str
    is_prefix: bool = False

    def contains(self, key: str) -> bool:
        """Say whether the key lies in this range."""
        return key.startswith(self.key) if self.is_prefix else key == self.key


@dataclass(frozen=True)
class KeyValue:
    """A key with its value and where it stands in the store's history."""

    key: str
    value: bytes
    create_revision: int
    mod_revision: int
    lease_id: int
    """0: none."""


@dataclass(frozen=True)
class Snapshot:
    """What one linearizable read saw."""

    revision: int
    items: tuple[KeyValue, ...]
    """Sorted by key."""


@dataclass(frozen=True)
class KeyChange:
    """One event of a watch: the key's new state, or its deletion."""

    key: str
    item: KeyValue | None
    """None: the key was deleted."""
    revision: int
    """Of the write, or of the deletion."""


@dataclass(frozen=True)
class ChangeBatch:
    """Events in order, with the highest revision that they are complete up to."""

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
    """Write a key, under a lease if given."""

    key: str
    value: bytes
    lease_id: int = 0


@dataclass(frozen=True)
class Delete:
    """Delete a key or a prefix."""

    key: str
    is_prefix: bool = False


@dataclass(frozen=True)
class TransactionResult:
    """Whether the compares held (and so the writes landed), and the store's revision after it."""

    succeeded: bool
    revision: int


@dataclass(frozen=True)
class Lease:
    """A lease as granted: the store may grant a longer one than asked for."""

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
    """See the module's guarantees. Every method may raise `StoreUnavailable`."""

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

        Who hears no answers, or is refused what holds now, renews nothing.
        """
        ...

    def revoke(self, lease_id: int) -> None:
        """End a lease now and delete its keys. A lease that is already gone is fine."""
        ...

    def watch(self, ranges: Sequence[KeyRange], after_revision: int) -> Watch:
        """Subscribe to all changes of the ranges with a revision above `after_revision`."""
        ...

    def close(self) -> None:
        """Release connections. Running watches end."""
        ...
