"""The restart budget, and the exit codes of the agents of a failed job.

The budget belongs to the job, not to an agent: it is a count in the group record, and only the write of the next group
changes it. So a failure is charged once per group, and all agents see the same count. A worker failure costs one
restart, a change of the members none.

Progress resets the count. It is evaluated when workers fail. Progress is as many new steps since the last reset as
usually take `progress_window_s`, at least one. While the usual time of a step is not known, no number of steps is
enough. Replayed steps are not new. So a script that always fails at the same place ends, while a long job survives any
number of faults. A script that commits no steps makes progress by running for sixty windows until it fails or hangs. A
worker that asks for a restart (exit code 101) is charged for it unless it made a new step. A checkpoint that cannot be
read costs nothing and is tried again without limit.

An error in the script itself (`find_script_error` in `agent/workers/last_error.py`) that ends every rank of two groups
in a row before any step was made ends the job, because it would end every further try. This rule does not apply if the
user has chosen a budget.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from signal import SIGKILL

from agent.core.backoff import doubled_s
from agent.core.causes import first_failure
from agent.core.failures import ExitReport, Failure
from agent.core.model import Group
from agent.core.reasons import EndingReason, FailedWorker, Finished, GaveUp, NotRetried, Requested
from agent.core.records import Identity
from agent.errors import EXIT_BUDGET, EXIT_STORE, EXIT_TIMEOUT, EXIT_UNSAVED, EXIT_USAGE
from trainer_runtime.contract import EXIT_RESTART

_WINDOWS_WITHOUT_STEPS = 60
"""Windows of `progress_window_s` that a script without steps must run to make progress: one hour by default. A rank
that cannot reach the others fails after torch's time-outs of 10 or 30 minutes."""
EARLY_S = 120.0
"""Only this soon after the start of a group does an error in the script wait for the same error in other ranks. Later
these would continue training meanwhile."""
_BACK_OFF_S = 0.5
"""Delay before the second restart."""
_BACK_OFF_MAX_S = 30.0

_AGENT_EXIT_CODES = frozenset({EXIT_USAGE, EXIT_STORE, EXIT_UNSAVED, EXIT_TIMEOUT, EXIT_BUDGET, EXIT_RESTART})
"""Exit codes that have a meaning of their own, so a failed job does not end with them by accident."""


def highest_step(group: Group, reports: Sequence[ExitReport]) -> int:
    """Highest step committed by any rank up to now."""
    return max((group.step, *(report.step for report in reports)))


@dataclass(frozen=True)
class FailureCount:
    """The fields of a group record about earlier failures (see `Group`). Progress resets all except `left_out`."""

    restarts: int = 0
    counted_from: int = 0
    placed_last: tuple[str, ...] = ()
    failed_alone: str = ""
    failed_early: str = ""
    left_out: tuple[Identity, ...] = ()
    failed_reads: int = 0
    script_error: str = ""
    is_script_error_again: bool = False
    """It also ended the previous group, without progress in between. Not in the record."""


def tally(
    group: Group, reports: Sequence[ExitReport], plain_s: float, window_s: float, *, is_failure: bool
) -> FailureCount:
    """Return the failure count after this group has ended.

    A node whose workers alone fail for the second time in a row comes last in the groups that follow, so that a spare
    takes its place. A node that cannot read the checkpoint comes last at once, so that another node tries. If both
    failures were before a first step, as on a node without a mount or a module, the node is left out.

    Args:
        group: the group that has ended.
        reports: exit reports of its members.
        plain_s: how long it ran, in seconds, if its script commits no steps.
        window_s: `progress_window_s`.
        is_failure: whether it ended by a failure that is charged.
    """
    before = _after_progress(group, reports, plain_s, window_s)
    if all(report.failure is None for report in reports):
        return before
    script_error = _shared_script_error(group, reports)
    failed, cannot_read = _failed_alone(reports), _cannot_read(reports)
    is_worst = cannot_read or (failed if failed == before.failed_alone else "")
    has_begun = highest_step(group, reports) > group.step or plain_s >= window_s
    early = "" if has_begun or len(group.members) == 1 else failed
    is_out = [member.identity for member in group.members if member.node_id == early == before.failed_early]
    return FailureCount(
        restarts=before.restarts + is_failure,
        counted_from=before.counted_from,
        placed_last=(*(each for each in before.placed_last if each != is_worst), is_worst)
        if is_worst
        else before.placed_last,
        failed_alone=failed,
        failed_early=early,
        left_out=(*before.left_out, *is_out),
        failed_reads=before.failed_reads + 1 if cannot_read else 0,
        script_error=script_error,
        is_script_error_again=bool(script_error) and script_error == before.script_error,
    )


