"""The fence: whether a checkpoint that a local worker has written counts.

A worker writes its files under a private name and asks. Its agent then commits the `checkpoint` record, in one
transaction that compares the group and the last commit with what the decision rested on: a node that was cut off, or
slept, cannot commit into a history that has gone on without it. An unanswered transaction is neither yes nor no: it is
sent again, with the same compares, until the view shows either our own record or one that makes it impossible.
"""

from __future__ import annotations

import msgspec

from agent.core import effects as fx
from agent.core import events as ev
from agent.core.lineage import may_commit
from agent.core.model import Checkpoint, ClusterView

Settled = fx.AnswerPublish | fx.WriteCheckpoint | fx.Refresh | None


def settle(asked: ev.PublishAsked, view: ClusterView, run: str, *, is_late: bool = False) -> Settled:
    """The verdict, if it is certain; else what brings it about; None: it is not known yet.

    Every record in a view may be older than it is by now, but never newer, and none goes back. So what makes a commit
    impossible in this view makes it impossible for good, and a write that rests on an old record is refused. But it
    may have landed just before: a newer group means no only in a view that is complete up to that group.

    Ranks that stopped for a handoff do not wait for ever: `is_late` says that they have trained on by now.
    """
    group, resume = view.group, view.resume
    if group is None or resume is None or group.value.number < asked.group:
        return None
    committed = view.checkpoint.value if view.checkpoint is not None else None
    if committed is not None and _is_same(committed, asked.checkpoint):
        return fx.AnswerPublish(asked.group, asked.checkpoint.copy, committed, "")
    if group.value.number > asked.group:
        is_complete = view.revision >= group.mod_revision
        return _no(asked, f"group {group.value.number} has been formed since") if is_complete else fx.Refresh()
    if resume.value.group != asked.group:
        return None
    reason = may_commit(asked.checkpoint, committed, resume.value, run)
    if reason:
        return _no(asked, reason)
    number = committed.number + 1 if committed is not None else 1
    is_late = is_late and asked.checkpoint.handoff > 0
    checkpoint = msgspec.structs.replace(asked.checkpoint, number=number, run=run, is_late=is_late)
    return fx.WriteCheckpoint(checkpoint, group.mod_revision, view.checkpoint.mod_revision if view.checkpoint else 0)


def _is_same(committed: Checkpoint, asked: Checkpoint) -> bool:
    return (committed.copy, committed.private) == (asked.copy, asked.private)


def _no(asked: ev.PublishAsked, reason: str) -> fx.AnswerPublish:
    return fx.AnswerPublish(asked.group, asked.checkpoint.copy, None, reason)
