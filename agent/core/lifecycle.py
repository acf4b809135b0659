"""The life cycle of an agent: `step(state, event, now) -> (state, effects)`, the only function that changes its state.

Each step first applies the event to the state (`apply_event.py`), then decides from the whole state what to do now
(`_decide`). Decisions are level-triggered: they compare the wanted state with the actual one, so a missed or repeated
event does no harm. Three things are decided separately, in this order:

- **Workers** follow the group record. Workers of a group that is no longer current are stopped. Workers of the current
  group are started once no process of an older group is left here, and are sent their restore point.
- **The store**: at most one write is under way. In order of priority: the job's spec, suspected neighbours, our node
  record, the status of our workers, the checkpoint of a local worker, leadership, and, for the leader, what it planned.
  Suspicions come before the node record, because a node may be admitted as soon as its record says that it reaches the
  group. A suspicion that it had not withdrawn would then count as a member's, and the suspected member be evicted.
- **Leaving**: when the job has ended, or a signal asked for it, once the workers are gone. The last agent of a job that
  has not ended first saves the snapshot in its memory (`last_checkpoint.py`).

A write that was refused, or whose answer was lost, is not repeated: everything is read again, and decided anew.
"""

from __future__ import annotations

from dataclasses import replace

import msgspec

from agent.core import effects as fx
from agent.core import events as ev
from agent.core import fence, last_checkpoint, neighbours
from agent.core.apply_event import apply_event, ask_to_leave, held_until, leave_as_asked, should_start_over
from agent.core.backoff import spread
from agent.core.handoff import stopped_at
from agent.core.incident import GroupChange, members_of
from agent.core.local_workers import PLANNED, Patience, Place, follow_group
from agent.core.model import Group, HandoffRequest, Leader, LinkState, Result, Spec
from agent.core.planner import plan
from agent.core.proposals import Plan, begin_again
from agent.core.reasons import UnsavedSteps
from agent.core.saved_states import RestorePoint
from agent.core.state import AgentState
from agent.core.transitions import due_before_end, due_status
from agent.core.view import ClusterView

_CAMPAIGN_STEP_S = 0.002
_CAMPAIGN_PLACES = 100
"""Number of places over which the agents that are not members are spread."""
_SIGTERM = 15


Effects = tuple[fx.Effect, ...]


def step(state: AgentState, event: ev.Event, now: float) -> tuple[AgentState, Effects]:
    """Apply one event and decide. `now` is the monotonic clock of this node, in seconds."""
    state = apply_event(state, event, now)
    return _decide(state, now, is_replanned=isinstance(event, ev.Ticked))


def wake_at(state: AgentState, now: float) -> float | None:
    """Return when to call `step` with `Ticked` at the latest, if nothing happens before. None: not needed."""
    planned = state.planned.wake_at if state.planned is not None else None
    workers = state.workers
    times = (
        workers.kill_at,
        workers.cause_until,
        workers.stuck_at,
        workers.quiesced_until,
        workers.move_until,
        workers.set_up_again_at,
        state.drain_until,
        state.retry_at,
        state.register_at,
        held_until(state),
        _campaign_at(state),
        _isolate_at(state),
        last_checkpoint.give_up_at(state),
        planned,
    )
    # Times that have passed were decided on already. If that had no effect, an event is needed, not another time.
    return min((t for t in times if t is not None and t > now), default=None)


# Deciding


def _decide(state: AgentState, now: float, *, is_replanned: bool) -> tuple[AgentState, Effects]:
    state = _leave_when_drained(_isolate(state, now), now)
    if is_replanned or not _is_plan_current(state, now):
        planned = _plan(state, now)
        planned_for = (state.view, state.seen) if planned is not None and state.view is not None else None
        if planned is not None or state.planned is not None:
            state = replace(state, planned=planned, planned_for=planned_for)
    decided: Effects = ()
    for decide in (_decide_workers, _decide_links, _decide_verdict, _decide_last_checkpoint, _decide_store):
        state, effects = decide(state, now)
        decided += effects
    return state, decided + _decide_exit(state)


def _leave_when_drained(state: AgentState, now: float) -> AgentState:
    if state.cached is not None and state.drain_until is None and state.identity in state.cached.spec.drained:
        state = ask_to_leave(state, now)
    if state.drain_until is None or state.leaving is not None:
        return state
    is_job_ending = state.cached is not None and state.cached.spec.ending is not None  # then it leaves with the result
    is_awaited = (state.is_member or is_job_ending) and now < state.drain_until
    return state if is_awaited else replace(state, leaving=leave_as_asked(state))


def _isolate_at(state: AgentState) -> float | None:
    if not state.is_store_lost or state.leaving is not None:
        return None
    return neighbours.isolate_at(state.links, state.lease_until, state.policy.lease_ttl_s)


