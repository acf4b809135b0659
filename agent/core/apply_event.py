"""Applying events: what each kind of event changes in the state of an agent. Nothing is decided here."""

from __future__ import annotations

from dataclasses import replace

from agent.core import cached_records, neighbours
from agent.core import effects as fx
from agent.core import events as ev
from agent.core.backoff import doubled_s, spread
from agent.core.member_status import WrittenStatus
from agent.core.model import Result
from agent.core.observations import Outage, Restart, follow, observe
from agent.core.reasons import AskedToEnd, JobOver, NodeIdTaken
from agent.core.state import AgentState, Leaving
from agent.core.view import ClusterView
from agent.errors import EXIT_USAGE

_SIGTERM = 15
_RETRY_S = 0.5
_LOST_AGAIN_WITHIN_S = 60.0
_FIRST_WAIT_S = 1.0
_LONGEST_WAIT_S = 30.0
_HOLDER_LEASES = 2.5
"""The lease, another one since a new etcd leader renews all leases, which is not visible, and the time to revoke it."""


def apply_event(  # noqa: C901, PLR0911, PLR0912 - one a kind of event
    state: AgentState, event: ev.Event, now: float
) -> AgentState:
    """Apply one event."""
    match event:
        case ev.ViewChanged(view):
            return _on_viewed(state, view, now)
        case ev.StoreLost():
            return replace(state, is_store_lost=True)
        case ev.WriteAnswered():
            return _on_answered(state, event, now)
        case ev.LeaseRenewed(until):
            return replace(_note_late_renewal(state, now), lease_until=until)
        case ev.LinkChanged():
            return replace(state, links=neighbours.note_link(state.links, event, now, state.me.timing.link_heartbeat_s))
        case ev.InventoryChanged(copies):
            return replace(state, copies=copies)
        case ev.RestorePointAsked(group):
            return replace(state, restoring_group=max(state.restoring_group, group))
        case ev.PublishAsked():
            return replace(state, asked=event, asked_at=now)
        case ev.SaveEnded():
            return replace(state, is_save_over=True)
        case ev.PortReserved(port):
            return replace(state, port=port)
        case ev.RanksQuiesced():
            until = now + state.policy.handoff_wait_s
            return replace(state, workers=state.workers.note_quiesced(event, until))
        case ev.WorkerExited() | ev.WorkersGone() | ev.WorkersMoved() | ev.WorkersReady() | ev.WorkersCannotMove():
            return replace(state, workers=state.workers.apply_event(event, now))
        case ev.StopAsked(signal):
            return _on_stop_asked(state, signal, now)
        case ev.RanksStarted(group, can_move=can_move) if can_move and group == state.workers.group:
            workers = replace(state.workers, can_move=True)
            return replace(state, workers=workers, observed=state.observed.note(event))
        case ev.ClockCompared() | ev.RanksStarted() | ev.StepTimeChanged() | ev.RanksStalled():
            return replace(state, observed=state.observed.note(event))
        case ev.HealthChecked(trouble):
            return replace(state, health=trouble)
        case ev.StandbyChanged():
            return replace(state, standby=event)
        case ev.Ticked():
            return state


def _on_viewed(state: AgentState, view: ClusterView, now: float) -> AgentState:
    is_older = state.view is not None and view.revision < state.view.revision
    is_back = state.is_store_lost
    # A follower's view is as old as its last read, and a view that was read before our last write may still arrive. If
    # it was read after that write, etcd has lost its history without an outage that this agent saw.
    is_behind = not (view.is_whole or state.must_refresh or view.includes(state.settled_revision))
    is_answered_later = is_back and state.pending is not None
    if is_older or is_behind or is_answered_later:  # perhaps another history: what we wrote may be gone
        state = replace(state, must_refresh=True, is_answer_void=state.pending is not None)
    elif is_back:  # everything was read again after the outage had begun
        state = replace(state, settled_revision=view.revision)
    if is_back:
        state = _note_outage_end(replace(state, is_store_lost=False), view.revision, now)
    else:
        state = _note_late_renewal(state, now)
    seen = observe(state.seen, view, now, is_back=is_back) if view.is_whole else follow(state.seen, view, now)
    restart = state.seen.restart
    if state.view is None and any(node.value.node_id == state.node_id for node in view.nodes):
        restart = Restart(view.revision, now)
    had_place = state.registered is not None
    state = replace(
        state,
        view=view,
        seen=replace(seen, restart=restart),
        leaderless_since=None if view.leader is not None else state.leaderless_since or now,
    )
    if not should_start_over(state, view):
        state = _remember(state, view, now, is_other_history=is_older or is_back)
    if had_place and state.registered is None:
        state = _note_outage_end(_note_lost_place(state, now), view.revision, now)
    if view.result is not None and state.leaving is None and not should_start_over(state, view):
        return replace(state, leaving=_leave_ended_job(state, view.result.value))
    return state


