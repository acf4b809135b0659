"""The job's metrics in the format of Prometheus. All have the label `job_id`.

Gauges of the job have the same value on every node that serves a page: aggregate with `max`. Gauges of the node (its
ranks' steps, its lease) describe the node that is scraped. Counters and histograms count incidents that ended since
this process started, so that `increase` and `rate` are correct. Totals of the run are gauges that begin with `run_`.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import get_args

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import generate_latest
from prometheus_client.registry import Collector

from agent.core.incident import Incident, Phases
from agent.core.model import Cause
from agent.core.saved_states import Checkpoint
from agent.core.view import ClusterView
from agent.observe.status import job_status
from agent.web.hub import Hub, KnownJobState

_BUCKETS_S = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0, 1800.0)
_STATES = ("training", "spare", "leaving", "unfit", "excluded")


class Counters:
    """Counters and histograms of incidents."""

    def __init__(self, job_id: str, registry: CollectorRegistry) -> None:
        self._job_id = job_id
        self._incidents = Counter(
            "elastic_agent_incidents", "Changes of group after the first start.", ["job_id", "cause"], registry=registry
        )
        self._downtime = Counter(
            "elastic_agent_downtime_seconds",
            "Time without progress: recovery and replayed steps.",
            ["job_id", "cause"],
            registry=registry,
        )
        self._replayed = Counter(
            "elastic_agent_replayed_steps", "Steps that were replayed after an incident.", ["job_id"], registry=registry
        )
        self._phases = Histogram(
            "elastic_agent_phase_seconds",
            "Duration of each phase of an incident.",
            ["job_id", "phase"],
            buckets=_BUCKETS_S,
            registry=registry,
        )
        self._recovery = Histogram(
            "elastic_agent_recovery_seconds",
            "From a fault or a planned change to the first step after it.",
            ["job_id", "cause"],
            buckets=_BUCKETS_S,
            registry=registry,
        )
        self._create_series()

    def _create_series(self) -> None:
        """Create all series with value 0: `increase` does not see a series that begins with 1."""
        self._replayed.labels(self._job_id)
        for cause in get_args(Cause):
            for each in (self._incidents, self._downtime, self._recovery):
                each.labels(self._job_id, cause)
        for name in Phases.__struct_fields__:
            self._phases.labels(self._job_id, _phase(name))

    def count(self, incidents: Sequence[Incident]) -> None:
        """Count incidents; the first start of a run is not one."""
        for incident in incidents:
            if not incident.is_first_start:
                self._count(incident)

    def _count(self, incident: Incident) -> None:
        self._incidents.labels(self._job_id, incident.cause).inc()
        self._downtime.labels(self._job_id, incident.cause).inc(incident.downtime_s)
        self._replayed.labels(self._job_id).inc(incident.replayed_steps)
        for name in Phases.__struct_fields__:
            seconds = getattr(incident.phases, name)
            if seconds is not None:
                self._phases.labels(self._job_id, _phase(name)).observe(seconds)
        if incident.phases.is_complete:
            self._recovery.labels(self._job_id, incident.cause).observe(incident.phases.total_s)


def _phase(field: str) -> str:
    return field.removesuffix("_s")


class Gauges(Collector):
    """Gauges, computed for each scrape."""

    def __init__(self, hub: Hub) -> None:
        self._hub = hub
        self._job_id = hub.keys.job_id

    def collect(self) -> Iterator[Metric]:
        """Yield the metric families."""
        yield self._gauge("page_viewers", "Browsers that follow the page.", self._hub.subscribers)
        steps = CounterMetricFamily(
            "elastic_agent_steps", "Steps made for the first time; replayed steps are not counted.", labels=["job_id"]
        )
        steps.add_metric([self._job_id], self._hub.step_rate.new_steps)
        yield steps
        if self._hub.known is not None:
            yield from self._of_job(self._hub.known)
        if self._hub.last_node is not None:
            yield from self._of_node()

    def _of_job(self, known: KnownJobState) -> Iterator[Metric]:
        view, statistics = known.view, known.history(time.time()).statistics
        status = job_status(self._job_id, view)
        yield self._gauge("goodput_ratio", "Share of the time with progress.", statistics.goodput)
        yield self._gauge("run_incidents", "Changes of group in this run.", statistics.incidents)
        yield self._gauge("run_downtime_seconds", "Downtime in this run.", statistics.downtime_s)
        yield self._gauge("run_replayed_steps", "Replayed steps in this run.", statistics.replayed_steps)
        yield self._gauge("group", "Number of the current group.", status.group)
        yield self._gauge("world_size", "Number of ranks in the current group.", status.world_size)
        yield self._gauge("restarts", "Worker failures without progress in between.", status.restarts)
        yield self._gauge("step_seconds", "Usual duration of a step, as last recorded.", status.step_s)
        if view.checkpoint is not None:
            yield from self._of_checkpoint(view.checkpoint.value)
        if view.spec is not None:
            yield self._gauge("np_min", "Least number of nodes.", view.spec.value.np_min)
            yield self._gauge("np_max", "Largest number of nodes.", view.spec.value.np_max)
        nodes = GaugeMetricFamily("elastic_agent_nodes", "Registered nodes by state.", labels=["job_id", "state"])
        for state, number in _states(view).items():
            nodes.add_metric([self._job_id, state], number)
        yield nodes

    def _of_checkpoint(self, committed: Checkpoint) -> Iterator[Metric]:
        yield self._gauge("checkpoint_step", "Step of the committed checkpoint.", committed.copy.step)
        if committed.at:
            age_s = max(0.0, time.time() - committed.at)
            yield self._gauge("checkpoint_age_seconds", "Age of the committed checkpoint.", age_s)
            yield self._gauge("checkpoint_size_bytes", "Size of all its files.", committed.size_bytes)
            yield self._gauge("checkpoint_write_seconds", "Time that writing it took.", committed.took_s)

    def _of_node(self) -> Iterator[Metric]:
        live = self._hub.live_ranks
        yield self._gauge(
            "alive", "Whether the agent's loop makes progress.", float(live is not None and live.is_alive)
        )
        if live is None:
            return
        steps = GaugeMetricFamily(
            "elastic_agent_rank_step", "Last step of each rank of this node.", labels=["job_id", "rank"]
        )
        for rank in live.ranks:
            steps.add_metric([self._job_id, str(rank.rank)], rank.step)
        yield steps
        if live.lease_left_s is not None:
            yield self._gauge(
                "lease_remaining_seconds", "Lower bound of the remaining time of this node's lease.", live.lease_left_s
            )
        if live.etcd_s is not None:
            yield self._gauge("lease_renewal_seconds", "Time that etcd took to renew this node's lease.", live.etcd_s)

    def _gauge(self, name: str, help_text: str, value: float) -> GaugeMetricFamily:
        family = GaugeMetricFamily(f"elastic_agent_{name}", help_text, labels=["job_id"])
        family.add_metric([self._job_id], value)
        return family


def _states(view: ClusterView) -> dict[str, int]:
    numbers = dict.fromkeys(_STATES, 0)
    group = view.group.value if view.group is not None else None
    spec = view.spec.value if view.spec is not None else None
    for stored in view.nodes:
        node = stored.value
        me = node.member.identity
        if node.unfit is not None:
            state = "unfit"
        elif node.is_draining or (spec is not None and me in spec.drained):
            state = "leaving"
        elif spec is not None and node.node_id in spec.excluded:
            state = "excluded"
        else:
            state = "training" if group is not None and group.node_rank(me) is not None else "spare"
        numbers[state] += 1
    return numbers


class Metrics:
    """The metrics that a scrape returns."""

    def __init__(self, job_id: str) -> None:
        self._registry = CollectorRegistry()
        self._counters = Counters(job_id, self._registry)

    def show(self, hub: Hub) -> None:
        """Add the gauges of this hub's job."""
        self._registry.register(Gauges(hub))

    def count(self, incidents: Sequence[Incident]) -> None:
        """Count incidents that have ended."""
        self._counters.count(incidents)

    def text(self) -> bytes:
        """Return all metrics in Prometheus's text format."""
        return generate_latest(self._registry)
