"""Handoffs: before a planned change, all ranks stop after the same step and save it.

The leader writes a handoff request. The ranks agree among themselves on the step. The request is fulfilled by a
checkpoint that rank 0 publishes with the number of the request. A snapshot is enough if all parts of it stay in the
memory of agents that continue; then the request is fulfilled when each member has reported that its ranks are quiesced.
The answer to the ranks is the next group. Ranks that get no answer within `handoff_wait_s` continue training, and the
request has expired. So the leader notes when a request was fulfilled, and decides by the state of the newest one:

- There is no request, it was lost with etcd's data, or an older request that landed late has replaced it: write it
  (again).
- It is not fulfilled: wait, for `handoff_timeout_s` before a drain, otherwise for `_TIMEOUT_S`; then make the change
  without a handoff. Ranks that failed to save do not report it. So if later checkpoints are committed and the requested
  one is not, write another request after `_RETRY_AFTER_S`.
- It was fulfilled within `handoff_wait_s`: all ranks are quiesced. Make the change now; no step is lost.
- It was fulfilled earlier, or at an unknown time: assume that the ranks train again. Write another request; after
  `_MAX_REQUESTS` requests, make the change without a handoff.
- It was fulfilled in memory, but too few of the agents that hold the snapshot remain after the change that is now
  planned: request a checkpoint.

Only the first request in a group may be fulfilled in memory, because the reason why it failed may persist.

A group can be handed off once its rank 0 has asked for the restore point, and after the restore point was written.
Before that there are no steps to lose.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from agent.core.model import HandoffRequest
from agent.core.neighbours import neighbours, next_member

if TYPE_CHECKING:
    from collections.abc import Sequence

    from agent.core.model import Cause, Group, Member, Quiesced
    from agent.core.policy import Policy
    from agent.core.reasons import GroupReason
    from agent.core.saved_states import Checkpoint
    from agent.core.view import ClusterView

_TIMEOUT_S = 600.0
"""How long a planned change other than a drain waits for a request to be fulfilled."""
_RETRY_AFTER_S = 120.0
"""Time after which a request is repeated whose checkpoint was not committed, although later ones were."""
_MAX_REQUESTS = 3
"""Requests in one group before a change is made without a handoff."""
_LONG_AGO = float("-inf")
"""`HandoffProgress.fulfilled_since` of a request whose ranks train again."""


@dataclass(frozen=True)
class HandoffProgress:
    """The newest handoff request of this group, and when the leader saw that it was fulfilled."""

    number: int = 0
    """Number of the request. 0: none was seen."""
    count: int = 0
    """How many requests were seen in this group."""
    first_seen_at: float = 0.0
    """When this request was first seen."""
    fulfilled_since: float | None = None
    """When it was first seen to be fulfilled. None: it is not. -inf: at an unknown time, or too late."""
    is_in_memory: bool = False
    """It was fulfilled by snapshots that the members hold in memory, not by a checkpoint."""


def note(progress: HandoffProgress, view: ClusterView, now: float, *, is_back: bool) -> HandoffProgress:
    """Return the progress of the newest handoff request after this view.

    Args:
        progress: the progress before this view, in the same group.
        view: the new view.
        now: monotonic, in seconds.
        is_back: there was no view for a while before this one, so its changes may have happened at any time since.
    """
    shown = view.handoff.value.number if view.handoff is not None else 0
    if shown > progress.number:
        progress = HandoffProgress(shown, progress.count + 1, now)
    if not progress.number or progress.fulfilled_since is not None:
        return progress
    if not is_fulfilled(progress.number, view):
        committed = view.checkpoint.value.number if view.checkpoint is not None else 0
        is_past = is_back and committed >= progress.number  # perhaps its own checkpoint was committed, and then another
        return replace(progress, fulfilled_since=_LONG_AGO) if is_past else progress
    saved = _saved(progress.number, view)
    is_late = any(each.is_late for each in _quiesced(progress.number, view)) if saved is None else saved.is_late
    return replace(progress, fulfilled_since=_LONG_AGO if is_back or is_late else now, is_in_memory=saved is None)


def is_fulfilled(number: int, view: ClusterView) -> bool:
    """Whether the request of this number in the current group is fulfilled, by a checkpoint or by all members."""
    if _saved(number, view) is not None:
        return True
    return view.group is not None and len(_quiesced(number, view)) == len(view.group.value.members)


def stopped_at(view: ClusterView) -> int | None:
    """The step after which all ranks of the current group have stopped for a handoff. None: they have not."""
    request = view.handoff.value if view.handoff is not None else None
    if request is None or view.group is None or request.group != view.group.value.number:
        return None
    number = request.number
    if (saved := _saved(number, view)) is not None:
        return None if saved.is_late else saved.copy.step
    found = _quiesced(number, view)
    is_over = len(found) < len(view.group.value.members) or any(each.is_late for each in found)
    return None if is_over else found[0].step


def _saved(number: int, view: ClusterView) -> Checkpoint | None:
    committed = view.checkpoint.value if view.checkpoint is not None else None
    return committed if committed is not None and committed.handoff >= number else None


def _quiesced(number: int, view: ClusterView) -> list[Quiesced]:
    return [each for each in view.quiesced if each.number == number]


def can_hand_off(group: Group, view: ClusterView) -> bool:
    """Whether the script of the group commits steps, which it shows when rank 0 asks for the restore point."""
    node = view.present.get(group.members[0].identity)
    return node is not None and node.value.restoring_group == group.number


def are_ranks_quiesced(progress: HandoffProgress, policy: Policy, now: float) -> bool:
    """Whether all ranks are stopped now and wait for the next group."""
    return progress.fulfilled_since is not None and now < progress.fulfilled_since + policy.handoff_wait_s


@dataclass(frozen=True)
class PlannedChange:
    """A planned change of a group."""

    cause: Cause
    reason: GroupReason
    members: Sequence[Member]
    """The members that continue. Empty: the group only ends."""

    def keeps_memory(self, group: Group, quiesced: Sequence[Quiesced] = ()) -> bool:
        """Whether no agent ends with the change, and the remaining members hold all parts of the group's snapshots.

        Each member holds the common part and the parts of its own ranks. Its neighbours hold these too; if they are
        large, only the next member.

        Args:
            group: the present group.
            quiesced: what its members have reported of the handoff; empty: it is only to be requested.
        """
        stays = {member.identity for member in self.members}
        with_next_only = {each.identity for each in quiesced if each.is_with_next_only}

        def is_held(member: Member) -> bool:
            me = member.identity
            others = (next_member(group, me),) if me in with_next_only else neighbours(group, me)
            return me in stays or any(other is not None and other.identity in stays for other in others)

        return self.cause != "drain" and all(is_held(member) for member in group.members)


def prepare_change(
    group: Group, change: PlannedChange, view: ClusterView, progress: HandoffProgress, policy: Policy, now: float
) -> HandoffRequest | float | None:
    """Return what a planned change of this group waits for.

    Returns:
        A request that must be written, or the time until which to wait. None: nothing (more), so make the change.
    """
    if not can_hand_off(group, view):
        return None
    committed = view.checkpoint.value if view.checkpoint is not None else None
    last = max(committed.number, committed.handoff) if committed is not None else 0

    def request_after(number: int) -> HandoffRequest:
        in_memory = not progress.count and change.keeps_memory(group)
        return HandoffRequest(group=group.number, after=max(last, number), in_memory=in_memory, reason=change.reason)

    if view.handoff is None or view.handoff.value.number < progress.number:
        return request_after(progress.number - 1)
    if progress.fulfilled_since is None:
        until = progress.first_seen_at + (policy.handoff_timeout_s if change.cause == "drain" else _TIMEOUT_S)
        has_later = committed is not None and committed.number >= progress.number
        retry_at = progress.first_seen_at + _RETRY_AFTER_S if has_later else until
        if now < min(until, retry_at):
            return min(until, retry_at)
        if now >= until:
            return None
    elif are_ranks_quiesced(progress, policy, now) and (
        not progress.is_in_memory or change.keeps_memory(group, _quiesced(progress.number, view))
    ):
        return None
    return request_after(progress.number) if progress.count < _MAX_REQUESTS else None