def _note_late_renewal(state: AgentState, now: float) -> AgentState:
    """Take it for the end of an outage if etcd has not renewed the lease of this agent for half of its length.

    etcd was away perhaps, for hardly longer than a lease, so that no request has failed. Then leases of others may have
    ended, too, although those live.
    """
    lease_ttl_s = state.policy.lease_ttl_s
    if state.view is None or state.registered is None or state.lease_until is None:
        return state
    is_late = now >= state.lease_until - lease_ttl_s / 2
    # Once in a lease length: or else a lost member would be waited for as long as all renewals are late.
    is_noted = state.outage is not None and now < state.outage.ended_at + lease_ttl_s
    return _note_outage_end(state, state.view.revision, now) if is_late and not is_noted else state


def _note_outage_end(state: AgentState, revision: int, now: float) -> AgentState:
    """From now on, members whose leases have ended have time to return."""
    outage = Outage(now, revision)
    return replace(state, outage=outage, seen=replace(state.seen, outage=outage, came_since_outage=frozenset()))


def _note_lost_place(state: AgentState, now: float) -> AgentState:
    """The lease has ended. Whoever loses it again and again waits, so that an overloaded etcd gets less to do.

    A member waits for a part of a lease length at most: later it would be taken for lost, which makes more work.
    """
    is_again = state.place_lost_at is not None and now < state.place_lost_at + _LOST_AGAIN_WITHIN_S
    lost = state.places_lost + 1 if is_again else 1
    longest_s = state.policy.lease_ttl_s / 4 if state.is_member else _LONGEST_WAIT_S
    wait_s = doubled_s(_FIRST_WAIT_S, lost - 2, longest_s) * spread(state.incarnation) if lost > 1 else 0.0
    return replace(state, places_lost=lost, place_lost_at=now, register_at=now + wait_s)


def _remember(state: AgentState, view: ClusterView, now: float, *, is_other_history: bool) -> AgentState:
    has_lost_data = cached_records.has_lost_data(state.cached, view)
    cached, status = cached_records.remember(state.cached, view), state.status
    observed = state.observed.note_group(cached.number if cached is not None else 0, now)
    if observed is not state.observed:  # also keep those of the last group, whose lost members may have failed first
        observed = observed.keep_clocks(tuple(each.group for each in (state.cached, cached) if each is not None))
    # An old backup may lack the newest statuses and nothing else. Otherwise forget once for each loss: what was written
    # again since is there.
    if is_other_history or (has_lost_data and not state.has_lost_data):
        status = WrittenStatus()
    group = cached.group if cached is not None and cached.group is not None and cached.group.members else None
    return replace(
        state,
        cached=cached,
        last_group=group or state.last_group,
        has_lost_data=has_lost_data,
        status=status,
        observed=observed,
    )


def _leave_ended_job(state: AgentState, result: Result) -> Leaving:
    over = JobOver(
        job_id=state.me.job_id,
        state=result.state,
        result=result.reason,
        summary=result.summary,
        was_over=state.workers.group == 0 and state.registered is None,
    )
    return Leaving(result.exit_code, over, is_hurried=result.state == "failed")


