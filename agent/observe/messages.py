"""Messages: the English of reasons, of failures, and of incidents.

The core decides and gives its reasons as data (`agent/core/reasons.py`). Everything that shows a reason to people calls
`describe`: the command line, the page, the agent's log, the report.
"""

from __future__ import annotations

import math
import signal
from collections.abc import Sequence
from typing import assert_never

from agent.core.effects import Exit
from agent.core.failures import Failure
from agent.core.incident import Incident, Phases, WorkerEnd
from agent.core.reasons import (
    AgentEnded,
    AskedToEnd,
    Beginning,
    CheckpointOnDisk,
    CommitRefused,
    DataLost,
    Ended,
    FailedWorker,
    Finished,
    Finishing,
    GaveUp,
    Hang,
    Hanging,
    HealthCheckFailed,
    JobOver,
    NodeIdTaken,
    NodesJoined,
    NodesLost,
    NodesMissing,
    NodesThere,
    NodesUnreachable,
    NotRetried,
    ProcessesLeft,
    Reason,
    Requested,
    SetUpFailed,
    Training,
    UnsavedSteps,
    Waiting,
    WorkersFailed,
)
from agent.observe.quantities import count, duration, replayed

SHOWN_S = 0.005
"""Shorter phases are not shown."""

_LEFT_OUT = "its ranks alone failed twice before their first step"
_DOING = {
    "exited": "has ended with code 0",
    "stopped": "is stopped by a signal",
    "disk": "hangs in the kernel (state D)",
    "sleeps": "sleeps",
    "runs": "computes",
    "waits": "waits for others",
}
_REQUESTED = {
    "np": "np is now {np}",
    "leave": "{names} {was} asked to leave",
    "exclude": "{names} {was} excluded by an operator",
    "restart": "an operator asked for a restart",
    "pause": "paused by {by}: nothing changes until it is resumed",
    "stop": "stopped by {by}",
    "reset": "reset by {by}",
    "start over": "a new run begins",
}
_DATA_LOST = {
    "unknown": "etcd has lost the job, and no node has it cached",
    "collecting": "etcd has lost data; waiting for all members to publish their cached records",
    "restored": "etcd had lost data; all members are back",
}
_WAITING = {
    "nodes": "{because}; waiting a moment for more",
    "return": "etcd was away; waiting for {names} to return",
    "newer records": "waiting for {names} to publish newer records, if etcd has lost any",
    "leave": "waiting for {names} to leave, and to save what nobody else holds in memory",
    "retry": "{because}{failures}; trying again within {within_s} s",
    "warm": "{because}; waiting for {names} to be warm",
    "set up": "{because}; waiting for {names} to set up the script",
    "inventory": "waiting for {names} to say what can be resumed from",
    "save": "waiting for {names} to save what its memory holds",
    "handoff": "{because}; the ranks are to stop after a common step and save it",
}


# Reasons


