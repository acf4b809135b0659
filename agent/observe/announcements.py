"""Announcements: sentences for the operator while a job runs, derived from the state of an agent, each printed once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from agent.core.incident import Incident
from agent.core.model import Group, Spec
from agent.core.reasons import PlanReason, Waiting
from agent.core.state import AgentState
from agent.core.view import ClusterView
from agent.observe.messages import describe, listed, one_line
from agent.observe.stragglers import stragglers

_INVENTORY_LATE_S = 2.0
"""At the start of each group the leader waits for all nodes to report their snapshots, for some milliseconds."""


@dataclass(frozen=True)
class Announced:
    """What has been announced already."""

    has_joined: bool = False
    np: str = ""
    group: int = 0
    incident: int = 0
    """Number of the last group whose completed incident was announced."""
    slow: tuple[int, tuple[int, ...]] = (0, ())
    """A group, and its ranks that were announced as stragglers."""
    looked_at: ClusterView | None = None
    """The view whose stragglers were announced."""
    trouble: str = ""
    reason: PlanReason | None = None
    inventory_since: float | None = None
    """Since when the leader has waited for nodes to report their snapshots. None: it does not."""


def announce(
    announced: Announced, state: AgentState, completed: Sequence[Incident] = (), *, now: float
) -> tuple[Announced, tuple[str, ...]]:
    """Return announcements of what is new in a state since the last ones.

    Args:
        announced: what has been announced.
        state: the state of the agent after a turn.
        completed: incidents that this agent has completed.
        now: monotonic clock, in seconds.
    """
    sentences: list[str] = []
    if state.registered is not None and not announced.has_joined:
        sentences.append(f"joined job {state.me.job_id} as {state.node_id}")
        announced = replace(announced, has_joined=True)
    spec = state.cached.spec if state.cached is not None else None
    if spec is not None and spec.np != announced.np:
        sentences += _np_announcements(state, announced.np, spec)
        announced = replace(announced, np=spec.np)
    if state.group is not None and state.group.number > announced.group:
        sentences.append(_group_sentence(state.group))
        announced = replace(announced, group=state.group.number)
    announced, from_leader = _announce_as_leader(announced, state, completed)
    sentences += from_leader
    if state.trouble != announced.trouble:
        sentences.append(f"a write was not answered: {state.trouble}" if state.trouble else "etcd takes writes again")
        announced = replace(announced, trouble=state.trouble)
    planned = state.planned
    reason = planned.reason if planned is not None and planned.action is None else None
    awaits_inventory = isinstance(reason, Waiting) and reason.what == "inventory"
    since = announced.inventory_since if announced.inventory_since is not None else now
    announced = replace(announced, inventory_since=since if awaits_inventory else None)
    is_brief = awaits_inventory and now < since + _INVENTORY_LATE_S
    if reason is not None and reason != announced.reason and not is_brief:
        sentences.append(describe(reason))
        announced = replace(announced, reason=reason)
    return announced, tuple(sentences)


def _announce_as_leader(
    announced: Announced, state: AgentState, completed: Sequence[Incident]
) -> tuple[Announced, list[str]]:
    """Announce what only the leader sees: completed incidents, and stragglers."""
    view = state.view
    if not state.is_leader or view is None or view.group is None:
        return announced, []
    sentences = []
    for incident in completed:
        if incident.phases.is_complete and incident.group > announced.incident:
            sentences.append(one_line(incident))
            announced = replace(announced, incident=incident.group)
    if view is announced.looked_at:
        return announced, sentences
    announced = replace(announced, looked_at=view)
    number = view.group.value.number
    named = announced.slow[1] if announced.slow[0] == number else ()
    slow = [each for each in stragglers(view) if each.rank not in named]
    if slow:
        sentences += [each.sentence for each in slow]
        announced = replace(announced, slow=(number, (*named, *(each.rank for each in slow))))
    return announced, sentences


def _np_announcements(state: AgentState, last: str, spec: Spec) -> list[str]:
    me = state.me
    mine = str(me.np_max) if me.np_min == me.np_max else f"{me.np_min}:{me.np_max}"
    if last:
        return [f"np is now {spec.np} (by {spec.changed_by})"]
    return [] if mine == spec.np else [f"the job's np is {spec.np}; --np={mine} given here is not used"]


def _group_sentence(group: Group) -> str:
    if not group.members:
        return f"group {group.number}: no node trains; {describe(group.reason)}"
    names = listed([member.node_id for member in group.members])
    ranks = "1 rank" if group.world_size == 1 else f"{group.world_size} ranks"
    return f"group {group.number}: {ranks} on {names}; {describe(group.reason)}"
