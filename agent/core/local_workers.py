"""This node's workers, and how they follow the group record.

Workers of a group live from `StartWorkers` until `WorkersGone`. No worker of a newer group is started before that.
When one fails the others are killed at once: they are stuck in a collective with it. Unless it died of a broken
connection: then the cause is most likely one of the others, which gets a moment to show it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from agent.core import effects as fx
from agent.core import events as ev
from agent.core.budget import EARLY_S, is_peer_lost, is_port_taken
from agent.core.causes import early_end, in_short, is_between_ranks
from agent.core.model import (
    Clock,
    ExitReport,
    Failure,
    Group,
    Identity,
    Quiesced,
    Spec,
)

_CAUSE_WITHIN_S = 1.5


def _is_consequence(exited: ev.WorkerExited) -> bool:
    """It died of a broken connection to another rank; not to where the checkpoint is."""
    # The words may stand in the exception alone: what is dumped after it pushes them out of the last lines.
    return not exited.unreadable and is_peer_lost(f"{exited.error}\n{exited.stderr_tail}")


@dataclass(frozen=True)
class LocalWorkers:
    """What is known of the local rank processes."""

    group: int = 0
    """Of the group that they belong to; 0: none was ever started."""
    master_port: int = 0
    first_rank: int = 0
    count: int = 0
    started_at: float = 0.0
    before: int = 0
    """Highest step that the workers before had committed; of the last of them that made one."""
    ended_before: tuple[Failure, ...] = ()
    """How those ended that did so of themselves, and failed."""
    step: int = 0
    """Highest step that one which has ended had committed."""
    failed_at: float = 0.0
    """When the first failure was seen."""
    is_alive: bool = False
    """Something of them may live."""
    exits: tuple[ev.WorkerExited, ...] = ()
    """In the order seen."""
    is_told_to_end: bool = False
    is_killed: bool = False
    stuck_at: float | None = None
    """When something that was killed should be gone. None: nothing was killed."""
    is_stuck: bool = False
    """Something of them lives on, long after it was killed."""
    kill_at: float | None = None
    told_handoff: int = 0
    """Number of the newest wish for a handoff that they were told; 0: none."""
    stood: ev.RanksQuiesced | None = None
    """They stand still, or stood, for a handoff. None: for none yet."""
    stand_until: float = 0.0
    """Then they train on, if they are not told anything."""
    report: ExitReport | None = None
    """The exit report as it was first written, so that it is the same when it is written again."""
    cause_until: float | None = None
    """Until when the others have time to show why one of them lost its connection, or that they make the same mistake.
    None: no failure yet."""

    @property
    def failures(self) -> tuple[ev.WorkerExited, ...]:
        """Those that ended otherwise than with exit code 0."""
        return tuple(e for e in self.exits if e.exit_code != 0)

    def awaits_cause(self, now: float) -> bool:
        """Whether more must show: so far all failures are consequences, or mistakes that others may make as well."""
        if self.cause_until is None or now >= self.cause_until or len(self.exits) == self.count:
            return False
        return all(_is_consequence(e) for e in self.failures) or all(e.mistake for e in self.failures)

    def absorb(self, event: ev.WorkerExited | ev.WorkersGone, now: float) -> LocalWorkers:
        """Note what became of them. What an older group's workers do no longer matters."""
        if event.group != self.group:
            return self
        match event:
            case ev.WorkerExited() if self.is_killed and event.signal is not None:
                # By us: no failure of its own, and no cause of another's.
                return replace(self, step=max(self.step, event.step))
            case ev.WorkerExited():
                failed_at = now if event.exit_code != 0 and not self.failures else self.failed_at
                step = max(self.step, event.step)
                return replace(self, exits=(*self.exits, event), step=step, failed_at=failed_at)
            case ev.WorkersGone():
                return replace(self, is_alive=False, kill_at=None, stuck_at=None, is_stuck=False)

    def note_stood(self, event: ev.RanksQuiesced, until: float) -> LocalWorkers:
        """Note that they stand still, and, if that is the first word of it, until when."""
        if event.group != self.group:
            return self
        is_first = self.stood is None or self.stood.number != event.number
        return replace(self, stood=event, stand_until=until if is_first else self.stand_until)


@dataclass(frozen=True)
class Patience:
    """How long workers have to end, in seconds."""

    grace_s: float
    """Between TERM and KILL."""
    kill_timeout_s: float
    """After KILL."""
    same_within_s: float = 0.0
    """After a mistake in the script, for the others to make the same; only in a group that has just begun."""


Followed = tuple[LocalWorkers, tuple[fx.Effect, ...]]


def follow_group(
    workers: LocalWorkers, wanted: Group | None, me: Identity, spec: Spec, now: float, patience: Patience
) -> Followed:
    """Start, end or kill local workers so that they are those of the wanted group (None: of no group)."""
    if workers.is_alive and workers.is_killed:
        is_stuck = workers.stuck_at is not None and now >= workers.stuck_at
        return replace(workers, is_stuck=is_stuck), ()
    if workers.is_alive:
        if wanted is not None and wanted.number == workers.group:
            return _mind_failures(workers, now, patience)
        return _end(workers, now, patience)
    if wanted is None or wanted.number <= workers.group:
        return workers, ()
    node_rank = wanted.node_rank(me)
    assert node_rank is not None  # noqa: S101 - a group is wanted only by its members
    started = LocalWorkers(
        group=wanted.number,
        master_port=wanted.members[0].port,
        first_rank=wanted.first_rank(node_rank),
        count=wanted.members[node_rank].nproc,
        started_at=now,
        before=workers.step or workers.before,
        ended_before=_ended(workers, wanted),
        is_alive=True,
    )
    return started, (fx.StartWorkers(wanted, node_rank, spec),)