def describe(reason: Reason) -> str:  # noqa: C901, PLR0911, PLR0912 - one for each kind of reason
    """Describe a reason in a sentence without a full stop: `lost node-b`."""
    match reason:
        case ProcessesLeft(group=group):
            return f"processes of group {group} survive SIGKILL"
        case SetUpFailed(exit_code=code, signal=signal, error=error):
            how = error or (f"code {code}" if code is not None else f"signal {signal}")
            return f"the set-up of the script ended with {how}"
        case HealthCheckFailed(trouble=trouble):
            return f"its health check failed: {trouble}"
        case NodesThere(nodes=nodes, np=np, is_all=is_all):
            return f"all of {count(nodes, 'node')} there" if is_all else f"{count(nodes, 'node')} there (np {np})"
        case NodesJoined(node_ids=node_ids, np=np):
            return f"{listed(node_ids)} joined (np {np})"
        case NodesLost(node_ids=node_ids, unfit=unfit):
            return "; ".join(
                [f"lost {listed(node_ids)}", *(f"{name} is unfit: {describe(why)}" for name, why in unfit)]
            )
        case NodesUnreachable(node_ids=node_ids):
            return f"{listed(node_ids)} and the others do not reach each other" if node_ids else ""
        case WorkersFailed():
            return _workers_failed(reason)
        case Requested(what="stop", node_ids=node_ids, by=by, saved=saved) if node_ids:
            after = (
                f"a new run begins after step {saved}"
                if saved
                else "there is no checkpoint, so that a new run begins anew"
            )
            return f"stopped by {by}; what only the memory of {listed(node_ids)} had could not be saved: {after}"
        case Requested(what=what, node_ids=node_ids, np=np, by=by):
            was = "was" if len(node_ids) == 1 else "were"
            return _REQUESTED[what].format(names=listed(node_ids), was=was, np=np, by=by)
        case CheckpointOnDisk(node_id=node_id, checkpoint=checkpoint):
            return f"{node_id} has the checkpoint {checkpoint} on its disk"
        case DataLost(state=state):
            return _DATA_LOST[state]
        case NodesMissing():
            return _nodes_missing(reason)
        case Training():
            return _training(reason)
        case Beginning(group=group, step=step):
            return f"group {group} begins {'at the start' if step is None else f'after step {step}'}"
        case Finishing(group=group, done=done, nodes=nodes):
            return f"group {group}: {done} of {nodes} nodes have finished"
        case Waiting():
            return _waiting(reason)
        case Finished(ranks=ranks, group=group):
            return f"{f'all {ranks} ranks' if ranks > 1 else 'the only rank'} finished in group {group}"
        case GaveUp(after_s=after_s, waiting=waiting):
            return f"gave up after {after_s:g} s of {describe(waiting)}"
        case NotRetried():
            return _not_retried(reason)
        case AgentEnded(exit_code=exit_code, advice=advice):
            how = "was killed" if exit_code is None else f"left with exit code {exit_code}"
            return f"its agent {how} before the job had ended; {advice}"
        case Ended(result=result):
            return f"the job has ended: {describe(result)}"
        case Hanging(because=because, first=first):
            return f"{describe(because)}; {_failed_worker(first)}"
        case JobOver():
            return _job_over(reason)
        case NodeIdTaken(node_id=node_id, pid=pid, address=address):
            return (
                f"node id {node_id!r} is held by a living agent (pid {pid}, address {address}): "
                "choose another --node_id, or stop that agent"
            )
        case AskedToEnd(signal=number):
            return "left the job, as it was asked to" if number is None else f"stopped by {signal_name(number)}"
        case CommitRefused():
            return _commit_refused(reason)
        case _:
            assert_never(reason)


def _workers_failed(reason: WorkersFailed) -> str:
    first = reason.first
    if first.unreadable:
        return f"waiting for the checkpoint: {first.node_id} cannot read {first.unreadable}"
    if first.is_port_taken:
        return f"the master's port on {first.node_id} was taken"
    apart = [describe(NodesUnreachable(node_ids=reason.unreachable))] if reason.unreachable else []
    out = (f"{name} is left out until its agent is started again: {_LEFT_OUT}" for name in reason.left_out)
    return "; ".join([_failed_worker(first), *apart, *out])


def _nodes_missing(reason: NodesMissing) -> str:
    here = listed(reason.here) or "none"
    text = f"waiting for {reason.missing} of {count(reason.needed, 'node')}; here: {here}"
    return text if reason.last is None else f"{text}; {describe(reason.last)}{_left_out(reason.left_out)}"


def _training(reason: Training) -> str:
    text = f"running on {count(reason.nodes, 'node')}"
    if reason.missing is not None:
        return f"{text}; {reason.missing} more needed for np {reason.np}"
    return f"{text} (np {reason.np}){_left_out(reason.left_out)}" if reason.np is not None else text


def _left_out(node_ids: Sequence[str]) -> str:
    return f"; left out: {listed(node_ids)} ({_LEFT_OUT})" if node_ids else ""


