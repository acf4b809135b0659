"""The last checkpoint: before the last node that holds the training's state leaves, its agent saves it.

An agent that was asked to leave first lets the ranks save in a handoff. Ranks that evaluate or compile do not take part
in time, and ranks that got the signal themselves have ended. Then only the agents' memory has the newest steps. If a
member of that group stays, the job goes on from its copies. If none stays, an agent lets a process write a checkpoint
from its own copy, once its workers are gone, and leaves when that checkpoint is committed, or could not be. It is the
leading agent, which knows who stays; or else, after the group was replaced by one without members, the agent of rank 0.
If they are two, the fence lets one of the checkpoints through.

An agent also saves its own copy when the leader has named it in the restore point, before a job ends
(`ending.py`).

It commits through the fence, like a rank. This is possible while the group that made the steps is current, and after it
was replaced by a group without members, since then nobody has gone on from another state.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from agent.core import effects as fx
from agent.core.lineage import as_begun, choose
from agent.core.reasons import AskedToEnd

if TYPE_CHECKING:
    from agent.core.state import AgentState

_WRITE_WITHIN_S = 600.0
"""How long the checkpoint may take until it is on disk: the disk may hang."""
_COMMIT_LEASES = 2.0
"""How long to wait for the commit, in leases: if etcd does not answer within the first, the agent has lost its own."""


def decide(state: AgentState, now: float) -> fx.SaveSnapshot | None:
    """Return the order to save what this agent's memory holds. None: there is nothing to save, or not yet."""
    view, cached = state.view, state.cached
    if state.saving is not None or state.workers.is_alive or not _is_view_current(state):
        return None
    if not _is_named(state) and not _may_save(state, now):
        return None
    assert view is not None and cached is not None  # noqa: S101, PT018 - checked above, as the next line
    assert view.group is not None and view.restore_point is not None  # noqa: S101, PT018
    committed = view.checkpoint.value if view.checkpoint is not None else None
    begun = as_begun(view.restore_point.value, committed)
    copy = choose([state.copies], begun, committed, cached.spec.run)
    if copy is None or (committed is not None and copy == committed.copy):
        return None
    return fx.SaveSnapshot(copy, view.group.value.number, committed)


def has_failed(state: AgentState, now: float) -> bool:
    """Whether this agent was asked to save what its memory holds, and could not."""
    committed = state.view.checkpoint if state.view is not None else None
    if state.saving is None or (committed is not None and committed.value.copy == state.saving):
        return False
    until = give_up_at(state)
    return state.is_save_over or (until is not None and now >= until)


def is_awaited(state: AgentState, now: float) -> bool:
    """Whether this agent stays until what its memory holds is saved."""
    if state.saving is not None:
        until = give_up_at(state)
        is_hurried = state.leaving is not None and state.leaving.is_hurried
        return not state.is_save_over and not is_hurried and (until is None or now < until)
    if not _may_save(state, now):
        return False
    if state.workers.is_alive:  # until they are gone, their snapshots do not count
        return not state.workers.is_stuck
    return not _is_view_current(state)


def give_up_at(state: AgentState) -> float | None:
    """Return when the last checkpoint is waited for no longer. None: none is being written."""
    if state.saving is None:
        return None
    if state.asked is None or state.asked.checkpoint.copy != state.saving:
        return state.saving_since + _WRITE_WITHIN_S
    return state.asked_at + _COMMIT_LEASES * state.policy.lease_ttl_s


def _is_named(state: AgentState) -> bool:
    """Whether the leader has asked this agent to save, before the job ends."""
    view = state.view
    if view is None or view.group is None or view.restore_point is None or view.result is not None:
        return False
    restore_point = view.restore_point.value
    return restore_point.group == view.group.value.number and restore_point.saver == state.identity


def _is_view_current(state: AgentState) -> bool:
    """Whether the view includes what this agent has written: perhaps a checkpoint of a rank is being committed."""
    is_read = state.view is not None and state.view.includes(state.settled_revision)
    return is_read and state.pending is None and not state.must_refresh


def _may_save(state: AgentState, now: float) -> bool:
    """Whether this agent was asked to leave, nobody stays who holds the state, and it can commit what it holds."""
    view, leaving = state.view, state.leaving
    if leaving is None or leaving.is_hurried or not isinstance(leaving.reason, AskedToEnd):
        return False
    if state.is_store_lost or state.has_lost_data or state.lease_until is None or now >= state.lease_until:
        return False
    if view is None or view.group is None or view.restore_point is None or view.result is not None:
        return False
    group = view.group.value
    if state.is_leader and view.is_whole:
        is_settled = not group.members or view.restore_point.value.group == group.number
        return is_settled and not does_a_holder_stay(state)
    has_rank_0 = state.workers.group == view.restore_point.value.group and state.workers.first_rank == 0
    return not group.members and has_rank_0


def does_a_holder_stay(state: AgentState) -> bool:
    """Return whether a member of the last group that trained is here that was not asked to leave, as a leader sees it.

    Of a group that this agent has not seen, every node counts as a member.
    """
    view = state.view
    last = state.last_group
    holders = None if last is None else {member.identity for member in last.members}
    return any(
        node.value.identity != state.identity
        and not node.value.is_draining
        and (holders is None or node.value.identity in holders)
        for node in (view.nodes if view is not None else ())
    )
