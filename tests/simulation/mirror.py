"""What a simulated agent sees of etcd, as `agent/store/mirror.py` would show it.

Everything is read, then each range brings its changes: late, some of them later than others, and each range on its
own. Now and then a stream breaks, and everything is read again; or a view is shown twice.
"""

from __future__ import annotations

import bisect
from typing import TYPE_CHECKING

from simulation.etcd import ETCD, KEYS

from agent.core import effects as fx
from agent.core import events as ev
from agent.errors import StoreUnavailable
from agent.store.api import ChangeBatch, Delete, KeyChange, KeyRange, Put
from agent.store.keys import view_of
from agent.store.mirror import RangeItems

if TYPE_CHECKING:
    from collections.abc import Sequence

    from simulation.agent import Agent


class Mirror:
    """Shows an agent what is in etcd, late."""

    def __init__(self, agent: Agent) -> None:
        self._agent = agent
        self._cluster = agent.cluster
        self._ranges: tuple[KeyRange, ...] = ()
        self._is_whole = False
        self._serial = 0
        """Of the last reading; what belongs to an older one is void."""
        self._is_watching = False
        self._is_due = False
        self._is_out = False
        self._wipes = 0
        self._positions: list[int] = []
        self._items = RangeItems(())
        self._revision = 0
        self.hidden: set[str] = set()
        """Keys that are watched, and whose changes do not come for now."""

    def follow(self, watch: fx.WatchKeys) -> None:
        self._ranges = KEYS.whole() if watch.is_whole else KEYS.followed(watch.node_id)
        self._is_whole = watch.is_whole
        self._items = RangeItems(self._ranges)
        self.refresh()

    def catch_up(self) -> int | None:
        """Never at once, so that other things happen in between."""
        return None

    def refresh(self) -> None:
        """Read everything again."""
        self._read_within(0.005)

    def show(self, writes: Sequence[Put | Delete], revision: int) -> None:
        """Show what this agent has just written, as `Mirror.show` does."""
        if self._is_watching and len(self._ranges) > 1 and self._revision < revision:
            self._items.show(writes, revision)
            self._deliver()

    def _read_within(self, delay_s: float) -> None:
        self._serial += 1
        serial, self._is_watching = self._serial, False
        self._agent.later(self._cluster.random.uniform(0.0, delay_s), lambda: self._read(serial))

    def _read(self, serial: int) -> None:
        if serial != self._serial:
            return
        etcd = self._cluster.etcd
        try:
            snapshot = self._agent.client.read(self._ranges)
        except StoreUnavailable:
            self._fail()
            return
        self._is_out = False
        self._is_watching, self._is_due = True, False
        self._wipes = etcd.data.wipes
        self._positions = [snapshot.revision] * len(self._ranges)
        self._items.reset(snapshot)
        self._revision = snapshot.revision
        self._deliver()
        self._beat(serial)

    def _fail(self) -> None:
        if not self._is_out:
            self._is_out = True
            self._agent.post(ev.StoreLost())
        self._read_within(1.0)

    def on_change(self) -> None:
        """Something was written: it will be here soon."""
        if self._is_watching and not self._is_due:
            self._is_due = True
            serial = self._serial
            slow = self._cluster.random.random() < 0.1
            delay_s = self._cluster.random.uniform(0.0, 0.5 if slow else 0.01)
            self._agent.later(delay_s, lambda: self._poll(serial))

    def _beat(self, serial: int) -> None:
        """Now and then: is the connection still there?"""
        if serial != self._serial:
            return
        if not self._cluster.can_talk(self._agent):
            self._fail()
            return
        self._agent.later(self._cluster.random.uniform(1.0, 4.0), lambda: self._beat(serial))
        self.on_change()

    def _poll(self, serial: int) -> None:
        if serial != self._serial:
            return
        self._is_due = False
        cluster, data = self._cluster, self._cluster.etcd.data
        if cluster.etcd.is_frozen or not cluster.network.is_open(ETCD, self._agent.serial):
            return  # nothing arrives; the next beat notices
        if self._wipes != data.wipes:
            self._fail()
            return
        if min(self._positions) + 1 < data.compacted or cluster.random.random() < cluster.drop:
            self.refresh()
            return
        is_new = [self._advance(index) for index in range(len(self._ranges))]
        if any(is_new):
            self._deliver()
        if min(self._positions) < data.revision and not self.hidden:
            self.on_change()

    def _advance(self, index: int) -> bool:
        """One range moves on, to now or not quite; return whether it shows anything new."""
        data, wanted, seen = self._cluster.etcd.data, self._ranges[index], self._positions[index]
        until = data.revision
        if until == seen or wanted.key in self.hidden:
            return False
        if self._cluster.random.random() < 0.2:
            until = self._cluster.random.randint(seen, until)
        first = bisect.bisect_right(data.history, seen, key=_revision)
        changes = list[KeyChange]()
        for batch in data.history[first:]:
            if batch.revision > until:
                break
            changes += [change for change in batch.changes if wanted.contains(change.key)]
        self._positions[index] = until
        if len(self._ranges) == 1:
            self._revision = until
        return self._items.apply(changes)

    def _deliver(self) -> None:
        view = view_of(self._items.snapshot(self._revision), KEYS, is_whole=self._is_whole)
        self._agent.post(ev.ViewChanged(view))
        if self._cluster.random.random() < self._cluster.drop:
            self._agent.post(ev.ViewChanged(view))  # repeated


def _revision(batch: ChangeBatch) -> int:
    return batch.revision
