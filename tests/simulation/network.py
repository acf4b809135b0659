"""The simulated network: who reaches whom, by direction, and the links between agents over it.

A link shows what `agent/peers` would show: a dead process closes its connections at once and is LOST in a third of a
second; one that is stopped, cut off, or whose host is gone without a word is SILENT after three heartbeats; one that
said goodbye is neither.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from simulation.etcd import ETCD

from agent.core import effects as fx
from agent.core import events as ev
from agent.core.model import LinkState, Member
from agent.core.records import Identity

if TYPE_CHECKING:
    from simulation.agent import Agent
    from simulation.cluster import Cluster

_DELAYS = {LinkState.UP: (0.01, 0.2), LinkState.LOST: (0.05, 0.35), LinkState.SILENT: (1.5, 2.5)}
"""How long it takes to notice."""


@dataclass
class _Link:
    """One agent's link to another."""

    peer: Member
    shown: LinkState | None = None
    coming: LinkState | None = None
    has_met: bool = False
    broken_until: float = 0.0


class Network:
    """Which ways are open, and all links."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._cuts: dict[tuple[int, int], float] = {}
        """Ways, and since when."""
        self._muted: set[tuple[int, int]] = set()
        self._links: dict[int, dict[Identity, _Link]] = {}
        self._identities: dict[int, Identity] = {}
        self._orders: dict[int, fx.HoldLinks] = {}
        """Not taken up yet."""
        self.slow: dict[int, float] = {}
        """After how many seconds these agents' orders are taken up."""
        self.are_clocks_compared = True
        """Agents compare their wall clocks as a link comes up."""

    def is_open(self, source: int, target: int) -> bool:
        """Whether messages get through in this direction."""
        return not self._cuts or (source, target) not in self._cuts

    def cut_for_s(self, source: int, target: int) -> float:
        """For how long nothing has got through in this direction."""
        return self._cluster.now - self._cuts[source, target]

    def is_open_both(self, one: int, other: int) -> bool:
        return self.is_open(one, other) and self.is_open(other, one)

    def cut(self, source: int, target: int) -> None:
        """Nothing gets through in this direction any more."""
        self._cuts.setdefault((source, target), self._cluster.now)
        self.update()

    def cut_off(self, who: Agent, *, from_etcd: bool = True) -> None:
        """Nothing gets to this agent, or from it."""
        others = [each.serial for each in self._cluster.agents if each is not who]
        for other in [*others, *([ETCD] if from_etcd else [])]:
            for way in ((who.serial, other), (other, who.serial)):
                self._cuts.setdefault(way, self._cluster.now)
        self.update()

    def mute(self, source: int, target: int) -> None:
        """This agent's link to the other gets no answer any more; all else gets through."""
        self._muted.add((source, target))
        self.update()

    def heal(self) -> None:
        self._cuts.clear()
        self._muted.clear()
        self.update()

    def reset(self, one: Agent, other: Agent) -> None:
        """The link between two living agents breaks, and takes its time to come back."""
        for agent, peer in ((one, other), (other, one)):
            for link in self._links.get(agent.serial, {}).values():
                if link.peer.link == peer.serial:
                    link.broken_until = self._cluster.now + 1.0
        self.update()
        self._cluster.after(1.0, self.update)

    def hold(self, agent: Agent, effect: fx.HoldLinks) -> None:
        """Hold these links and no others: soon, and of orders that follow each other quickly only the last."""
        is_due = agent.serial in self._orders
        self._orders[agent.serial] = effect
        if not is_due:
            slow = self._cluster.random.random() < 0.1
            delay_s = self.slow.get(agent.serial, self._cluster.random.uniform(0.0, 0.5 if slow else 0.01))
            agent.later(delay_s, lambda: self._take_up(agent))

    def _take_up(self, agent: Agent) -> None:
        effect = self._orders.pop(agent.serial)
        old = self._links.get(agent.serial, {})
        if self._identities.get(agent.serial) != effect.me:
            old = {}
        self._identities[agent.serial] = effect.me
        self._links[agent.serial] = {peer.identity: old.get(peer.identity) or _Link(peer) for peer in effect.peers}
        for link in self._links[agent.serial].values():
            if link.shown is not None and self._cluster.by_serial[link.peer.link].exit is None:
                agent.post(ev.LinkChanged(link.peer.identity, link.shown, f"it is {link.shown.value}"))
        self.update()

    def update(self) -> None:
        """Look at all links: something has changed."""
        for agent in self._cluster.agents:
            for link in self._links.get(agent.serial, {}).values():
                self._look(agent, link)

    def _look(self, agent: Agent, link: _Link) -> None:
        state = self._state(agent, link)
        if state is None or state in (link.shown, link.coming):
            return
        link.coming = state
        delay_s = self._cluster.random.uniform(*_DELAYS[state])
        self._cluster.after(delay_s, lambda: self._show(agent, link, state))

    def _show(self, agent: Agent, link: _Link, state: LinkState) -> None:
        if link.coming is state:
            link.coming = None
        if self._links.get(agent.serial, {}).get(link.peer.identity) is not link:
            return
        if self._state(agent, link) is not state:
            self._look(agent, link)
            return
        if state is link.shown:
            return
        link.shown = state
        link.has_met |= state is LinkState.UP
        agent.post(ev.LinkChanged(link.peer.identity, state, f"it is {state.value}"))
        if state is LinkState.UP and self.are_clocks_compared:
            error_s = self._cluster.random.uniform(0.001, 0.01)
            wrong_s = self._cluster.random.uniform(-error_s, error_s)
            ahead_s = self._cluster.by_serial[link.peer.link].ahead_s - agent.ahead_s
            agent.post(ev.ClockCompared(link.peer.identity, ahead_s + wrong_s, error_s))

    def _state(self, agent: Agent, link: _Link) -> LinkState | None:
        """What the link should show; None: no more than it did."""
        peer = self._cluster.by_serial[link.peer.link]
        if peer.exit is not None:
            return None
        is_muted = (agent.serial, peer.serial) in self._muted
        if is_muted or not self.is_open_both(agent.serial, peer.serial) or peer.is_host_dead or peer.is_paused:
            return LinkState.SILENT
        is_another = self._identities.get(peer.serial) != link.peer.identity
        if peer.is_dead or is_another or link.broken_until > self._cluster.now:
            return LinkState.LOST if link.has_met else LinkState.SILENT
        return LinkState.UP
