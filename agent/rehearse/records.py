"""What the recorder left, read back; the one place that knows the form of its lines."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import msgspec

Key = tuple[str, str, str, int]
"""Kind, class and name of an object, and its place among those that have these in common."""


class SeenObject(msgspec.Struct, frozen=True):
    """One object of the script, as it was before a step."""

    kind: str
    """optimizer, scheduler, scaler, generator, module (what no optimizer trains of it), or tensor (in a variable)."""
    type: str
    """Its class."""
    name: str
    """The script's variable, or an empty string."""
    is_held: bool
    """Whether a State saves it."""
    mark: str
    """Hash of its state."""
    is_old: bool = False
    """Whether a variable has the same tensors as at the line before. Others are made anew in each step."""


class LateObject(msgspec.Struct, frozen=True, tag="late"):
    """What a step computed after its line was written, for a second optimizer for instance."""

    losses: list[float | None] = []
    inputs: list[str] = []
    is_end: bool = False
    """Whether this is all of it: the step was committed to a State, or the next one has begun."""

    def __add__(self, more: LateObject) -> LateObject:
        """Both, in this order."""
        return LateObject(self.losses + more.losses, self.inputs + more.inputs, self.is_end or more.is_end)


class StepRecord(msgspec.Struct, frozen=True, tag="step"):
    """One step of the training by one rank. All hashes are equal for equal content.

    With a State a step ends with a commit; without one, before the first of the script's optimizers steps again.
    """

    count: int
    """Steps of this process, this one included."""
    step: int | None
    """The step's number by the State's count, from 1; None without a State."""
    state_epoch: int | None
    epoch: int | None
    """The script's own count of epochs."""
    epoch_name: str
    """The variable that it is in."""
    world: int
    losses: list[float | None]
    """Of each backward pass before the first optimizer stepped, without a scaler's factor; None: not finite."""
    inputs: list[str]
    """Of each forward pass before the first optimizer stepped."""
    rows: list[str]
    """Of each sample of this step; empty where there are too many, or no tensors."""
    weights: str
    buffers: str
    random: dict[str, str]
    """The global random states: Python, NumPy, torch, CUDA."""
    objects: list[SeenObject]
    model: str
    """The script's variable that holds the model; of several, the first that is called."""
    models: list[str] = []
    """The variables of all modules that optimizers train."""
    seeded: list[str] = []
    """Global random states that the rehearsal has seeded, not the script, and that were drawn from."""
    read: list[str] = []
    """In the first line: files in the working directory that were opened for reading before."""
    overwritten: list[str] = []
    """Files there that were opened for writing until now, and had a content."""
    late: LateObject = LateObject()
    """What came after, so far."""

    @property
    def ordinal(self) -> int:
        """The number of the step as far as this process knows it."""
        return self.count if self.step is None else self.step

    def keyed(self) -> dict[Key, SeenObject]:
        """The objects by what they are recognised by in another process."""
        found: dict[Key, SeenObject] = {}
        for seen in self.objects:
            place = sum(key[:3] == (seen.kind, seen.type, seen.name) for key in found)
            found[(seen.kind, seen.type, seen.name, place)] = seen
        return found


Rank = list[StepRecord]
"""The lines of one rank in the order in which they were written."""

_decode = msgspec.json.Decoder(StepRecord | LateObject).decode


def groups_in(directory: Path) -> list[int]:
    """Numbers of the groups that have recorded a step, in order."""
    return sorted({int(path.name[6:12]) for path in directory.glob("group-*.jsonl")})


def read_group(directory: Path, group: int) -> dict[int, Rank]:
    """All whole lines of a group by rank, in the order of ranks."""
    paths = sorted(directory.glob(f"group-{group:06d}.rank-*.jsonl"))
    return {int(path.stem[-5:]): list(_lines(path)) for path in paths}


def complete_steps(ranks: dict[int, Rank]) -> int:
    """Steps that every rank of the group has recorded; 0 as long as a rank has none."""
    if not ranks or any(not lines for lines in ranks.values()):
        return 0
    is_whole = len(ranks) == next(iter(ranks.values()))[0].world
    return min(len(lines) for lines in ranks.values()) if is_whole else 0


def cut(ranks: dict[int, Rank]) -> dict[int, Rank]:
    """Leave out steps that not all ranks have recorded."""
    shortest = min(len(lines) for lines in ranks.values())
    return {rank: lines[:shortest] for rank, lines in ranks.items()}


def errors_in(directory: Path) -> str:
    """What went wrong in the recorder itself; empty if nothing did."""
    with suppress(FileNotFoundError):
        return (directory / "recorder-errors.txt").read_text(encoding="utf-8", errors="replace")
    return ""


def _lines(path: Path) -> Iterator[StepRecord]:
    line, late = None, LateObject()
    with path.open("rb") as file:
        for each in file:
            if not each.endswith(b"\n"):
                continue
            record: StepRecord | LateObject = _decode(each)
            if isinstance(record, LateObject):
                late += record
                continue
            if line is not None:
                yield msgspec.structs.replace(line, late=late + LateObject(is_end=True))
            line, late = record, LateObject()
    if line is not None:
        yield msgspec.structs.replace(line, late=late)
