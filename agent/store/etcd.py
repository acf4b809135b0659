"""The store on etcd: deadlines, rotation between endpoints, retries where they are safe, watches that fail loudly.

- **Deadlines.** Every call has one, because a frozen etcd accepts connections and answers nothing.
- **Rotation.** The client leaves an endpoint that is unreachable or late for the next one. It also ends the watches on
  that endpoint, so that they move too: an idle watch would notice the failure only after seconds.
- **Retries only where a repeat is harmless** (read, grant, refresh, revoke). A transaction is sent again only if
  nothing of the first attempt has left this process, or if etcd rejected it because of an unknown token. After any
  other failure it may have been applied.
- **Renew only after an answer.** A renewal is sent only if the one before was answered, or else a health RPC just now.
  Otherwise, where responses get lost and requests do not, etcd would keep the lease of a node that no longer receives
  anything. So such a node renews its lease once more at the most.
- **Probe reads.** A member whose disk is stuck answers health RPCs, renews leases, and keeps a watch open and silent.
  Therefore a linearizable read precedes a renewal from time to time, and an endpoint that cannot answer it is left.
- **A rejected watch raises.** The protocol reports the rejection only in the field `canceled` of a reply.

The client of the package etcd3 is not used (`docs/decisions/0001-etcd-client.md`).
"""

from __future__ import annotations

import math
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import grpc
import tenacity

from agent.errors import LeaseGone, StoreRefused, StoreUnavailable
from agent.store import etcd_errors, etcd_protocol
from agent.store.access import ANONYMOUS, Credentials
from agent.store.api import Compare, Delete, KeyRange, Lease, Put, Snapshot, Store, TransactionResult, Watch
from agent.store.connections import AuthToken, EtcdConnection, EtcdConnections, Metadata
from agent.store.etcd_errors import EndpointFailed, NeverSent, OutOfTime
from agent.store.etcd_watch import EtcdWatch
from agent.store.keys import ROOT

_T = TypeVar("_T")

_PROBE_EVERY_S = 4.0
"""Rarer than renewals, because for each read the cluster's leader exchanges a message with the other members."""

_CallOptions = dict[str, Any]
"""Keyword arguments of every call: `timeout` and `metadata`."""
_Invoke = Callable[[EtcdConnection, _CallOptions], _T]


