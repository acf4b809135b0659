"""What an agent and its workers agree on: variable names, exit codes, the control page, the channel.

What both sides read, with `snapshot_page`. Standard library only, so that the agent can import it without torch.

The **control page** is one page of shared memory (a memfd) per worker, made by the agent and handed down by
descriptor. Its number is in `CONTROL_FD`. All fields are unsigned 64-bit little-endian integers, each with one
writer, so that an aligned 8-byte store needs no lock:

| offset | field | writer | meaning |
|---|---|---|---|
| 0 | version | agent | `PAGE_VERSION` |
| 8 | step | worker | highest step committed by this rank in this group; 0 before the first |
| 16 | handoff | agent | number of the handoff that is wanted; 0: none. Only grows |
| 24 | stopped | worker | number of the handoff that this rank stands still for; 0: it trains. See below |
| 32 | phase | worker | 1 where no steps are to be expected: within `tr.phase`, and after the last epoch; else 0 |
| 40 | own_us | worker | microseconds that this group's steps took this rank itself, without waiting for others; a sum |
| 48 | stacks | worker | signal by which it appends its stacks to `STACKS_FD`; 0: none |
| 56 | output | guardian | bytes that the worker has written to stdout and stderr |
| 64 | restored | worker | 1 once its State has what it begins from: steps are to be expected |
| 72 | in_memory | agent | 1 if a snapshot in memory is enough for the handoff that is wanted; else 0. Set before it |

A rank sets `stopped` before it saves for the handoff, and to 0 only to train on, not when it leaves: while the field
equals `handoff`, a rank whose group is over is not sent SIGTERM but told to leave as soon as it asks.

The **channel** is one end of a Unix SEQPACKET socket pair per worker; its number is in `CHANNEL_FD`. Each packet is one
JSON object of at most `MESSAGE_BYTES`. The worker asks, one question at a time; each is answered once. The channel ends
when the agent does.

| from | message | means |
|---|---|---|
| worker | `{"ask": "resume"}` | where does my group begin? Answered when the group's record is there |
| agent | `{"resume": {"copy", "checkpoint", "memory": [...]}}` | at this copy, or null: at step 0; see below |
| worker | `{"publish": checkpoint}` | its files are on disk under the private name: does it count? |
| agent | `{"verdict": {"copy", "checkpoint", "reason"}}` | as committed; null: it does not count, for that reason |
| worker | `{"ask": "leave"}` | this rank stands at the step of a handoff: is its group over? |
| worker | `{"stood": {"handoff", "step"}}` | all ranks stand still there, with snapshots that are whole; no answer |
| agent | `{"leave": true}` | it is: end with `EXIT_RESTART`. Else there is no answer, and the rank goes on in time |
| worker | `{"began": {"entered", "joined", "loaded", "stepped", "step"}}` | its first step is done; no answer |
| worker | `{"snapped": {"step"}}` | its snapshot of this step is whole; no answer |
| worker | `{"damaged": {"kind", "rank"}}` | this piece of what it was given to begin from is damaged; no answer |
| agent | `{"map": {"number", "places"}}` | where each shard of a parameter-server job is; see `shard_map` |
| server | `{"copy": {"map", "shard", "is_whole"}}` | by that map; not whole: the replica does not answer |
| worker | `{"unreadable": sentence}` | the last word of a rank 0 that cannot read what it must begin from; no answer |

Where no checkpoint was ever committed (both are null) another run's may be adopted: published without a private name.
A copy is `{"run", "group", "step"}`. A checkpoint, the committed one or one that asks to be it, is `{"copy", "name",
"private", "manifest_sha256", "kept": [...], "superseded": [...], "is_rollback", "handoff", "node", "size_bytes",
"took_s", "at"}`: its directory's final and private name, and private names of older ones; the handoff that it was
made for, or 0; the node whose own disk has it, or an empty string if all see it; for people, the bytes of its files,
the seconds until they were on disk, and when that began. Other keys in an answer are ignored. What `began` tells are
seconds since boot (CLOCK_BOOTTIME): when this runtime had been imported, when the rank was in a process group, when
it had what it begins from, and when its first step was committed; and that step's number.

A rank puts **snapshots** into a memory that its agent made (`SNAPSHOT_FD`); `snapshot_page` has its layout. They are
not asked about: `snapped` may come at any time, also while a question is open. Where the copy to begin from is not the
committed checkpoint it is held in memory, and every rank asks where to begin. `memory`, empty or absent where this node
holds nothing of the copy, lists what it holds of it: `{"kind": "common" | "part", "rank", "at", "bytes",
"sum", "world_size"}`, with the rank that wrote it, the place in a memory, and the size of the world that made it. The
descriptors of these memories come with the answer (SCM_RIGHTS), one for each entry and in their order; the worker
closes them.

The **stacks** are a memfd per worker (`STACKS_FD`). A worker that can registers a signal handler of the C level
(`faulthandler`), which needs no interpreter that still runs: the agent sends the signal that stands on the page, and
reads what was appended. Its name begins with `STACKS_NAME`, by which a process tells whether the number still means it.
"""

