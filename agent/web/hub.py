"""The present state of the job, and the browsers that follow it.

Records come from a mirror of etcd whenever they change. Agents are asked for the state of their ranks once a second:
all agents while a browser follows, else only the agent of this node, for the curves that the next visitor sees. Once a
browser has followed, also the agent of rank 0, whose metrics are drawn.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cached_property

import msgspec

from agent.core.incident import Incident
from agent.core.model import Node
from agent.core.view import ClusterView
from agent.errors import RecordError, StoreUnavailable
from agent.links.queries import LiveRanks
from agent.observe.log import log
from agent.observe.report.run_history import RunHistory
from agent.store.api import Snapshot, Store
from agent.store.keys import JobKeys, Views, decode
from agent.store.mirror import Mirror
from agent.web.curves import Curves, Point
from agent.web.page_data import Past, Present, past, present
from agent.web.rank_poller import RankPoller, StepRate

_POLL_EVERY_S = 1.0
_ANSWER_WITHIN_S = 0.5
_MIN_BETWEEN_UPDATES_S = 0.1
"""Changes that come together are sent as one update."""
_MAX_SAMPLES = 900
_LAST_READ_WITHIN_S = 1.0

Sample = tuple[float, float, float]
"""Wall clock in seconds since 1970, steps per second, goodput."""


class JobNow(msgspec.Struct, frozen=True, kw_only=True):
    """The state of the ranks at this moment."""

    nodes: dict[str, LiveRanks]
    """Nodes that have answered, by node id."""
    sample: Sample
    points: dict[str, Point]
    """New points of the curves of metrics, by name."""


@dataclass(frozen=True)
class KnownJobState:
    """The job's records."""

    job_id: str
    view: ClusterView
    incidents: tuple[Incident, ...]
    """Incidents of the current run, in the order of their groups."""

    @property
    def last_group(self) -> int:
        """Number of the newest group with an incident. 0: there is none."""
        return self.incidents[-1].group if self.incidents else 0

    def history(self, now: float) -> RunHistory:
        """Return the run's history at `now`, in seconds since 1970."""
        return RunHistory.of(self.job_id, self.view, self.incidents, now)

    @cached_property
    def secret(self) -> str:
        """The job's secret."""
        assert self.view.spec is not None  # noqa: S101 - only jobs with a spec are known
        return self.view.spec.value.secret


class JobRecords:
    """Decodes successive snapshots, and reuses what the previous snapshot contained as well. For one thread."""

    def __init__(self, keys: JobKeys) -> None:
        self._keys = keys
        self._views = Views(keys, is_whole=True)
        self._incidents: dict[str, tuple[int, Incident]] = {}

    def of(self, snapshot: Snapshot) -> KnownJobState | None:
        """Decode a snapshot. None: there is no such job (yet). Raises `RecordError`."""
        view = self._views.of(snapshot)
        before, self._incidents = self._incidents, {}
        for item in snapshot.items:
            if item.key.startswith(self._keys.incidents):
                decoded = before.get(item.key)
                if decoded is None or decoded[0] != item.mod_revision:
                    decoded = item.mod_revision, decode(item, Incident).value
                self._incidents[item.key] = decoded
        if view.spec is None:
            return None
        run = view.spec.value.run
        incidents = (incident for _, incident in self._incidents.values() if incident.run == run)
        return KnownJobState(self._keys.job_id, view, tuple(sorted(incidents, key=lambda each: each.group)))


class Subscriber:
    """A queue of updates for one browser. It holds one update of each kind, so a slow browser costs no memory."""

    def __init__(self) -> None:
        self._pending: dict[str, bytes] = {}
        self._arrived = asyncio.Event()

    def put(self, kind: str, data: bytes) -> None:
        """Add an update; it replaces a pending one of the same kind."""
        self._pending[kind] = data
        self._arrived.set()

    async def next(self) -> list[tuple[str, bytes]]:
        """Wait for updates, and take all that are pending."""
        await self._arrived.wait()
        self._arrived.clear()
        updates, self._pending = list(self._pending.items()), {}
        return updates


