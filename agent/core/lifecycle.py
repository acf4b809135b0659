"""One agent's life: `step(state, event, now) -> (state, effects)`, the only function that changes its state.

Each step first notes what happened (`_absorb`), then decides from the whole state what should be done now
(`_decide`). Deciding is level-triggered: it compares what should be with what is, so a missed or repeated event
is harmless. Three things are decided apart, in this order:

- **Workers** follow the group record: those of a group that is no longer current are stopped; those of the current
  one are started once nothing of an older group lives here.
- **The store**: at most one write is under way. What comes first: the job's spec, our place among the nodes, the
  report on our workers, leadership, and, for the leader, the next group or the result.
- **Leaving**: when the job has ended or a signal asked for it, once the workers are gone.

A write that was refused, or whose answer was lost, is not repeated: everything is read again, and decided anew.
"""

from __future__ import annotations

from dataclasses import replace

from agent.core import events as ev
from agent.core import memory
from agent.core.local import follow_group, report_on
from agent.core.membership import Plan, Sightings, begin_again, observe, plan
from agent.core.model import ClusterView, Group, Leader, Result, Spec
from agent.core.state import AgentState, Leaving

EXIT_USAGE = 2
_RETRY_S = 0.5
_CAMPAIGN_STEP_S = 0.002
_CAMPAIGN_MAX_S = 1.0
_HOLDER_LEASES = 1.5


Effects = tuple[ev.Effect, ...]


def step(state: AgentState, event: ev.Event, now: float) -> tuple[AgentState, Effects]:
    """Take in one event and decide. `now` is this node's monotonic clock, in seconds."""
    return _decide(_absorb(state, event, now), now)


def wake_at(state: AgentState, now: float) -> float | None:
    """When to call `step` with `Ticked` at the latest if nothing happens before."""
    planned = state.planned.wake_at if state.planned is not None else None
    workers = state.workers
    times = (workers.kill_at, workers.cause_until, state.retry_at, _held_until(state), _campaign_at(state), planned)
    # What was due has been decided on by now; if nothing came of it, it waits for an event, not for a time.
    return min((t for t in times if t is not None and t > now), default=None)


# Noting what happened


def _absorb(state: AgentState, event: ev.Event, now: float) -> AgentState:  # noqa: PLR0911 - one a kind of event
    match event:
        case ev.Viewed(view):
            return _on_viewed(state, view, now)
        case ev.StoreLost():
            return replace(state, is_store_lost=True)
        case ev.Answered():
            return _on_answered(state, event, now)
        case ev.PortReserved(port):
            return replace(state, port=port)
        case ev.WorkerExited() | ev.WorkersGone():
            return replace(state, workers=state.workers.absorb(event))
        case ev.StopAsked(signal):
            return _on_stop_asked(state, signal)
        case ev.Ticked():
            return state


def _on_viewed(state: AgentState, view: ClusterView, now: float) -> AgentState:
    if state.view is not None and view.revision < state.view.revision:  # another history: what we wrote may be gone
        state = replace(state, must_refresh=True)
    if state.is_store_lost:
        state = replace(state, is_store_lost=False, outage_ended_at=now)
    seen = observe(state.seen, view, now) if view.is_whole else Sightings()
    state = replace(
        state,
        view=view,
        seen=replace(seen, outage_ended_at=state.outage_ended_at),
        leaderless_since=None if view.leader is not None else state.leaderless_since or now,
    )
    if not _should_start_over(state, view):
        state = _remember(state, view)
    if view.result is not None and state.leaving is None and not _should_start_over(state, view):
        return replace(state, leaving=_farewell(state, view.result.value))
    return state


def _remember(state: AgentState, view: ClusterView) -> AgentState:
    has_lost_data = memory.has_lost_data(state.known, view)
    workers = state.workers.forget_report() if has_lost_data else state.workers
    return replace(state, known=memory.remember(state.known, view), has_lost_data=has_lost_data, workers=workers)


def _farewell(state: AgentState, result: Result) -> Leaving:
    how = "succeeded" if result.succeeded else "failed"
    sentence = f"job {state.me.job_id} {how}: {result.reason}"
    if state.workers.group == 0 and state.registered is None:
        sentence = f"job {state.me.job_id} is finished ({how}: {result.reason}); start it over with --fresh"
    return Leaving(result.exit_code, sentence, is_hurried=not result.succeeded)