def _shared_script_error(group: Group, reports: Sequence[ExitReport]) -> str:
    """The error in the script that ended every rank of the group before any step was made. Empty: there is none."""
    found = {report.failure.script_error if report.failure is not None else "" for report in reports}
    is_whole = len(reports) == len(group.members) and highest_step(group, reports) == 0
    return found.pop() if is_whole and len(found) == 1 else ""


def _after_progress(group: Group, reports: Sequence[ExitReport], plain_s: float, window_s: float) -> FailureCount:
    step = highest_step(group, reports)
    step_s = max((report.step_s for report in reports), default=0.0)
    # Without reports of the steps and their usual time, progress is counted once there are some.
    has_progressed = step_s > 0.0 and step - group.counted_from >= max(1, round(window_s / step_s))
    if has_progressed or (step == 0 and plain_s >= _WINDOWS_WITHOUT_STEPS * window_s):
        return FailureCount(counted_from=step, left_out=group.left_out)
    return FailureCount(
        restarts=group.restarts,
        counted_from=group.counted_from,
        placed_last=group.placed_last,
        failed_alone=group.failed_alone,
        failed_early=group.failed_early,
        left_out=group.left_out,
        failed_reads=group.failed_reads,
        script_error=group.script_error,
    )


def counts(group: Group, reports: Sequence[ExitReport], failure: Failure) -> bool:
    """Whether the failure that ended a group is charged. A restart that a worker asked for is not, after a new step."""
    return failure.exit_code != EXIT_RESTART or highest_step(group, reports) <= group.step


def _failed_alone(reports: Sequence[ExitReport]) -> str:
    """Id of the node whose own workers failed. Empty: there is none, or several."""
    own = {report.node_id for report in reports if report.failure is not None and is_own(report.failure)}
    return own.pop() if len(own) == 1 else ""


def _cannot_read(reports: Sequence[ExitReport]) -> str:
    """Id of the node that could not read the checkpoint, if that was the first failure. Otherwise empty."""
    found = first_failure(reports)
    return found[0].node_id if found is not None and found[1].unreadable else ""


def is_own(failure: Failure) -> bool:
    """Whether the worker itself failed, and not its peer, the master port, or the storage of the checkpoint."""
    return not (failure.is_peer_lost or failure.is_port_taken or failure.unreadable)


def back_off_s(used: int) -> float:
    """The least time between the starts of two groups. `used`: restarts since the last progress. 0 after the first.

    A repeated failure may only need time: a file system may be away, or a device may still be held. Not used after a
    group that made new steps: its failure is another one, and ranks that keep their processes wait meanwhile.
    """
    return 0.0 if used <= 1 else doubled_s(_BACK_OFF_S, used - 2, _BACK_OFF_MAX_S)


def exit_code(reason: Finished | EndingReason) -> int:
    """Return the agents' exit code when the job ends for this reason."""
    match reason:
        case Finished() | Requested(saved=None):
            return 0
        case Requested():
            return EXIT_UNSAVED
        case GaveUp():
            return EXIT_TIMEOUT
        case NotRetried(restarts=0):
            return agent_exit_code(reason.first)
        case NotRetried():
            return EXIT_BUDGET


def agent_exit_code(failure: FailedWorker) -> int:
    """The exit code of the worker, or 128 + signal. 1 if the code has another meaning as an exit code of an agent."""
    if failure.signal is not None:
        return 128 + failure.signal
    code = failure.exit_code or 1
    return 1 if code in _AGENT_EXIT_CODES else code


_PEER_LOST = (
    "Connection closed by peer",
    "Connection reset by peer",
    "Broken pipe",
    "Connection refused",
    "remote process exited or there was a network error",
    "DistNetworkError",
    "Socket closed",
    "Connection was likely closed",
    "failed to recv, got 0 bytes",
    "seconds waiting for clients. ",
    "trainer_runtime.dist.PeerError: ",
)


def is_port_taken(stderr_tail: str, port: int) -> bool:
    """Whether torch reports in this output of rank 0 that the master port was taken after it had been chosen."""
    return "EADDRINUSE" in stderr_tail and f"port: {port}," in stderr_tail


def is_peer_lost(stderr_tail: str, signal: int | None) -> bool:
    """Whether this output says that a connection to another rank broke: messages of gloo, NCCL, TCPStore, or ours.

    It says nothing about a rank that was killed by SIGKILL: no broken connection does that.
    """
    return signal != SIGKILL and any(phrase in stderr_tail for phrase in _PEER_LOST)