def _isolate(state: AgentState, now: float) -> AgentState:
    """Leave the group when cut off from etcd and from a member: the others may have gone on without this node."""
    due = _isolate_at(state)
    return state if due is None or now < due else replace(state, life=state.life + 1, links=())


def _is_plan_current(state: AgentState, now: float) -> bool:
    """Whether the last plan was made from the present view. Most events of an agent that leads change nothing there."""
    planned, made_from = state.planned, state.planned_for
    if planned is None or made_from is None or state.is_store_lost:
        return False
    is_due = planned.wake_at is not None and now >= planned.wake_at
    return made_from[0] is state.view and made_from[1] is state.seen and not is_due


def _plan(state: AgentState, now: float) -> Plan | None:
    if not state.is_leader or state.view is None or not state.view.is_whole or state.view.result is not None:
        return None
    if state.is_store_lost:  # nodes in the view may be gone, and a write may be applied without an answer
        return None
    if _is_new(state, state.view):
        return None
    return plan(state.view, state.seen, state.policy, now)


def _decide_workers(state: AgentState, now: float) -> tuple[AgentState, Effects]:
    cached = state.cached
    if cached is None:
        return state, ()
    group = state.group
    wanted = group if state.leaving is None and state.is_member else None
    patience = Patience(_grace_s(state), state.policy.kill_timeout_s, state.policy.same_within_s)
    may_wait = wanted is None and _may_wait(state, cached.spec)
    joined = _as_member(state, group) if may_wait and group is not None else None
    place = Place(wanted, state.identity, cached.spec, joined, may_wait=may_wait)
    workers, effects = follow_group(state.workers, place, now, patience)
    if workers is not state.workers:
        state = replace(state, workers=workers)
    state, sent = _send_to_workers(state)
    return state, effects + sent


def _may_wait(state: AgentState, spec: Spec) -> bool:
    """Whether processes of this node, which is no member, may set up the script and wait until they are let in."""
    is_asked_to_leave = state.leaving is not None or state.drain_until is not None
    is_wanted = spec.ending is None and not is_asked_to_leave and state.node_id not in spec.excluded
    return spec.in_place and is_wanted and not state.health


def _as_member(state: AgentState, group: Group) -> Group | None:
    """Return the current group as if this node had joined it; None if it cannot for now."""
    registered = state.registered
    if registered is None or not group.members or state.identity in group.left_out:
        return None
    return msgspec.structs.replace(group, members=(*group.members, registered.value.member), in_place=True)


def _send_to_workers(state: AgentState) -> tuple[AgentState, Effects]:
    """Send the running workers the restore point and the handoff request of their group, each once."""
    workers, sent = state.workers, list[fx.Effect]()
    if not workers.is_alive or workers.is_waiting:
        return state, ()
    restore_point = state.cached.restore_point if state.cached is not None else None
    if restore_point is not None and restore_point.group == workers.group > state.sent_restore_point:
        state = replace(state, sent_restore_point=restore_point.group)
        sent.append(fx.SendRestorePoint(restore_point))
    request = state.view.handoff.value if state.view is not None and state.view.handoff is not None else None
    if workers.entering is not None:
        return state, tuple(sent)
    if request is not None and request.group == workers.group and request.number > workers.sent_handoff:
        state = replace(state, workers=replace(workers, sent_handoff=request.number))
        sent.append(fx.RequestHandoff(request.group, request.number, request.in_memory))
    return state, tuple(sent)


def _grace_s(state: AgentState) -> float:
    """How long workers may take to end by themselves. 0 if they hang in a collective with a rank that is gone."""
    if state.leaving is not None:
        return 0.0 if state.leaving.is_hurried else state.policy.stop_grace_s
    is_cut_off = state.is_store_lost
    is_planned = state.group is not None and state.group.cause not in ("lost", "failed", "wait")
    return state.policy.stop_grace_s if is_planned and not is_cut_off else 0.0


def _decide_links(state: AgentState, _now: float) -> tuple[AgentState, Effects]:
    cached = state.cached
    if cached is None:
        return state, ()
    links = state.links
    peers = neighbours.peers(state.group, state.identity, links, state.view) if state.leaving is None else ()
    links = neighbours.of_peers(links, peers)
    is_any_up = any(link.state is LinkState.UP for link in links)
    state = replace(state, links=links, has_had_link=state.has_had_link or is_any_up)
    if not state.is_member and state.group is not None and neighbours.are_all_up(links, peers):
        state = replace(state, reachable_group=state.group.number)
    effects: Effects = ()
    link = fx.HoldLinks(state.identity, cached.spec.secret, peers)
    if link != state.held_links:
        state, effects = replace(state, held_links=link), (link,)
    look = fx.SetHangThreshold(state.policy.lease_ttl_s if neighbours.is_anyone_silent(links) else None)
    if look != state.hang_threshold:
        state, effects = replace(state, hang_threshold=look), (*effects, look)
    return state, effects


