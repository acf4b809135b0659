"""The workers of this node, and how they follow the group record.

Workers of a group live from `StartWorkers` until `WorkersGone`. No worker of a newer group is started before that. If
the next group is entered in place, quiesced workers that can move go on in it: `WorkersMoved` ends the old group here.
If they cannot after all, or do not answer in time, they are ended, and others are started. A node that is no member
starts processes, too: they set up the script, and wait until the node is let in. When a worker fails, the others are
killed at once, because they hang in a collective with it. If it failed because of a broken connection, the cause is
most likely the failure of another worker. Then the others get a moment to fail by themselves.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

from agent.core import effects as fx
from agent.core import events as ev
from agent.core.backoff import doubled_s
from agent.core.budget import EARLY_S, is_peer_lost, is_port_taken
from agent.core.causes import in_short, is_between_ranks
from agent.core.failures import Clock, ExitReport, Failure
from agent.core.model import Group, Quiesced, Spec
from agent.core.reasons import SetUpFailed
from agent.core.records import Identity

_CAUSE_WITHIN_S = 1.5
PLANNED = frozenset({"join", "scale", "drain"})
"""Causes for which the ranks were quiesced. An operator who asks for a restart wants new processes."""
_UNPLANNED = frozenset({"lost", "failed"})
"""Causes for which the connections between ranks are broken."""
_SET_UP_AGAIN_S = 10.0
_SET_UP_AGAIN_MAX_S = 300.0
"""How long after a set-up that failed it is tried again: at first, and at most. The job may wait for this node."""
_MOVE_WITHIN_S = 10.0
"""How long workers may take to leave for the next group."""


def _is_consequence(exited: ev.WorkerExited) -> bool:
    """Whether it failed because of a broken connection to another rank, not to the storage of the checkpoint."""
    # The message may be in the exception alone: output that follows pushes it out of the last lines.
    return not exited.unreadable and is_peer_lost(f"{exited.error}\n{exited.stderr_tail}", exited.signal)


class Reached(NamedTuple):
    """How far a group had come that has ended."""

    group: int
    step: int
    """Highest step that was committed."""


@dataclass(frozen=True)
class LocalWorkers:
    """The local rank processes, as far as they are known."""

    group: int = 0
    """Number of the group that they belong to. 0: none was ever started."""
    master_port: int = 0
    first_rank: int = 0
    count: int = 0
    started_at: float = 0.0
    before: Reached | None = None
    """How far earlier workers had come: those of the last group that made a step. None: none of them made one."""
    ended_before: tuple[Failure, ...] = ()
    """How the workers of the group before failed, without those that this agent ended."""
    step: int = 0
    """Highest step that an ended worker had committed."""
    failed_at: float = 0.0
    """When the first failure was seen."""
    is_alive: bool = False
    """A process of theirs may be alive."""
    exits: tuple[ev.WorkerExited, ...] = ()
    """In the order in which they were seen."""
    is_waiting: bool = False
    """They set up the script, or have done so, and are in no group yet. `group` is the one that ran at their start."""
    set_up_failure: SetUpFailed | None = None
    """How the first of them has ended in the set-up, by itself. None: none has."""
    set_ups_failed: int = 0
    """How many set-ups have failed in a row."""
    set_up_again_at: float | None = None
    """When the set-up that failed is tried again, unless the group changes before."""
    is_asked_to_end: bool = False
    is_killed: bool = False
    stuck_at: float | None = None
    """When all killed processes should be gone. None: nothing was killed."""
    is_stuck: bool = False
    """A process of theirs is alive long after it was killed."""
    kill_at: float | None = None
    sent_handoff: int = 0
    """Number of the newest handoff request that was sent to them. 0: none."""
    quiesced: ev.RanksQuiesced | None = None
    """The newest handoff that they stopped for. None: none yet."""
    quiesced_until: float = 0.0
    """When they train on, unless they get an answer before."""
    report: ExitReport | None = None
    """The exit report as it was first written, so that it is the same when it is written again."""
    can_move: bool = False
    """They can enter the next group without a new process: they have made a step, or have set up and wait."""
    entering: LocalWorkers | None = None
    """What they are once they have moved. None: they were not asked to."""
    move_until: float | None = None
    """When they should have moved."""
    cause_until: float | None = None
    """Until when to wait for the cause of a lost connection, or for the same script error in other workers. None: no
    failure yet.
    """

    @property
    def failures(self) -> tuple[ev.WorkerExited, ...]:
        """The workers that ended with another exit code than 0."""
        return tuple(e for e in self.exits if e.exit_code != 0)

    @property
    def reached(self) -> Reached | None:
        """How far these workers had come, or earlier ones. None: none of them made a step."""
        return Reached(self.group, self.step) if self.step and not self.is_waiting else self.before

    @property
    def has_set_up(self) -> bool:
        """Whether they have set up the script, and wait to be let in."""
        return self.is_alive and self.is_waiting and self.can_move and not (self.exits or self.is_asked_to_end)

    def awaits_cause(self, now: float) -> bool:
        """Whether to wait for more failures: so far all are consequences, or script errors that others may have too."""
        if self.cause_until is None or now >= self.cause_until or len(self.exits) == self.count:
            return False
        return all(_is_consequence(e) for e in self.failures) or all(e.script_error for e in self.failures)

    def apply_event(  # noqa: PLR0911 - one for each kind of event
        self,
        event: ev.WorkerExited | ev.WorkersGone | ev.WorkersMoved | ev.WorkersReady | ev.WorkersCannotMove,
        now: float,
    ) -> LocalWorkers:
        """Apply the end of a worker, or of all, or their move. Events about an older group are ignored."""
        if event.group != self.group:
            return self
        match event:
            case ev.WorkerExited() if self.is_killed and event.signal is not None:
                # Killed by this agent: neither a failure of its own nor the cause of another one.
                return replace(self, step=max(self.step, event.step))
            case ev.WorkerExited() if self.is_waiting:
                failure = SetUpFailed(exit_code=event.exit_code, signal=event.signal, error=event.error)
                exits = (*self.exits, event)
                if self.exits or self.is_asked_to_end:
                    return replace(self, exits=exits)
                again_at = now + doubled_s(_SET_UP_AGAIN_S, self.set_ups_failed, _SET_UP_AGAIN_MAX_S)
                failed = self.set_ups_failed + 1
                return replace(
                    self, exits=exits, set_up_failure=failure, set_ups_failed=failed, set_up_again_at=again_at
                )
            case ev.WorkerExited():
                failed_at = now if event.exit_code != 0 and not self.failures else self.failed_at
                step = max(self.step, event.step)
                return replace(self, exits=(*self.exits, event), step=step, failed_at=failed_at)
            case ev.WorkersGone():
                return replace(
                    self, is_alive=False, kill_at=None, stuck_at=None, is_stuck=False, entering=None, move_until=None
                )
            case ev.WorkersMoved():
                assert self.entering is not None  # noqa: S101 - workers move only when asked to
                return replace(self.entering, started_at=event.at, before=replace(self, step=event.step).reached)
            case ev.WorkersReady() | ev.WorkersCannotMove():
                is_ready = isinstance(event, ev.WorkersReady)
                return replace(self, can_move=is_ready, set_ups_failed=0 if is_ready else self.set_ups_failed)

    def note_quiesced(self, event: ev.RanksQuiesced, until: float) -> LocalWorkers:
        """Note that they stopped for a handoff, and, at the first event of that handoff, until when they wait."""
        if event.group != self.group:
            return self
        is_first = self.quiesced is None or self.quiesced.number != event.number
        return replace(self, quiesced=event, quiesced_until=until if is_first else self.quiesced_until)


@dataclass(frozen=True)
class Patience:
    """How long workers may take to end, in seconds."""

    grace_s: float
    """Between SIGTERM and SIGKILL."""
    kill_timeout_s: float
    """After SIGKILL."""
    same_within_s: float = 0.0
    """After an error in the script, for the same error in other workers. Only used in a group that has just begun."""


Followed = tuple[LocalWorkers, tuple[fx.Effect, ...]]


@dataclass(frozen=True)
class Place:
    """Where the workers of this node belong."""

    wanted: Group | None
    """The group that this node is a member of. None: it is no member."""
    me: Identity
    spec: Spec
    joined: Group | None = None
    """The current group as if this node had joined it. None: it is a member, or cannot join for now."""
    may_wait: bool = False
    """Processes of this node may wait until it is let in."""

    @property
    def node_rank(self) -> int:
        """The node rank in the wanted group."""
        node_rank = self.wanted.node_rank(self.me) if self.wanted is not None else None
        assert node_rank is not None  # noqa: S101 - a group is wanted only by its members
        return node_rank


def follow_group(workers: LocalWorkers, place: Place, now: float, patience: Patience) -> Followed:
    """Start, end or kill workers so that those of the wanted group run here, or such that wait to be let in."""
    wanted = place.wanted
    if workers.is_alive and workers.is_killed:
        is_stuck = workers.stuck_at is not None and now >= workers.stuck_at
        return replace(workers, is_stuck=is_stuck), ()
    if workers.is_alive:
        return _follow_alive(workers, place, now, patience)
    if wanted is None and place.joined is not None:
        # A set-up that failed is tried again after a while; one that was ended by this agent, at once.
        is_again = workers.is_waiting and (workers.set_up_again_at is None or now >= workers.set_up_again_at)
        is_due = place.joined.number > workers.group or is_again
        return _set_up(workers, place, place.joined, now) if is_due else (workers, ())
    if wanted is None or wanted.number <= workers.group:
        return workers, ()
    started = replace(
        _workers_of(wanted, place.node_rank),
        started_at=now,
        before=workers.reached,
        ended_before=_ended(workers, wanted),
    )
    return started, (fx.StartWorkers(wanted, place.node_rank, place.spec),)


def _follow_alive(workers: LocalWorkers, place: Place, now: float, patience: Patience) -> Followed:
    if place.wanted is not None and place.wanted.number == workers.group:
        return _mind_failures(workers, now, patience)
    if place.wanted is None and workers.is_waiting and place.may_wait and not workers.exits:
        return workers, ()
    return _move(workers, place, now) or _end(workers, now, patience)


def _set_up(workers: LocalWorkers, place: Place, joined: Group, now: float) -> Followed:
    node_rank = len(joined.members) - 1
    started = replace(
        _workers_of(joined, node_rank),
        is_waiting=True,
        started_at=now,
        before=workers.reached,
        set_ups_failed=workers.set_ups_failed,
    )
    return started, (fx.SetUpWorkers(joined, node_rank, place.spec),)


def _workers_of(group: Group, node_rank: int) -> LocalWorkers:
    return LocalWorkers(
        group=group.number,
        master_port=group.members[0].port,
        first_rank=group.first_rank(node_rank),
        count=group.members[node_rank].nproc,
        is_alive=True,
    )


def _move(workers: LocalWorkers, place: Place, now: float) -> Followed | None:
    """Send workers that are quiesced, have lost a rank, or wait, into the wanted group. None: they have to end."""
    wanted = place.wanted
    if wanted is None or not wanted.in_place or workers.exits or workers.is_asked_to_end:
        return None
    is_planned = wanted.cause in PLANNED
    is_free = workers.sent_handoff if is_planned else wanted.cause in _UNPLANNED
    if not (workers.is_waiting or (workers.can_move and is_free)):
        return None
    if workers.entering is None:
        until = now + _MOVE_WITHIN_S if workers.can_move else None  # those that still set up move once they have
        moving = replace(workers, entering=_workers_of(wanted, place.node_rank), move_until=until)
        return moving, (fx.MoveWorkers(workers.group, wanted, place.node_rank, place.spec, is_planned),)
    is_late = workers.move_until is not None and now >= workers.move_until
    return None if is_late or workers.entering.group != wanted.number else (workers, ())


def _ended(workers: LocalWorkers, wanted: Group) -> tuple[Failure, ...]:
    """How the workers of the group before the wanted one failed, without those that this agent ended."""
    if workers.is_asked_to_end or workers.is_waiting or workers.group != wanted.number - 1:
        return ()
    return tuple(in_short(_failure(workers, each)) for each in workers.failures)


def _mind_failures(workers: LocalWorkers, now: float, patience: Patience) -> Followed:
    if not workers.failures:
        return workers, ()
    if workers.cause_until is None:
        is_script_error = bool(workers.failures[0].script_error)
        is_early = workers.step == 0 and now < workers.started_at + EARLY_S
        within_s = (patience.same_within_s if is_early else 0.0) if is_script_error else _CAUSE_WITHIN_S
        workers = replace(workers, cause_until=now + within_s)
    return (workers, ()) if workers.awaits_cause(now) else _kill(workers, now, patience)


def _end(workers: LocalWorkers, now: float, patience: Patience) -> Followed:
    kill_at = now + patience.grace_s if workers.kill_at is None else min(workers.kill_at, now + patience.grace_s)
    if now >= kill_at:
        return _kill(replace(workers, kill_at=None), now, patience)
    ending = replace(workers, is_asked_to_end=True, kill_at=kill_at)
    return ending, () if workers.is_asked_to_end else (fx.TerminateWorkers(workers.group),)


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

    Args: workers: of the group that is reported on. me: whose workers they are. now: monotonic, in seconds.
    """
    event, is_late = workers.quiesced, now >= workers.quiesced_until
    if event is None or not (event.is_shared or is_late):
        return None
    return Quiesced(
        group=workers.group,
        node_id=me.node_id,
        incarnation=me.incarnation,
        number=event.number,
        step=event.step,
        is_late=is_late,
        is_with_next_only=event.is_with_next_only,
    )


def _first(workers: LocalWorkers) -> ev.WorkerExited:
    """The first failure; or the rank that ended with code 0 before it, if all failures are lost connections."""
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
        why="" if is_early else ended.why,
        script_error=_shared_script_error(workers),
        last_step=ended.step if is_early else 0,
    )


def _shared_script_error(workers: LocalWorkers) -> str:
    """The script error that ended all of them. Empty: not all ended by the same one."""
    found = {each.script_error for each in workers.exits}
    return found.pop() if len(found) == 1 and len(workers.exits) == workers.count else ""