class EtcdStore(Store):
    """A client of one etcd cluster; `api.py` lists its guarantees. May be used from any thread.

    Args:
        endpoints: `host:port` of the cluster's members, tried in this order.
        credentials: TLS and the user.
        home: a prefix where the user may read and write. A read without ranges reads this key.
        attempt_timeout_s: the deadline of one attempt.
        retry_for_s: how long a call that is safe to repeat is repeated before it raises.
    """

    def __init__(
        self,
        endpoints: Sequence[str],
        credentials: Credentials = ANONYMOUS,
        *,
        home: str = ROOT,
        attempt_timeout_s: float = 1.0,
        retry_for_s: float = 3.0,
    ) -> None:
        self._pool = EtcdConnections(endpoints, credentials.tls)
        self._token = AuthToken(credentials.user)
        self._user_text = f"user {credentials.user.name!r}" if credentials.user is not None else "this client"
        self._home = home
        self._attempt_timeout_s = attempt_timeout_s
        self._retry_for_s = retry_for_s
        self._probe_at = time.monotonic() + _PROBE_EVERY_S
        self._answering: EtcdConnection | None = None
        """It has answered the last renewal."""
        self._closed = threading.Event()
        self._lock = threading.Lock()
        self._watches: weakref.WeakSet[EtcdWatch] = weakref.WeakSet()

    def read(self, ranges: Sequence[KeyRange]) -> Snapshot:
        """Read all ranges at one revision."""
        request = etcd_protocol.read_request(ranges, self._home)
        reply = self._repeat(lambda connection, options: connection.kv.Txn(request, **options))
        return Snapshot.of(reply.header.revision, etcd_protocol.items_of(reply))

    def transact(self, compares: Sequence[Compare], writes: Sequence[Put | Delete]) -> TransactionResult:
        """Apply all writes if all compares hold, else none. Not repeated once it may have been sent."""
        request = etcd_protocol.write_request(compares, writes)

        def commit(connection: EtcdConnection, options: _CallOptions) -> Any:  # noqa: ANN401 - an untyped message
            try:
                return connection.kv.Txn(request, **options)
            except grpc.RpcError as error:
                if etcd_errors.code_of(error) is grpc.StatusCode.NOT_FOUND:
                    raise LeaseGone(f"etcd: {etcd_errors.details_of(error)}") from None
                raise

        reply = self._repeat(commit, retry_on=NeverSent, for_s=self._attempt_timeout_s)
        return TransactionResult(reply.succeeded, reply.header.revision)

    def grant(self, ttl_s: float) -> Lease:
        """Grant a lease of at least `ttl_s` seconds. A repeat may leave a second lease, which expires."""
        request = etcd_protocol.grant_request(math.ceil(ttl_s))
        reply = self._repeat(lambda connection, options: connection.lease.LeaseGrant(request, **options))
        return Lease(reply.ID, float(reply.TTL))

    def refresh(self, lease_id: int) -> float:
        """Renew a lease; return its length in seconds, 0.0 if it is gone."""
        request = etcd_protocol.refresh_request(lease_id)

        def keep_alive(connection: EtcdConnection, options: _CallOptions) -> float:
            ends_at = time.monotonic() + options["timeout"]
            if self._answering is not connection:
                _wait_for_answer(connection, options)
            self._answering = None
            reply = connection.keep_alive(request, **_call_options(options["metadata"], ends_at))
            if reply is None:
                raise EndpointFailed(f"etcd at {connection.endpoint} ended the renewal of a lease without an answer")
            self._answering = connection
            return float(reply.TTL)

        self._probe()
        return self._repeat(keep_alive)

    def revoke(self, lease_id: int) -> None:
        """End a lease now and delete its keys. Does nothing if the lease is already gone."""
        request = etcd_protocol.revoke_request(lease_id)

        def end_lease(connection: EtcdConnection, options: _CallOptions) -> None:
            try:
                connection.lease.LeaseRevoke(request, **options)
            except grpc.RpcError as error:
                if etcd_errors.code_of(error) is not grpc.StatusCode.NOT_FOUND:
                    raise

        self._repeat(end_lease)

    def watch(self, ranges: Sequence[KeyRange], after_revision: int) -> Watch:
        """Subscribe to all changes of the ranges with a revision above `after_revision`."""

        def subscribe(connection: EtcdConnection, options: _CallOptions) -> EtcdWatch:
            metadata = options["metadata"]
            return EtcdWatch(
                connection,
                ranges,
                after_revision,
                metadata=metadata,
                failure=lambda error: self._failure(connection, error),
                refusal=lambda reason: self._refused_watch(connection, reason, metadata),
            )

        watch = self._attempt(subscribe, time.monotonic() + self._attempt_timeout_s)
        with self._lock:
            self._watches.add(watch)
        if self._pool.current() is not watch.connection:  # perhaps left before the watch was registered
            watch.leave()
        return watch

    def close(self) -> None:
        """Release etcd_protocol. Running watches end."""
        self._closed.set()
        for watch in self._open_watches():
            watch.cancel()
        self._pool.close()

    def _open_watches(self) -> list[EtcdWatch]:
        with self._lock:
            return list(self._watches)

    def _repeat(
        self, invoke: _Invoke[_T], *, retry_on: type[EndpointFailed] = EndpointFailed, for_s: float | None = None
    ) -> _T:
        """Attempt a call until it is answered, fails with another error than `retry_on`, or `for_s` has passed."""
        for_s = self._retry_for_s if for_s is None else for_s
        last: list[EndpointFailed] = []
        """The last attempt that had its time: its error has the cause, unlike that of one that is cut short."""

        def attempt(give_up_at: float) -> _T:
            try:
                return self._attempt(invoke, give_up_at)
            except OutOfTime:
                if last and retry_on is EndpointFailed:  # otherwise it matters whether this attempt was sent
                    raise last[0] from None
                raise
            except EndpointFailed as error:
                last[:] = [error]
                raise

        retrying = tenacity.Retrying(
            retry=tenacity.retry_if_exception_type(retry_on),
            wait=tenacity.wait_random_exponential(multiplier=0.05, max=0.5),
            stop=tenacity.stop_after_delay(for_s) | tenacity.stop_when_event_set(self._closed),
            sleep=tenacity.sleep_using_event(self._closed),
            reraise=True,
        )
        answer: _T = retrying(attempt, time.monotonic() + for_s)
        return answer

    def _attempt(self, invoke: _Invoke[_T], give_up_at: float) -> _T:
        connection = self._pool.current()
        try:
            return self._invoke(invoke, connection, min(give_up_at, time.monotonic() + self._attempt_timeout_s))
        except grpc.RpcError as error:
            failure = self._failure(connection, error)
            is_cut_short = etcd_errors.code_of(error) is grpc.StatusCode.DEADLINE_EXCEEDED
            if is_cut_short and time.monotonic() >= give_up_at and type(failure) is EndpointFailed:
                failure = OutOfTime(*failure.args)
            raise failure from None
        except ValueError:
            # gRPC raises this if the channel was closed during the call.
            if self._closed.is_set():
                raise StoreUnavailable("the connection to etcd was closed by this process") from None
            raise

    def _invoke(self, invoke: _Invoke[_T], connection: EtcdConnection, ends_at: float) -> _T:
        """Call one endpoint; call it again with a new token if etcd rejected the call because of an unknown token."""
        metadata = self._token.metadata(connection, ends_at)
        try:
            return invoke(connection, _call_options(metadata, ends_at))
        except grpc.RpcError as error:
            if not (self._token.has_user and etcd_errors.is_caller_unknown(etcd_errors.details_of(error))):
                raise
        metadata = self._token.metadata(connection, ends_at, refused=metadata)
        return invoke(connection, _call_options(metadata, ends_at))

    def _failure(self, connection: EtcdConnection, error: grpc.RpcError) -> Exception:
        """Translate a failed call into an exception of the store, and leave an endpoint that does not answer."""
        code, details = etcd_errors.code_of(error), etcd_errors.details_of(error)
        if etcd_errors.is_etcd_away(error):
            self._leave(connection)
            kind = NeverSent if etcd_errors.was_never_sent(error) else EndpointFailed
            is_late = code is grpc.StatusCode.DEADLINE_EXCEEDED
            how = " in time" if is_late else f": {details}"
            return kind(f"etcd at {connection.endpoint} did not answer{how}")
        if etcd_errors.is_permission_denied(details):
            return StoreRefused(self._permission_text(connection))
        if "user name is empty" in details:
            return StoreRefused(f"etcd at {connection.endpoint} wants a user: give --etcd_user and its password")
        if code is grpc.StatusCode.INVALID_ARGUMENT and not etcd_errors.is_caller_unknown(details):
            return ValueError(f"etcd refused the request: {details}")
        return StoreUnavailable(f"etcd at {connection.endpoint} refused ({code.name}): {details}")

    def _probe(self) -> None:
        """From time to time, read something, and leave an endpoint that cannot answer it.

        Raises:
            StoreRefused: etcd does not permit this client to read.
        """
        if time.monotonic() < self._probe_at:
            return
        request = etcd_protocol.read_request((), self._home)
        try:
            self._attempt(
                lambda connection, options: connection.kv.Txn(request, **options),
                time.monotonic() + self._attempt_timeout_s,
            )
        except StoreRefused:
            for watch in self._open_watches():  # etcd would continue to serve an open one
                watch.leave()
            raise
        except StoreUnavailable:
            pass  # a slow disk is no reason to lose a lease
        self._probe_at = time.monotonic() + _PROBE_EVERY_S

    def _leave(self, connection: EtcdConnection) -> None:
        self._pool.leave(connection)
        if self._pool.current() is not connection:
            for watch in self._open_watches():
                if watch.connection is connection:
                    watch.leave()

    def _refused_watch(self, connection: EtcdConnection, reason: str, metadata: Metadata) -> StoreUnavailable:
        """Translate the rejection of a watch.

        Some versions of etcd answer "permission denied" to a token that they have forgotten, so the next call fetches a
        new one. If the permission really is missing, the read before the next watch reports it.
        """
        if self._token.has_user and (etcd_errors.is_caller_unknown(reason) or etcd_errors.is_permission_denied(reason)):
            self._token.forget(metadata)
        elif etcd_errors.is_permission_denied(reason):
            return StoreRefused(self._permission_text(connection))
        return StoreUnavailable(f"etcd at {connection.endpoint} refused the watch: {reason}")

    def _permission_text(self, connection: EtcdConnection) -> str:
        return (
            f"etcd at {connection.endpoint} does not permit this to {self._user_text}: grant a role with readwrite "
            f"on the prefix {self._home}"
        )


def _wait_for_answer(connection: EtcdConnection, options: _CallOptions) -> None:
    """Call the health service, which costs etcd nothing, not even access to its disk. Any answer will do.

    Raises:
        grpc.RpcError: no answer came.
    """
    try:
        connection.health(b"", **options)
    except grpc.RpcError as error:
        if etcd_errors.is_etcd_away(error):
            raise


def _call_options(metadata: Metadata, ends_at: float) -> _CallOptions:
    return {"timeout": max(0.001, ends_at - time.monotonic()), "metadata": metadata}
