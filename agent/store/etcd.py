"""The store over etcd: deadlines, rotation between endpoints, retries where they are safe, watches that fail loudly.

- **A deadline on every call.** A frozen etcd accepts connections and answers nothing.
- **Rotation.** An endpoint that is unreachable or late is left for the next one; the call after it goes there.
- **Retries only where a repeat is harmless** (read, grant, refresh, revoke). A transaction is never repeated:
  the first attempt may have landed.
- **A refused watch raises.** In the protocol it is silent unless `canceled` is read.

etcd3's own client is not used: its watcher burns a core while etcd is down and never subscribes again.
"""

from __future__ import annotations

import math
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

# First among the project's and foreign modules: it settles which protobuf implementation is loaded.
from agent.store import wire  # isort: skip
import grpc
import tenacity

from agent.errors import Compacted, ConfigError, StoreUnavailable
from agent.store.api import (
    ChangeBatch,
    Compare,
    Delete,
    KeyRange,
    Lease,
    Put,
    Snapshot,
    Store,
    TransactionResult,
    Watch,
)

_DEFAULT_PORT = 2379
_GONE_ENDPOINT = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED)

_T = TypeVar("_T")


class _EndpointFailed(StoreUnavailable):
    """The endpoint did not answer: another one, or another try, may."""


def parse_endpoints(text: str) -> tuple[str, ...]:
    """Split `host:port,host:port` (`http://` allowed, port 2379 if missing) into gRPC targets."""
    endpoints = tuple(_parse_endpoint(part.strip()) for part in text.split(",") if part.strip())
    if not endpoints:
        raise ConfigError(f"no etcd endpoint in {text!r}: want host:port, several separated by commas")
    return endpoints


def _parse_endpoint(part: str) -> str:
    address = part.removeprefix("http://").rstrip("/")
    bracketed, closing, rest = address.rpartition("]")
    name, colon, port = rest.partition(":")
    host = bracketed + closing + name
    # Brackets hold the whole host or do not occur; an IPv6 address without them leaves no number after its first colon.
    is_host = bracketed.startswith("[") and not name if closing else bool(name) and "[" not in name
    is_port = not colon or (port.isascii() and port.isdigit() and 0 < int(port) < 65536)
    if not is_host or not is_port or set(address) & set("/@?# "):
        raise ConfigError(f"bad etcd endpoint {part!r}: want host:port or http://host:port, IPv6 in brackets")
    return f"{host}:{port or _DEFAULT_PORT}"


