"""The contract between an agent and its workers: environment variables, exit codes, the control page, the channel.

Both sides import this module and `snapshot_page`. It uses the standard library only, so that the agent can import it
without torch.

The **control page** is one page of shared memory (a memfd) per worker. The agent creates it and hands it down by
descriptor, whose number is in `CONTROL_FD`. All fields but `metrics` are unsigned 64-bit little-endian integers. Each
field has one writer, so an aligned 8-byte store needs no lock:

| offset | field | writer | meaning |
|---|---|---|---|
| 0 | version | agent | `PAGE_VERSION` |
| 8 | step | worker | highest step committed by this rank in this group; 0 before the first |
| 16 | handoff | agent | number of the requested handoff; 0: none. Only increases |
| 24 | quiesced | worker | number of the handoff for which this rank is quiesced; 0: it trains. See below |
| 32 | phase | worker | 1 where no steps are expected: within `tr.phase`, and after the last epoch; else 0 |
| 40 | own_us | worker | this rank's own time in this group's steps, without waits for other ranks; sum, microseconds |
| 48 | stacks | worker | signal on which the worker appends its stacks to `STACKS_FD`; 0: none |
| 56 | output | guardian | bytes that the worker has written to stdout and stderr |
| 64 | restored | worker | 1 once its State is restored: from then on steps are expected |
| 72 | in_memory | agent | 1 if a snapshot in memory is enough for the requested handoff; else 0. Set before `handoff` |
| 80 | replicated | agent | step of the newest snapshot whose part was sent to other nodes, or was given up |
| 88 | replicating_us | agent | microseconds until this node's slowest part was sent. Set before `replicated` |
| 96 | over | agent | number of a group that is over without a handoff: a rank of it breaks its connections |
| 104 | question | agent | how often it has asked for `unfinished`. Only increases |
| 112 | unfinished | worker | upper half: question; lower: one more than its unfinished collectives; 0: not known |
| 120 | metrics_asked | agent | how often it has asked for `metrics`. Only increases |
| 128 | metrics_step | worker | the step that `metrics` are of; 0: none in this group yet |
| 136 | metrics | worker | at most `MAX_METRICS`; each a name, `METRIC_NAME_BYTES` of UTF-8 with zeros, and a double |

Nothing depends on the order in which the other side sees two fields change, which aarch64 does not keep: with an old
`in_memory` a rank saves a checkpoint, as the others do once it takes no snapshot; an old `replicating_us` is an
estimate; metrics may be taken for those of the step before. Where order matters, a message on the channel or a write to
an eventfd follows, which keeps it.

A rank sets `quiesced` before it saves for the handoff. It sets the field to 0 only to continue training, not when it
leaves: while the field equals `handoff`, a rank whose group is over is not sent SIGTERM: it is answered `leave`, or
`move`, as soon as it asks. With `move` comes the descriptor of another memory for snapshots, if they are taken; the
agent has set `step`, `handoff`, `quiesced`, `restored` and `replicated` to 0 before. A rank that gives up waiting sets
`quiesced` to 0 and then looks once more for an answer. What it sends after `move` is ignored until `moved`.

The **channel** is one end of a Unix SEQPACKET socket pair per worker; its number is in `CHANNEL_FD`. Each packet is one
JSON object of at most `MESSAGE_BYTES`. The worker asks one question at a time; the agent answers each once. The channel
is closed when the agent exits.
| from | message | means |
|---|---|---|
| worker | `{"ask": "restore_point"}` | From which state does my group begin? Answered once the group's record exists |
| agent | `{"restore_point": {"copy", "checkpoint", "memory": [...]}}` | at state `copy`; null: at step 0 |
| worker | `{"publish": checkpoint}` | The files are on disk under the private name: commit this checkpoint? |
| agent | `{"verdict": {"copy", "checkpoint", "reason"}}` | as committed; null: not committed, for this reason |
| worker | `{"ask": "leave"}` | This rank is quiesced at the step of a handoff: is its group over? |
| worker | `{"quiesced": {"handoff", "step"}}` | all ranks are quiesced at this step, with snapshots; no answer |
| agent | `{"leave": true}` | the group is over: exit with `EXIT_RESTART`. Without an answer the rank continues |
| agent | `{"move": {variable: value}}` | the group is over: go on in another one, with these environment variables |
| worker | `{"ask": "place"}` | This process has set up, or its group broke: which group does it enter? Answer: `move` |
| worker | `{"can_move": boolean}` | whether this rank can do that; no answer |
| worker | `{"moved": true}` | it has left the old group: what it sends from now on is of the new one; no answer |
| worker | `{"started": {"entered", "joined", "set_up", "loaded", "stepped", "step"}}` | first step made; no answer |
| worker | `{"snapshot": {"step", "at_s"}}` | the snapshot of this step is complete since then; no answer |
| worker | `{"damaged": {"kind", "rank"}}` | this piece of the snapshot to restore is damaged; no answer |
| agent | `{"map": {"number", "places"}}` | where each shard of a parameter-server job is; see `shard_map` |
| server | `{"replica": {"map", "shard", "is_complete"}}` | by that map; not complete: the replica does not answer |
| worker | `{"unreadable": sentence}` | last message of a rank 0 that cannot read the state to restore; no answer |

If no checkpoint was ever committed (both are null), a checkpoint of another run may be adopted: it is published without
a private name. A state is identified by `{"run", "group", "step", "save"}`. A checkpoint, committed or proposed, is
`{"copy", "name", "private", "manifest_sha256", "kept": [...], "superseded": [...], "is_rollback", "handoff", "node",
"size_bytes", "took_s", "at"}`: the final and the private name of its directory, and private names of older checkpoints;
the handoff that it was made for, or 0; the node whose own disk has it, or an empty string if all nodes see it; and for
people, the bytes of its files, the seconds until they were on disk, and when that began. Other keys in an answer are
ignored. The times in `started` are seconds since boot (CLOCK_BOOTTIME): when this runtime had been imported, when the
rank had joined a process group, when its script had set up and asked for its State, when that was restored, and when
its first step was committed; `step` is the number of that step.

A rank writes **snapshots** into memory that its agent created (`SNAPSHOT_FD`); `snapshot_page` has the layout. They
need no answer: `snapshot` may come at any time, also while a question is open. If the restore point is not the
committed checkpoint, it is a snapshot in memory, and every rank asks for the restore point. `memory` lists the pieces
of that snapshot on this node, and is empty or absent if there are none: `{"kind": "common" | "part", "rank", "at",
"bytes", "sum", "world_size"}`, with the rank that wrote the piece, its offset in a memory, and the size of the world
that made it. The descriptors of these memories come with the answer (SCM_RIGHTS), one for each entry and in their
order; the worker closes them.

Agents send each other the parts of snapshots that only one rank has. If the group has several nodes, a rank waits until
`replicated` shows its last snapshot before it replaces the one before that: the agent signals each change of that field
by the eventfd `REPLICATED_FD`. A part larger than `snapshot_page.LINK_PART_BYTES` was sent once the next node has it, a
smaller one once the agent has passed it to its links. `at_s` is in seconds on the monotonic clock.

The **stacks** are a memfd per worker (`STACKS_FD`). A worker that can registers a signal handler at C level
(`faulthandler`), which works even if the interpreter does not run: the agent sends the signal whose number is on the
page, and reads what was appended. The memfd's name begins with `STACKS_NAME`, by which a process checks that the
descriptor number still refers to it.
"""

