"""What the operator is told of a job as it goes, each piece of news once."""

from __future__ import annotations

from dataclasses import replace

from agent.core import effects as fx
from agent.core.messages import one_line
from agent.core.model import Group, Spec
from agent.core.state import AgentState
from agent.core.stragglers import stragglers


def say_news(state: AgentState, _now: float) -> tuple[AgentState, tuple[fx.Effect, ...]]:
    """Sentences for the operator, each once."""
    news: list[str] = []
    if state.registered is not None and not state.said_joined:
        news.append(f"joined job {state.me.job_id} as {state.node_id}")
        state = replace(state, said_joined=True)
    spec = state.known.spec if state.known is not None else None
    if spec is not None and spec.np != state.said_np:
        news += _np_news(state, spec)
        state = replace(state, said_np=spec.np)
    if state.group is not None and state.group.number > state.said_group:
        news.append(_group_sentence(state.group))
        state = replace(state, said_group=state.group.number)
    state, told = _leaders_news(state)
    news += told
    if state.trouble != state.said_trouble:
        news.append(f"a write was not answered: {state.trouble}" if state.trouble else "etcd takes writes again")
        state = replace(state, said_trouble=state.trouble)
    planned = state.planned
    if planned is not None and planned.action is None and planned.reason != state.said_reason:
        news.append(planned.reason)
        state = replace(state, said_reason=planned.reason)
    return state, tuple(fx.Announce(sentence) for sentence in news)


def _leaders_news(state: AgentState) -> tuple[AgentState, list[str]]:
    """What only the leader sees: what an incident has cost, and which ranks are slow."""
    view = state.view
    if not state.is_leader or view is None or view.group is None:
        return state, []
    news = []
    incident = state.written
    if incident is not None and incident.phases.is_complete and incident.group > state.said_incident:
        news.append(one_line(incident))
        state = replace(state, said_incident=incident.group)
    number = view.group.value.number
    said = state.said_slow[1] if state.said_slow[0] == number else ()
    slow = [each for each in stragglers(view) if each.rank not in said]
    if slow:
        news += [each.sentence for each in slow]
        state = replace(state, said_slow=(number, (*said, *(each.rank for each in slow))))
    return state, news


def _np_news(state: AgentState, spec: Spec) -> list[str]:
    me = state.me
    mine = str(me.np_max) if me.np_min == me.np_max else f"{me.np_min}:{me.np_max}"
    if state.said_np:
        return [f"np is now {spec.np} (by {spec.changed_by})"]
    return [] if mine == spec.np else [f"the job's np is {spec.np}; --np={mine} given here is not used"]


def _group_sentence(group: Group) -> str:
    if not group.members:
        return f"group {group.number}: nobody trains; {group.reason}"
    names = ", ".join(member.node_id for member in group.members)
    ranks = "1 rank" if group.world_size == 1 else f"{group.world_size} ranks"
    return f"group {group.number}: {ranks} on {names}; {group.reason}"
