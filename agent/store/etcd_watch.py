"""A watch over one endpoint of etcd: one stream with one subscription per range."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import grpc

from agent.errors import Compacted, StoreUnavailable
from agent.store import connections
from agent.store.api import ChangeBatch, KeyRange, Watch
from agent.store.auth_token import Metadata

# A member that has lost the others would keep a watch open and silent. With this it ends it.
_REQUIRE_LEADER = (("hasleader", "true"),)


class EtcdWatch(Watch):
    """See `api.py`.

    Args:
        link: the endpoint.
        ranges: what to watch.
        after_revision: the last revision that is known.
        metadata: says who asks.
        failure: what to raise for a call that failed.
        refusal: what to raise for a subscription that etcd refused, for this reason.
    """

    def __init__(
        self,
        link: connections.EtcdConnection,
        ranges: Sequence[KeyRange],
        after_revision: int,
        *,
        metadata: Metadata,
        failure: Callable[[grpc.RpcError], Exception],
        refusal: Callable[[str], Exception],
    ) -> None:
        self.link = link
        self._after_revision = after_revision
        self._is_single = len(connections.disjoint(ranges)) == 1
        self._failure = failure
        self._refusal = refusal
        self._ended = threading.Event()
        self._is_left = False
        requests = self._requests(connections.watch_requests(ranges, after_revision))
        self._stream = link.watch.Watch(requests, metadata=(*metadata, *_REQUIRE_LEADER))

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
                raise StoreUnavailable(f"etcd at {self.link.endpoint} ended the watch")
        except grpc.RpcError as error:
            if self._is_left and not self._ended.is_set():
                raise StoreUnavailable(f"etcd at {self.link.endpoint} was left, since a call to it failed") from None
            if not self._ended.is_set():
                raise self._failure(error) from None
        finally:
            self.cancel()

    def cancel(self) -> None:
        """End the iteration, from any thread."""
        self._ended.set()
        self._stream.cancel()

    def leave(self) -> None:
        """Have the iteration raise `StoreUnavailable`, from any thread."""
        self._is_left = True
        self._stream.cancel()

    def _requests(self, requests: Sequence[Any]) -> Iterator[Any]:
        """Keep the sending half of the stream open: its end would be an invitation to end the other half."""
        yield from requests
        self._ended.wait()

    def _batch(self, reply: Any) -> ChangeBatch | None:  # noqa: ANN401 - a message without a type
        if reply.canceled:
            raise self._canceled(reply)
        changes = tuple(connections.changes_of(reply, self._after_revision))
        if changes:
            return ChangeBatch(reply.events[-1].kv.mod_revision, changes)
        # A progress notice speaks for its own range only.
        is_progress = self._is_single and not reply.created and reply.header.revision > self._after_revision
        return ChangeBatch(reply.header.revision, ()) if is_progress else None

    def _canceled(self, reply: Any) -> Exception:  # noqa: ANN401 - same
        if reply.compact_revision > 0:
            return Compacted(
                f"etcd has forgotten what came before revision {reply.compact_revision}: read it all again"
            )
        return self._refusal(reply.cancel_reason or "no reason given")
