"""States of the training: snapshots that agents hold, the committed checkpoint, and where a group begins."""

from __future__ import annotations

import msgspec

from agent.core.bounds import Count, Run, Seconds, WallClock, WorldSize
from agent.core.records import Identity, MemberRecord, Record


class StateId(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A state of the training: the step that it was committed at, and in which group of which run.

    Equal steps of two groups are two copies: a group that was cut off and its successor may both have made step 105.
    So are two saves of one step: what a script does after its last commit, and saves, is newer than that commit.
    """

    run: Run
    group: Count
    step: Count
    save: Count = 0
    """Times that a save closed the epoch since that step was committed."""


class Replica(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A snapshot, or parts of one, that a node holds in memory."""

    copy: StateId
    world_size: WorldSize
    has_common: bool
    """Whether it has the part that is equal on all ranks."""
    parts: tuple[Count, ...]
    """Ranks whose own parts it has."""


class Inventory(MemberRecord, frozen=True, kw_only=True):
    """The snapshots that a member held in memory when its workers of a group started."""

    group: Count
    copies: tuple[Replica, ...]


class Checkpoint(Record, frozen=True, kw_only=True):
    """The committed checkpoint: where training may resume, and which files may be deleted; no others may.

    Written by the agent whose worker wrote the files, through the fence: only while `group`, and this record, are
    still those that the decision rested on.
    """

    number: Count = 0
    """Number of writes of this record. 0: not written yet."""
    run: Run = ""
    """The run of the job. `copy.run` may be an older run, whose checkpoint was adopted."""
    copy: StateId
    name: str
    """Final name of its directory."""
    private: str
    """Name of its directory before the rename. Empty: it had its final name already."""
    manifest_sha256: str
    kept: tuple[str, ...]
    """Private names of the older checkpoints of this run that are kept, oldest first."""
    superseded: tuple[str, ...]
    """Private names of the older checkpoints that may be deleted now."""
    is_rollback: bool = False
    """This is an older checkpoint, because the previous one was damaged."""
    handoff: Count = 0
    """Number of the handoff that it was made for: all ranks stopped after this step. 0: none."""
    is_late: bool = False
    """The ranks have trained on, because the checkpoint was not committed in time."""
    node: str = ""
    """Id of the node whose local disk has it. Empty: all nodes see the directory."""
    size_bytes: Count = 0
    """Size of all its files. This and the next two are only displayed, and are 0 if not known."""
    took_s: Seconds = 0.0
    """Time until the files were on disk. Training goes on meanwhile, except during hooks and for shards."""
    at: WallClock = 0.0
    """When writing began: wall clock of the writer, seconds since 1970."""


class RestorePoint(Record, frozen=True, kw_only=True):
    """The state that a group begins from. No rank takes a step before this is written."""

    group: Count
    copy: StateId | None
    """None: training begins at the start."""
    lineage: tuple[StateId, ...]
    """The restore points back to the committed checkpoint, oldest first. Copies of a group count up to this step."""
    checkpoint: Checkpoint | None
    """The committed checkpoint. None: a checkpoint of an older run may be adopted."""
    saver: Identity | None = None
    """The agent that saves the copy from its memory, in a group without members before the job is stopped. None: no
    agent is asked to."""
