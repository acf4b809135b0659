"""The history of a run, gathered from the job's records for the report and the web page. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cached_property
from typing import Literal

from agent.core.incident import Incident
from agent.core.model import Group, Result, Spec
from agent.core.view import ClusterView
from agent.observe.goodput import Outage, RunStatistics, outages, run_statistics
from agent.observe.report.timeline import FaultMark, Span, fault_marks, rows, spans


@dataclass(frozen=True)
class RunHistory:
    """A run's records, and what follows from them."""

    job_id: str
    spec: Spec
    group: Group | None
    result: Result | None
    incidents: Sequence[Incident]
    """Incidents of this run, in the order of their groups."""
    present: frozenset[str]
    """Ids of the registered nodes."""
    now: float
    """Wall clock, seconds since 1970."""

    @classmethod
    def of(cls, job_id: str, view: ClusterView, incidents: Sequence[Incident], now: float) -> RunHistory:
        """Gather the history from a complete view of a job that has a spec; incidents of other runs are left out."""
        assert view.spec is not None  # noqa: S101 - callers find jobs by their spec
        spec = view.spec.value
        return cls(
            job_id=job_id,
            spec=spec,
            group=view.group.value if view.group is not None else None,
            result=view.result.value if view.result is not None else None,
            incidents=tuple(incident for incident in incidents if incident.run == spec.run),
            present=frozenset(node.value.node_id for node in view.nodes),
            now=now,
        )

    @property
    def end(self) -> float:
        """The present time; for a job that has ended, its end, or the last time that is known."""
        if self.result is None:
            return self.now
        ended = [each.ended_at or each.stopped_at for each in outages(self.incidents, self.now)]
        return self.result.at or max(ended, default=self.now)

    @property
    def begin(self) -> float:
        """The start of the history that is kept."""
        return self.outages[0].began_at if self.outages else self.end

    @cached_property
    def outages(self) -> tuple[Outage, ...]:
        """The incidents on the time axis."""
        return outages(self.incidents, self.end)

    @cached_property
    def counted_outages(self) -> tuple[Outage, ...]:
        """The incidents that count as downtime: all but the first start."""
        return tuple(each for each in self.outages if not each.incident.is_first_start)

    @cached_property
    def statistics(self) -> RunStatistics:
        """What the incidents cost."""
        return run_statistics(self.incidents, self.end, has_ended=self.result is not None)

    @cached_property
    def spans(self) -> tuple[Span, ...]:
        """What the nodes did over time."""
        return spans(self.outages, self.end, self.present)

    @cached_property
    def fault_marks(self) -> tuple[FaultMark, ...]:
        """Where and when the faults were."""
        return fault_marks(self.outages, self.present)

    @cached_property
    def rows(self) -> tuple[str, ...]:
        """The nodes, in the order of the timeline's rows."""
        return rows(self.outages)

    @property
    def state(self) -> Literal["training", "waiting", "succeeded", "stopped", "failed"]:
        """The job's state."""
        if self.result is not None:
            return self.result.state
        return "training" if self.group is not None and self.group.members else "waiting"

    @property
    def is_truncated(self) -> bool:
        """Whether the run's oldest incidents are no longer kept."""
        return bool(self.incidents) and not self.incidents[0].is_first_start


def moment(at: float) -> str:
    """`2026-11-21 21:00:03 UTC`."""
    return datetime.fromtimestamp(at, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
