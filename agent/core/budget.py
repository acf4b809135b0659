"""The restart budget, and what a failed job's agents exit with.

The budget is the job's, not an agent's: a count in the group record, changed only by the write that makes the
next group, so once per group and equal for all. A worker failure costs one, a change of the members none. It is
refilled by progress, which is looked at when workers fail: by so many new steps since the last refill as
`progress_window_s` of training makes, at least one; they are too few as long as nobody knows what a step takes. Steps
that are done again are not new, so a script which fails again and again at one place ends, and a long job survives any
number of faults. Scripts that commit no steps, and only these, make progress by running for sixty windows until they
fail or stand still. A worker that asks for its restart (code 101) pays for it unless it took a new step. A checkpoint
that cannot be read costs nothing, and is tried again without end.

Unless the user has chosen a budget, a mistake in the script itself (`find_mistake` in `agent/workers/last_error.py`)
that ends every rank of two groups in a row, before anything is trained, ends the job: it would end every other try.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from agent.core.backoff import doubled_s
from agent.core.causes import first_failure
from agent.core.messages import how_it_ended
from agent.core.model import ExitReport, Failure, Group, Identity
from agent.errors import EXIT_BUDGET, EXIT_STORE, EXIT_TIMEOUT, EXIT_USAGE

_PLAIN_WINDOWS = 60
"""An hour by default: whoever cannot reach the other ranks fails after 10 or 30 minutes, torch's time-outs."""
EARLY_S = 120.0
"""Only so soon after a group has begun does a mistake in the script wait for others to make the same: later they would
train on meanwhile."""
_BACK_OFF_S = 0.5
_BACK_OFF_MAX_S = 30.0

EXIT_NO_RESTART = 93
EXIT_RESTART = 101
_WITH_A_MEANING = frozenset({EXIT_USAGE, EXIT_STORE, EXIT_TIMEOUT, EXIT_BUDGET, EXIT_NO_RESTART, EXIT_RESTART})


def highest_step(group: Group, reports: Sequence[ExitReport]) -> int:
    """Highest step committed by any rank up to now."""
    return max((group.step, *(report.step for report in reports)))


@dataclass(frozen=True)
class FailureCount:
    """What a group record keeps of earlier failures. Progress resets all of it except `left_out`."""

    restarts: int = 0
    counted_from: int = 0
    last: tuple[str, ...] = ()
    failed: str = ""
    early: str = ""
    left_out: tuple[Identity, ...] = ()
    unread: int = 0
    mistake: str = ""
    is_mistake_again: bool = False
    """It is the one of the group before, and nothing was done in between. Not in the record."""


def tally(
    group: Group, reports: Sequence[ExitReport], plain_s: float, window_s: float, *, is_failure: bool
) -> FailureCount:
    """What is remembered once this group has ended.

    A node whose workers fail for the second time in a row, while no other's do, comes last in the groups that follow,
    so that a spare takes its place; one that cannot read the checkpoint at once, so that another tries. If both times
    it was before a first step, as where a mount or a module is missing, it is left out.

    Args:
        group: that has ended.
        reports: of its members.
        plain_s: how long it ran, in seconds, if its script commits nothing.
        window_s: so much training refills the budget, in seconds.
        is_failure: whether it ended by a failure that counts.
    """
    before = _after_progress(group, reports, plain_s, window_s)
    if all(report.failure is None for report in reports):
        return before
    mistake = _shared_mistake(group, reports)
    failed, cannot_read = _failed_alone(reports), _cannot_read(reports)
    is_worst = cannot_read or (failed if failed == before.failed else "")
    has_begun = highest_step(group, reports) > group.step or plain_s >= window_s
    early = "" if has_begun or len(group.members) == 1 else failed
    is_out = [member.identity for member in group.members if member.node_id == early == before.early]
    return FailureCount(
        restarts=before.restarts + is_failure,
        counted_from=before.counted_from,
        last=(*(each for each in before.last if each != is_worst), is_worst) if is_worst else before.last,
        failed=failed,
        early=early,
        left_out=(*before.left_out, *is_out),
        unread=before.unread + 1 if cannot_read else 0,
        mistake=mistake,
        is_mistake_again=bool(mistake) and mistake == before.mistake,
    )


