"""Keeps a lease alive on a thread of its own, as long as the agent's loop is alive.

A lease means "this agent works". Before each renewal the thread therefore checks that the loop still completes turns:
an agent that hangs must lose its membership although this thread still runs. A renewal that falls due while the loop
is late is sent as soon as the loop completes a turn, because being late by less than the lease does no harm. The time
until which the lease can be trusted without an answer from etcd is counted from the *sending* of the last renewal that
was answered, on the clock that also runs while the machine is suspended. An unexpected error costs one renewal, never
the thread.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from agent import clock
from agent.errors import StoreUnavailable
from agent.observe.log import InternalErrors
from agent.store.api import Lease, Store

_RENEWALS_PER_TTL = 4
_RETRY_S = 0.25


class LeaseKeeper:
    """Renews one lease at a time. All methods may be called from any thread.

    Args:
        store: the store that granted the lease. Its `refresh` has a deadline, so a frozen etcd cannot hang the keeper.
        is_loop_alive: whether the agent's loop completed a turn recently; the lease is renewed only while it is. Call
            `loop_turned` when this becomes true again.
        on_lost: called on the keeper's thread, once for each lease that turns out to be gone.
        on_renewed: called after each answered renewal, with the value of `fresh_until`, on the keeper's thread or on
            that of the caller of `hold`.
    """

    def __init__(
        self,
        store: Store,
        is_loop_alive: Callable[[], bool],
        on_lost: Callable[[int], None],
        on_renewed: Callable[[float], None] = lambda _until: None,
    ) -> None:
        self._store = store
        self._is_loop_alive = is_loop_alive
        self._on_lost = on_lost
        self._on_renewed = on_renewed
        lock = threading.Lock()
        self._lease_changed = threading.Condition(lock)
        self._may_renew = threading.Condition(lock)
        self._lease: Lease | None = None
        self._renew_at = 0.0
        """When to renew it next, on the monotonic clock, which conditions wait by."""
        self._fresh_until: float | None = None
        self._latency_s: float | None = None
        self._is_closed = False
        self._mishaps = InternalErrors("the keeper of the lease")
        self._thread = threading.Thread(target=self._run, name="lease-keeper", daemon=True)
        self._thread.start()

    def hold(self, lease: Lease, sent_at: float | None = None) -> None:
        """Keep this lease alive instead of any other.

        Args:
            lease: as it was granted or renewed.
            sent_at: when that was requested, on the boot-time clock. It then counts as a renewal. None: not known, so
                the lease is renewed at once.
        """
        if sent_at is None:
            self._replace(lease)
        else:
            self._replace(lease, sent_at + lease.ttl_s / _RENEWALS_PER_TTL - clock.now())
            self._on_answer(lease, sent_at, lease.ttl_s)

    def drop(self) -> None:
        """Stop renewing. The lease lives on until it expires or is revoked."""
        self._replace(None)

    def loop_turned(self) -> None:
        """Send the renewal that waits for the agent's loop, if there is one. Does not block."""
        with self._may_renew:
            self._may_renew.notify_all()

    def fresh_until(self) -> float | None:
        """Return the time, on the boot-time clock, until which the lease surely lives; None before the first answer."""
        with self._lease_changed:
            return self._fresh_until

    def latency_s(self) -> float | None:
        """Return how long the store took to answer the last renewal of this lease; None before the first answer."""
        with self._lease_changed:
            return self._latency_s

    def has_run_out(self) -> bool:
        """Whether the lease's time has passed without an answered renewal."""
        until = self.fresh_until()
        return until is not None and clock.now() >= until

    def close(self) -> None:
        """Drop the lease and end the thread."""
        with self._lease_changed:
            self._is_closed = True
        self.drop()
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def _replace(self, lease: Lease | None, pause_s: float = 0.0) -> None:
        with self._lease_changed:
            self._lease, self._renew_at = lease, time.monotonic() + pause_s
            self._fresh_until = self._latency_s = None
            self._lease_changed.notify_all()
            self._may_renew.notify_all()

    def _run(self) -> None:
        while (lease := self._wait_for_lease()) is not None:
            try:
                pause_s = self._renew(lease) if self._wait_for_loop(lease) else 0.0
            except Exception as error:  # noqa: BLE001 - without this thread the agent would lose its membership
                self._mishaps.report(error)
                pause_s = _RETRY_S
            self._renew_after(lease, pause_s)

    def _wait_for_lease(self) -> Lease | None:
        """Return the lease to renew now, once there is one that is due; None once closed."""
        with self._lease_changed:
            while not self._is_closed:
                wait_s = self._renew_at - time.monotonic() if self._lease is not None else None
                if wait_s is not None and wait_s <= 0.0:
                    return self._lease
                self._lease_changed.wait(wait_s)
            return None

    def _wait_for_loop(self, lease: Lease) -> bool:
        """Wait until the loop is alive; return False if this lease has been replaced or dropped."""
        with self._may_renew:
            self._may_renew.wait_for(lambda: self._lease is not lease or self._is_loop_alive())
            return self._lease is lease

    def _renew_after(self, lease: Lease, pause_s: float) -> None:
        with self._lease_changed:
            if self._lease is lease:
                self._renew_at = time.monotonic() + pause_s

    def _renew(self, lease: Lease) -> float:
        """Renew once; return the time to wait before the next renewal."""
        pause_s = lease.ttl_s / _RENEWALS_PER_TTL
        sent_at = clock.now()
        try:
            ttl_s = self._store.refresh(lease.lease_id)
        except StoreUnavailable:
            return min(pause_s, _RETRY_S)
        self._on_answer(lease, sent_at, ttl_s)
        return pause_s

    def _on_answer(self, lease: Lease, sent_at: float, ttl_s: float) -> None:
        until = sent_at + ttl_s if ttl_s > 0.0 else None
        with self._lease_changed:
            if self._lease is not lease:
                return  # dropped or replaced while the renewal was in flight
            self._fresh_until, self._latency_s = until, clock.now() - sent_at
            if until is None:
                self._lease = None
        if until is None:
            self._on_lost(lease.lease_id)
        else:
            self._on_renewed(until)
