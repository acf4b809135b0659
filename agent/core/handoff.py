"""What comes before a planned change: the wish that all ranks stop after one and the same step, and save it.

The leader wishes; the ranks settle among themselves where they stop, and rank 0 publishes that checkpoint with the
wish's number. The answer to them is the next group. Until then nothing is held up by it: ranks that get no answer
within `handoff_wait_s` train on, and the wish is over. So what the leader sees of one has a time:

- no wish yet, or it was lost with etcd's data, or written over by an older one that landed late: wish (again);
- wished for: wait, for a drain `handoff_timeout_s`, else `_PATIENCE_S`; then change in the plain way. Ranks that could
  not save do not say so: if later checkpoints are committed and that one is not, wish anew after `_ANEW_S`;
- fulfilled a moment ago: all ranks stand still. Change now, and nothing is lost;
- fulfilled longer ago, or at an unknown time: they have trained on. Wish anew; after `_WISHES` in the plain way.

Only ranks that asked where to begin can be handed off, and only once they were told: before that nothing is lost.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from agent.core.model import Handoff

if TYPE_CHECKING:
    from agent.core.model import Cause, ClusterView, Group, Policy

_PATIENCE_S = 600.0
_ANEW_S = 120.0
_WISHES = 3
_LONG_AGO = float("-inf")


@dataclass(frozen=True)
class Wish:
    """The newest wish of this group, and when its leader saw what became of it."""

    number: int = 0
    """0: none was seen."""
    count: int = 0
    """Of the wishes in this group."""
    since: float = 0.0
    fulfilled_since: float | None = None


def note(wish: Wish, view: ClusterView, now: float, *, is_back: bool) -> Wish:
    """Note what a view shows of the wish.

    Args:
        wish: what was noted before in this group.
        view: what is seen now.
        now: monotonic, in seconds.
        is_back: nothing was seen for a while before this view: what is new in it may have happened at any time.
    """
    shown = view.handoff.value.number if view.handoff is not None else 0
    committed = view.checkpoint.value if view.checkpoint is not None else None
    if shown > wish.number:
        wish = Wish(shown, wish.count + 1, now)
    if not wish.number or committed is None or wish.fulfilled_since is not None:
        return wish
    if is_back and committed.number >= wish.number:  # its own, perhaps, and another since
        return replace(wish, fulfilled_since=_LONG_AGO)
    if committed.handoff < wish.number:
        return wish
    return replace(wish, fulfilled_since=_LONG_AGO if committed.is_late else now)


def can_hand_off(group: Group, view: ClusterView) -> bool:
    """Whether the group's script commits: its rank 0 asked where to begin."""
    first = group.members[0].identity
    return any(node.value.member.identity == first and node.value.resumed == group.number for node in view.nodes)


def stand_still(wish: Wish, policy: Policy, now: float) -> bool:
    """Whether all ranks wait for the next group at this moment."""
    return wish.fulfilled_since is not None and now < wish.fulfilled_since + policy.handoff_wait_s


def precede(
    group: Group, cause: Cause, reason: str, view: ClusterView, wish: Wish, policy: Policy, now: float
) -> Handoff | float | None:
    """What a planned change of this group waits for: a wish to be written, or until when; None: nothing (more)."""
    if not can_hand_off(group, view):
        return None
    committed = view.checkpoint.value.number if view.checkpoint is not None else 0
    wanted = Handoff(group=group.number, after=committed, reason=reason)
    if view.handoff is None or view.handoff.value.number < wish.number:
        return wanted
    if wish.fulfilled_since is None:
        until = wish.since + (policy.handoff_timeout_s if cause == "drain" else _PATIENCE_S)
        anew_at = wish.since + _ANEW_S if committed >= wish.number else until
        if now < min(until, anew_at):
            return min(until, anew_at)
        if now >= until:
            return None
    elif stand_still(wish, policy, now):
        return None
    return wanted if wish.count < _WISHES else None
