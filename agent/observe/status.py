"""A job's present state, for people and for programs: what `elastic-agent status` prints."""

from __future__ import annotations

import sys
from typing import Literal

import msgspec
from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from agent.core.handoff import is_fulfilled
from agent.core.hangs import standing
from agent.core.model import Node, Spec, Timing
from agent.core.observations import Observations, observe
from agent.core.planner import plan
from agent.core.policy import Policy
from agent.core.reasons import Doing, Requested
from agent.core.records import Identity
from agent.core.view import ClusterView
from agent.observe.messages import describe, one_line
from agent.observe.quantities import duration
from agent.observe.stragglers import stragglers

# The leader has a policy, and knows since when it waits. Whatever is due it does at once: so in a state that can be
# read, each of its waits goes on, and a job without a result may be restarted.
_PATIENT = Policy(
    lease_ttl_s=1.0,
    settle_s=1.0,
    stop_grace_s=1.0,
    kill_timeout_s=1.0,
    handoff_timeout_s=1.0,
    handoff_wait_s=1.0,
    max_restarts=sys.maxsize,
    progress_window_s=60.0,
    elastic_timeout_s=None,
)


State = Literal["training", "waiting", "succeeded", "stopped", "failed"]


class NodeStatus(msgspec.Struct, frozen=True, kw_only=True):
    """One registered node."""

    node_id: str
    address: str
    nproc: int
    ranks: list[int]
    """Empty: the node is a spare, or waits for a group."""
    is_leader: bool
    has_finished: bool
    note: str
    """Whether the node is leaving, cannot train, or is suspected, and why."""
    standby: str
    """Its standby processes, or why it has none. Empty: not reported."""
    timing: Timing
    """The durations in effect on this node."""


class RankStatus(msgspec.Struct, frozen=True, kw_only=True):
    """A rank that has made no step for longer than usual."""

    rank: int
    node_id: str
    step: int
    """Its last committed step."""
    for_s: float
    """Seconds since that step."""
    doing: Doing
    where: str
    """Code location, such as `train.py:33 in load`. Empty: the stack could not be read."""


class JobStatus(msgspec.Struct, frozen=True, kw_only=True):
    """The JSON object of `elastic-agent status --json`."""

    job_id: str
    run: str
    np: str
    state: State
    reason: str
    """Why the job is in this state, or what it waits for. Names the rank that blocks the others, if there is one."""
    group: int
    cause: str
    world_size: int
    restarts: int
    leader: str | None
    handoff: str
    """Reason of the open handoff request: the ranks are to stop after a common step and save it.

    Empty: there is no request, or it is fulfilled.
    """
    paused_by: str
    """User who paused the job. Empty: it is not paused."""
    stopped_by: str
    """User who asked for the end of the job. Empty: nobody did."""
    excluded: list[str]
    """Ids of nodes that may not be members of later groups."""
    stalls: list[RankStatus]
    """Ranks that have made no step for longer than usual."""
    slow: list[str]
    """One message per straggler: a rank that the others wait for in every step."""
    step_s: float
    """Usual duration of a step, as last recorded. 0: not known."""
    incident: str
    """The incident that led to the current group, in one line with its phases. Empty: no record of it."""
    checkpoint_step: int | None
    """Step of the committed checkpoint. None: there is none."""
    checkpoint_node: str | None
    """Node whose local disk holds the committed checkpoint. None: all nodes can read it, or there is none."""
    exit_code: int | None
    nodes: list[NodeStatus]


def job_status(job_id: str, view: ClusterView) -> JobStatus:
    """Summarize a complete view of a job. The job must have a spec."""
    assert view.spec is not None  # noqa: S101 - callers find jobs by their spec
    group = view.group.value if view.group is not None else None
    result = view.result.value if view.result is not None else None
    committed = view.checkpoint.value if view.checkpoint is not None else None
    is_reset = result is not None and result.is_reset
    if result is not None and is_reset:
        state: State = "waiting"
        reason = f"{describe(result.reason)}; its next agents begin a new run"
        result = None
    elif result is not None:
        state = result.state
        reason = "; ".join(filter(None, (describe(result.reason), result.summary)))
    elif not view.nodes:
        state, reason = "waiting", "no agent is running; the next agents continue the job"
        if view.spec.value.ending is not None:
            reason = f"no agent is running; the next agents end the job: {describe(view.spec.value.ending)}"
    else:
        state = "training" if group is not None and group.members else "waiting"
        reason = describe(plan(view, observe(Observations(), view, 0.0), _PATIENT, 0.0).reason)
    return JobStatus(
        job_id=job_id,
        run=view.spec.value.run,
        np=view.spec.value.np,
        state=state,
        reason=reason,
        group=group.number if group is not None else 0,
        cause=f"{group.cause}: {describe(group.reason)}" if group is not None else "",
        world_size=group.world_size if group is not None else 0,
        restarts=group.restarts if group is not None else 0,
        leader=view.leader.value.node_id if view.leader is not None else None,
        handoff=_handoff_reason(view) if state == "training" else "",
        paused_by=view.spec.value.paused_by,
        stopped_by="" if is_reset else _who_stopped(view.spec.value),
        excluded=list(view.spec.value.excluded),
        stalls=_stalls(view) if state == "training" else [],
        slow=[each.sentence for each in stragglers(view)] if state == "training" else [],
        step_s=view.incident.value.step_s if view.incident is not None else 0.0,
        incident=one_line(view.incident.value) if view.incident is not None else "",
        checkpoint_step=committed.copy.step if committed is not None else None,
        checkpoint_node=(committed.node or None) if committed is not None else None,
        exit_code=result.exit_code if result is not None else None,
        nodes=_node_statuses(view, view.spec.value),
    )


