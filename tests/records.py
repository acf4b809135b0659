"""Incidents made by hand, for tests of what is told of them."""

from __future__ import annotations

from typing import Any

from reasons import LOST

from agent.core.failures import Failure
from agent.core.incident import Incident, IncidentMember, Phases, Totals, WorkerEnd
from agent.core.model import Cause, Spec
from agent.core.reasons import GroupReason, NodesThere
from agent.observe.goodput import training_since
from agent.observe.report.run_history import RunHistory

BEGAN_AT = 1795300000.0
"""When the run's first group was written."""
START = Phases(
    detect_s=0.0, agree_s=1.0, stop_s=0.0, start_s=2.0, join_s=0.5, set_up_s=0.0, load_s=0.1, first_step_s=0.4
)
RESTART = Phases(
    detect_s=0.5, agree_s=0.5, stop_s=0.25, start_s=1.0, join_s=0.5, set_up_s=0.0, load_s=0.25, first_step_s=0.5
)


def failure(rank: int, **told: object) -> Failure:
    """Code 1, unless something else is told."""
    usual: dict[str, Any] = {
        "rank": rank,
        "local_rank": 0,
        "exit_code": 1,
        "signal": None,
        "is_peer_lost": False,
        "tail": "",
        "at": 0.0,
    }
    return Failure(**{**usual, **told})


def ended(node_id: str, rank: int, *, after_s: float = 0.0, error_s: float | None = 0.0, **told: object) -> WorkerEnd:
    return WorkerEnd(node_id=node_id, failure=failure(rank, **told), after_s=after_s, error_s=error_s)


class Run:
    """A run's incidents, one after the other; each carries on the totals of those before."""

    def __init__(self, *names: str, np: tuple[int, int] = (1, 9), nproc: int = 1, phases: Phases = START) -> None:
        self.np = np
        self.nproc = nproc
        self.incidents: list[Incident] = []
        self.add(
            "start", 0.0, names, reason=NodesThere(nodes=len(names), np=f"{np[0]}:{np[1]}", is_all=True), phases=phases
        )

    def add(
        self,
        cause: Cause,
        after_s: float,
        names: tuple[str, ...],
        *,
        reason: GroupReason = LOST,
        phases: Phases = RESTART,
        ended: tuple[WorkerEnd, ...] = (),
        **told: object,
    ) -> Incident:
        """The next group, written so long after the first."""
        incident = Incident(
            run="r1",
            group=len(self.incidents) + 1,
            cause=cause,
            reason=reason,
            at=BEGAN_AT + after_s,
            began_at=training_since(self.incidents[0]) if self.incidents else BEGAN_AT,
            members=tuple(IncidentMember(node_id=name, nproc=self.nproc) for name in names),
            ended=ended,
            phases=phases,
            trained_before=len(self.incidents),
            reached=0,
            before=self.incidents[-1].totals if self.incidents else Totals(),
            **told,
        )
        self.incidents.append(incident)
        return incident

    def history(self, now_s: float, **told: object) -> RunHistory:
        """The history that a report shows `now_s` seconds after the first group."""
        last = next(each for each in reversed(self.incidents) if each.members)
        usual: dict[str, Any] = {
            "job_id": "job",
            "spec": Spec(run="r1", np_min=self.np[0], np_max=self.np[1], secret="", changed_by="", changed_at=0.0),
            "group": None,
            "result": None,
            "incidents": tuple(self.incidents),
            "present": frozenset(place.node_id for place in last.members),
            "now": BEGAN_AT + now_s,
        }
        return RunHistory(**{**usual, **told})
