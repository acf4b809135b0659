"""What happens to a job, a line of JSON for each event: for whoever keeps or forwards logs.

| event | also says |
|---|---|
| `np` | np, changed_by |
| `node joined`, `node left` | node_id |
| `group` | group, cause, reason, world_size, nodes |
| `incident` | incident: the record as `history --json` has it, once its group has made a step |
| `checkpoint` | step, size_bytes, took_s |
| `ended` | state, reason, exit_code |

Each has `at` (seconds since 1970), `job_id` and `run`. Every agent that is asked to writes all events of the job, from
its own start on; it begins with what is there by then. Of nodes that come and go, and of checkpoints, what lies between
two looks at etcd (a tenth of a second, or an outage) is not told; of groups and incidents all is.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import msgspec

from agent.core.incident import Incident
from agent.core.model import ClusterView
from agent.observe.history import as_data
from agent.observe.log import log
from agent.web.hub import KnownJobState
from agent.workers.output import Sink
from agent.workers.terminal import write_all

Event = dict[str, Any]


def changes(before: KnownJobState | None, after: KnownJobState) -> Iterator[Event]:
    """What has happened between two looks at a job; None: it is seen for the first time."""
    old = before.view if before is not None else None
    yield from _of_spec(old, after.view)
    there, here = _node_ids(old), _node_ids(after.view)
    yield from ({"event": "node left", "node_id": name} for name in sorted(there - here))
    yield from ({"event": "node joined", "node_id": name} for name in sorted(here - there))
    yield from _groups(before, after)
    committed = after.view.checkpoint
    if committed is not None and (old is None or committed != old.checkpoint):
        kept = committed.value
        yield {"event": "checkpoint", "step": kept.copy.step, "size_bytes": kept.size_bytes, "took_s": kept.took_s}
    if after.view.result is not None and (old is None or old.result is None):
        ended = after.view.result.value
        yield {"event": "ended", "state": ended.state, "reason": ended.reason, "exit_code": ended.exit_code}


def _of_spec(before: ClusterView | None, after: ClusterView) -> Iterator[Event]:
    old = before.spec.value if before is not None and before.spec is not None else None
    if after.spec is not None and (old is None or old.np != after.spec.value.np):
        yield {"event": "np", "np": after.spec.value.np, "changed_by": after.spec.value.changed_by}


def _groups(before: KnownJobState | None, after: KnownJobState) -> Iterator[Event]:
    """Each has an incident, so that none is missed; of those before the first look only the last is told."""
    first = before.last_group + 1 if before is not None else after.last_group
    for incident in after.incidents:
        if incident.group >= first:
            yield {
                "event": "group",
                "group": incident.group,
                "cause": incident.cause,
                "reason": incident.reason,
                "world_size": sum(place.nproc for place in incident.members),
                "nodes": [place.node_id for place in incident.members],
            }


def _node_ids(view: ClusterView | None) -> set[str]:
    return {node.value.node_id for node in view.nodes} if view is not None else set()


class EventLog:
    """Writes them, on a thread of its own: a disk that is full, or a pipe that nobody reads, holds up nobody.

    Args:
        job_id: in each line.
        to: descriptor of the file.
        is_again: an earlier process has told what is there.
    """

    def __init__(self, job_id: str, to: int, *, is_again: bool) -> None:
        self._job_id = job_id
        self._to = to
        self._is_again = is_again
        self._last: KnownJobState | None = None
        self._sink = Sink(lambda: None)
        self._lost = 0
        """Lines that could not be written."""

    def note(self, known: KnownJobState, over: Sequence[Incident], now: float) -> None:
        """Write what has happened since the last look, and the incidents that are over since."""
        if self._last is None and self._is_again:
            self._last = known
        told = [*changes(self._last, known), *({"event": "incident", "incident": as_data(each)} for each in over)]
        self._last = known
        run = known.view.spec.value.run if known.view.spec is not None else ""
        for event in told:
            self._put(msgspec.json.encode({"at": now, "job_id": self._job_id, "run": run} | event) + b"\n")

    def close(self) -> None:
        """Wait until all is written, but not for long."""
        self._sink.flush()

    def _put(self, line: bytes) -> None:
        if self._sink.is_full:
            self._lose("nobody takes them")
        else:
            self._sink.put(self._write, line)

    def _write(self, line: bytes) -> None:
        try:
            write_all(self._to, line)
        except OSError as error:
            self._lose(error.strerror or str(error))

    def _lose(self, why: str) -> None:
        self._lost += 1
        if self._lost == 1:
            log.warning("events of the job are lost: they cannot be written", reason=why)
