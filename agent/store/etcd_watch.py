"""A watch on one endpoint of etcd: one stream with one subscription per range."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import grpc

from agent.errors import Compacted, StoreUnavailable
from agent.store.api import ChangeBatch, KeyRange, Watch
from agent.store.connections import EtcdConnection, Metadata
from agent.store.etcd_protocol import changes_of, disjoint, watch_requests

# Without this, a member that has lost the other members keeps a watch open and silent. With it, the member ends it.
_REQUIRE_LEADER = (("hasleader", "true"),)


class EtcdWatch(Watch):
    """A running subscription; see `api.py`.

    Args:
        connection: the endpoint.
        ranges: the ranges to watch.
        after_revision: the last revision that the caller has.
        metadata: authenticates the caller.
        failure: returns the exception to raise for a call that failed.
        refusal: returns the exception to raise for a subscription that etcd rejected with this reason.
    """

    def __init__(
        self,
        connection: EtcdConnection,
        ranges: Sequence[KeyRange],
        after_revision: int,
        *,
        metadata: Metadata,
        failure: Callable[[grpc.RpcError], Exception],
        refusal: Callable[[str], Exception],
    ) -> None:
        self.connection = connection
        self._after_revision = after_revision
        self._is_single = len(disjoint(ranges)) == 1
        self._failure = failure
        self._refusal = refusal
        self._ended = threading.Event()
        self._is_left = False
        requests = self._requests(watch_requests(ranges, after_revision))
        self._stream = connection.watch.Watch(requests, metadata=(*metadata, *_REQUIRE_LEADER))

    def __iter__(self) -> Iterator[ChangeBatch]:
        """Yield batches until cancelled. Raises `Compacted` or `StoreUnavailable`."""
        endpoint = self.connection.endpoint
        try:
            for reply in self._stream:
                batch = self._batch(reply)
                if self._ended.is_set():
                    return
                if batch is not None:
                    yield batch
            if not self._ended.is_set():
                raise StoreUnavailable(f"etcd at {endpoint} ended the watch")
        except grpc.RpcError as error:
            if self._is_left and not self._ended.is_set():
                raise StoreUnavailable(f"the watch left etcd at {endpoint}, because a call to it failed") from None
            if not self._ended.is_set():
                raise self._failure(error) from None
        finally:
            self.cancel()

    def cancel(self) -> None:
        """End the iteration, from any thread."""
        self._ended.set()
        self._stream.cancel()

    def leave(self) -> None:
        """Make the iteration raise `StoreUnavailable`, from any thread."""
        self._is_left = True
        self._stream.cancel()

    def _requests(self, requests: Sequence[Any]) -> Iterator[Any]:
        """Yield the requests, then keep the sending half of the stream open: etcd may end a half-closed stream."""
        yield from requests
        self._ended.wait()

    def _batch(self, reply: Any) -> ChangeBatch | None:  # noqa: ANN401 - a message without a type
        if reply.canceled:
            raise self._cancelled(reply)
        changes = tuple(changes_of(reply, self._after_revision))
        if changes:
            return ChangeBatch(reply.events[-1].kv.mod_revision, changes)
        # A progress notice is valid for its own range only.
        is_progress = self._is_single and not reply.created and reply.header.revision > self._after_revision
        return ChangeBatch(reply.header.revision, ()) if is_progress else None

    def _cancelled(self, reply: Any) -> Exception:  # noqa: ANN401 - same
        if reply.compact_revision > 0:
            return Compacted(
                f"etcd has compacted the history before revision {reply.compact_revision}: read everything again"
            )
        return self._refusal(reply.cancel_reason or "no reason given")