from __future__ import annotations

import mmap
import os
import struct
from pathlib import Path

JOB_ID = "ELASTIC_AGENT_JOB_ID"
RUN_ID = "ELASTIC_AGENT_RUN_ID"
"""Random id of the job's current run; every fresh start creates a new one."""
GROUP = "ELASTIC_AGENT_GROUP"
"""Number of the group that this worker belongs to."""
RANKS_KEY = "ELASTIC_AGENT_RANKS_KEY"
"""Hexadecimal key with which the ranks of this group authenticate to each other. It is derived from the job's secret,
which cannot be computed from it."""
MIN_SECRET = 16
"""Minimum length in characters of a secret that a person has chosen, so that it cannot be guessed."""
NODE_ID = "ELASTIC_AGENT_NODE_ID"
CHECKPOINT_DIR = "ELASTIC_AGENT_CHECKPOINT_DIR"
FRESH = "ELASTIC_AGENT_FRESH"
"""`1`: do not resume from checkpoints of other runs in the directory."""
CONTROL_FD = "ELASTIC_AGENT_CONTROL_FD"
CHANNEL_FD = "ELASTIC_AGENT_CHANNEL_FD"
STACKS_FD = "ELASTIC_AGENT_STACKS_FD"
STACKS_NAME = "elastic-agent:stacks"
_PAGE_NAME = "elastic-agent"
OVER_FD = "ELASTIC_AGENT_OVER_FD"
"""Eventfd that signals a change of `over` or `question` on the control page."""
VERDICT_WITHIN_S = "ELASTIC_AGENT_VERDICT_WITHIN_S"
"""Seconds within which the agent knows what becomes of a group whose ranks have lost each other."""
REPLICATED_FD = "ELASTIC_AGENT_REPLICATED_FD"
"""Eventfd that signals a change of `replicated` or `over` on the control page. Absent: no snapshots are taken."""
SNAPSHOT_FD = "ELASTIC_AGENT_SNAPSHOT_FD"
"""Absent: no snapshots are taken."""
SNAPSHOT_OVERHEAD = "ELASTIC_AGENT_SNAPSHOT_OVERHEAD"
"""Largest share of the steps' time that snapshots may take, in percent; absent: 1."""
SNAPSHOT_MEMORY = "ELASTIC_AGENT_SNAPSHOT_MEMORY"
"""Bytes that the snapshots of all ranks of a node may take together; absent: half of the memory free in its cgroup."""
SETUP = "ELASTIC_AGENT_SETUP"
"""The process sets up in a world of its own, and enters a group at `State.run`: its own (`alone`), or one that it waits
for (`wait`). Absent: it enters its group at `init`."""
HANDOFF_WAIT_S = "ELASTIC_AGENT_HANDOFF_WAIT_S"
"""Seconds that a rank quiesced for a handoff waits for the next group before it continues training."""
SCRIPT_CALLS = "ELASTIC_AGENT_SCRIPT_CALLS"
"""JSON, for an agent that a script has turned into: maps an option to the call in the script that stands for it."""
PS_INCARNATION = "ELASTIC_AGENT_PS_INCARNATION"
"""Counts the processes that an agent has started in one place of a parameter-server job."""