class Hub:
    """Follows the job and publishes its state. Methods are called on the event loop's thread.

    Args:
        store: the job's etcd.
        keys: the job's keys.
        is_own_node: whether a node record is that of the agent that serves the page.
        on_change: called with the records whenever they have changed.
    """

    def __init__(
        self,
        store: Store,
        keys: JobKeys,
        is_own_node: Callable[[Node], bool],
        on_change: Callable[[KnownJobState], None],
    ) -> None:
        self.store = store
        self.keys = keys
        self.known: KnownJobState | None = None
        """None: nothing has been read yet, or there is no such job."""
        self.last_node: Node | None = None
        """Newest record of this node, also after it was removed. None: the node has never joined."""
        self.live_ranks: LiveRanks | None = None
        """Latest answer of this node's agent. None: it does not answer."""
        self.step_rate = StepRate()
        self._is_own_node = is_own_node
        self._on_change = on_change
        self._newest: KnownJobState | None = None
        self._changed = asyncio.Event()
        self._poller = RankPoller()
        self._probe = RankPoller()
        self._subscribers: set[Subscriber] = set()
        self._was_followed = False
        self._samples: deque[Sample] = deque(maxlen=_MAX_SAMPLES)
        self._curves = Curves()
        self._published: dict[str, bytes] = {}
        """Newest update by kind, which a new subscriber gets at once."""
        self._past_made_of: object = None
        """What the last published past was made of."""

    @property
    def node(self) -> Node | None:
        """This node's record. None: it has not joined, or was removed."""
        nodes = self.known.view.nodes if self.known is not None else ()
        return next((node.value for node in nodes if self._is_own_node(node.value)), None)

    @property
    def subscribers(self) -> int:
        """Number of browsers that follow."""
        return len(self._subscribers)

    async def run(self, has_ended: asyncio.Event) -> None:
        """Follow the job until `has_ended` is set."""
        loop = asyncio.get_running_loop()
        records = JobRecords(self.keys)

        def deliver(snapshot: Snapshot) -> None:
            try:
                known = records.of(snapshot)
            except RecordError:  # the agent itself reports it; the page shows what was read last
                return
            if known is not None:
                loop.call_soon_threadsafe(self._on_records, known)

        mirror = Mirror(self.store, self.keys.whole(), deliver, _log_outage)
        mirror.start()
        try:
            async with asyncio.TaskGroup() as tasks:
                following, polling = tasks.create_task(self._follow()), tasks.create_task(self._poll())
                await has_ended.wait()
                following.cancel()
                polling.cancel()
            await self._read_last()
        finally:
            self._poller.keep_only(())
            self._probe.keep_only(())
            await asyncio.to_thread(mirror.close)

    @contextmanager
    def subscribe(self) -> Iterator[Subscriber]:
        """Subscribe until the end of the block. The present state is the first update."""
        subscriber = Subscriber()
        for kind, data in self._published.items():
            subscriber.put(kind, data)
        subscriber.put("samples", msgspec.json.encode(tuple(self._samples)))
        subscriber.put("curves", msgspec.json.encode(self._curves.points()))
        self._was_followed = True
        self._subscribers.add(subscriber)
        try:
            yield subscriber
        finally:
            self._subscribers.discard(subscriber)

    async def probe(self) -> LiveRanks | None:
        """Ask this node's agent now. None: it does not answer, or has never joined."""
        if self.last_node is None or self.known is None:
            return None
        answers = await self._probe.ask([self.last_node], self.known.secret, _ANSWER_WITHIN_S)
        return answers.get(self.last_node.node_id)

    def _on_records(self, known: KnownJobState) -> None:
        self._newest = known
        self._changed.set()

    async def _follow(self) -> None:
        while True:
            await self._changed.wait()
            self._changed.clear()
            self._publish_newest()
            await asyncio.sleep(_MIN_BETWEEN_UPDATES_S)

    def _publish_newest(self) -> None:
        """Publish the newest records, unless they are published already."""
        if self._newest is None or self._newest is self.known:
            return
        self.known = self._newest
        self.last_node = self.node or self.last_node
        self._on_change(self.known)
        history = self.known.history(time.time())
        made_of = (history.incidents, history.present, history.result)
        if made_of != self._past_made_of:
            self._past_made_of = made_of
            self._publish("past", past(history))
        self._publish("present", present(history, self.known.view))

    def _publish(self, kind: str, what: Past | Present) -> None:
        self._published[kind] = msgspec.json.encode(what)
        self._send(kind, self._published[kind])

    async def _read_last(self) -> None:
        """Read the records once more: the job's end, or everything of a short job, may not have been delivered."""
        with suppress(TimeoutError, StoreUnavailable, RecordError):
            async with asyncio.timeout(_LAST_READ_WITHIN_S):
                snapshot = await asyncio.to_thread(self.store.read, self.keys.whole())
                self._newest = JobRecords(self.keys).of(snapshot)
        self._publish_newest()

    async def _poll(self) -> None:
        while True:
            began_at = time.monotonic()
            if self.known is not None and self.last_node is not None:
                await self._poll_once(self.known, self.last_node)
            await asyncio.sleep(max(0.0, began_at + _POLL_EVERY_S - time.monotonic()))

    async def _poll_once(self, known: KnownJobState, own: Node) -> None:
        asked = self._asked(known, own)
        self._poller.keep_only(asked)
        answers = await self._poller.ask(asked, known.secret, _ANSWER_WITHIN_S)
        self.live_ranks = answers.get(own.node_id)
        now = time.time()
        step = max((rank.step for live in answers.values() for rank in live.ranks), default=0)
        rate = self.step_rate.update(now, step) if step else 0.0
        sample = (now, rate, known.history(now).statistics.goodput)
        self._samples.append(sample)
        points = self._curves.note(now, answers)
        self._send("ranks", msgspec.json.encode(JobNow(nodes=answers, sample=sample, points=points)))

    def _asked(self, known: KnownJobState, own: Node) -> list[Node]:
        """Return the nodes whose agents are asked for their ranks."""
        group = known.view.group.value if known.view.group is not None else None
        first = group.members[0].identity if group is not None and group.members and self._was_followed else None
        nodes = (node.value for node in known.view.nodes)
        return [each for each in nodes if self._subscribers or each == own or each.identity == first] or [own]

    def _send(self, kind: str, data: bytes) -> None:
        for subscriber in self._subscribers:
            subscriber.put(kind, data)


def _log_outage(reason: str) -> None:
    log.info("the web page cannot reach etcd; it shows the last known state", reason=reason)
