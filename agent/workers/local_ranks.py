"""The ranks of one group on this node: what they have reported so far, and what follows from it.

Nothing here acts or waits. `worker_group.py` does; it holds a lock whenever it reads or changes this.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from agent.core.budget import is_peer_lost
from agent.core.events import RanksQuiesced, RanksStarted
from agent.links.queries import LiveRank
from agent.workers.snapshot_store import RankMemory
from trainer_runtime.contract import EXIT_RESTART

if TYPE_CHECKING:
    from collections.abc import Set as AbstractSet

    from agent.core.failures import Failure
    from agent.workers.channel import Channel
    from agent.workers.launch_plan import Launch, RankCommand
    from agent.workers.local_rank import LocalRank
    from agent.workers.process import Exited, RankProcess


@dataclass
class LocalRanks:
    """The ranks of one group on this node, from its start, or from when they were sent into it."""

    group: int = 0
    """Number of their group. 0: none was ever started."""
    ranks: tuple[LocalRank, ...] = ()
    is_waiting: bool = False
    """They set up the script, and are in no group yet. `group` is the one that ran at their start."""
    ahead: tuple[RankCommand, ...] = ()
    """What standbys may run to set up, once it is known that the ranks of this script can move."""
    has_asked_restore_point: bool = False
    has_started: bool = False
    """All have completed a step."""
    quiesced_handoff: int = 0
    """Number of the newest handoff for which all ranks were quiesced with snapshots."""
    is_ending: bool = False
    move: Launch | None = None
    """The group into which the ranks are to be sent. None: they are not."""
    is_planned: bool = False
    """They are quiesced for the handoff before that group."""
    shown_rank: int | None = None
    """The rank whose last lines were printed because the console does not show its output."""

    @property
    def are_gone(self) -> bool:
        """Whether no process of any rank is left."""
        return all(rank.is_gone for rank in self.ranks)

    @property
    def processes(self) -> list[RankProcess]:
        """The processes that are not gone."""
        return [rank.process for rank in self.ranks if rank.process and not rank.is_gone]

    @property
    def channels(self) -> list[Channel]:
        """The channels of all ranks that were started."""
        return [rank.process.channel for rank in self.ranks if rank.process]

    @property
    def running_process(self) -> RankProcess | None:
        """The first process that has not ended. Its list of imports can be read."""
        return next((rank.process for rank in self.ranks if rank.process and not rank.has_exited), None)

    @property
    def have_set_up(self) -> bool:
        """Whether all have set up the script, and wait to be sent into a group."""
        # Not of the channels: a rank whose process could not be started has none.
        has_asked = (rank.process is not None and rank.process.channel.awaits_place for rank in self.ranks)
        return self.is_waiting and self.move is None and all(has_asked)

    @property
    def may_move(self) -> bool:
        """Whether each can enter the other group, and has stopped for it or will."""
        assert self.move is not None  # noqa: S101 - asked for ranks that are to be sent into one
        processes = self.processes
        return len(processes) == len(self.move.commands) and all(
            self.is_waiting
            or (each.channel.can_move and (each.is_quiesced or each.channel.awaits_place or not self.is_planned))
            for each in processes
        )

    @property
    def have_asked(self) -> bool:
        """Whether each has asked what becomes of it."""
        return all(each.awaits_place or (self.is_planned and each.awaits_leave_answer) for each in self.channels)

    @property
    def memories(self) -> dict[int, RankMemory]:
        """Each rank's memory for snapshots, by rank."""
        return {
            rank.command.rank: RankMemory(process.memory, process.replicated_event, process.page)
            for rank in self.ranks
            if (process := rank.process) and process.memory is not None and process.replicated_event is not None
        }

    def sent_into(self, launch: Launch) -> LocalRanks:
        """The same ranks in the group into which they are sent now."""
        for rank, command in zip(self.ranks, launch.commands, strict=True):
            rank.group, rank.command = launch.group, command
        return LocalRanks(launch.group, self.ranks, ahead=launch.ahead)

    def note_question(self, channel: Channel) -> bool:
        """Note whether a rank has asked for its restore point. Return whether it is the first of the group."""
        is_first = channel.has_asked_restore_point and not self.has_asked_restore_point
        self.has_asked_restore_point |= is_first
        return is_first

    def note_started(self) -> RanksStarted | None:
        """Return the event that all ranks have completed their first step, once."""
        reports = [channel.started for channel in self.channels]
        if self.has_started or None in reports:
            return None
        self.has_started = True
        latest = {
            name: max(getattr(started, name) for started in reports)
            for name in ("entered", "set_up", "loaded", "stepped", "step")
        }
        # They join at one moment. Who tells an earlier one has set up before, while the others waited for it there.
        latest["joined"] = max(latest["entered"], min(each.joined for each in reports if each is not None))
        can_move = all(channel.can_move for channel in self.channels)
        return RanksStarted(group=self.group, can_move=can_move, **latest)

    def note_quiesced(self) -> RanksQuiesced | None:
        """Return the event that all ranks are quiesced for another handoff, with snapshots, once."""
        reports = {channel.quiesced for channel in self.channels}
        quiesced = reports.pop()
        if reports or quiesced is None or quiesced.handoff <= self.quiesced_handoff:
            return None
        self.quiesced_handoff = quiesced.handoff
        return RanksQuiesced(self.group, quiesced.handoff, quiesced.step, is_shared=False)

    def note_shown_cause(self) -> tuple[int, Exited] | None:
        """Return the rank that failed first, and how, unless the console shows it or it was returned before."""
        causes = sorted((rank.cause.at, rank.command.rank, rank) for rank in self.ranks if rank.cause)
        shown = [rank for rank in self.ranks if _has_console(rank)]
        if self.shown_rank is not None or not causes or not shown or any(rank.cause for rank in shown):
            return None
        _, self.shown_rank, first = causes[0]
        assert first.cause is not None  # noqa: S101 - only ranks with a cause are listed
        return self.shown_rank, first.cause

    def has_shown_errors(self, failure: Failure) -> bool:
        """Whether the console shows the error that ended this rank.

        A script error ends all ranks alike, so it is enough if one of them is shown.
        """
        # Without an exception, the reported last lines are of both streams.
        streams = {2} if failure.error else {1, 2}
        shown = {each.command.rank for each in self.ranks if _has_console(each, streams)}
        return failure.rank in {*shown, self.shown_rank} or bool(shown and failure.script_error)

    def live(self) -> tuple[int, tuple[LiveRank, ...]]:
        """Return the number of the group, and the state of its ranks."""
        ranks = () if self.is_waiting else self.ranks
        return self.group, tuple(rank.live() for rank in ranks)


def _has_console(rank: LocalRank, streams: AbstractSet[int] = frozenset({2})) -> bool:
    return rank.command.console_prefix is not None and streams <= {*rank.command.console_streams}


def is_cause(exited: Exited) -> bool:
    """Whether a rank failed by itself, printed a reason, and did not merely lose a peer."""
    if is_peer_lost(f"{exited.error}\n{exited.tail}", exited.signal):
        return False
    return bool(exited.error) or (bool(exited.tail.strip()) and exited.exit_code not in {None, 0, EXIT_RESTART})
