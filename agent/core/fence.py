"""The fence: whether a checkpoint that a local worker has written is committed.

A worker writes its files under a private name and asks its agent to commit them. The agent writes the `checkpoint`
record in one transaction, which compares the group and the last commit with those that the decision was based on. So a
node that was cut off or suspended cannot commit into a history that has continued without it. A transaction without an
answer is neither accepted nor refused: it is sent again with the same compares, until the view shows either this record
or one that makes the commit impossible.
"""

from __future__ import annotations

import msgspec

from agent.core import effects as fx
from agent.core import events as ev
from agent.core.lineage import refusal
from agent.core.reasons import CommitRefused
from agent.core.saved_states import Checkpoint
from agent.core.view import ClusterView

Settled = fx.AnswerPublish | fx.WriteCheckpoint | None


def settle(asked: ev.PublishAsked, view: ClusterView, run: str, *, is_late: bool = False) -> Settled:
    """Return the answer to the worker if it is certain, otherwise the effect that leads to it. None: wait.

    A record in a view may be older than the one in etcd, but never newer, and records never go back. So if this view
    makes the commit impossible, it stays impossible, and a write that is based on an old record is refused. Our write
    may have been applied just before the next group was formed; a view that has that group then has our record too.
    What the last group made may still be committed after it was replaced by one without members, which has no restore
    point: see `last_checkpoint.py`.

    Args:
        asked: the request of the worker.
        view: the newest view.
        run: the run of the job.
        is_late: ranks that stopped for a handoff have not got an answer in time, so they train again by now.
    """
    group, restore_point = view.group, view.restore_point
    if group is None or restore_point is None or group.value.number < asked.group:
        return None
    committed = view.checkpoint.value if view.checkpoint is not None else None
    if committed is not None and _is_same(committed, asked.checkpoint):
        return fx.AnswerPublish(asked.group, asked.checkpoint.copy, committed, None)
    if group.value.number > asked.group:
        return _no(asked, CommitRefused(why="group", group=group.value.number))
    if restore_point.value.group != asked.group and group.value.members:
        return None
    reason = refusal(asked.checkpoint, committed, restore_point.value, run)
    if reason is not None:
        return _no(asked, reason)
    number = committed.number + 1 if committed is not None else 1
    is_late = is_late and asked.checkpoint.handoff > 0
    checkpoint = msgspec.structs.replace(asked.checkpoint, number=number, run=run, is_late=is_late)
    return fx.WriteCheckpoint(checkpoint, group.mod_revision, view.checkpoint.mod_revision if view.checkpoint else 0)


def _is_same(committed: Checkpoint, asked: Checkpoint) -> bool:
    return (committed.copy, committed.private) == (asked.copy, asked.private)


def _no(asked: ev.PublishAsked, reason: CommitRefused) -> fx.AnswerPublish:
    return fx.AnswerPublish(asked.group, asked.checkpoint.copy, None, reason)
