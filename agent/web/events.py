"""The job's events, one line of JSON each, for programs that keep or forward logs.

| event | fields |
|---|---|
| `np` | np, changed_by |
| `node joined`, `node left` | node_id |
| `group` | group, cause, reason, world_size, nodes |
| `incident` | incident: as in `history --json`, once its group has made a step |
| `checkpoint` | step, size_bytes, write_s |
| `ended` | state, reason, exit_code |

Each event has `at` (seconds since 1970), `job_id` and `run`. Every agent with `--events` writes all events of the job
from its own start on; it begins with events for the state at that time. Groups and incidents are complete. Nodes that
come and go, and checkpoints, may be missed between two reads of etcd (a tenth of a second, or an outage).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import msgspec

from agent.core.incident import Incident
from agent.core.view import ClusterView
from agent.observe.incidents import incident_json
from agent.observe.log import log
from agent.observe.messages import describe
from agent.web.hub import KnownJobState
from agent.workers.output import Sink
from agent.workers.terminal import write_all

Event = dict[str, Any]


class FinishedIncidents:
    """Returns each incident once, when it is over, for metrics, events and traces.

    Args:
        since: wall clock, seconds since 1970; incidents that were over before are not returned.
    """

    def __init__(self, since: float) -> None:
        self._since = since
        self._run = ""
        self._groups: set[int] = set()
        """Groups whose incidents are over."""

    def of(self, known: KnownJobState) -> list[Incident]:
        """Return the incidents that are over now and were not before. The first start of a run is one of them."""
        run = known.incidents[-1].run if known.incidents else self._run
        if run != self._run:
            self._run, self._groups = run, set()
        over = [each for each in known.incidents if _is_over(each, known.last_group) and each.group not in self._groups]
        self._groups.update(each.group for each in over)
        return [each for each in over if each.at + each.phases.after_s >= self._since]


def _is_over(incident: Incident, last_group: int) -> bool:
    """Whether nothing will be added to the incident: its group has made a step, or another group followed."""
    return incident.phases.is_complete or incident.group < last_group


def changes(before: KnownJobState | None, after: KnownJobState) -> Iterator[Event]:
    """Yield the events between two states of a job. `before` None: the job is seen for the first time."""
    old = before.view if before is not None else None
    yield from _spec_events(old, after.view)
    old_nodes, new_nodes = _node_ids(old), _node_ids(after.view)
    yield from ({"event": "node left", "node_id": name} for name in sorted(old_nodes - new_nodes))
    yield from ({"event": "node joined", "node_id": name} for name in sorted(new_nodes - old_nodes))
    yield from _group_events(before, after)
    committed = after.view.checkpoint
    if committed is not None and (old is None or committed != old.checkpoint):
        kept = committed.value
        yield {"event": "checkpoint", "step": kept.copy.step, "size_bytes": kept.size_bytes, "write_s": kept.took_s}
    if after.view.result is not None and (old is None or old.result is None):
        ended = after.view.result.value
        yield {"event": "ended", "state": ended.state, "reason": describe(ended.reason), "exit_code": ended.exit_code}


def _spec_events(before: ClusterView | None, after: ClusterView) -> Iterator[Event]:
    old = before.spec.value if before is not None and before.spec is not None else None
    if after.spec is not None and (old is None or old.np != after.spec.value.np):
        yield {"event": "np", "np": after.spec.value.np, "changed_by": after.spec.value.changed_by}


def _group_events(before: KnownJobState | None, after: KnownJobState) -> Iterator[Event]:
    """Yield every new group, from its incident. Of groups before the first state only the last is reported."""
    first = before.last_group + 1 if before is not None else after.last_group
    for incident in after.incidents:
        if incident.group >= first:
            yield {
                "event": "group",
                "group": incident.group,
                "cause": incident.cause,
                "reason": describe(incident.reason),
                "world_size": sum(member.nproc for member in incident.members),
                "nodes": [member.node_id for member in incident.members],
            }


def _node_ids(view: ClusterView | None) -> set[str]:
    return {node.value.node_id for node in view.nodes} if view is not None else set()


class EventLog:
    """Writes events on a separate thread, so that a full disk, or a pipe that nobody reads, blocks nothing.

    Args:
        job_id: part of each line.
        to: descriptor of the file.
        is_restart: whether an earlier process has written events of the present state.
    """

    def __init__(self, job_id: str, to: int, *, is_restart: bool) -> None:
        self._job_id = job_id
        self._to = to
        self._is_restart = is_restart
        self._last: KnownJobState | None = None
        self._sink = Sink(lambda: None)
        self._lost_lines = 0

    def update(self, known: KnownJobState, over: Sequence[Incident], now: float) -> None:
        """Write the events since the last update, and the incidents that are over since."""
        if self._last is None and self._is_restart:
            self._last = known
        incidents = ({"event": "incident", "incident": incident_json(each)} for each in over)
        events = [*changes(self._last, known), *incidents]
        self._last = known
        run = known.view.spec.value.run if known.view.spec is not None else ""
        for event in events:
            self._put(msgspec.json.encode({"at": now, "job_id": self._job_id, "run": run} | event) + b"\n")

    def close(self) -> None:
        """Wait until all lines are written, for a bounded time."""
        self._sink.flush()

    def _put(self, line: bytes) -> None:
        if self._sink.is_full:
            self._on_lost_line("the reader is too slow, or gone")
        else:
            self._sink.put(self._write, line)

    def _write(self, line: bytes) -> None:
        try:
            write_all(self._to, line)
        except OSError as error:
            self._on_lost_line(error.strerror or str(error))

    def _on_lost_line(self, why: str) -> None:
        self._lost_lines += 1
        if self._lost_lines == 1:
            log.warning("events of the job are lost: they cannot be written", reason=why)