# Variables for `trainer_runtime.standby`; the script never sees them.
STANDBY_FD = "ELASTIC_AGENT_STANDBY_FD"
"""Socket on which a standby reports that it is warm and receives "go". Absent: a cold start."""
STANDBY_ORDER_FD = "ELASTIC_AGENT_STANDBY_ORDER_FD"
"""Memory file with the order as JSON: the modules to preload, and at "go" the environment."""
STANDBY_PYTHONPATH = "ELASTIC_AGENT_STANDBY_PYTHONPATH"
"""The user's own PYTHONPATH. Absent: none was set."""
IMPORTS_FD = "ELASTIC_AGENT_IMPORTS_FD"
"""Memory file of `IMPORTS_BYTES` in which the script's imports are recorded."""
IMPORTS_BYTES = 1 << 20

EXIT_RESTART = 101
"""Exit code of a worker that asks for a restart: the next group is formed (Paddle's convention)."""
EXIT_NO_RESTART = 93
"""Exit code of a worker that must not be restarted: the job fails, with this worker as its cause."""

MESSAGE_BYTES = 64 << 10
MAX_DESCRIPTORS = 253
"""Descriptors in one message; the kernel's limit."""
MAX_KEEP = 100
"""Largest number of checkpoints that a job can keep: their names are in a record in etcd and in messages."""