def _decide_verdict(state: AgentState, now: float) -> tuple[AgentState, Effects]:
    settled = _settle(state, now)
    return (replace(state, asked=None), (settled,)) if isinstance(settled, fx.AnswerPublish) else (state, ())


def _decide_last_checkpoint(state: AgentState, now: float) -> tuple[AgentState, Effects]:
    save = last_checkpoint.decide(state, now)
    return (state, ()) if save is None else (replace(state, saving=save.copy, saving_since=now), (save,))


def _settle(state: AgentState, now: float) -> fence.Settled:
    if state.asked is None or state.view is None or state.cached is None or state.has_lost_data:
        return None
    is_late = now >= state.asked_at + state.policy.handoff_wait_s
    return fence.settle(state.asked, state.view, state.cached.spec.run, is_late=is_late)


def _decide_store(state: AgentState, now: float) -> tuple[AgentState, Effects]:
    state, watch = _decide_watch(state)
    if state.pending is not None or state.has_left or now < state.retry_at:
        return state, watch
    effect = _next_store_effect(state, now)
    if effect is None:
        return state, watch
    match effect:
        case fx.WriteStatus(status):
            state = replace(state, workers=replace(state.workers, report=status.exit))
        case fx.Deregister():  # afterwards this agent does not lead, and sees less
            state = replace(state, unsaved=_unsaved_steps(state))
        case _:
            pass
    after = state.view.revision if state.view is not None else 0
    return replace(state, pending=effect, pending_since=now, pending_after=after), (*watch, effect)


def _decide_watch(state: AgentState) -> tuple[AgentState, Effects]:
    watch = fx.WatchKeys(state.node_id, is_whole=state.is_leader)
    if state.has_left or watch == state.watched:
        return state, ()
    return replace(state, watched=watch), (watch,)


def _next_store_effect(state: AgentState, now: float) -> fx.StoreEffect | None:
    is_leaving = state.leaving is not None
    if is_leaving and not last_checkpoint.is_awaited(state, now):
        return fx.Deregister()
    if state.must_refresh:
        return fx.Refresh()
    view = state.view
    if view is None or not view.includes(state.settled_revision):
        return None
    if is_leaving:
        return _commit_effect(state, now)
    return (
        _spec_effect(state, view)
        or _neighbours_effect(state, view, now)
        or _place_effect(state, now)
        or _status_effect(state, view, now)
        or _commit_effect(state, now)
        or _leader_effect(state, view, now)
    )


def _status_effect(state: AgentState, view: ClusterView, now: float) -> fx.StoreEffect | None:
    group = view.group
    if group is None or group.value.members or view.spec is None or view.spec.value.ending is None:
        return due_status(state.status, state.workers, state.observed, state.copies, view, state.identity, now)
    if state.workers.is_alive or state.registered is None:  # until then another agent may hold its node id
        return None
    has_failed = last_checkpoint.has_failed(state, now)
    return due_before_end(state.status, group, state.copies, state.identity, has_failed_to_save=has_failed)


def _neighbours_effect(state: AgentState, view: ClusterView, now: float) -> fx.StoreEffect | None:
    if state.registered is None:
        return None
    change = neighbours.report_suspicions(state.links, view, state.identity, has_had_link=state.has_had_link)
    if change is not None or state.lease_until is None or now >= state.lease_until:
        return change
    return neighbours.evict(view, state.identity, is_leader=state.is_leader)


def _commit_effect(state: AgentState, now: float) -> fx.StoreEffect | None:
    settled = _settle(state, now)
    return None if isinstance(settled, fx.AnswerPublish) else settled


def _spec_effect(state: AgentState, view: ClusterView) -> fx.StoreEffect | None:
    if view.result is not None and should_start_over(state, view):
        last = begin_again(view.group.value if view.group is not None else None, state.me.run)
        return fx.StartOver(_spec(state, last.number + 1), last, view.result.mod_revision)
    return fx.CreateSpec(_spec(state, 1)) if state.is_leader and _is_new(state, view) else None


def _is_new(state: AgentState, view: ClusterView) -> bool:
    """Whether the job has no records yet. A leader's view shows it; otherwise other nodes may have cached some."""
    return view.is_whole and view.spec is None and state.cached is None and not view.cached


def _spec(state: AgentState, first_group: int) -> Spec:
    """The spec that this agent's command line asks for."""
    return Spec(
        run=state.me.run,
        np_min=state.me.np_min,
        np_max=state.me.np_max,
        first_group=first_group,
        fresh=state.me.fresh,
        secret=state.me.secret,
        changed_by=state.node_id,
        changed_at=state.me.started_at,
    )