def _who_stopped(spec: Spec) -> str:
    return spec.ending.by if isinstance(spec.ending, Requested) else ""


def _stalls(view: ClusterView) -> list[RankStatus]:
    return [
        RankStatus(
            rank=rank.rank,
            node_id=stall.node_id,
            step=rank.step,
            for_s=stall.for_s,
            doing=rank.doing,
            where=rank.where,
        )
        for stall in standing(view.stalls)
        for rank in stall.ranks
    ]


def _handoff_reason(view: ClusterView) -> str:
    if view.handoff is None or view.group is None or view.handoff.value.group != view.group.value.number:
        return ""
    request = view.handoff.value
    # Once fulfilled, the next group follows within about a second, or the request was given up.
    return "" if is_fulfilled(request.number, view) else describe(request.reason)


def _node_statuses(view: ClusterView, spec: Spec) -> list[NodeStatus]:
    finished = {report.identity for report in view.exits if report.failure is None}
    return [_node_status(view, spec, node.value, has_finished=node.value.identity in finished) for node in view.nodes]


def _node_status(view: ClusterView, spec: Spec, node: Node, *, has_finished: bool) -> NodeStatus:
    me = node.identity
    group = view.group.value if view.group is not None else None
    node_rank = group.node_rank(me) if group is not None else None
    ranks: list[int] = []
    if group is not None and node_rank is not None:
        first = group.first_rank(node_rank)
        ranks = list(range(first, first + node.nproc))
    return NodeStatus(
        node_id=node.node_id,
        address=node.address,
        nproc=node.nproc,
        ranks=ranks,
        is_leader=view.leader is not None and me == view.leader.value.identity,
        note=_note(view, spec, node),
        standby=node.standby,
        timing=node.timing,
        has_finished=has_finished,
    )


def _note(view: ClusterView, spec: Spec, node: Node) -> str:
    me = node.member.identity
    notes = ["leaving"] * (node.is_draining or me in spec.drained) + ["excluded"] * (node.node_id in spec.excluded)
    notes += [f"unfit: {describe(node.unfit)}"] if node.unfit is not None else []
    suspicions = [stored.value for stored in view.suspects]
    notes += [
        f"suspected by {each.by_node_id}: {each.why}"
        for each in suspicions
        if each.identity == me and _is_member(each.accuser, view)
    ]
    if not _is_member(me, view):
        notes += [
            f"not admitted: it cannot reach {each.node_id}: {each.why}" for each in suspicions if each.accuser == me
        ]
    return "; ".join(notes)


def _is_member(who: Identity, view: ClusterView) -> bool:
    return view.group is not None and view.group.value.node_rank(who) is not None


def render(status: JobStatus) -> list[RenderableType]:
    """Return the lines and the table to print.

    They are `Text`, since a reason may contain rich's markup characters.
    """
    first = Text.assemble("job ", (status.job_id, "bold"), f"  {status.state}: {status.reason}")
    return [first, *_lines(status), *([_table(status)] if status.nodes else [])]


def _lines(status: JobStatus) -> list[Text]:
    sizes = f"np {status.np}  group {status.group}  world size {status.world_size}"
    because = f"cause of this group: {status.cause}" if status.cause else ""
    is_stopping = status.stopped_by and status.exit_code is None
    tries = f"  restarts without progress before this group {status.restarts}" if status.exit_code is None else ""
    lines = (
        f"{sizes}{tries}",
        status.incident or because,
        *status.slow,
        f"a step takes {duration(status.step_s)}" if status.step_s else "",
        f"handoff requested: {status.handoff}" if status.handoff else "",
        f"stopping, requested by {status.stopped_by}" if is_stopping else "",
        f"excluded: {', '.join(status.excluded)}" if status.excluded else "",
        _checkpoint_line(status),
        *(_timing_line(node.timing) for node in status.nodes if node.is_leader and status.exit_code is None),
    )
    return [Text(line) for line in lines if line]


def _checkpoint_line(status: JobStatus) -> str:
    if status.checkpoint_step is None:
        return ""
    where = f", on the disk of {status.checkpoint_node} only" if status.checkpoint_node else ""
    return f"newest checkpoint: step {status.checkpoint_step}{where}"


def _timing_line(timing: Timing) -> str:
    return (
        f"a loss is noticed within {timing.detect_within_s:g} s  lease {timing.lease_ttl_s:g} s  "
        f"link heartbeat {timing.link_heartbeat_s:g} s  settle window {timing.settle_s:g} s"
    )


def _table(status: JobStatus) -> Table:
    table = Table("node", "address", "ranks", "standby", "")
    for node in sorted(status.nodes, key=lambda n: (not n.ranks, n.ranks, n.node_id)):
        notes = ["leader"] * node.is_leader + ["finished"] * node.has_finished + [node.note] * bool(node.note)
        is_spare = status.state == "training" and not node.note
        ranks = ",".join(map(str, node.ranks)) or ("spare" if is_spare else "-")
        table.add_row(*map(Text, (node.node_id, node.address, ranks, node.standby, " ".join(notes))))
    return table