def _shared_mistake(group: Group, reports: Sequence[ExitReport]) -> str:
    """The mistake in the script that has ended every rank of the group, before anything was trained."""
    found = {report.failure.mistake if report.failure is not None else "" for report in reports}
    is_whole = len(reports) == len(group.members) and highest_step(group, reports) == 0
    return found.pop() if is_whole and len(found) == 1 else ""


def _after_progress(group: Group, reports: Sequence[ExitReport], plain_s: float, window_s: float) -> FailureCount:
    step = highest_step(group, reports)
    step_s = max((report.step_s for report in reports), default=0.0)
    # Where nobody says how far they came, and how fast, it is counted when somebody does.
    has_progressed = step_s > 0.0 and step - group.counted_from >= max(1, round(window_s / step_s))
    if has_progressed or (step == 0 and plain_s >= _PLAIN_WINDOWS * window_s):
        return FailureCount(counted_from=step, left_out=group.left_out)
    return FailureCount(
        restarts=group.restarts,
        counted_from=group.counted_from,
        last=group.last,
        failed=group.failed,
        early=group.early,
        left_out=group.left_out,
        unread=group.unread,
        mistake=group.mistake,
    )


def counts(group: Group, reports: Sequence[ExitReport], failure: Failure) -> bool:
    """Whether a failure that ends a group costs a restart: one that was asked for does not, after a new step."""
    return failure.exit_code != EXIT_RESTART or highest_step(group, reports) <= group.step


def _failed_alone(reports: Sequence[ExitReport]) -> str:
    """The node whose own workers failed, if no other's did."""
    own = {report.node_id for report in reports if report.failure is not None and is_own(report.failure)}
    return own.pop() if len(own) == 1 else ""


def _cannot_read(reports: Sequence[ExitReport]) -> str:
    """The node that could not read the checkpoint, if that is what the group ended of."""
    found = first_failure(reports)
    return found[0].node_id if found is not None and found[1].unreadable else ""


def is_own(failure: Failure) -> bool:
    """Whether it is the worker that failed: not its peer, its port, or the disk that it reads from."""
    return not (failure.is_peer_lost or failure.is_port_taken or failure.unreadable)


def back_off_s(used: int) -> float:
    """How long after the last one began a group may begin, by what the budget was used for: at once after the first.

    What fails again and again may only need time: a file system that is away, a device that is still held.
    """
    return 0.0 if used <= 1 else doubled_s(_BACK_OFF_S, used - 2, _BACK_OFF_MAX_S)


def agent_exit_code(failure: Failure) -> int:
    """The worker's own code, 128 + signal, or 1 if its code has a meaning of its own among agents' codes."""
    if failure.signal is not None:
        return 128 + failure.signal
    code = failure.exit_code or 1
    return 1 if code in _WITH_A_MEANING else code


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
    "trainer_runtime.dist.PeerError: ",
)


def is_port_taken(stderr_tail: str, port: int) -> bool:
    """Whether rank 0 says that the master's port, which was free when it was chosen, has been taken since (torch)."""
    return "EADDRINUSE" in stderr_tail and f"port: {port}," in stderr_tail


def is_peer_lost(stderr_tail: str) -> bool:
    """Whether a worker says that it died because another rank did (in the words of gloo, NCCL, TCPStore, or ours)."""
    return any(phrase in stderr_tail for phrase in _PEER_LOST)


def describe(report: ExitReport, failure: Failure) -> str:
    """The failure in a few words: `rank 1 on node-b was killed by SIGKILL`."""
    return how_it_ended(report.node_id, failure)
