"""The job in numbers, as Prometheus reads them. All have the label `job_id`.

Gauges of the job are the same on every node that serves a page: aggregate with `max`. Those of the node (its ranks'
steps, its lease, its etcd) are of the one that is asked. Counters and histograms count what was over since this process
began: `increase` and `rate` are right with them. What the whole run has cost is in gauges that begin with `run_`.
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
from agent.core.model import Cause, Checkpoint, ClusterView
from agent.observe.status import job_status
from agent.web.hub import Hub, KnownJobState

_BUCKETS_S = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0, 1800.0)
_STATES = ("training", "spare", "leaving", "unfit", "excluded")


class Counters:
    """Counts incidents."""

    def __init__(self, job_id: str, registry: CollectorRegistry) -> None:
        self._job_id = job_id
        self._incidents = Counter(
            "elastic_agent_incidents", "Changes of group after the first start.", ["job_id", "cause"], registry=registry
        )
        self._lost = Counter(
            "elastic_agent_lost_seconds",
            "Time without training, or for steps done again.",
            ["job_id", "cause"],
            registry=registry,
        )
        self._redone = Counter(
            "elastic_agent_redone_steps", "Steps that were done again.", ["job_id"], registry=registry
        )
        self._phases = Histogram(
            "elastic_agent_phase_seconds",
            "Where the time of each incident went.",
            ["job_id", "phase"],
            buckets=_BUCKETS_S,
            registry=registry,
        )
        self._recovery = Histogram(
            "elastic_agent_recovery_seconds",
            "From a fault, or a decision, to the first step after it.",
            ["job_id", "cause"],
            buckets=_BUCKETS_S,
            registry=registry,
        )
        self._begin()

    def _begin(self) -> None:
        """All are there from the beginning: a series that begins with 1 has never increased."""
        self._redone.labels(self._job_id)
        for cause in get_args(Cause):
            for each in (self._incidents, self._lost, self._recovery):
                each.labels(self._job_id, cause)
        for name in Phases.__struct_fields__:
            self._phases.labels(self._job_id, _phase(name))

    def count(self, incidents: Sequence[Incident]) -> None:
        """Count these. The first start of a run is none."""
        for incident in incidents:
            if not incident.is_first_start:
                self._count(incident)

    def _count(self, incident: Incident) -> None:
        self._incidents.labels(self._job_id, incident.cause).inc()
        self._lost.labels(self._job_id, incident.cause).inc(incident.phases.total_s + incident.redone * incident.step_s)
        self._redone.labels(self._job_id).inc(incident.redone)
        for name in Phases.__struct_fields__:
            seconds = getattr(incident.phases, name)
            if seconds is not None:
                self._phases.labels(self._job_id, _phase(name)).observe(seconds)
        if incident.phases.is_complete:
            self._recovery.labels(self._job_id, incident.cause).observe(incident.phases.total_s)


def _phase(field: str) -> str:
    return field.removesuffix("_s")


class Gauges(Collector):
    """What holds at the moment of asking."""

    def __init__(self, hub: Hub) -> None:
        self._hub = hub
        self._job_id = hub.keys.job_id

    def collect(self) -> Iterator[Metric]:
        """One family after the other."""
        yield self._gauge("page_viewers", "Browsers that follow the page.", self._hub.listeners)
        steps = CounterMetricFamily("elastic_agent_steps", "Steps that nobody had made before.", labels=["job_id"])
        steps.add_metric([self._job_id], self._hub.pace.gained)
        yield steps
        if self._hub.known is not None:
            yield from self._of_job(self._hub.known)
        if self._hub.was_here is not None:
            yield from self._of_node()

    def _of_job(self, known: KnownJobState) -> Iterator[Metric]:
        view, found = known.view, known.story(time.time()).numbers
        status = job_status(self._job_id, view)
        yield self._gauge("goodput_ratio", "Share of the time in which the training got ahead.", found.goodput)
        yield self._gauge("run_incidents", "Changes of group in this run.", found.totals.incidents)
        yield self._gauge("run_lost_seconds", "What they have cost.", found.totals.lost_s)
        yield self._gauge("run_redone_steps", "Steps of this run that were done again.", found.totals.redone)
        yield self._gauge("group", "Number of the current group.", status.group)
        yield self._gauge("world_size", "Ranks of the current group.", status.world_size)
        yield self._gauge("restarts", "Worker failures without progress since.", status.restarts)
        yield self._gauge("step_seconds", "The usual time of a step, as last noted.", status.step_s)
        if view.checkpoint is not None:
            yield from self._of_checkpoint(view.checkpoint.value)
        if view.spec is not None:
            yield self._gauge("np_min", "Nodes that are needed.", view.spec.value.np_min)
            yield self._gauge("np_max", "Nodes that are wanted.", view.spec.value.np_max)
        nodes = GaugeMetricFamily("elastic_agent_nodes", "Nodes that are there, by state.", labels=["job_id", "state"])
        for state, number in _states(view).items():
            nodes.add_metric([self._job_id, state], number)
        yield nodes

    def _of_checkpoint(self, committed: Checkpoint) -> Iterator[Metric]:
        yield self._gauge("checkpoint_step", "Step of the committed checkpoint.", committed.copy.step)
        if committed.at:
            age_s = max(0.0, time.time() - committed.at)
            yield self._gauge("checkpoint_age_seconds", "Since it was begun.", age_s)
            yield self._gauge("checkpoint_size_bytes", "Of all its files.", committed.size_bytes)
            yield self._gauge("checkpoint_took_seconds", "Until they were on disk.", committed.took_s)

    def _of_node(self) -> Iterator[Metric]:
        pulse = self._hub.pulse
        yield self._gauge("alive", "Whether the agent's loop turns.", float(pulse is not None and pulse.is_alive))
        if pulse is None:
            return
        steps = GaugeMetricFamily(
            "elastic_agent_rank_step", "The last step of a rank of this node.", labels=["job_id", "rank"]
        )
        for rank in pulse.ranks:
            steps.add_metric([self._job_id, str(rank.rank)], rank.step)
        yield steps
        if pulse.lease_left_s is not None:
            yield self._gauge("lease_left_seconds", "For so long this node's lease surely lives.", pulse.lease_left_s)
        if pulse.etcd_s is not None:
            yield self._gauge("etcd_answer_seconds", "What etcd took to renew this node's lease.", pulse.etcd_s)

    def _gauge(self, name: str, what: str, value: float) -> GaugeMetricFamily:
        family = GaugeMetricFamily(f"elastic_agent_{name}", what, labels=["job_id"])
        family.add_metric([self._job_id], value)
        return family


def _states(view: ClusterView) -> dict[str, int]:
    found = dict.fromkeys(_STATES, 0)
    group = view.group.value if view.group is not None else None
    spec = view.spec.value if view.spec is not None else None
    for stored in view.nodes:
        node = stored.value
        me = node.member.identity
        if node.unfit:
            state = "unfit"
        elif node.is_draining or (spec is not None and me in spec.drained):
            state = "leaving"
        elif spec is not None and node.node_id in spec.excluded:
            state = "excluded"
        else:
            state = "training" if group is not None and group.node_rank(me) is not None else "spare"
        found[state] += 1
    return found


class Metrics:
    """What a scrape gets."""

    def __init__(self, job_id: str) -> None:
        self._registry = CollectorRegistry()
        self._tally = Counters(job_id, self._registry)

    def show(self, hub: Hub) -> None:
        """Tell of this hub's job."""
        self._registry.register(Gauges(hub))

    def count(self, incidents: Sequence[Incident]) -> None:
        """Count these."""
        self._tally.count(incidents)

    def text(self) -> bytes:
        """In the format of Prometheus."""
        return generate_latest(self._registry)
