"""What is known of the job at this moment, and who wants to be told of each change.

Records come from a mirror of etcd, whenever they change. How the ranks are is asked for once a second: of all nodes
while somebody looks, else of this one only, for the curve that the next visitor wants to see.
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
from agent.core.model import ClusterView, Node
from agent.errors import RecordError, StoreUnavailable
from agent.links.queries import LiveRanks
from agent.observe.log import log
from agent.observe.report.story import Story
from agent.store.api import Snapshot, Store
from agent.store.keys import JobKeys, Views, decode
from agent.store.mirror import Mirror
from agent.web.page_data import Past, Present, past, present
from agent.web.rank_poller import RankPoller
from agent.web.step_rate import StepRate

_LOOK_EVERY_S = 1.0
_ANSWER_WITHIN_S = 0.5
_BETWEEN_PICTURES_S = 0.1
"""What changes at once is shown at once."""
_SAMPLES = 900
_LAST_WITHIN_S = 1.0

Sample = tuple[float, float, float]
"""When, in seconds since 1970; steps a second; goodput."""


class JobNow(msgspec.Struct, frozen=True, kw_only=True):
    """What the ranks do at this moment."""

    nodes: dict[str, LiveRanks]
    """Of those that have answered, by node id."""
    sample: Sample


@dataclass(frozen=True)
class KnownJobState:
    """The job's records."""

    job_id: str
    view: ClusterView
    incidents: tuple[Incident, ...]
    """Of the current run, in the order of their groups."""

    @property
    def last_group(self) -> int:
        """The newest one's number; 0: there was none."""
        return self.incidents[-1].group if self.incidents else 0

    def story(self, now: float) -> Story:
        """What they tell at this time, in seconds since 1970."""
        return Story.of(self.job_id, self.view, self.incidents, now)

    @cached_property
    def secret(self) -> str:
        """The job's."""
        assert self.view.spec is not None  # noqa: S101 - else it is not known
        return self.view.spec.value.secret


class JobRecords:
    """Reads one snapshot after another; what the one before had as well is not decoded again. For one thread."""

    def __init__(self, keys: JobKeys) -> None:
        self._keys = keys
        self._views = Views(keys, is_whole=True)
        self._incidents: dict[str, tuple[int, Incident]] = {}

    def of(self, snapshot: Snapshot) -> KnownJobState | None:
        """What it tells; None: there is no such job (yet). Raises `RecordError`."""
        view = self._views.of(snapshot)
        before, self._incidents = self._incidents, {}
        for item in snapshot.items:
            if item.key.startswith(self._keys.incidents):
                was = before.get(item.key)
                if was is None or was[0] != item.mod_revision:
                    was = item.mod_revision, decode(item, Incident).value
                self._incidents[item.key] = was
        if view.spec is None:
            return None
        run = view.spec.value.run
        incidents = (incident for _, incident in self._incidents.values() if incident.run == run)
        return KnownJobState(self._keys.job_id, view, tuple(sorted(incidents, key=lambda each: each.group)))


class Subscriber:
    """One who wants to be told. Who is slow misses what is out of date by then, and costs no memory."""

    def __init__(self) -> None:
        self._news: dict[str, bytes] = {}
        self._arrived = asyncio.Event()

    def tell(self, kind: str, said: bytes) -> None:
        """Put it in the place of an older one of its kind."""
        self._news[kind] = said
        self._arrived.set()

    async def next(self) -> list[tuple[str, bytes]]:
        """Wait for something, and take all there is."""
        await self._arrived.wait()
        self._arrived.clear()
        news, self._news = list(self._news.items()), {}
        return news