def _place_effect(state: AgentState, now: float) -> fx.StoreEffect | None:
    if state.port == 0:
        return None
    registered = state.registered
    if registered is not None:
        return None if registered.value == state.node else fx.UpdateNode(state.node, registered.create_revision)
    if state.holder is not None and state.holder.is_alive is False:
        return fx.TakeOver(state.holder)
    until = held_until(state)
    if until is not None and now < until and _is_id_held(state):
        return None
    return fx.Register(state.node) if now >= state.register_at else None


def _is_id_held(state: AgentState) -> bool:
    return state.view is not None and any(n.value.node_id == state.node_id for n in state.view.nodes)


def _campaign_at(state: AgentState) -> float | None:
    if state.leaderless_since is None or state.registered is None:
        return None
    members = state.group.members if state.group is not None else ()
    rank = state.group.node_rank(state.identity) if state.group is not None else None
    if rank is None:  # members know the job best; the others do not all try at once, as each in vain costs two requests
        share = 2.0 * spread(state.incarnation) - 1.0
        place = len(members) + share * min(state.me.np_max, _CAMPAIGN_PLACES)
    else:
        place = rank
    return state.leaderless_since + place * _CAMPAIGN_STEP_S


def _leader_effect(state: AgentState, view: ClusterView, now: float) -> fx.StoreEffect | None:
    campaign_at = _campaign_at(state)
    if campaign_at is not None:
        leader = Leader(node_id=state.node_id, incarnation=state.incarnation)
        return fx.Campaign(leader) if now >= campaign_at else None
    if state.planned is None or view.leader is None or state.planned.action is None:
        return None
    return _planned_write(state.planned, view, view.leader.create_revision, state.wall(now))


def _planned_write(planned: Plan, view: ClusterView, leader_revision: int, wall: float) -> fx.StoreEffect | None:
    group_revision = view.group.mod_revision if view.group is not None else 0
    match planned.action:
        case Group() as group:
            spec_revision = view.spec.mod_revision if view.spec is not None else 0
            change = None if planned.is_old else _group_change(group, view, wall)
            return fx.WriteGroup(group, change, planned.restored, group_revision, spec_revision, leader_revision)
        case HandoffRequest() as handoff:
            return fx.WriteHandoff(handoff, group_revision, leader_revision)
        case Spec() as spec:
            assert view.spec is not None  # noqa: S101 - the plan changes it
            return fx.WriteSpec(spec, view.spec.mod_revision, group_revision, leader_revision)
        case RestorePoint() as restore_point:
            return fx.WriteRestorePoint(restore_point, group_revision, leader_revision)
        case Result() as result:
            return fx.WriteResult(msgspec.structs.replace(result, at=wall), group_revision, leader_revision)
        case fx.Refresh() | None as other:
            return other


def _group_change(group: Group, view: ClusterView, wall: float) -> GroupChange:
    """Return the record that the incident of this group is made from.

    Args:
        group: the group that is to be written.
        view: shows the previous group.
        wall: wall clock, seconds since 1970.
    """
    ended = (each.step for each in view.exits if each.step)
    stopped = stopped_at(view) if group.cause in PLANNED else None
    return GroupChange(
        run=group.run,
        group=group.number,
        cause=group.cause,
        reason=group.reason,
        at=wall,
        members=members_of(group),
        last_reached=max(ended, default=stopped),
    )


def _decide_exit(state: AgentState) -> Effects:
    if state.leaving is None or state.workers.is_alive or not state.has_left:
        return ()
    return (fx.Exit(state.leaving.code, state.leaving.reason, state.unsaved),)


def _unsaved_steps(state: AgentState) -> UnsavedSteps | None:
    """The steps that no checkpoint has, if the job has failed, or goes on and this node is the last that could save."""
    view, cached = state.view, state.cached
    if view is None or cached is None:
        return None
    if view.result is None:
        is_alone = view.is_whole and not any(node.value.identity != state.identity for node in view.nodes)
        if not is_alone and state.saving is None:
            return None
    elif view.result.value.state != "failed" or view.result.value.run != cached.spec.run:
        return None
    saved = cached.checkpoint.copy.step if cached.checkpoint is not None else 0
    held = max((each.copy.step for each in state.copies if each.copy.run == cached.spec.run), default=0)
    reached = max(held, state.workers.reached.step if state.workers.reached is not None else 0)
    if reached <= saved:
        return None
    return UnsavedSteps(reached=reached, saved=saved, were_ranks_signalled=_were_ranks_signalled(state))


def _were_ranks_signalled(state: AgentState) -> bool:
    """Whether the ranks got the signal that ended this agent, as systemd sends it to all processes of a unit."""
    workers = state.workers
    return not workers.is_asked_to_end and any(ended.signal == _SIGTERM for ended in workers.exits)