from __future__ import annotations

import mmap
import os
import struct

JOB_ID = "ELASTIC_AGENT_JOB_ID"
RUN_ID = "ELASTIC_AGENT_RUN_ID"
"""Random id of the job's current run: new at each fresh start."""
GROUP = "ELASTIC_AGENT_GROUP"
"""Number of the group that this worker belongs to."""
RANKS_KEY = "ELASTIC_AGENT_RANKS_KEY"
"""Hexadecimal: what the ranks of this group, and no others, authenticate to each other with. It follows from the job's
secret, which cannot be found from it."""
MIN_SECRET = 16
"""Characters of a secret that somebody has chosen: who guesses must not have a chance."""
NODE_ID = "ELASTIC_AGENT_NODE_ID"
CHECKPOINT_DIR = "ELASTIC_AGENT_CHECKPOINT_DIR"
FRESH = "ELASTIC_AGENT_FRESH"
"""`1`: checkpoints of other runs in the directory are not to be resumed from."""
CONTROL_FD = "ELASTIC_AGENT_CONTROL_FD"
CHANNEL_FD = "ELASTIC_AGENT_CHANNEL_FD"
STACKS_FD = "ELASTIC_AGENT_STACKS_FD"
STACKS_NAME = "elastic-agent:stacks"
SNAPSHOT_FD = "ELASTIC_AGENT_SNAPSHOT_FD"
"""Absent: no snapshots."""
SNAPSHOT_OVERHEAD = "ELASTIC_AGENT_SNAPSHOT_OVERHEAD"
"""What snapshots may take of the time of the steps, in percent; absent: 1."""
SNAPSHOT_MEMORY = "ELASTIC_AGENT_SNAPSHOT_MEMORY"
"""What the snapshots of the ranks of a node may take in all, in bytes; absent: half of what is free in its cgroup."""
HANDOFF_WAIT_S = "ELASTIC_AGENT_HANDOFF_WAIT_S"
"""How long a rank that stands at the step of a handoff waits for what comes of it, in seconds."""
SCRIPT_CALLS = "ELASTIC_AGENT_SCRIPT_CALLS"
"""JSON, to an agent that a script has become: by option, the call that it stands for, as the script has it."""
PS_INCARNATION = "ELASTIC_AGENT_PS_INCARNATION"
"""Counts the processes that an agent has started in a place of a parameter-server job."""

# What `trainer_runtime.standby` is told; a script never sees these.
STANDBY_FD = "ELASTIC_AGENT_STANDBY_FD"
"""Socket on which a standby says that it is warm and is told to go. Absent: a cold start."""
STANDBY_ORDER_FD = "ELASTIC_AGENT_STANDBY_ORDER_FD"
"""Memory file with the order, as JSON: what to import ahead, and at "go" the environment."""
STANDBY_PYTHONPATH = "ELASTIC_AGENT_STANDBY_PYTHONPATH"
"""The user's own PYTHONPATH. Absent: none was set."""
IMPORTS_FD = "ELASTIC_AGENT_IMPORTS_FD"
"""Memory file of `IMPORTS_BYTES` for what the script imports."""
IMPORTS_BYTES = 1 << 20

