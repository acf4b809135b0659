"""The job's record of its committed checkpoint, as a worker sees it, in the form that goes over the channel.

`agent.core.model` has the same values for the agent; `trainer_runtime.contract` describes the messages.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from trainer_runtime.manifest import field_of, final_name, names_of, parse_stem, stem_of

if TYPE_CHECKING:
    from collections.abc import Sequence


@dataclass(frozen=True, slots=True)
class StateId:
    """A state of the training: the step that it was committed at, and in which group of which run."""

    run: str
    group: int
    step: int
    save: int = 0
    """Times that a save closed the epoch since that step was committed."""

    @property
    def stem(self) -> str:
        """The final name of its directory."""
        return stem_of(self.run, self.group, self.step, self.save)


@dataclass(frozen=True, slots=True, kw_only=True)
class CommittedCheckpoint:
    """The committed checkpoint, or one that asks to be it."""

    copy: StateId
    name: str
    """Its directory's name, once in place."""
    private: str
    """Its directory's name before that; empty if another run wrote it."""
    manifest_sha256: str
    kept: tuple[str, ...]
    """Private names of this run's older checkpoints that are kept, oldest first."""
    superseded: tuple[str, ...]
    """Private names of those that may be deleted once this is committed."""
    is_rollback: bool = False
    """What was committed is damaged; this is an older one."""
    handoff: int = 0
    """Number of the handoff that it was made for: all ranks stand still after this step. 0: none."""
    node: str = ""
    """Id of the node whose own disk has it. Empty: all nodes see the directory."""
    size_bytes: int = 0
    """Of all its files; this and the next two are for people, and 0 where they are not known."""
    took_s: float = 0.0
    """Until they were on disk; training goes on meanwhile, but for hooks and shards."""
    at: float = 0.0
    """When it was begun: wall clock of the writer, seconds since 1970."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaPiece:
    """A piece of the copy to begin from, in a memory that this node's agent keeps."""

    is_common: bool
    """What is equal on all ranks; else what is one rank's own."""
    rank: int
    """Who wrote it."""
    at: int
    bytes: int
    sum: int
    world_size: int
    """Of the world that made the copy."""
    descriptor: int
    """Of that memory."""


@dataclass(frozen=True, slots=True)
class RestorePoint:
    """Where the group begins."""

    copy: StateId | None
    """None: from the start."""
    checkpoint: CommittedCheckpoint | None
    """The committed one. None: another run's may be adopted."""
    memory: tuple[ReplicaPiece, ...] = ()
    """What this node holds of the copy, where it is not the committed checkpoint."""

    @property
    def is_in_memory(self) -> bool:
        """Whether the copy to begin from is held in memory, here or on other nodes."""
        return self.copy is not None and (self.checkpoint is None or self.copy != self.checkpoint.copy)


@dataclass(frozen=True, slots=True)
class Verdict:
    """Whether a checkpoint counts."""

    copy: StateId
    checkpoint: CommittedCheckpoint | None
    """As committed. None: it does not count."""
    reason: str


def publication(checkpoint: CommittedCheckpoint) -> dict[str, Any]:
    """Return what a worker sends to ask whether its checkpoint counts."""
    return {"publish": asdict(checkpoint)}


def resume_of(answer: object, descriptors: Sequence[int]) -> RestorePoint:
    """Read the agent's answer, and the descriptors that came with it; ValueError if it is of another form."""
    told = field_of(answer, "resume", dict)
    pieces = told.get("memory", [])
    if len(pieces) != len(descriptors):
        raise ValueError(f"it tells of {len(pieces)} pieces in memory, and came with {len(descriptors)} descriptors")
    return RestorePoint(
        copy=None if told.get("copy") is None else _copy_of(told),
        checkpoint=_checkpoint_of(told.get("checkpoint")),
        memory=tuple(map(_piece_of, pieces, descriptors)),
    )


def verdict_of(answer: object) -> Verdict:
    """Read the agent's verdict; ValueError if it is of another form."""
    told = field_of(answer, "verdict", dict)
    return Verdict(
        copy=_copy_of(told),
        checkpoint=_checkpoint_of(told.get("checkpoint")),
        reason=field_of(told, "reason", str),
    )


def _piece_of(record: object, descriptor: int) -> ReplicaPiece:
    return ReplicaPiece(
        is_common=field_of(record, "kind", str) == "common",
        rank=field_of(record, "rank", int),
        at=field_of(record, "at", int),
        bytes=field_of(record, "bytes", int),
        sum=field_of(record, "sum", int),
        world_size=field_of(record, "world_size", int),
        descriptor=descriptor,
    )


def _copy_of(record: object) -> StateId:
    copy = field_of(record, "copy", dict)
    return StateId(field_of(copy, "run", str), *(field_of(copy, name, int) for name in ("group", "step", "save")))


def _checkpoint_of(record: object) -> CommittedCheckpoint | None:
    if record is None:
        return None
    checkpoint = CommittedCheckpoint(
        copy=_copy_of(record),
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
        place = parse_stem(final_name(name))
        if place is None or place[0] != checkpoint.copy.run:
            raise ValueError(f"{name!r} is not a checkpoint of the run {checkpoint.copy.run}")
    return checkpoint
