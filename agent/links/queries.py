"""Queries of readers to an agent, and the replies: the logs on its node, and the current state of its ranks.

`log_server.py` serves them, `log_reader.py` sends them. No decision of the job depends on a reply.
"""

from __future__ import annotations

from typing import Annotated, Literal, Protocol

import msgspec

_Run = Annotated[str, msgspec.Meta(pattern=r"^[0-9a-f]{1,64}\Z")]
_NodeId = Annotated[str, msgspec.Meta(pattern=r"^[A-Za-z0-9._-]{1,128}\Z")]
_Number = Annotated[int, msgspec.Meta(ge=0, le=2**62)]


class FindLogs(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Lists the logs of one node in one group."""

    run: _Run
    group: _Number
    node_id: _NodeId
    """The node whose ranks wrote the logs. Nodes may share a directory."""


class ReadLog(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Reads a part of one log, starting at `offset` bytes."""

    run: _Run
    group: _Number
    node_id: _NodeId
    rank: _Number
    offset: _Number


class LogEntry(msgspec.Struct, frozen=True, kw_only=True):
    """The log of one rank."""

    rank: int
    size_bytes: int


class LogsFound(msgspec.Struct, frozen=True, kw_only=True):
    """The logs of one node in one group."""

    directory: str
    """Where the logs are, or would be. For people."""
    logs: tuple[LogEntry, ...]
    """Sorted by rank."""


class LogFiles(Protocol):
    """Logs on disk. A call may block for ever."""

    def find(self, find: FindLogs) -> LogsFound:
        """List the logs of one node in one group. Raises `OSError`."""
        ...

    def read(self, read: ReadLog, limit_bytes: int) -> bytes:
        """Read a part of one log; return nothing at its end. Raises `OSError`."""
        ...


RankState = Literal["starting", "training", "phase", "quiesced", "ended"]
"""The state of a rank.

- starting: it has not received its restore point yet.
- training: it commits steps, or does not report steps at all.
- phase: it does something that has no steps.
- quiesced: it has stopped for a handoff.
- ended: its process has ended.
"""


class LiveRank(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """The current state of one rank."""

    rank: int
    step: int
    """The last step that it committed; 0: none in this group."""
    state: RankState
    metrics_step: int = 0
    """The step that `metrics` are of; 0: none yet."""
    metrics: dict[str, float | None] = {}
    """Metrics that rank 0 has committed. None: not a finite number."""


class LiveRanks(msgspec.Struct, frozen=True, kw_only=True):
    """The current state of the ranks of one node."""

    group: int
    """The group of these ranks; 0: none have been started yet."""
    ranks: tuple[LiveRank, ...]
    is_alive: bool
    """Whether the agent's loop completes turns."""
    lease_left_s: float | None
    """How long the agent's lease surely lives; None: it has no lease, or none that was renewed."""
    etcd_s: float | None
    """How long etcd took to answer the last renewal; None: there was none."""