def _on_answered(state: AgentState, answer: ev.WriteAnswered, now: float) -> AgentState:
    state = replace(state, pending=None)
    if isinstance(answer.effect, fx.Deregister):  # unanswered, the lease runs out by itself
        return replace(state, has_left=True)
    if state.is_answer_void:
        return replace(state, is_answer_void=False, must_refresh=True)
    match answer.outcome:
        case ev.Outcome.DONE:
            return _on_done(state, answer)
        case ev.Outcome.REFUSED:
            state = replace(state, must_refresh=True, status=answer.status or state.status)
            if answer.holder is not None:
                return _on_id_held(state, answer.holder, now)
            return replace(state, holder=None) if isinstance(answer.effect, fx.TakeOver) else state
        case ev.Outcome.UNKNOWN:
            return replace(state, must_refresh=True, retry_at=now + _RETRY_S, trouble=answer.reason)


def _on_done(state: AgentState, answer: ev.WriteAnswered) -> AgentState:
    if not isinstance(answer.effect, fx.Refresh):  # reading may work where writing does not
        state = replace(state, trouble="")
    match answer.effect:
        case fx.Refresh():
            seen = replace(state.seen, read_at=state.pending_since)
            return replace(state, must_refresh=False, settled_revision=answer.revision, seen=seen)
        case fx.WriteStatus(status):
            return replace(state, status=answer.status or WrittenStatus(status.group, status, answer.revision))
        case fx.TakeOver() | fx.Register():
            state = replace(state, holder=None)
        case _:
            pass
    # A leader's view will include the write, for its changes come in order. A follower's does if it was shown there.
    will_include = state.view is not None and (state.view.is_whole or state.view.includes(answer.revision))
    has_lost_history = answer.revision < state.pending_after  # then it is in no view, and would be written again
    return replace(state, settled_revision=answer.revision, must_refresh=has_lost_history or not will_include)


def _on_id_held(state: AgentState, holder: fx.NodeIdHolder, now: float) -> AgentState:
    """Another agent has our node id. If it is alive and our id was not chosen by the operator, take another id."""
    if holder.node.pid == state.me.pid and holder.is_alive:  # ourselves, in an earlier life
        return replace(state, holder=replace(holder, is_alive=False))
    is_same = state.holder is not None and state.holder.lease_id == holder.lease_id
    state = replace(state, holder=holder, held_since=state.held_since if is_same else now)
    outlives_lease = not state.is_store_lost and now >= (held_until(state) or now)
    if holder.is_alive is False or (holder.is_alive is None and not outlives_lease):
        return state
    if not state.me.is_node_id_chosen:
        return replace(state, suffix=state.suffix + 1, holder=None)
    taken = NodeIdTaken(node_id=state.node_id, pid=holder.node.pid, address=holder.node.address)
    return replace(state, leaving=Leaving(EXIT_USAGE, taken))


def held_until(state: AgentState) -> float | None:
    """Until when an agent on another host that holds our node id has renewed its lease, if it is alive."""
    if state.holder is None or state.holder.is_alive is not None:
        return None
    since = max(state.held_since, state.outage.ended_at if state.outage else 0.0)  # etcd renews all leases as it starts
    return since + _HOLDER_LEASES * state.policy.lease_ttl_s


def _on_stop_asked(state: AgentState, signal: int, now: float) -> AgentState:
    """SIGTERM asks for an orderly end, a second one for a quick one. Any other signal ends the agent."""
    if state.leaving is not None:
        return replace(state, leaving=replace(state.leaving, is_hurried=True))
    if signal != _SIGTERM:
        return replace(state, leaving=Leaving(128 + signal, AskedToEnd(signal=signal)))
    if state.drain_until is None:
        return ask_to_leave(state, now)
    return replace(state, drain_until=now, leaving=replace(leave_as_asked(state), is_hurried=True))


def ask_to_leave(state: AgentState, now: float) -> AgentState:
    """Leave once the group goes on without this node, or when the time for that is over."""
    return replace(state, drain_until=now + state.policy.handoff_timeout_s + state.policy.lease_ttl_s)


def leave_as_asked(state: AgentState) -> Leaving:
    """The end of an agent that was asked to leave, by an operator of the job or by a signal."""
    is_drained = state.cached is not None and state.identity in state.cached.spec.drained
    return Leaving(0 if is_drained else state.policy.preempted_code, AskedToEnd())


def should_start_over(state: AgentState, view: ClusterView) -> bool:
    """Whether this agent is to start a finished job over."""
    if view.result is None or state.cached is not None:
        return False
    return state.me.fresh or view.result.value.is_reset
