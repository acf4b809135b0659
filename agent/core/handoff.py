"""What comes before a planned change: the wish that all ranks stop after one and the same step, and save it.

The leader wishes; the ranks settle among themselves where they stop. What fulfils the wish is a checkpoint that rank 0
publishes with its number. Where all that the ranks have stays in the memory of agents that go on, a snapshot is enough:
then each member says that its ranks stand still. The answer to them is the next group. Until then nothing is held up:
ranks that get no answer within `handoff_wait_s` train on, and the wish is over. So what the leader sees of one has a
time:

- no wish yet, or it was lost with etcd's data, or written over by an older one that landed late: wish (again);
- wished for: wait, for a drain `handoff_timeout_s`, else `_PATIENCE_S`; then change in the plain way. Ranks that could
  not save do not say so: if later checkpoints are committed and that one is not, wish anew after `_ANEW_S`;
- fulfilled a moment ago: all ranks stand still. Change now, and nothing is lost;
- fulfilled longer ago, or at an unknown time: they have trained on. Wish anew; after `_WISHES` in the plain way;
- fulfilled in memory, which the change that is due by now would not leave enough of: wish for a checkpoint.

Only the first wish in a group may be fulfilled in memory: what kept that from coming about may last.

Only ranks that asked where to begin can be handed off, and only once they were told: before that nothing is lost.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from agent.core.model import HandoffRequest
from agent.core.neighbours import neighbours

if TYPE_CHECKING:
    from collections.abc import Sequence

    from agent.core.model import Cause, Checkpoint, ClusterView, Group, Member, Policy, Quiesced

_PATIENCE_S = 600.0
_ANEW_S = 120.0
_WISHES = 3
_LONG_AGO = float("-inf")


@dataclass(frozen=True)
class HandoffProgress:
    """The newest wish of this group, and when its leader saw what became of it."""

    number: int = 0
    """0: none was seen."""
    count: int = 0
    """Of the wishes in this group."""
    since: float = 0.0
    fulfilled_since: float | None = None
    is_in_memory: bool = False
    """By what the members hold in memory, and no checkpoint."""


def note(wish: HandoffProgress, view: ClusterView, now: float, *, is_back: bool) -> HandoffProgress:
    """Note what a view shows of the wish.

    Args:
        wish: what was noted before in this group.
        view: what is seen now.
        now: monotonic, in seconds.
        is_back: nothing was seen for a while before this view: what is new in it may have happened at any time.
    """
    shown = view.handoff.value.number if view.handoff is not None else 0
    if shown > wish.number:
        wish = HandoffProgress(shown, wish.count + 1, now)
    if not wish.number or wish.fulfilled_since is not None:
        return wish
    if not is_fulfilled(wish.number, view):
        committed = view.checkpoint.value.number if view.checkpoint is not None else 0
        is_past = is_back and committed >= wish.number  # by its own, perhaps, and another since
        return replace(wish, fulfilled_since=_LONG_AGO) if is_past else wish
    saved = _saved(wish.number, view)
    is_late = any(each.is_late for each in _stood(wish.number, view)) if saved is None else saved.is_late
    return replace(wish, fulfilled_since=_LONG_AGO if is_back or is_late else now, is_in_memory=saved is None)


def is_fulfilled(number: int, view: ClusterView) -> bool:
    """Whether the current group's wish of this number has been met, by a checkpoint or by all of its members."""
    if _saved(number, view) is not None:
        return True
    return view.group is not None and len(_stood(number, view)) == len(view.group.value.members)


def _saved(number: int, view: ClusterView) -> Checkpoint | None:
    committed = view.checkpoint.value if view.checkpoint is not None else None
    return committed if committed is not None and committed.handoff >= number else None


def _stood(number: int, view: ClusterView) -> list[Quiesced]:
    return [each for each in view.quiesced if each.number == number]


def can_hand_off(group: Group, view: ClusterView) -> bool:
    """Whether the group's script commits: its rank 0 asked where to begin."""
    first = group.members[0].identity
    return any(node.value.member.identity == first and node.value.resumed == group.number for node in view.nodes)


def stand_still(wish: HandoffProgress, policy: Policy, now: float) -> bool:
    """Whether all ranks wait for the next group at this moment."""
    return wish.fulfilled_since is not None and now < wish.fulfilled_since + policy.handoff_wait_s


@dataclass(frozen=True)
class PlannedChange:
    """A planned change of a group."""

    cause: Cause
    reason: str
    members: Sequence[Member]
    """Who is to go on; nobody, if the group just ends."""

    def keeps_memory(self, group: Group) -> bool:
        """Whether no agent ends with it, and those who go on hold all that the group has in memory.

        Which is what is common, their own ranks' parts, and those of their neighbours.
        """
        stays = {member.identity for member in self.members}
        return self.cause != "drain" and all(
            stays & {who.identity for who in (member, *neighbours(group, member.identity))} for member in group.members
        )


def precede(
    group: Group, change: PlannedChange, view: ClusterView, wish: HandoffProgress, policy: Policy, now: float
) -> HandoffRequest | float | None:
    """What a planned change of this group waits for: a wish to be written, or until when; None: nothing (more)."""
    if not can_hand_off(group, view):
        return None
    committed = view.checkpoint.value if view.checkpoint is not None else None
    last = max(committed.number, committed.handoff) if committed is not None else 0

    def wish_after(number: int) -> HandoffRequest:
        in_memory = not wish.count and change.keeps_memory(group)
        return HandoffRequest(group=group.number, after=max(last, number), in_memory=in_memory, reason=change.reason)

    if view.handoff is None or view.handoff.value.number < wish.number:
        return wish_after(wish.number - 1)
    if wish.fulfilled_since is None:
        until = wish.since + (policy.handoff_timeout_s if change.cause == "drain" else _PATIENCE_S)
        anew_at = wish.since + _ANEW_S if committed is not None and committed.number >= wish.number else until
        if now < min(until, anew_at):
            return min(until, anew_at)
        if now >= until:
            return None
    elif stand_still(wish, policy, now) and (change.keeps_memory(group) or not wish.is_in_memory):
        return None
    return wish_after(wish.number) if wish.count < _WISHES else None