def _waiting(reason: Waiting) -> str:
    names = listed(reason.node_ids)
    because = describe(reason.because) if reason.because is not None else ""
    match reason.what, reason.because:
        case "lease", WorkersFailed(first=first):
            how = " of a broken connection" if first.is_peer_lost else ""
            return f"{because}{how}; checking the lease of {names}"
        case "lease", _:
            return f"{because}; waiting for a lease to end"
        case "checkpoint", CheckpointOnDisk(node_id=node_id, checkpoint=checkpoint):
            return f"waiting for {node_id}: only its own disk has the checkpoint {checkpoint}"
        case "same error", WorkersFailed(first=first):
            return f"{first.script_error}; waiting for the same error on {names}"
        case what, _:
            failures = f": {count(reason.failures, 'failure')} without progress" if reason.failures else ""
            within_s = max(1, math.ceil(reason.within_s))
            return _WAITING[what].format(because=because, names=names, failures=failures, within_s=within_s)


def _not_retried(reason: NotRetried) -> str:
    how = _failed_worker(reason.first)
    match reason.why:
        case "asked":
            return f"{how}, which asks for no restart"
        case "script error":
            return f"{how}, as did every rank, twice in a row; --max_restarts=N tries N times"
        case "budget":
            if reason.restarts == 0:
                return f"{how}, and no restart is allowed (--max_restarts=0)"
            return f"{how}, after {count(reason.restarts, 'restart')} without progress"


def _job_over(reason: JobOver) -> str:
    how = f"{reason.state}: {describe(reason.result)}"
    if reason.was_over:
        again = "elastic-agent reset lets it continue from its newest checkpoint, if any; --fresh starts it over"
        return f"job {reason.job_id} is finished ({how}); {again}"
    return "; ".join(filter(None, (f"job {reason.job_id} {how}", reason.summary)))


def _commit_refused(reason: CommitRefused) -> str:
    save = f", save {reason.save}," if reason.save else ""
    state = f"step {reason.step}{save} of group {reason.group}"
    match reason.why:
        case "group":
            return f"group {reason.group} has been formed since"
        case "history":
            return f"{state} is not of this job's history"
        case "fork":
            return f"{state} is not of this job's history: it continues from another copy"
        case "not older":
            return f"{state} is not older than what it replaces"
        case "committed":
            return f"{state} is committed already"


def describe_exit(ended: Exit) -> str:
    """Describe why an agent ends, and the steps that are given up with it."""
    why = ended.reason if isinstance(ended.reason, str) else describe(ended.reason)
    return f"{why}; {_unsaved_steps(ended.unsaved)}" if ended.unsaved is not None else why


def _unsaved_steps(unsaved: UnsavedSteps) -> str:
    kept = f"the newest checkpoint is of step {unsaved.saved}" if unsaved.saved else "there is no checkpoint"
    text = f"{count(unsaved.reached - unsaved.saved, 'step')} up to step {unsaved.reached} given up: {kept}"
    if not unsaved.were_ranks_signalled:
        return text
    return (
        f"{text}, and SIGTERM ended the ranks before they could save: signal the agent alone (systemd: KillMode=mixed)"
    )


# Failures of workers


