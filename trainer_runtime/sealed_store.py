"""A store whose values are authenticated: only ranks that have the group's key can write what the others read.

torch's TCPStore accepts every client. gloo exchanges the ranks' addresses in it, so a stranger who reached it could
take the place of a rank, and be sent the model. In this store each value carries a code (HMAC, RFC 2104) over its key
and the value. Counters (`add`) carry none: a stranger can change them, and so delay ranks or make them fail.
"""

from __future__ import annotations

import hashlib
import hmac
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

if TYPE_CHECKING:
    from datetime import timedelta

    from torch._C._distributed_c10d import Store

    Base = Store
else:
    Base = dist.Store  # public, but missing from torch's types

_CODE_BYTES = 2 * hashlib.sha256().digest_size
"""In hexadecimal, because `compare_set` takes text only."""


class ForgedError(RuntimeError):
    """The rank store contains a value that was not written by a rank of this group."""


class SealedStore(Base):
    """A store over another one. Methods are those of `torch.distributed.Store`.

    C++ calls them, too: keep a reference as long as a process group uses it.

    All methods that read raise `ForgedError` if a value was not written with this key under this name.

    Args:
        store: has the values.
        key: key of the codes, which only the ranks have.
        timeout: how long methods wait, until `set_timeout` is called. None: as the other store does.
        has_counters: `get` also returns counters, which a stranger can change.
    """

    def __init__(
        self, store: Store, key: bytes, timeout: timedelta | None = None, *, has_counters: bool = False
    ) -> None:
        super().__init__()
        self._store = store
        self._key = key
        self._has_counters = has_counters
        self._timeout = timeout
        """What the other store was told last. None: nothing."""
        self._clones: list[SealedStore] = []
        if timeout is not None:
            self.set_timeout(timeout)

    def set(self, key: str, value: str | bytes) -> None:
        """Set a value."""
        data = _as_bytes(value)
        self._store.set(key, self._code(key, data) + data)  # type: ignore[arg-type] # torch takes bytes

    def get(self, key: str) -> bytes:
        """Wait for a value and return it."""
        self._pass_on_timeout()
        found = self._store.get(key)
        return found if self._has_counters and found.isdigit() else self._verify(key, found)

    def multi_get(self, keys: list[str]) -> list[bytes]:
        """Wait for values and return them, in one round trip."""
        self._pass_on_timeout()
        return [self._verify(key, found) for key, found in zip(keys, self._store.multi_get(keys), strict=True)]

    def compare_set(self, key: str, expected: str | bytes, desired: str | bytes) -> bytes:
        """Set a value if the present one is `expected`, or there is none and `expected` is empty; return the value."""
        sealed = [self._code(key, data) + data if data else b"" for data in map(_as_bytes, (expected, desired))]
        found = self._store.compare_set(key, *(each.decode() for each in sealed))
        return self._verify(key, found) if found else b""

    def add(self, key: str, amount: int) -> int:
        """Add to a counter and return it. It is not authenticated."""
        return self._store.add(key, amount)

    def check(self, keys: list[str]) -> bool:
        """Return whether all keys have values; does not wait."""
        return self._store.check(keys)

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        """Wait until all keys have values."""
        if timeout is None:
            self._pass_on_timeout()
            self._store.wait(keys)
        else:
            self._store.wait(keys, timeout)

    def delete_key(self, key: str) -> bool:
        """Remove a value; return whether there was one."""
        return self._store.delete_key(key)

    def num_keys(self) -> int:
        """Return the number of keys."""
        return self._store.num_keys()

    def clone(self) -> SealedStore:
        """Return a store with a connection of its own."""
        store: Any = self._store  # torch 2.13 has no type for `clone`
        made = SealedStore(store.clone(), self._key, self._timeout, has_counters=self._has_counters)
        self._clones.append(made)  # C++ holds no reference to it
        return made

    def list_keys(self) -> list[str]:
        """Return all keys."""
        return self._store.list_keys()

    deleteKey, getNumKeys, listKeys = delete_key, num_keys, list_keys  # noqa: N815 - the names by which C++ calls them

    def _pass_on_timeout(self) -> None:
        """Let the other store wait as long as this one, whose timeout C++ sets without a call."""
        if self._timeout is not None and (timeout := self.timeout) != self._timeout:  # type: ignore[attr-defined] # missing from torch's types
            self._timeout = timeout
            self._store.set_timeout(timeout)

    def _code(self, key: str, data: bytes) -> bytes:
        return hmac.digest(self._key, key.encode() + b"\0" + data, hashlib.sha256).hex().encode()

    def _verify(self, key: str, sealed: bytes) -> bytes:
        code, data = sealed[:_CODE_BYTES], sealed[_CODE_BYTES:]
        if not hmac.compare_digest(code, self._code(key, data)):
            raise ForgedError(
                f"the value of {key} in the ranks' store was not written by a rank of this group; make MASTER_PORT "
                "reachable from the job's machines only"
            )
        return data


def _as_bytes(value: Any) -> bytes:  # noqa: ANN401 - torch's C++ passes lists of numbers
    return value.encode() if isinstance(value, str) else bytes(value)