class Hub:
    """See the module. Methods are called on the event loop's thread.

    Args:
        store: the job's etcd.
        keys: the job's.
        is_here: tells the node whose agent serves the page.
        on_change: given the records, whenever they have changed.
    """

    def __init__(
        self, store: Store, keys: JobKeys, is_here: Callable[[Node], bool], on_change: Callable[[KnownJobState], None]
    ) -> None:
        self.store = store
        self.keys = keys
        self.known: KnownJobState | None = None
        """None: nothing has been read yet, or there is no such job."""
        self.was_here: Node | None = None
        """This node's newest record. None: it has never joined."""
        self.pulse: LiveRanks | None = None
        """Of this node, lately. None: its agent does not answer."""
        self.pace = StepRate()
        self._is_here = is_here
        self._on_change = on_change
        self._newest: KnownJobState | None = None
        self._changed = asyncio.Event()
        self._pulses = RankPoller()
        self._probe = RankPoller()
        self._listeners: set[Subscriber] = set()
        self._samples: deque[Sample] = deque(maxlen=_SAMPLES)
        self._shown: dict[str, bytes] = {}
        """What a newcomer is told at once, by kind."""
        self._past_of: object = None
        """What the past was told of last."""

    @property
    def here(self) -> Node | None:
        """This node's record. None: it has not joined, or has lost its place."""
        nodes = self.known.view.nodes if self.known is not None else ()
        return next((node.value for node in nodes if self._is_here(node.value)), None)

    @property
    def listeners(self) -> int:
        """How many look."""
        return len(self._listeners)

    async def run(self, has_ended: asyncio.Event) -> None:
        """Follow the job until then."""
        loop = asyncio.get_running_loop()
        records = JobRecords(self.keys)

        def deliver(snapshot: Snapshot) -> None:
            known = records.of(snapshot)
            if known is not None:
                loop.call_soon_threadsafe(self._note, known)

        mirror = Mirror(self.store, self.keys.whole(), deliver, _tell_of_outage)
        mirror.start()
        try:
            async with asyncio.TaskGroup() as tasks:
                following, looking = tasks.create_task(self._follow()), tasks.create_task(self._look())
                await has_ended.wait()
                following.cancel()
                looking.cancel()
            await self._look_last()
        finally:
            self._pulses.keep_only(())
            self._probe.keep_only(())
            await asyncio.to_thread(mirror.close)

    @contextmanager
    def listening(self) -> Iterator[Subscriber]:
        """Somebody looks: all that is known comes first."""
        listener = Subscriber()
        for kind, said in self._shown.items():
            listener.tell(kind, said)
        listener.tell("samples", msgspec.json.encode(tuple(self._samples)))
        self._listeners.add(listener)
        try:
            yield listener
        finally:
            self._listeners.discard(listener)

    async def look_here(self) -> LiveRanks | None:
        """Ask this node's agent now. None: it does not answer, or has never joined."""
        if self.was_here is None or self.known is None:
            return None
        pulses = await self._probe.ask([self.was_here], self.known.secret, _ANSWER_WITHIN_S)
        return pulses.get(self.was_here.node_id)

    def _note(self, known: KnownJobState) -> None:
        self._newest = known
        self._changed.set()

    async def _follow(self) -> None:
        while True:
            await self._changed.wait()
            self._changed.clear()
            self._take()
            await asyncio.sleep(_BETWEEN_PICTURES_S)

    def _take(self) -> None:
        """Tell of the newest records."""
        if self._newest is None or self._newest is self.known:
            return
        self.known = self._newest
        self.was_here = self.here or self.was_here
        self._on_change(self.known)
        story = self.known.story(time.time())
        cause = (story.incidents, story.present, story.result)
        if cause != self._past_of:
            self._past_of = cause
            self._say("past", past(story))
        self._say("present", present(story, self.known.view))

    def _say(self, kind: str, what: Past | Present) -> None:
        self._shown[kind] = msgspec.json.encode(what)
        self._tell(kind, self._shown[kind])

    async def _look_last(self) -> None:
        """How the job ended may not have come yet; of a short one nothing has."""
        with suppress(TimeoutError, StoreUnavailable, RecordError):
            async with asyncio.timeout(_LAST_WITHIN_S):
                snapshot = await asyncio.to_thread(self.store.read, self.keys.whole())
                self._newest = JobRecords(self.keys).of(snapshot)
        self._take()

    async def _look(self) -> None:
        while True:
            began_at = time.monotonic()
            if self.known is not None and self.was_here is not None:
                await self._look_once(self.known, self.was_here)
            await asyncio.sleep(max(0.0, began_at + _LOOK_EVERY_S - time.monotonic()))

    async def _look_once(self, known: KnownJobState, here: Node) -> None:
        asked = [node.value for node in known.view.nodes] if self._listeners else [here]
        self._pulses.keep_only(asked)
        pulses = await self._pulses.ask(asked, known.secret, _ANSWER_WITHIN_S)
        self.pulse = pulses.get(here.node_id)
        now = time.time()
        step = max((rank.step for pulse in pulses.values() for rank in pulse.ranks), default=0)
        pace = self.pace.take(now, step) if step else 0.0
        sample = (now, pace, known.story(now).numbers.goodput)
        self._samples.append(sample)
        self._tell("ranks", msgspec.json.encode(JobNow(nodes=pulses, sample=sample)))

    def _tell(self, kind: str, said: bytes) -> None:
        for listener in self._listeners:
            listener.tell(kind, said)


def _tell_of_outage(reason: str) -> None:
    log.info("the web page does not see etcd; it shows what it knows", reason=reason)
