"""What a report tells, gathered from a job's records. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cached_property
from typing import Literal

from agent.core.incident import Incident
from agent.core.model import ClusterView, Group, Result, Spec
from agent.observe.goodput import Numbers, Outage, numbers, outages
from agent.observe.report.timeline import Mark, Span, marks, rows, spans


@dataclass(frozen=True)
class Story:
    """A run's records, and what follows from them."""

    job_id: str
    spec: Spec
    group: Group | None
    result: Result | None
    incidents: Sequence[Incident]
    """Of this run, in the order of their groups."""
    present: frozenset[str]
    """Ids of the nodes that are there."""
    now: float
    """Wall clock, seconds since 1970."""

    @classmethod
    def of(cls, job_id: str, view: ClusterView, incidents: Sequence[Incident], now: float) -> Story:
        """What a whole view of a job that has a spec tells, and its incidents, of which other runs' are left out."""
        assert view.spec is not None  # noqa: S101 - a job without one is not found in the first place
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
        """The time now; of a job that has ended, the time of that, or the last that is known of it."""
        if self.result is None:
            return self.now
        ended = [each.ended_at or each.stopped_at for each in outages(self.incidents, self.now)]
        return self.result.at or max(ended, default=self.now)

    @property
    def begin(self) -> float:
        """The start of what is shown."""
        return self.outages[0].began_at if self.outages else self.end

    @cached_property
    def outages(self) -> tuple[Outage, ...]:
        """The incidents in time."""
        return outages(self.incidents, self.end)

    @cached_property
    def costly(self) -> tuple[Outage, ...]:
        """Those that cost time: all but the first start."""
        return tuple(each for each in self.outages if not each.incident.is_first_start)

    @cached_property
    def numbers(self) -> Numbers:
        """What they cost."""
        return numbers(self.incidents, self.end, has_ended=self.result is not None)

    @cached_property
    def spans(self) -> tuple[Span, ...]:
        """What the nodes did."""
        return spans(self.outages, self.end, self.present)

    @cached_property
    def marks(self) -> tuple[Mark, ...]:
        """Where the faults were."""
        return marks(self.outages, self.present)

    @cached_property
    def rows(self) -> tuple[str, ...]:
        """The nodes."""
        return rows(self.outages)

    @property
    def state(self) -> Literal["training", "waiting", "succeeded", "stopped", "failed"]:
        """In a word."""
        if self.result is not None:
            return self.result.state
        return "training" if self.group is not None and self.group.members else "waiting"

    @property
    def is_cut(self) -> bool:
        """Whether incidents of this run are not kept any more."""
        return bool(self.incidents) and not self.incidents[0].is_first_start


def moment(at: float) -> str:
    """`2026-11-21 21:00:03 UTC`."""
    return datetime.fromtimestamp(at, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