PAGE_BYTES = 4096
PAGE_VERSION = 8
MAX_METRICS = 4
METRIC_NAME_BYTES = 32
_U64 = struct.Struct("<Q")
_VERSION_AT = 0
_STEP_AT = 8
_HANDOFF_AT = 16
_QUIESCED_AT = 24
_PHASE_AT = 32
_OWN_AT = 40
_STACKS_AT = 48
OUTPUT_AT = 56
"""Public for the guardian, which has a copy of this number because it cannot import this file."""
_RESTORED_AT = 64
_IN_MEMORY_AT = 72
_REPLICATED_AT = 80
_REPLICATING_AT = 88
_OVER_AT = 96
_QUESTION_AT = 104
_UNFINISHED_AT = 112
_METRICS_ASKED_AT = 120
_METRICS_STEP_AT = 128
_METRICS_AT = 136
_METRIC = struct.Struct(f"<{METRIC_NAME_BYTES}sd")
_HALF = 32


def not_handed_down(variable: str, fd: int, what: str) -> RuntimeError:
    """Return the error of a process that has the agent's variable, but not the descriptor. `what`: is wrong with it."""
    return RuntimeError(
        f"{variable} is {fd}, which is {what}: only the process that the agent started can use it; to use State in "
        f"another process, start that process without {variable}"
    )


def is_control_page(fd: int) -> bool:
    """Return whether the descriptor is a control page, and not what a child of the script has under its number."""
    try:
        return str(Path(f"/proc/self/fd/{fd}").readlink()).startswith(f"/memfd:{_PAGE_NAME}:")
    except OSError:
        return False


