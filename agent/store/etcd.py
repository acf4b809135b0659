"""The store over etcd: deadlines, rotation between endpoints, retries where they are safe, watches that fail loudly.

- **A deadline on every call.** A frozen etcd accepts connections and answers nothing.
- **Rotation.** An endpoint that is unreachable or late is left for the next one. Its watches are ended, so that they
  follow: a quiet one would notice by itself only after seconds.
- **Retries only where a repeat is harmless** (read, grant, refresh, revoke). A transaction is sent a second time only
  if nothing of the first has left this process, or if etcd refused it for want of a token it knows; after anything
  else it may have landed.
- **Who does not hear does not renew.** Where answers get lost and requests do not, etcd would keep the lease of a node
  that knows nothing any more. So a renewal follows an answer.
- **Who learns nothing looks elsewhere.** A member whose disk is stuck answers, renews, and keeps a watch open and
  silent. So now and then something is read before a renewal, and a member that cannot say what holds now is left.
- **A refused watch raises.** In the protocol it is silent unless `canceled` is read.

etcd3's own client is not used (`docs/decisions/0001-etcd-client.md`).
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
from agent.store import connections, etcd_errors
from agent.store.access import ANONYMOUS, Credentials
from agent.store.api import Compare, Delete, KeyRange, Lease, Put, Snapshot, Store, TransactionResult, Watch
from agent.store.auth_token import AuthToken, Metadata
from agent.store.etcd_errors import EndpointFailed, NeverSent
from agent.store.etcd_watch import EtcdWatch
from agent.store.keys import ROOT

_T = TypeVar("_T")

_LOOK_EVERY_S = 4.0
"""Rarer than renewals, for that costs the cluster's leader a word with the others."""

_How = dict[str, Any]
"""What every call is given: `timeout` and `metadata`."""
_Invoke = Callable[[connections.EtcdConnection, _How], _T]


