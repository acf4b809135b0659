# ruff: noqa: E501 - code is quoted as it is
"""The core's guards, and what happens without each: the file, the code, what takes its place, and what then fails.

`test_guards.py` plays each story on a core without the guard, in a process of its own.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Guard:
    """One guard, and the story that needs it."""

    why: str
    module: str
    code: str
    instead: str
    story: str
    """`scenario NAME`, `seed N` of the random clusters, or `story NAME N`: a test of `test_stories.py` and its seed."""


GUARDS = (
    Guard(
        why="a spec is created only if there is none",
        module="agent.store.job",
        code="return [Compare(keys.spec, create_revision=0)], [",
        instead="return [], [",
        story="scenario agent-paused",
    ),
    Guard(
        why="one leader",
        module="agent.store.job",
        code="return [mine], [Put(keys.leader",
        instead="return [], [Put(keys.leader",
        story="scenario clock-jumps",
    ),
    Guard(
        why="the fence compares the group",
        module="agent.store.job",
        code="return [is_current, is_next], [",
        instead="return [is_next], [",
        story="seed 13",
    ),
    Guard(
        why="the fence compares the last commit",
        module="agent.store.job",
        code="return [is_current, is_next], [",
        instead="return [is_current], [",
        story="seed 86",
    ),
    Guard(
        why="the leader's writes rest on the group seen",
        module="agent.store.job",
        code="            Compare(keys.group, mod_revision=effect.group_revision),\n",
        instead="",
        story="seed 6",
    ),
    Guard(
        why="a node id belongs to one",
        module="agent.store.job",
        code="[Compare(key, create_revision=0)], [Put(key, encode(node), lease.lease_id)]",
        instead="[], [Put(key, encode(node), lease.lease_id)]",
        story="scenario two-agents-one-host",
    ),
    Guard(
        why="one lease for all tries to register",
        module="agent.store.job",
        code="lease = self._living_lease() or self._store.grant",
        instead="lease = self._store.grant",
        story="seed 103",
    ),
    Guard(
        why="the lease is kept from before the answer",
        module="agent.store.job",
        code="        self._keeper.hold(lease)  # first: should the answer be lost, the record is kept alive all the same\n",
        instead="",
        story="scenario cut-from-etcd-alone",
    ),
    Guard(
        why="an answer from a lost history is void",
        module="agent.core.absorb",
        code="    if state.is_answer_void:\n        return replace(state, is_answer_void=False, must_refresh=True)\n",
        instead="",
        story="story test_a_wiped_etcd_and_a_lost_member_give_the_next_number 8",
    ),
    Guard(
        why="another history is read again",
        module="agent.core.absorb",
        code="state = replace(state, must_refresh=True, is_answer_void=state.pending is not None)",
        instead="state = replace(state, is_answer_void=state.pending is not None)",
        story="scenario wiped-and-a-member-lost",
    ),
    Guard(
        why="what was reported is reported again",
        module="agent.core.absorb",
        code="workers = state.workers.forget_report() if has_lost_data else state.workers",
        instead="workers = state.workers",
        story="story test_work_reported_before_a_wipe_is_reported_again 8",
    ),
    Guard(
        why="an unanswered write is looked after",
        module="agent.core.absorb",
        code="return replace(state, must_refresh=True, retry_at=now + _RETRY_S, trouble=answer.reason)",
        instead="return replace(state, retry_at=now + _RETRY_S, trouble=answer.reason)",
        story="scenario node-cut-off",
    ),
    Guard(
        why="a refused write is looked after",
        module="agent.core.absorb",
        code="            state = replace(state, must_refresh=True)\n            if answer.holder",
        instead="            if answer.holder",
        story="scenario budget-spent",
    ),
    Guard(
        why="a follower reads its own write",
        module="agent.core.absorb",
        code="must_refresh=not is_ordered)",
        instead="must_refresh=False)",
        story="scenario budget-spent",
    ),
    Guard(
        why="a job that is started over is not remembered",
        module="agent.core.absorb",
        code="    if not should_start_over(state, view):\n        state = _remember",
        instead="    if True:\n        state = _remember",
        story="scenario finished",
    ),
    Guard(
        why="a finished job is left",
        module="agent.core.absorb",
        code="if view.result is not None and state.leaving is None and not should_start_over(state, view):",
        instead="if False:",
        story="scenario finished",
    ),
    Guard(
        why="a draining node waits for the next group",
        module="agent.core.lifecycle",
        code="is_awaited = is_member and not state.is_store_lost and now < state.drain_until",
        instead="is_awaited = False",
        story="scenario sigterm-to-the-leader",
    ),
    Guard(
        why="nothing is decided from before our own write",
        module="agent.core.lifecycle",
        code="if view is None or view.revision < state.settled_revision:",
        instead="if view is None:",
        story="scenario fork-cut-off-group",
    ),
    Guard(
        why="one write at a time",
        module="agent.core.lifecycle",
        code="if state.pending is not None or state.has_left or",
        instead="if state.has_left or",
        story="scenario agent-paused",
    ),
    Guard(
        why="a cut-off agent stops its workers",
        module="agent.core.lifecycle",
        code="return state if due is None or now < due else replace(state, life=state.life + 1, links=())",
        instead="return state",
        story="scenario node-cut-off",
    ),
    Guard(
        why="workers are told of their own group's beginning",
        module="agent.core.lifecycle",
        code="resume.group == workers.group > state.told_resume",
        instead="resume.group > state.told_resume",
        story="scenario agent-paused",
    ),
    Guard(
        why="an agent outlives its workers",
        module="agent.core.lifecycle",
        code="if state.leaving is None or state.workers.is_alive or not state.has_left:",
        instead="if state.leaving is None or not state.has_left:",
        story="scenario draining-node-is-left-out",
    ),
    Guard(
        why="an agent leaves its place first",
        module="agent.core.lifecycle",
        code="state.workers.is_alive or not state.has_left:",
        instead="state.workers.is_alive:",
        story="scenario no-restart",
    ),
    Guard(
        why="a spec is created only by who knows none",
        module="agent.core.lifecycle",
        code="if view.spec is None and state.known is None:",
        instead="if view.spec is None:",
        story="scenario wiped",
    ),
    Guard(
        why="what is known outlives what is shown",
        module="agent.core.memory",
        code="if view.spec is None or has_lost_data(known, view):",
        instead="if view.spec is None:",
        story="scenario old-backup",
    ),
    Guard(
        why="no worker of an older group lives",
        module="agent.core.local",
        code="    if workers.is_alive:\n        if wanted is not None and wanted.number == workers.group:",
        instead="    if workers.is_alive and wanted is not None and wanted.number == workers.group:\n        if wanted is not None and wanted.number == workers.group:",
        story="scenario agent-paused",
    ),
    Guard(
        why="a group's workers are started once",
        module="agent.core.local",
        code="if wanted is None or wanted.number <= workers.group:",
        instead="if wanted is None:",
        story="scenario budget-spent",
    ),
)