def _on_answered(state: AgentState, answer: ev.Answered, now: float) -> AgentState:
    state = replace(state, pending=None)
    if isinstance(answer.effect, ev.Deregister):  # unanswered, the lease runs out by itself
        return replace(state, has_left=True)
    match answer.outcome:
        case ev.Outcome.DONE:
            return _on_done(state, answer)
        case ev.Outcome.REFUSED:
            state = replace(state, must_refresh=True)
            if answer.holder is not None:
                return _on_id_held(state, answer.holder, now)
            return replace(state, holder=None) if isinstance(answer.effect, ev.TakeOver) else state
        case ev.Outcome.UNKNOWN:
            return replace(state, must_refresh=True, retry_at=now + _RETRY_S, trouble=answer.reason)


def _on_done(state: AgentState, answer: ev.Answered) -> AgentState:
    if not isinstance(answer.effect, ev.Refresh):  # reading may work where writing does not
        state = replace(state, trouble="")
    match answer.effect:
        case ev.Refresh():
            return replace(state, must_refresh=False, settled_revision=answer.revision)
        case ev.WriteReport(report):
            return replace(state, workers=state.workers.note_reported(report.group))
        case ev.TakeOver() | ev.Register():
            state = replace(state, holder=None)
        case _:
            pass
    # A follower's view has no order between its keys: only a new read is known to include the write.
    is_ordered = state.view is not None and state.view.is_whole
    return replace(state, settled_revision=answer.revision, must_refresh=not is_ordered)


def _on_id_held(state: AgentState, holder: ev.Holder, now: float) -> AgentState:
    """Another agent has our node id. If it lives, an id that nobody chose steps aside."""
    is_same = state.holder is not None and state.holder.lease_id == holder.lease_id
    state = replace(state, holder=holder, held_since=state.held_since if is_same else now)
    outlives_lease = now >= (_held_until(state) or now)
    if holder.is_alive is False or (holder.is_alive is None and not outlives_lease):
        return state
    if not state.me.is_node_id_chosen:
        return replace(state, suffix=state.suffix + 1, holder=None)
    sentence = (
        f"node id {state.node_id!r} is held by a living agent (pid {holder.node.pid}, address "
        f"{holder.node.address}): choose another --node_id, or stop that agent"
    )
    return replace(state, leaving=Leaving(EXIT_USAGE, sentence))


def _held_until(state: AgentState) -> float | None:
    """When a holder on another host must have renewed its lease if it lives."""
    if state.holder is None or state.holder.is_alive is not None:
        return None
    return state.held_since + _HOLDER_LEASES * state.policy.lease_ttl_s


def _on_stop_asked(state: AgentState, signal: int) -> AgentState:
    if state.leaving is not None:
        return replace(state, leaving=replace(state.leaving, is_hurried=True))
    is_term = signal == 15
    sentence = "asked to leave (SIGTERM)" if is_term else f"stopped by signal {signal}"
    return replace(state, leaving=Leaving(0 if is_term else 128 + signal, sentence))


# Deciding


def _decide(state: AgentState, now: float) -> tuple[AgentState, Effects]:
    state = replace(state, planned=_plan(state, now))
    state, said = _say_news(state)
    state, first = _decide_workers(state, now)
    state, second = _decide_store(state, now)
    return state, said + first + second + _decide_exit(state)


def _plan(state: AgentState, now: float) -> Plan | None:
    if not state.is_leader or state.view is None or not state.view.is_whole or state.view.result is not None:
        return None
    return plan(state.view, state.seen, state.policy, now)


def _say_news(state: AgentState) -> tuple[AgentState, Effects]:
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
    if state.trouble != state.said_trouble:
        news.append(f"a write was not answered: {state.trouble}" if state.trouble else "etcd takes writes again")
        state = replace(state, said_trouble=state.trouble)
    planned = state.planned
    if planned is not None and planned.action is None and planned.reason != state.said_reason:
        news.append(planned.reason)
        state = replace(state, said_reason=planned.reason)
    return state, tuple(ev.Say(sentence) for sentence in news)


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