def signal_name(number: int) -> str:
    """The name of a signal: `SIGKILL`. For a signal without a name: `signal 63`."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def how_it_ended(node_id: str, failure: Failure) -> str:
    """Describe the failure of a worker: `rank 1 on node-b was killed by SIGKILL: memory ran out`."""
    return _failed_worker(failure.in_short(node_id))


def _failed_worker(failed: FailedWorker) -> str:
    why = why_it_ended(failed)
    return f"rank {failed.rank} on {failed.node_id} {_how(failed)}{f': {why}' if why else ''}"


def why_it_ended(failed: Failure | FailedWorker) -> str:
    """Describe why a worker ended, as far as the system or its end show it. Empty: it is not known."""
    if failed.exit_code != 0:
        return failed.why
    ended = f"it ended after step {failed.last_step}" if failed.last_step else "it ended"
    return f"{ended}, before the other ranks were done"


def _how(failed: FailedWorker) -> str:
    if failed.hang is not None:
        return describe_hang(failed.hang)
    if failed.unreadable:
        return f"could not read {failed.unreadable}"
    if failed.is_port_taken:
        return "found the master's port taken"
    how = f"exited with code {failed.exit_code}"
    if failed.signal is not None:
        how = f"was killed by {signal_name(failed.signal)}"
    return f"{how} ({failed.error})" if failed.error else how


def describe_hang(hang: Hang) -> str:
    """Describe a hang: `made no step after step 9 for 70 s: it sleeps at train.py:33 in load; …`."""
    at = f" at {hang.where}" if hang.where else ""
    text = f"made no step after step {hang.step} for {hang.for_s} s: it {_DOING[hang.doing]}{at}"
    if hang.doing == "waits":
        return text + (f"; others wait at {', '.join(hang.elsewhere)}" if hang.elsewhere else ", and so do all")
    return text + (f"; {hang.waiting} of {hang.others} others wait for it" if hang.waiting else "")


# Incidents


def cause_of(incident: Incident) -> str:
    """Describe the cause of an incident, with other failures that may have been first by the clocks of their nodes."""
    if incident.cause != "failed" or not incident.ended:
        return describe(incident.reason)
    first, others = incident.ended[0], rivals(incident.ended)
    cause = how_it_ended(first.node_id, first.failure)
    if not others:
        return cause
    named = listed([f"rank {each.failure.rank} on {each.node_id}" for each in others])
    return f"{cause} (or {named} first, {how_near(others)})"


def rivals(ended: Sequence[WorkerEnd]) -> tuple[WorkerEnd, ...]:
    """The failures that may have come before the first one by the clocks of their nodes, and are not consequences."""
    return tuple(each for each in ended[1:] if not _is_later(each.failure) and _may_be_first(each))


def _is_later(failure: Failure) -> bool:
    return failure.is_peer_lost or failure.is_early_end


def consequences(ended: Sequence[WorkerEnd]) -> tuple[WorkerEnd, ...]:
    """The failures that are consequences of the first one, or later than it."""
    either = rivals(ended)
    return tuple(each for each in ended[1:] if each not in either)


def _may_be_first(ended: WorkerEnd) -> bool:
    return ended.error_s is None or ended.after_s <= ended.error_s


def how_near(others: Sequence[WorkerEnd]) -> str:
    """How close these failures are to the first one: `within 12 ms`."""
    furthest_s = max((each.after_s + each.error_s for each in others if each.error_s is not None), default=None)
    if furthest_s is None or any(each.error_s is None for each in others):
        return "by clocks that were never compared"
    if furthest_s < 1.0:
        return f"within {math.ceil(furthest_s * 1000)} ms"
    return f"within {duration(furthest_s)}"


def listed(names: Sequence[str], most: int = 8) -> str:
    """List names: `a, b and c`. If there are more than `most`: `a, b and 3 more`. Of none: an empty text."""
    if not names:
        return ""
    shown, more = list(names[:most]), len(names) - most
    if more > 0:
        shown.append(f"{more} more")
    return shown[0] if len(shown) == 1 else f"{', '.join(shown[:-1])} and {shown[-1]}"


def time_of(phases: Phases) -> str:
    """List the known phases: `detect 0.02, agree 0.01, stop 0.1 s`. Empty: none is known."""
    parts = [f"{name} {_seconds(spent_s)}" for name, spent_s in spent(phases) if spent_s >= SHOWN_S]
    return f"{', '.join(parts)} s" if parts else ""


def spent(phases: Phases) -> list[tuple[str, float]]:
    """The names and durations of the known phases, in seconds, in their order."""
    known = ((name, getattr(phases, name)) for name in phases.__struct_fields__)
    return [(name.removesuffix("_s").replace("_", " "), each) for name, each in known if each is not None]


def _seconds(value: float) -> str:
    return f"{value:.2f}" if value < 0.095 else f"{value:.1f}"


REPLAY_NOT_KNOWN = "how many steps were replayed is not known, since no node is left that had trained"
"""Of an incident that `is_at_least` what is counted."""


def one_line(incident: Incident) -> str:
    """Describe an incident on one line.

    `group 4 after 3.4 s: rank 1 on node-b was killed by SIGKILL; detect 0.02, …, first step 0.7 s; 3 replayed steps`.
    """
    after = f" after {duration(incident.phases.total_s)}" if incident.phases.is_complete else ""
    replay = replayed(incident.replayed_steps) if incident.replayed_steps else ""
    if incident.is_at_least:
        replay = REPLAY_NOT_KNOWN
    details = (time_of(incident.phases), replay)
    return "; ".join([f"group {incident.group}{after}: {cause_of(incident)}", *filter(None, details)])
