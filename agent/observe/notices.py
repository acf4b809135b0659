"""Notices that an agent prints on its console, derived from its state.

The classes look at the state after each turn of the agent's loop, as `status` looks at the records. They decide
nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from agent.core.causes import first_failure, with_early_end
from agent.core.failures import Failure
from agent.core.model import Node
from agent.core.reasons import SetUpFailed
from agent.core.records import Identity
from agent.core.state import AgentFacts, AgentState
from agent.core.view import ClusterView
from agent.observe.messages import describe, how_it_ended

_WAIT_NOTICE_EVERY_S = 10.0
_MAX_DIFFERENCES = 5


class WaitNotices:
    """Print every few seconds what a job waits for while nobody trains: which nodes are missing, and for how long.

    Args:
        machines: node ids that the operator named. Empty: the expected nodes are not known.
        print_notice: called with each notice.
    """

    def __init__(self, machines: Sequence[str], print_notice: Callable[[str], None]) -> None:
        self._machines = machines
        self._print = print_notice
        self._since: float | None = None
        self._due = 0.0

    def update(self, state: AgentState, now: float) -> None:
        """Print a notice if one is due. `now`: monotonic, in seconds."""
        if not _is_waiting(state):
            self._since = None
        elif self._since is None:
            self._since, self._due = now, now + _WAIT_NOTICE_EVERY_S
        elif now >= self._due:
            self._due = now + _WAIT_NOTICE_EVERY_S
            self._print(f"{_wait_reason(state)}{self._missing(state)} ({now - self._since:.0f} s)")

    def _missing(self, state: AgentState) -> str:
        if state.view is None or not state.view.is_whole:
            return ""
        registered = {node.value.node_id for node in state.view.nodes}
        missing = [machine for machine in self._machines if machine not in registered]
        return f"; missing: {', '.join(missing)}" if missing else ""


def _is_waiting(state: AgentState) -> bool:
    """Whether the job waits. Not if it trains, this agent is leaving, or etcd cannot be reached."""
    is_over = state.leaving is not None or state.drain_until is not None or state.is_store_lost or state.view is None
    if is_over or (state.group is not None and state.group.members):
        return False
    return state.planned is None or state.planned.action is None


def _wait_reason(state: AgentState) -> str:
    """Return what the job waits for."""
    if state.planned is not None:
        return describe(state.planned.reason)
    leader = state.view.leader if state.view is not None else None
    return f"waiting for {leader.value.node_id} to form a group" if leader is not None else "waiting for a leader"


class EtcdOutageNotice:
    """Warn once per outage that etcd cannot be reached.

    No warning once the job has ended or this agent is leaving: an etcd that the agents bring is then stopped with them,
    so that the loss is expected.

    Args:
        reason: returns why the last attempt to reach etcd failed.
        warn: called with the warning and the reason, once per outage.
    """

    def __init__(self, reason: Callable[[], str], warn: Callable[[str, str], None]) -> None:
        self._reason = reason
        self._warn = warn
        self._has_warned = False

    def update(self, state: AgentState, _now: float) -> None:
        """Warn if an outage has begun, by the state of an agent of a collective job."""
        self.notice(is_lost=state.is_store_lost, is_over=_is_over(state), is_training=state.workers.is_alive)

    def notice(self, *, is_lost: bool, is_over: bool, is_training: bool) -> None:
        """Warn if an outage has begun, unless the job is over or this agent is leaving."""
        if not is_lost:
            self._has_warned = False
        elif not self._has_warned:
            self._has_warned = True
            if not is_over:
                goes_on = "; the ranks run on" if is_training else ""
                self._warn(f"etcd cannot be reached{goes_on}", self._reason())


def _is_over(state: AgentState) -> bool:
    has_ended = state.view is not None and state.view.result is not None
    return has_ended or state.leaving is not None or state.drain_until is not None


class SetUpNotice:
    """Warn once that the script's set-up has failed in a process that was to join.

    Args:
        warn: called with the warning.
    """

    def __init__(self, warn: Callable[[str], None]) -> None:
        self._warn = warn
        self._last: SetUpFailed | None = None

    def update(self, state: AgentState) -> None:
        """Warn if a set-up has failed."""
        failure, last = state.workers.set_up_failure, self._last
        self._last = failure
        if failure is not None and failure is not last:
            self._warn(f"{describe(failure)}: this node does not join yet; it tries again later")


class NodeDifferences:
    """Warn once per node whose software differs from this node's: versions, or the training script.

    Such nodes need not fail or hang: they may silently train something else. The leader prints it, since it sees all
    nodes.

    Args:
        warn: called with each warning.
    """

    def __init__(self, warn: Callable[[str], None]) -> None:
        self._warn = warn
        self._seen: set[Identity] = set()
        self._revision = 0

    def update(self, state: AgentState) -> None:
        """Compare nodes that have not been seen before with this one."""
        view = state.view
        if view is None or not view.is_whole or view.revision == self._revision:
            return
        self._revision = view.revision
        for who in sorted(view.present.keys() - self._seen):
            self._seen.add(who)
            self._compare(state.me, view.present[who].value)

    def _compare(self, me: AgentFacts, other: Node) -> None:
        here, there = dict(me.about.facts), dict(other.about.facts)
        if here.get("script name") != there.get("script name"):  # then their contents differ, too
            there["script"] = here.get("script", "none")
        differ = [
            f"{name} {there.get(name, 'none')} there, {here.get(name, 'none')} on {me.node_id}"
            if name != "script"
            else f"its script, or a module that it imports, is not the same as on {me.node_id}"
            for name in sorted({*here, *there})
            if here.get(name) != there.get(name)
        ]
        if differ:
            self._warn(
                f"{other.node_id} runs other software: {'; '.join(differ[:_MAX_DIFFERENCES])}; "
                "install the same versions and the same script on all nodes; another training needs another --job_id"
            )


class FailedRank(Protocol):
    """The end of a worker, from a record or from a network message."""

    @property
    def tail(self) -> str:
        """Last lines of its standard error, or of both streams."""
        ...

    @property
    def traceback(self) -> str:
        """Traceback of its exception, if `tail` does not contain all of it."""
        ...


def first_failure_of_job(view: ClusterView) -> tuple[str, Failure] | None:
    """Return the first failure of the last group with ranks, and the name of its node. None: no worker has failed.

    A job that fails ends with a group without members. How the ranks before it ended is in that group's incident or, as
    long as this is not written, in their own reports.
    """
    if view.group is None:
        return None
    group = view.group.value
    if group.members:
        first = first_failure(with_early_end(group, view.exits))
    else:
        ended = next((each.value.ended for each in reversed(view.backlog.incidents) if each.value.ended), ())
        if ended:
            return ended[0].node_id, ended[0].failure
        last = max((each.group for each in view.backlog.statuses), default=0)
        first = first_failure([each.exit for each in view.backlog.statuses if each.exit and each.group == last])
    return (first[0].node_id, first[1]) if first is not None else None


def first_failure_output(node_id: str, failure: Failure) -> str:
    """Return a failure with the end of its standard error, for every node's console. Empty: it left no output."""
    if not (failure.traceback or failure.tail).strip():
        return ""
    return failure_output(how_it_ended(node_id, failure), failure)


def failure_output(how: str, failed: FailedRank) -> str:
    """Return the last output of a worker as a block of lines under a heading that says `how` it ended."""
    lines = (failed.traceback or failed.tail).rstrip().splitlines()
    return "\n".join([f"{how}; its last lines:", *(f"  | {line}" for line in lines)])
