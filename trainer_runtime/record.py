"""The job's record of its committed checkpoint, as a worker sees it, with the codec for the agent channel.

`agent.core.model` has the same records for the agent; `trainer_runtime.contract` describes the messages.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from trainer_runtime.manifest import field_of, final_name, names_of, parse_stem, stem_of

if TYPE_CHECKING:
    from collections.abc import Sequence


@dataclass(frozen=True, slots=True)
class StateId:
    """Identifies a state of the training: the step that was committed, and the group and run that committed it."""

    run: str
    group: int
    step: int
    save: int = 0
    """Number of saves that closed the epoch since that step was committed."""

    @property
    def stem(self) -> str:
        """Final name of the state's checkpoint directory."""
        return stem_of(self.run, self.group, self.step, self.save)


@dataclass(frozen=True, slots=True, kw_only=True)
class CommittedCheckpoint:
    """The committed checkpoint, or one that is proposed for the commit."""

    copy: StateId
    name: str
    """Final name of its directory."""
    private: str
    """Private name of its directory before the rename; empty if another run wrote it."""
    manifest_sha256: str
    kept: tuple[str, ...]
    """Private names of this run's older checkpoints that are kept, oldest first."""
    superseded: tuple[str, ...]
    """Private names of checkpoints that may be deleted once this one is committed."""
    is_rollback: bool = False
    """The checkpoint committed before is damaged; this is an older one."""
    handoff: int = 0
    """Number of the handoff that it was made for, for which all ranks are quiesced after this step; 0: none."""
    node: str = ""
    """Id of the node whose own disk has it. Empty: all nodes see the directory."""
    size_bytes: int = 0
    """Size of all its files. This field and the next two are informational, and 0 if unknown."""
    took_s: float = 0.0
    """Seconds until the files were on disk; training continues meanwhile, except during hooks and shards."""
    at: float = 0.0
    """When the save began: the writer's wall clock, in seconds since 1970."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaPiece:
    """A piece of the snapshot to restore, in a memory that this node's agent holds."""

    is_common: bool
    """Whether the piece is equal on all ranks; else it is one rank's own part."""
    rank: int
    """The rank that wrote it."""
    at: int
    bytes: int
    sum: int
    world_size: int
    """Size of the world that made the snapshot."""
    descriptor: int
    """Descriptor of the memory."""


@dataclass(frozen=True, slots=True)
class RestorePoint:
    """The state from which the group begins."""

    copy: StateId | None
    """The state to restore; None: begin at step 0."""
    checkpoint: CommittedCheckpoint | None
    """The committed checkpoint. None: a checkpoint of another run may be adopted."""
    memory: tuple[ReplicaPiece, ...] = ()
    """Pieces of the snapshot on this node, if the state to restore is not that of the committed checkpoint."""

    @property
    def is_in_memory(self) -> bool:
        """Whether the state to restore is a snapshot in memory, of this node or others."""
        return self.copy is not None and (self.checkpoint is None or self.copy != self.checkpoint.copy)


@dataclass(frozen=True, slots=True)
class Verdict:
    """The agent's answer to a proposed checkpoint."""

    copy: StateId
    checkpoint: CommittedCheckpoint | None
    """The checkpoint as committed; None: it was not committed."""
    reason: str
    is_saved: bool = False
    """Another checkpoint of this very state is committed."""


def publish_message(checkpoint: CommittedCheckpoint) -> dict[str, Any]:
    """Return the message that proposes a checkpoint for the commit."""
    return {"publish": asdict(checkpoint)}


def parse_restore_point(answer: object, descriptors: Sequence[int]) -> RestorePoint:
    """Parse the agent's restore point with the descriptors that came with it; ValueError if it is malformed."""
    fields = field_of(answer, "restore_point", dict)
    pieces = fields.get("memory", [])
    if len(pieces) != len(descriptors):
        raise ValueError(f"it lists {len(pieces)} pieces in memory, and came with {len(descriptors)} descriptors")
    return RestorePoint(
        copy=None if fields.get("copy") is None else _parse_state_id(fields),
        checkpoint=_parse_checkpoint(fields.get("checkpoint")),
        memory=tuple(map(_parse_piece, pieces, descriptors)),
    )


def parse_verdict(answer: object) -> Verdict:
    """Parse the agent's verdict; ValueError if it is malformed."""
    fields = field_of(answer, "verdict", dict)
    return Verdict(
        copy=_parse_state_id(fields),
        checkpoint=_parse_checkpoint(fields.get("checkpoint")),
        reason=field_of(fields, "reason", str),
        is_saved=bool(fields.get("is_saved")),
    )


def _parse_piece(record: object, descriptor: int) -> ReplicaPiece:
    return ReplicaPiece(
        is_common=field_of(record, "kind", str) == "common",
        rank=field_of(record, "rank", int),
        at=field_of(record, "at", int),
        bytes=field_of(record, "bytes", int),
        sum=field_of(record, "sum", int),
        world_size=field_of(record, "world_size", int),
        descriptor=descriptor,
    )


def _parse_state_id(record: object) -> StateId:
    copy = field_of(record, "copy", dict)
    return StateId(field_of(copy, "run", str), *(field_of(copy, name, int) for name in ("group", "step", "save")))


def _parse_checkpoint(record: object) -> CommittedCheckpoint | None:
    if record is None:
        return None
    checkpoint = CommittedCheckpoint(
        copy=_parse_state_id(record),
        name=field_of(record, "name", str),
        private=field_of(record, "private", str),
        manifest_sha256=field_of(record, "manifest_sha256", str),
        kept=names_of(record, "kept"),
        superseded=names_of(record, "superseded"),
        is_rollback=field_of(record, "is_rollback", bool),
        handoff=field_of(record, "handoff", int),
        node=field_of(record, "node", str),
    )
    finals = {checkpoint.copy.stem, checkpoint.name, *map(final_name, filter(None, [checkpoint.private]))}
    if len(finals) > 1 or parse_stem(checkpoint.name) is None:
        raise ValueError(f"{checkpoint.name!r} and {checkpoint.private!r} are not the names of {checkpoint.copy}")
    for name in (*checkpoint.kept, *checkpoint.superseded):
        parsed = parse_stem(final_name(name))
        if parsed is None or parsed[0] != checkpoint.copy.run:
            raise ValueError(f"{name!r} is not a checkpoint of the run {checkpoint.copy.run}")
    return checkpoint