class EtcdStore(Store):
    """A client of one etcd cluster; see `api.py` for what it promises. May be used from any thread.

    Args:
        endpoints: `host:port` of the cluster's members, tried in this order.
        credentials: how to connect, and as whom.
        home: a prefix where the user may read and write: a read of no range is one of this key.
        attempt_timeout_s: how long one attempt may take.
        retry_for_s: how long a call that is safe to repeat is repeated; it raises once that time is over.
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
        self._pool = connections.EtcdConnections(endpoints, credentials.tls)
        self._session = AuthToken(credentials.user)
        self._who = f"user {credentials.user.name!r}" if credentials.user is not None else "this client"
        self._home = home
        self._attempt_timeout_s = attempt_timeout_s
        self._retry_for_s = retry_for_s
        self._look_at = time.monotonic() + _LOOK_EVERY_S
        self._closed = threading.Event()
        self._lock = threading.Lock()
        self._watches: weakref.WeakSet[EtcdWatch] = weakref.WeakSet()

    def read(self, ranges: Sequence[KeyRange]) -> Snapshot:
        """Read all ranges at one revision."""
        request = connections.read_request(ranges, self._home)
        reply = self._repeat(lambda link, how: link.kv.Txn(request, **how))
        return Snapshot(reply.header.revision, connections.items_of(reply))

    def transact(self, compares: Sequence[Compare], writes: Sequence[Put | Delete]) -> TransactionResult:
        """Apply all writes if all compares hold, else none. Never repeated once it may have been sent."""
        request = connections.write_request(compares, writes)

        def commit(link: connections.EtcdConnection, how: _How) -> Any:  # noqa: ANN401 - a message of etcd's
            try:
                return link.kv.Txn(request, **how)
            except grpc.RpcError as error:
                if etcd_errors.code_of(error) is grpc.StatusCode.NOT_FOUND:
                    raise LeaseGone(f"etcd: {etcd_errors.details_of(error)}") from None
                raise

        reply = self._repeat(commit, after=NeverSent, for_s=self._attempt_timeout_s)
        return TransactionResult(reply.succeeded, reply.header.revision)

    def grant(self, ttl_s: float) -> Lease:
        """Grant a lease of at least `ttl_s` seconds. A repeat may leave a second lease, which just runs out."""
        request = connections.grant_request(math.ceil(ttl_s))
        reply = self._repeat(lambda link, how: link.lease.LeaseGrant(request, **how))
        return Lease(reply.ID, float(reply.TTL))

    def refresh(self, lease_id: int) -> float:
        """Renew a lease; return its length in seconds, 0.0 if it is gone."""
        request = connections.refresh_request(lease_id)

        def keep_alive(link: connections.EtcdConnection, how: _How) -> float:
            ends_at = time.monotonic() + how["timeout"]
            _wait_for_answer(link, how)
            reply = link.keep_alive(request, **_how(how["metadata"], ends_at))
            if reply is None:
                raise EndpointFailed(f"etcd at {link.endpoint} ended a lease's renewal without an answer")
            return float(reply.TTL)

        self._look()
        return self._repeat(keep_alive)

    def revoke(self, lease_id: int) -> None:
        """End a lease now and delete its keys. A lease that is already gone is fine."""
        request = connections.revoke_request(lease_id)

        def end_lease(link: connections.EtcdConnection, how: _How) -> None:
            try:
                link.lease.LeaseRevoke(request, **how)
            except grpc.RpcError as error:
                if etcd_errors.code_of(error) is not grpc.StatusCode.NOT_FOUND:
                    raise

        self._repeat(end_lease)

    def watch(self, ranges: Sequence[KeyRange], after_revision: int) -> Watch:
        """Subscribe to all changes of the ranges with a revision above `after_revision`."""

        def subscribe(link: connections.EtcdConnection, how: _How) -> EtcdWatch:
            metadata = how["metadata"]
            return EtcdWatch(
                link,
                ranges,
                after_revision,
                metadata=metadata,
                failure=lambda error: self._failure(link, error),
                refusal=lambda reason: self._refused_watch(link, reason, metadata),
            )

        watch = self._attempt(subscribe, time.monotonic() + self._attempt_timeout_s)
        with self._lock:
            self._watches.add(watch)
        if self._pool.current() is not watch.link:  # left meanwhile, perhaps before it was among them
            watch.leave()
        return watch

    def close(self) -> None:
        """Release connections. Running watches end."""
        self._closed.set()
        for watch in self._all_watches():
            watch.cancel()
        self._pool.close()

    def _all_watches(self) -> list[EtcdWatch]:
        with self._lock:
            return list(self._watches)

    def _repeat(
        self, invoke: _Invoke[_T], *, after: type[EndpointFailed] = EndpointFailed, for_s: float | None = None
    ) -> _T:
        """Attempt until it is answered, fails in another way than `after`, or the time for it is over."""
        for_s = self._retry_for_s if for_s is None else for_s
        retrying = tenacity.Retrying(
            retry=tenacity.retry_if_exception_type(after),
            wait=tenacity.wait_random_exponential(multiplier=0.05, max=0.5),
            stop=tenacity.stop_after_delay(for_s) | tenacity.stop_when_event_set(self._closed),
            sleep=tenacity.sleep_using_event(self._closed),
            reraise=True,
        )
        answer: _T = retrying(self._attempt, invoke, time.monotonic() + for_s)
        return answer

    def _attempt(self, invoke: _Invoke[_T], give_up_at: float) -> _T:
        link = self._pool.current()
        try:
            return self._invoke(invoke, link, min(give_up_at, time.monotonic() + self._attempt_timeout_s))
        except grpc.RpcError as error:
            raise self._failure(link, error) from None
        except ValueError:
            # gRPC's way to say that the channel was closed under the call.
            if self._closed.is_set():
                raise StoreUnavailable("the connection to etcd was closed by this process") from None
            raise

    def _invoke(self, invoke: _Invoke[_T], link: connections.EtcdConnection, ends_at: float) -> _T:
        """Call one endpoint; once more with another token if etcd does not know this one, and so has done nothing."""
        metadata = self._session.metadata(link, ends_at)
        try:
            return invoke(link, _how(metadata, ends_at))
        except grpc.RpcError as error:
            if not (self._session.has_user and etcd_errors.is_caller_unknown(etcd_errors.details_of(error))):
                raise
        metadata = self._session.metadata(link, ends_at, refused=metadata)
        return invoke(link, _how(metadata, ends_at))

    def _failure(self, link: connections.EtcdConnection, error: grpc.RpcError) -> Exception:
        """Say what went wrong in the store's own words, and leave an endpoint that does not answer."""
        code, details = etcd_errors.code_of(error), etcd_errors.details_of(error)
        if etcd_errors.is_etcd_away(error):
            self._leave(link)
            kind = NeverSent if etcd_errors.was_never_sent(error) else EndpointFailed
            return kind(f"etcd at {link.endpoint} did not answer: {details}")
        if etcd_errors.is_permission_denied(details):
            return StoreRefused(self._forbidden(link))
        if "user name is empty" in details:
            return StoreRefused(f"etcd at {link.endpoint} wants to know who asks: give --etcd_user and its password")
        if code is grpc.StatusCode.INVALID_ARGUMENT and not etcd_errors.is_caller_unknown(details):
            return ValueError(f"etcd refused the request: {details}")
        return StoreUnavailable(f"etcd at {link.endpoint} refused ({code.name}): {details}")

    def _look(self) -> None:
        """If it is time, leave an endpoint that cannot say what holds now.

        Raises:
            StoreRefused: etcd says that this client may not know.
        """
        if time.monotonic() < self._look_at:
            return
        request = connections.read_request((), self._home)
        try:
            self._attempt(lambda link, how: link.kv.Txn(request, **how), time.monotonic() + self._attempt_timeout_s)
        except StoreRefused:
            for watch in self._all_watches():  # an open one would be served on
                watch.leave()
            raise
        except StoreUnavailable:
            pass  # a slow disk is no reason to lose a lease
        self._look_at = time.monotonic() + _LOOK_EVERY_S

    def _leave(self, link: connections.EtcdConnection) -> None:
        self._pool.leave(link)
        if self._pool.current() is not link:
            for watch in self._all_watches():
                if watch.link is link:
                    watch.leave()

    def _refused_watch(self, link: connections.EtcdConnection, reason: str, metadata: Metadata) -> StoreUnavailable:
        """Some versions say "permission denied" of a token that they forgot: so the next call brings another one.

        Should it be true all the same, the read before the next watch is told so.
        """
        if self._session.has_user and (
            etcd_errors.is_caller_unknown(reason) or etcd_errors.is_permission_denied(reason)
        ):
            self._session.forget(metadata)
        elif etcd_errors.is_permission_denied(reason):
            return StoreRefused(self._forbidden(link))
        return StoreUnavailable(f"etcd at {link.endpoint} refused the watch: {reason}")

    def _forbidden(self, link: connections.EtcdConnection) -> str:
        return (
            f"etcd at {link.endpoint} does not permit this to {self._who}: grant a role with readwrite on the prefix "
            f"{self._home}"
        )


def _wait_for_answer(link: connections.EtcdConnection, how: _How) -> None:
    """Ask what costs etcd nothing, not even a look at its disk. Whatever it says: it is heard.

    Raises:
        grpc.RpcError: it was not.
    """
    try:
        link.health(b"", **how)
    except grpc.RpcError as error:
        if etcd_errors.is_etcd_away(error):
            raise


def _how(metadata: Metadata, ends_at: float) -> _How:
    return {"timeout": max(0.001, ends_at - time.monotonic()), "metadata": metadata}