class ControlPage:
    """A worker's control page, mapped from a descriptor. The descriptor may be closed afterwards."""

    def __init__(self, fd: int) -> None:
        self._map = mmap.mmap(fd, PAGE_BYTES)

    @classmethod
    def create(cls, name: str) -> tuple[ControlPage, int]:
        """Create a new page; return it with the descriptor for the worker, which the caller closes."""
        fd = os.memfd_create(f"{_PAGE_NAME}:{name}", os.MFD_CLOEXEC)
        os.ftruncate(fd, PAGE_BYTES)
        page = cls(fd)
        _U64.pack_into(page._map, _VERSION_AT, PAGE_VERSION)
        return page, fd

    def begin_group(self) -> None:
        """Set the fields as at the start of a worker. The agent does so while the worker waits to be moved."""
        for at in (_STEP_AT, _HANDOFF_AT, _QUIESCED_AT, _RESTORED_AT, _REPLICATED_AT, _METRICS_STEP_AT):
            _U64.pack_into(self._map, at, 0)

    @property
    def version(self) -> int:
        """Layout version that the agent wrote."""
        return self._read(_VERSION_AT)

    @property
    def step(self) -> int:
        """Highest step committed by this rank in this group; 0 before the first."""
        return self._read(_STEP_AT)

    @step.setter
    def step(self, value: int) -> None:
        _U64.pack_into(self._map, _STEP_AT, value)

    @property
    def handoff(self) -> int:
        """Number of the requested handoff; 0: none."""
        return self._read(_HANDOFF_AT)

    @handoff.setter
    def handoff(self, value: int) -> None:
        _U64.pack_into(self._map, _HANDOFF_AT, value)

    @property
    def quiesced(self) -> int:
        """Number of the handoff for which this rank is quiesced; 0: it trains."""
        return self._read(_QUIESCED_AT)

    @quiesced.setter
    def quiesced(self, value: int) -> None:
        _U64.pack_into(self._map, _QUIESCED_AT, value)

    @property
    def phase(self) -> int:
        """1 where no steps are expected; else 0."""
        return self._read(_PHASE_AT)

    @phase.setter
    def phase(self, value: int) -> None:
        _U64.pack_into(self._map, _PHASE_AT, value)

    @property
    def own_us(self) -> int:
        """This rank's own time in the steps of this group, in microseconds; a sum."""
        return self._read(_OWN_AT)

    @own_us.setter
    def own_us(self, value: int) -> None:
        _U64.pack_into(self._map, _OWN_AT, value)

    @property
    def stacks(self) -> int:
        """Signal on which the worker dumps its stacks; 0: none."""
        return self._read(_STACKS_AT)

    @stacks.setter
    def stacks(self, value: int) -> None:
        _U64.pack_into(self._map, _STACKS_AT, value)

    @property
    def output(self) -> int:
        """Bytes of output that the worker has written."""
        return self._read(OUTPUT_AT)

    @property
    def restored(self) -> int:
        """1 once the worker's State is restored; else 0."""
        return self._read(_RESTORED_AT)

    @restored.setter
    def restored(self, value: int) -> None:
        _U64.pack_into(self._map, _RESTORED_AT, value)

    @property
    def in_memory(self) -> int:
        """1 if a snapshot in memory is enough for the requested handoff; else 0."""
        return self._read(_IN_MEMORY_AT)

    @in_memory.setter
    def in_memory(self, value: int) -> None:
        _U64.pack_into(self._map, _IN_MEMORY_AT, value)

    @property
    def replicated(self) -> int:
        """Step of the newest snapshot whose part was sent to other nodes, or was given up; 0: none."""
        return self._read(_REPLICATED_AT)

    @replicated.setter
    def replicated(self, value: int) -> None:
        _U64.pack_into(self._map, _REPLICATED_AT, value)

    @property
    def replicating_us(self) -> int:
        """Microseconds until the slowest part of this node's ranks was sent, as last measured; 0: none was."""
        return self._read(_REPLICATING_AT)

    @replicating_us.setter
    def replicating_us(self, value: int) -> None:
        _U64.pack_into(self._map, _REPLICATING_AT, value)

    @property
    def over(self) -> int:
        """Number of a group that is over without a handoff; 0: none."""
        return self._read(_OVER_AT)

    @over.setter
    def over(self, value: int) -> None:
        _U64.pack_into(self._map, _OVER_AT, value)

    @property
    def question(self) -> int:
        """Number of the agent's newest question for unfinished collectives; 0: it has not asked."""
        return self._read(_QUESTION_AT)

    @question.setter
    def question(self, value: int) -> None:
        _U64.pack_into(self._map, _QUESTION_AT, value)

    @property
    def answered(self) -> int:
        """Number of the newest question that the worker has answered."""
        return self._read(_UNFINISHED_AT) >> _HALF

    @property
    def unfinished(self) -> int | None:
        """How many collectives were unfinished at the newest answer; None: not known."""
        lower = self._read(_UNFINISHED_AT) & ((1 << _HALF) - 1)
        return lower - 1 if lower else None

    def answer(self, question: int, unfinished: int | None) -> None:
        """Answer a question, in one store."""
        _U64.pack_into(self._map, _UNFINISHED_AT, question << _HALF | (0 if unfinished is None else unfinished + 1))

    @property
    def metrics_asked(self) -> int:
        """How often the agent has asked for metrics."""
        return self._read(_METRICS_ASKED_AT)

    @metrics_asked.setter
    def metrics_asked(self, value: int) -> None:
        _U64.pack_into(self._map, _METRICS_ASKED_AT, value)

    @property
    def metrics_step(self) -> int:
        """The step that `metrics` are of; 0: none in this group yet."""
        return self._read(_METRICS_STEP_AT)

    @property
    def metrics(self) -> dict[str, float]:
        """The metrics that the worker wrote last."""
        end = _METRICS_AT + MAX_METRICS * _METRIC.size
        pairs = _METRIC.iter_unpack(self._map[_METRICS_AT:end])
        return {name.rstrip(b"\0").decode(errors="ignore"): value for name, value in pairs if name[0]}

    def write_metrics(self, step: int, metrics: dict[str, float]) -> None:
        """Write the metrics of a step: the first `MAX_METRICS` of them, with their names cut to fit."""
        shown = [(name.encode(errors="replace")[:METRIC_NAME_BYTES], value) for name, value in metrics.items()]
        for index, metric in enumerate((shown + MAX_METRICS * [(b"", 0.0)])[:MAX_METRICS]):
            _METRIC.pack_into(self._map, _METRICS_AT + index * _METRIC.size, *metric)
        _U64.pack_into(self._map, _METRICS_STEP_AT, step)

    def close(self) -> None:
        """Unmap the page."""
        self._map.close()

    def _read(self, at: int) -> int:
        return int(_U64.unpack_from(self._map, at)[0])
