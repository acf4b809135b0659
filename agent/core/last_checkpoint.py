"""The last checkpoint: before a job's last agent leaves, it saves the snapshot in its memory.

An agent that was asked to leave first lets the ranks save in a handoff. Ranks that evaluate or compile do not take part
in time, and ranks that got the signal themselves have ended. Then only the agents' memory has the newest steps. If
other nodes stay, they go on from their copies. If none stays, the leading agent lets a process write a checkpoint from
its own copy, once its workers are gone, and leaves when that checkpoint is committed, or could not be.

It commits through the fence, like a rank. This is possible while the group that made the steps is current, and after it
was replaced by a group without members, since then nobody has gone on from another state.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from agent.core import effects as fx
from agent.core.lineage import choose
from agent.core.reasons import AskedToEnd

if TYPE_CHECKING:
    from agent.core.model import Checkpoint, ClusterView, Identity, StateId
    from agent.core.state import AgentState

_COMMIT_LEASES = 2.0
"""How long to wait for the commit, in leases: if etcd does not answer within the first, the agent has lost its own."""


def decide(state: AgentState) -> fx.SaveSnapshot | None:
    """Return the order to save what this agent's memory holds. None: there is nothing to save, or not yet."""
    view = state.view
    if state.saving is not None or state.workers.is_alive or view is None or view.group is None or not _is_last(state):
        return None
    committed = view.checkpoint.value if view.checkpoint is not None else None
    copy = _unsaved_copy(state, view, committed)
    return fx.SaveSnapshot(copy, view.group.value.number, committed) if copy is not None else None


def is_awaited(state: AgentState, now: float) -> bool:
    """Whether this agent stays until what its memory holds is saved."""
    if not _is_last(state):
        return False
    if state.workers.is_alive:  # until they are gone, their snapshots do not count
        return not state.workers.is_stuck
    until = give_up_at(state)
    return state.saving is not None and not state.is_save_over and (until is None or now < until)


def give_up_at(state: AgentState) -> float | None:
    """Return when the commit of the last checkpoint is waited for no longer. None: it was not asked for."""
    if state.saving is None or state.asked is None or state.asked.checkpoint.copy != state.saving:
        return None
    return state.asked_at + _COMMIT_LEASES * state.policy.lease_ttl_s


def _is_last(state: AgentState) -> bool:
    """Whether this agent was asked to leave, nobody stays, and what it holds can be committed."""
    view, leaving = state.view, state.leaving
    if leaving is None or leaving.is_hurried or not isinstance(leaving.reason, AskedToEnd):
        return False
    if view is None or not state.is_leader or not view.is_whole or view.result is not None or state.has_lost_data:
        return False
    if view.group is None or view.restore_point is None:
        return False
    group = view.group.value
    is_settled = not group.members or view.restore_point.value.group == group.number
    return is_settled and not does_anybody_stay(view, state.identity)


def does_anybody_stay(view: ClusterView, me: Identity) -> bool:
    """Return whether another node is here that was not asked to leave."""
    return any(node.value.identity != me and not node.value.is_draining for node in view.nodes)


def _unsaved_copy(state: AgentState, view: ClusterView, committed: Checkpoint | None) -> StateId | None:
    """Return the newest copy that is complete here, if it is newer than the committed checkpoint."""
    if view.restore_point is None or view.spec is None:
        return None
    copy = choose([state.copies], view.restore_point.value, committed, view.spec.value.run)
    return copy if committed is None or copy != committed.copy else None