EXIT_RESTART = 101
"""A worker's exit code for "restart me": the next group is formed (Paddle's convention)."""
EXIT_NO_RESTART = 93
"""A worker's exit code for "do not restart": the job fails with this worker as its cause."""

MESSAGE_BYTES = 64 << 10
MAX_DESCRIPTORS = 253
"""In one message: what the kernel allows."""
MAX_KEEP = 100
"""Checkpoints that a job can keep: their names are in a record in etcd, and in messages."""

PAGE_BYTES = 4096
PAGE_VERSION = 4
_U64 = struct.Struct("<Q")
_VERSION_AT = 0
_STEP_AT = 8
_HANDOFF_AT = 16
_STOPPED_AT = 24
_PHASE_AT = 32
_OWN_AT = 40
_STACKS_AT = 48
OUTPUT_AT = 56
"""For the guardian, which cannot import this file."""
_RESTORED_AT = 64
_IN_MEMORY_AT = 72


class ControlPage:
    """A worker's control page, mapped from a descriptor. The descriptor may be closed afterwards."""

    def __init__(self, fd: int) -> None:
        self._map = mmap.mmap(fd, PAGE_BYTES)

    @classmethod
    def create(cls, name: str) -> tuple[ControlPage, int]:
        """Make a new page; return it with the descriptor to hand to the worker (the caller closes it)."""
        fd = os.memfd_create(f"elastic-agent:{name}", os.MFD_CLOEXEC)
        os.ftruncate(fd, PAGE_BYTES)
        page = cls(fd)
        _U64.pack_into(page._map, _VERSION_AT, PAGE_VERSION)
        return page, fd

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
        """Number of the handoff that is wanted; 0: none."""
        return self._read(_HANDOFF_AT)

    @handoff.setter
    def handoff(self, value: int) -> None:
        _U64.pack_into(self._map, _HANDOFF_AT, value)

    @property
    def stopped(self) -> int:
        """Number of the handoff that this rank stands still for; 0: it trains."""
        return self._read(_STOPPED_AT)

    @stopped.setter
    def stopped(self, value: int) -> None:
        _U64.pack_into(self._map, _STOPPED_AT, value)

    @property
    def phase(self) -> int:
        """1 where no steps are to be expected; else 0."""
        return self._read(_PHASE_AT)

    @phase.setter
    def phase(self, value: int) -> None:
        _U64.pack_into(self._map, _PHASE_AT, value)

    @property
    def own_us(self) -> int:
        """Microseconds that this group's steps took this rank itself; a sum."""
        return self._read(_OWN_AT)

    @own_us.setter
    def own_us(self, value: int) -> None:
        _U64.pack_into(self._map, _OWN_AT, value)

    @property
    def stacks(self) -> int:
        """Signal by which the worker tells its stacks; 0: none."""
        return self._read(_STACKS_AT)

    @stacks.setter
    def stacks(self, value: int) -> None:
        _U64.pack_into(self._map, _STACKS_AT, value)

    @property
    def output(self) -> int:
        """Bytes of output so far."""
        return self._read(OUTPUT_AT)

    @property
    def restored(self) -> int:
        """1 once its State has what it begins from; else 0."""
        return self._read(_RESTORED_AT)

    @restored.setter
    def restored(self, value: int) -> None:
        _U64.pack_into(self._map, _RESTORED_AT, value)

    @property
    def in_memory(self) -> int:
        """1 if a snapshot in memory is enough for the handoff that is wanted; else 0."""
        return self._read(_IN_MEMORY_AT)

    @in_memory.setter
    def in_memory(self, value: int) -> None:
        _U64.pack_into(self._map, _IN_MEMORY_AT, value)

    def close(self) -> None:
        """Unmap the page."""
        self._map.close()

    def _read(self, at: int) -> int:
        return int(_U64.unpack_from(self._map, at)[0])