def _decide_workers(state: AgentState, now: float) -> tuple[AgentState, Effects]:
    if state.known is None:
        return state, ()
    wanted = None
    group = state.group
    if state.leaving is None and group is not None and group.node_rank(state.identity) is not None:
        wanted = group
    grace = state.policy.stop_grace_s
    if (state.leaving is not None and state.leaving.is_hurried) or (
        group is not None and group.cause in ("lost", "failed", "wait") and state.leaving is None
    ):
        grace = 0.0  # the ranks are stuck in a collective with one that is gone: nothing is left to save
    workers, effects = follow_group(state.workers, wanted, state.identity, state.known.spec, now=now, grace_s=grace)
    return replace(state, workers=workers), effects


def _decide_store(state: AgentState, now: float) -> tuple[AgentState, Effects]:
    state, watch = _decide_watch(state)
    if state.pending is not None or state.has_left or now < state.retry_at:
        return state, watch
    effect = _next_store_effect(state, now)
    if effect is None:
        return state, watch
    return replace(state, pending=effect), (*watch, effect)


def _decide_watch(state: AgentState) -> tuple[AgentState, Effects]:
    watch = ev.Watch(state.node_id, is_whole=state.is_leader)
    if state.has_left or watch == state.watched:
        return state, ()
    return replace(state, watched=watch), (watch,)


def _next_store_effect(state: AgentState, now: float) -> ev.StoreEffect | None:
    if state.leaving is not None:
        return ev.Deregister()
    if state.must_refresh:
        return ev.Refresh()
    view = state.view
    if view is None or view.revision < state.settled_revision:
        return None
    return (
        _spec_effect(state, view)
        or _place_effect(state, now)
        or report_on(state.workers, view, state.identity, now)
        or _leader_effect(state, view, now)
    )


def _should_start_over(state: AgentState, view: ClusterView) -> bool:
    return view.result is not None and state.me.fresh and state.known is None


def _spec_effect(state: AgentState, view: ClusterView) -> ev.StoreEffect | None:
    if view.result is not None and _should_start_over(state, view):
        last = begin_again(view.group.value if view.group is not None else None)
        return ev.StartOver(_spec(state, last.number + 1), last, view.result.mod_revision)
    if view.spec is None and state.known is None:
        return ev.CreateSpec(_spec(state, 1))
    return None


def _spec(state: AgentState, first_group: int) -> Spec:
    """The job as this agent's command line asks for it."""
    return Spec(
        run=state.me.run,
        np_min=state.me.np_min,
        np_max=state.me.np_max,
        first_group=first_group,
        fresh=state.me.fresh,
        changed_by=state.node_id,
        changed_at=state.me.started_at,
    )


def _place_effect(state: AgentState, now: float) -> ev.StoreEffect | None:
    if state.port == 0:
        return None
    registered = state.registered
    if registered is not None:
        return None if registered.value == state.node else ev.UpdateNode(state.node, registered.create_revision)
    if state.holder is not None and state.holder.is_alive is False:
        return ev.TakeOver(state.holder)
    held_until = _held_until(state)
    if held_until is not None and now < held_until and _is_id_held(state):
        return None
    return ev.Register(state.node)


def _is_id_held(state: AgentState) -> bool:
    return state.view is not None and any(n.value.node_id == state.node_id for n in state.view.nodes)


def _campaign_at(state: AgentState) -> float | None:
    if state.leaderless_since is None or state.registered is None:
        return None
    rank = state.group.node_rank(state.identity) if state.group is not None else None
    return state.leaderless_since + min((rank or 0) * _CAMPAIGN_STEP_S, _CAMPAIGN_MAX_S)


def _leader_effect(state: AgentState, view: ClusterView, now: float) -> ev.StoreEffect | None:
    campaign_at = _campaign_at(state)
    if campaign_at is not None:
        leader = Leader(node_id=state.node_id, incarnation=state.me.incarnation)
        return ev.Campaign(leader) if now >= campaign_at else None
    if state.planned is None or view.leader is None:
        return None
    group_revision = view.group.mod_revision if view.group is not None else 0
    match state.planned.action:
        case Group() as group:
            spec_revision = view.spec.mod_revision if view.spec is not None else 0
            leader_revision = view.leader.create_revision
            return ev.WriteGroup(group, state.planned.spec, group_revision, spec_revision, leader_revision)
        case Result() as result:
            return ev.WriteResult(result, group_revision, view.leader.create_revision)
        case None:
            return None


def _decide_exit(state: AgentState) -> Effects:
    if state.leaving is None or state.workers.is_alive or not state.has_left:
        return ()
    return (ev.Exit(state.leaving.code, state.leaving.sentence),)
