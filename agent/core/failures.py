"""How the workers of a node ended."""

from __future__ import annotations

import msgspec

from agent.core.bounds import Count, Seconds, WallClock
from agent.core.reasons import FailedWorker, Hang
from agent.core.records import Identity, MemberRecord


class Failure(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """How a worker failed."""

    rank: Count
    local_rank: Count
    exit_code: Count | None
    """None: it was killed by `signal`. 0: it ended before the other ranks were done."""
    signal: Count | None
    is_port_taken: bool = False
    """It could not listen on the master port of the group."""
    is_peer_lost: bool
    """It failed because the connection to another rank broke, most likely as a consequence of another failure."""
    unreadable: str = ""
    """Which checkpoint it could not read, and why; it had to begin from that one. Empty: it was something else."""
    tail: str
    """Last lines of its standard error, or of both output streams if no exception is known."""
    at: WallClock
    """When it ended: wall clock of its node, seconds since 1970."""
    error: str = ""
    """The exception that ended it, on one line. Empty: none is known."""
    traceback: str = ""
    """Its traceback, where the script recorded one (torch's `@record`) or `tail` holds only a part. Else empty."""
    why: str = ""
    """The cause as the system reports it: memory ran out, or a GPU failed. Empty: none is known."""
    script_error: str = ""
    """The error in the script that ended each rank of the node before any process group existed, and its place. Empty:
    not all of them ended so, or the cause may be another one."""
    last_step: Count = 0
    """The last step that it committed, if it ended with code 0 before the other ranks were done. 0: none."""
    hang: Hang | None = None
    """It did not end but made no step. None: it ended."""

    @property
    def is_early_end(self) -> bool:
        """Whether it ended with code 0, but before the other ranks, whose connections to it then broke."""
        return self.exit_code == 0

    def in_short(self, node_id: str) -> FailedWorker:
        """Return the failure as it is in reasons: without the output of the worker."""
        return FailedWorker(
            node_id=node_id,
            rank=self.rank,
            exit_code=self.exit_code,
            signal=self.signal,
            is_port_taken=self.is_port_taken,
            is_peer_lost=self.is_peer_lost,
            unreadable=self.unreadable,
            error=self.error,
            why=self.why,
            script_error=self.script_error,
            last_step=self.last_step,
            hang=self.hang,
        )


class Clock(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """How the wall clock of another node compares to this node's."""

    who: Identity
    ahead_s: Seconds
    error_s: Seconds
    """Bound of the error of `ahead_s`."""


class ExitReport(MemberRecord, frozen=True, kw_only=True):
    """How the workers of one node ended in one group."""

    group: Count
    step: Count
    """Highest step that its ranks committed. 0: the script commits none."""
    failure: Failure | None
    """The first failure. None: all of its workers ended with exit code 0."""
    after_s: Seconds = 0.0
    """Seconds from that failure until this was reported."""
    step_s: Seconds = 0.0
    """The usual time of a step. 0: not known."""
    clocks: tuple[Clock, ...] = ()
    """How the clocks of its neighbours compare to its own."""
