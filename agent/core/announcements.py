"""Announcements: sentences for the operator while a job runs. Each one is printed once."""

from __future__ import annotations

from dataclasses import replace

from agent.core import effects as fx
from agent.core.model import Group, Spec
from agent.core.state import AgentState
from agent.core.stragglers import stragglers
from agent.observe.messages import describe, one_line


def announce(state: AgentState, _now: float) -> tuple[AgentState, tuple[fx.Effect, ...]]:
    """Return announcements of what is new in the state since the last ones."""
    sentences: list[str] = []
    if state.registered is not None and not state.has_announced_join:
        sentences.append(f"joined job {state.me.job_id} as {state.node_id}")
        state = replace(state, has_announced_join=True)
    spec = state.cached.spec if state.cached is not None else None
    if spec is not None and spec.np != state.announced_np:
        sentences += _np_announcements(state, spec)
        state = replace(state, announced_np=spec.np)
    if state.group is not None and state.group.number > state.announced_group:
        sentences.append(_group_sentence(state.group))
        state = replace(state, announced_group=state.group.number)
    state, from_leader = _announce_as_leader(state)
    sentences += from_leader
    if state.trouble != state.announced_trouble:
        sentences.append(f"a write was not answered: {state.trouble}" if state.trouble else "etcd takes writes again")
        state = replace(state, announced_trouble=state.trouble)
    planned = state.planned
    waits_for = describe(planned.reason) if planned is not None and planned.action is None else state.announced_reason
    if waits_for != state.announced_reason:
        sentences.append(waits_for)
        state = replace(state, announced_reason=waits_for)
    return state, tuple(fx.Announce(sentence) for sentence in sentences)


def _announce_as_leader(state: AgentState) -> tuple[AgentState, list[str]]:
    """Announce what only the leader sees: completed incidents, and stragglers."""
    view = state.view
    if not state.is_leader or view is None or view.group is None:
        return state, []
    sentences = []
    incident = state.written
    if incident is not None and incident.phases.is_complete and incident.group > state.announced_incident:
        sentences.append(one_line(incident))
        state = replace(state, announced_incident=incident.group)
    number = view.group.value.number
    announced = state.announced_slow[1] if state.announced_slow[0] == number else ()
    slow = [each for each in stragglers(view) if each.rank not in announced]
    if slow:
        sentences += [each.sentence for each in slow]
        state = replace(state, announced_slow=(number, (*announced, *(each.rank for each in slow))))
    return state, sentences


def _np_announcements(state: AgentState, spec: Spec) -> list[str]:
    me = state.me
    mine = str(me.np_max) if me.np_min == me.np_max else f"{me.np_min}:{me.np_max}"
    if state.announced_np:
        return [f"np is now {spec.np} (by {spec.changed_by})"]
    return [] if mine == spec.np else [f"the job's np is {spec.np}; --np={mine} given here is not used"]


def _group_sentence(group: Group) -> str:
    if not group.members:
        return f"group {group.number}: no node trains; {describe(group.reason)}"
    names = ", ".join(member.node_id for member in group.members)
    ranks = "1 rank" if group.world_size == 1 else f"{group.world_size} ranks"
    return f"group {group.number}: {ranks} on {names}; {describe(group.reason)}"