class EtcdStore(Store):
    """A client of one etcd cluster; see `api.py` for what it promises. May be used from any thread.

    Args:
        endpoints: `host:port` of the cluster's members, tried in this order.
        attempt_timeout_s: how long one attempt may take.
        retry_for_s: how long a call that is safe to repeat is repeated; it raises once that time is over.
    """

    def __init__(self, endpoints: Sequence[str], *, attempt_timeout_s: float = 1.0, retry_for_s: float = 3.0) -> None:
        self._pool = wire.LinkPool(endpoints)
        self._attempt_timeout_s = attempt_timeout_s
        self._retry_for_s = retry_for_s
        self._closed = threading.Event()
        self._watches: weakref.WeakSet[_EtcdWatch] = weakref.WeakSet()

    def read(self, ranges: Sequence[KeyRange]) -> Snapshot:
        """Read all ranges at one revision."""
        request = wire.read_request(ranges)
        reply = self._repeat(lambda link, timeout_s: link.kv.Txn(request, timeout=timeout_s))
        return Snapshot(reply.header.revision, wire.items_of(reply))

    def transact(self, compares: Sequence[Compare], writes: Sequence[Put | Delete]) -> TransactionResult:
        """Apply all writes if all compares hold, else none. Never repeated."""
        request = wire.write_request(compares, writes)
        reply = self._attempt(lambda link: link.kv.Txn(request, timeout=self._attempt_timeout_s))
        return TransactionResult(reply.succeeded, reply.header.revision)

    def grant(self, ttl_s: float) -> Lease:
        """Grant a lease of at least `ttl_s` seconds. A repeat may leave a second lease, which just runs out."""
        request = wire.grant_request(math.ceil(ttl_s))
        reply = self._repeat(lambda link, timeout_s: link.lease.LeaseGrant(request, timeout=timeout_s))
        return Lease(reply.ID, float(reply.TTL))

    def refresh(self, lease_id: int) -> float:
        """Renew a lease; return its length in seconds, 0.0 if it is gone."""
        request = wire.refresh_request(lease_id)

        def keep_alive(link: wire.Link, timeout_s: float) -> float:
            replies = link.lease.LeaseKeepAlive(iter((request,)), timeout=timeout_s)
            try:
                for reply in replies:
                    return float(reply.TTL)
            finally:
                replies.cancel()
            raise _EndpointFailed(f"etcd at {link.endpoint} ended a lease's renewal without an answer")

        return self._repeat(keep_alive)

    def revoke(self, lease_id: int) -> None:
        """End a lease now and delete its keys. A lease that is already gone is fine."""
        request = wire.revoke_request(lease_id)

        def end_lease(link: wire.Link, timeout_s: float) -> None:
            try:
                link.lease.LeaseRevoke(request, timeout=timeout_s)
            except grpc.RpcError as error:
                if wire.error_code(error) is not grpc.StatusCode.NOT_FOUND:
                    raise

        self._repeat(end_lease)

    def watch(self, ranges: Sequence[KeyRange], after_revision: int) -> Watch:
        """Subscribe to all changes of the ranges with a revision above `after_revision`."""
        watch = self._attempt(lambda link: _EtcdWatch(link, ranges, after_revision, self._failure))
        self._watches.add(watch)
        return watch

    def close(self) -> None:
        """Release connections. Running watches end."""
        self._closed.set()
        for watch in tuple(self._watches):
            watch.cancel()
        self._pool.close()

    def _repeat(self, invoke: Callable[[wire.Link, float], _T]) -> _T:
        """Attempt until it is answered or the time for it is over."""
        ends_at = time.monotonic() + self._retry_for_s

        def attempt(link: wire.Link) -> _T:
            return invoke(link, max(0.001, min(self._attempt_timeout_s, ends_at - time.monotonic())))

        retrying = tenacity.Retrying(
            retry=tenacity.retry_if_exception_type(_EndpointFailed),
            wait=tenacity.wait_random_exponential(multiplier=0.05, max=0.5),
            stop=tenacity.stop_after_delay(self._retry_for_s) | tenacity.stop_when_event_set(self._closed),
            sleep=tenacity.sleep_using_event(self._closed),
            reraise=True,
        )
        answer: _T = retrying(self._attempt, attempt)
        return answer

    def _attempt(self, invoke: Callable[[wire.Link], _T]) -> _T:
        link = self._pool.current()
        try:
            return invoke(link)
        except grpc.RpcError as error:
            raise self._failure(link, error) from None
        except ValueError:
            # gRPC's way to say that the channel was closed under the call.
            if self._closed.is_set():
                raise StoreUnavailable("the connection to etcd was closed by this process") from None
            raise

    def _failure(self, link: wire.Link, error: grpc.RpcError) -> Exception:
        """Say what went wrong in the store's own words, and leave an endpoint that does not answer."""
        code, details = wire.error_code(error), wire.error_details(error)
        if code is grpc.StatusCode.INVALID_ARGUMENT:
            return ValueError(f"etcd refused the request: {details}")
        if code not in _GONE_ENDPOINT:
            return StoreUnavailable(f"etcd at {link.endpoint} refused ({code.name}): {details}")
        self._pool.leave(link)
        return _EndpointFailed(f"etcd at {link.endpoint} did not answer: {details}")


class _EtcdWatch(Watch):
    """One stream with one subscription per range."""

    def __init__(
        self,
        link: wire.Link,
        ranges: Sequence[KeyRange],
        after_revision: int,
        failure: Callable[[wire.Link, grpc.RpcError], Exception],
    ) -> None:
        self._link = link
        self._after_revision = after_revision
        self._is_single = len(wire.disjoint(ranges)) == 1
        self._failure = failure
        self._ended = threading.Event()
        self._stream = link.watch.Watch(self._requests(wire.watch_requests(ranges, after_revision)))

    def __iter__(self) -> Iterator[ChangeBatch]:
        """Yield batches until cancelled. Raises `Compacted` or `StoreUnavailable`."""
        try:
            for reply in self._stream:
                batch = self._batch(reply)
                if self._ended.is_set():
                    return
                if batch is not None:
                    yield batch
            if not self._ended.is_set():
                raise StoreUnavailable(f"etcd at {self._link.endpoint} ended the watch")
        except grpc.RpcError as error:
            if not self._ended.is_set():
                raise self._failure(self._link, error) from None
        finally:
            self.cancel()

    def cancel(self) -> None:
        """End the iteration, from any thread."""
        self._ended.set()
        self._stream.cancel()

    def _requests(self, requests: Sequence[Any]) -> Iterator[Any]:
        """Keep the sending half of the stream open: its end would be an invitation to end the other half."""
        yield from requests
        self._ended.wait()

    def _batch(self, reply: Any) -> ChangeBatch | None:  # noqa: ANN401 - a message without a type
        if reply.canceled:
            raise _refusal(self._link, reply)
        changes = tuple(wire.changes_of(reply, self._after_revision))
        if changes:
            return ChangeBatch(reply.events[-1].kv.mod_revision, changes)
        # A progress notice speaks for its own range only.
        is_progress = self._is_single and not reply.created and reply.header.revision > self._after_revision
        return ChangeBatch(reply.header.revision, ()) if is_progress else None


def _refusal(link: wire.Link, reply: Any) -> Exception:  # noqa: ANN401 - same
    if reply.compact_revision > 0:
        return Compacted(f"etcd has forgotten what came before revision {reply.compact_revision}: read it all again")
    return StoreUnavailable(f"etcd at {link.endpoint} refused the watch: {reply.cancel_reason or 'no reason given'}")