def _ended(workers: LocalWorkers, wanted: Group) -> tuple[Failure, ...]:
    """How those of the group before the wanted one ended, where that was not our doing."""
    if workers.is_told_to_end or workers.group != wanted.number - 1:
        return ()
    return tuple(in_short(_failure(workers, each)) for each in workers.failures)


def _mind_failures(workers: LocalWorkers, now: float, patience: Patience) -> Followed:
    if not workers.failures:
        return workers, ()
    if workers.cause_until is None:
        is_mistake = bool(workers.failures[0].mistake)
        is_early = workers.step == 0 and now < workers.started_at + EARLY_S
        within_s = (patience.same_within_s if is_early else 0.0) if is_mistake else _CAUSE_WITHIN_S
        workers = replace(workers, cause_until=now + within_s)
    return (workers, ()) if workers.awaits_cause(now) else _kill(workers, now, patience)


def _end(workers: LocalWorkers, now: float, patience: Patience) -> Followed:
    kill_at = now + patience.grace_s if workers.kill_at is None else min(workers.kill_at, now + patience.grace_s)
    if now >= kill_at:
        return _kill(replace(workers, kill_at=None), now, patience)
    told = replace(workers, is_told_to_end=True, kill_at=kill_at)
    return told, () if workers.is_told_to_end else (fx.TerminateWorkers(workers.group),)


def _kill(workers: LocalWorkers, now: float, patience: Patience) -> Followed:
    killed = replace(workers, is_killed=True, stuck_at=now + patience.kill_timeout_s)
    return killed, (fx.KillWorkers(workers.group),)


def exit_report(
    workers: LocalWorkers, me: Identity, step_s: float, clocks: tuple[Clock, ...], now: float
) -> ExitReport | None:
    """How the workers ended. None: they run, or more must show first.

    Args:
        workers: of the group that is reported on.
        me: whose workers they are.
        step_s: the usual time of a step; 0: not known.
        clocks: how the clocks of neighbours compare to this node's.
        now: monotonic, in seconds.
    """
    if workers.awaits_cause(now) or (not workers.failures and len(workers.exits) < workers.count):
        return None
    return workers.report or ExitReport(
        group=workers.group,
        node_id=me.node_id,
        incarnation=me.incarnation,
        step=workers.step,
        failure=_failure(workers, _first(workers)) if workers.failures else None,
        after_s=now - workers.failed_at if workers.failures else 0.0,
        step_s=step_s,
        clocks=clocks,
    )


def quiesced(workers: LocalWorkers, me: Identity, now: float) -> Quiesced | None:
    """Report that the ranks stopped for a handoff, once their neighbours hold their parts; or, later, that it is late.

    Args:
        workers: of the group that is reported on.
        me: whose workers they are.
        now: monotonic, in seconds.
    """
    stood, is_late = workers.stood, now >= workers.stand_until
    if stood is None or not (stood.is_shared or is_late):
        return None
    return Quiesced(
        group=workers.group,
        node_id=me.node_id,
        incarnation=me.incarnation,
        number=stood.number,
        step=stood.step,
        is_late=is_late,
    )


def _first(workers: LocalWorkers) -> ev.WorkerExited:
    """The failure that was first; or the rank that ended with code 0 before, if all have lost their connections."""
    first = min(workers.failures, key=lambda e: (_is_consequence(e), e.at, e.local_rank))
    if not _is_consequence(first) or not is_between_ranks(first.error):
        return first
    ended = [each for each in workers.exits if each.exit_code == 0 and each.at <= first.at]
    return min(ended, key=lambda e: (e.at, e.local_rank), default=first)


def _failure(workers: LocalWorkers, ended: ev.WorkerExited) -> Failure:
    rank = workers.first_rank + ended.local_rank
    is_early = ended.exit_code == 0
    is_taken = not ended.unreadable and rank == 0 and is_port_taken(ended.stderr_tail, workers.master_port)
    return Failure(
        rank=rank,
        local_rank=ended.local_rank,
        exit_code=ended.exit_code,
        signal=ended.signal,
        is_port_taken=is_taken,
        is_peer_lost=not is_taken and not is_early and _is_consequence(ended),
        unreadable=ended.unreadable,
        tail=ended.stderr_tail,
        at=ended.at,
        error=ended.error,
        traceback=ended.traceback,
        why=early_end(ended.step) if is_early else ended.why,
        mistake=_shared_mistake(workers),
    )


def _shared_mistake(workers: LocalWorkers) -> str:
    """The one that has ended all of them."""
    found = {each.mistake for each in workers.exits}
    return found.pop() if len(found) == 1 and len(workers.exits) == workers.count else ""
