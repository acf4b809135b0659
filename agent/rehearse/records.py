"""The records that the recorder wrote: their format, and how to read them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import msgspec

Key = tuple[str, str, str, int]
"""Kind, class and name of an object, and its index among the objects that have these in common."""


class ObjectRecord(msgspec.Struct, frozen=True):
    """One object of the script and its state before a step."""

    kind: str
    """optimizer, scheduler, scaler, generator, module (tensors that no optimizer trains) or tensor (in a variable)."""
    type: str
    """Its class."""
    name: str
    """The script's variable that holds it, or an empty string."""
    is_in_state: bool
    """Whether a State saves it."""
    digest: str
    """Hash of its state."""
    is_persistent: bool = False
    """Whether it has the same tensor objects as one step before; if not, they are created again in each step."""


class LatePart(msgspec.Struct, frozen=True, tag="late"):
    """What a step computed after its line was written, for a second optimizer for example."""

    losses: list[float | None] = []
    inputs: list[str] = []
    is_complete: bool = False
    """Whether the step is over: it was committed to a State, or the next step has begun."""

    def __add__(self, more: LatePart) -> LatePart:
        """Concatenate two parts."""
        return LatePart(self.losses + more.losses, self.inputs + more.inputs, self.is_complete or more.is_complete)


class StepRecord(msgspec.Struct, frozen=True, tag="step"):
    """One training step of one rank. Contents are recorded as hashes, equal for equal content.

    With a State a step ends with a commit; without one, before the script's first optimizer steps again.
    """

    count: int
    """Number of the step in this process, from 1."""
    step: int | None
    """The step's number by the State's count, from 1; None without a State."""
    state_epoch: int | None
    epoch: int | None
    """The script's own count of epochs."""
    epoch_name: str
    """The name of this variable."""
    world: int
    losses: list[float | None]
    """The loss of each backward pass before the first optimizer step, without a scaler's factor; None: not finite."""
    inputs: list[str]
    """The hash of the inputs of each forward pass before the first optimizer step."""
    rows: list[str]
    """The hash of each sample of this step; empty if there are too many or no tensors."""
    weights: str
    buffers: str
    random: dict[str, str]
    """Hashes of the global random states: Python, NumPy, torch, CUDA."""
    objects: list[ObjectRecord]
    model: str
    """The script's variable that holds the model; of several models, the one that is called first."""
    models: list[str] = []
    """The variables that hold modules with trained parameters."""
    seeded: list[str] = []
    """Global random states that were drawn from and that the rehearsal, not the script, has seeded."""
    read: list[str] = []
    """In the first line only: files in the working directory that were opened for reading before this step."""
    overwritten: list[str] = []
    """Files there that were not empty when they were opened for writing, up to this step."""
    late: LatePart = LatePart()
    """What the step computed after this line was written, so far."""

    @property
    def ordinal(self) -> int:
        """The number of the step: by the State's count, or else in this process."""
        return self.count if self.step is None else self.step

    def objects_by_key(self) -> dict[Key, ObjectRecord]:
        """Return the objects by a key under which they are found in another process."""
        found: dict[Key, ObjectRecord] = {}
        for entry in self.objects:
            place = sum(key[:3] == (entry.kind, entry.type, entry.name) for key in found)
            found[(entry.kind, entry.type, entry.name, place)] = entry
        return found


RankRecords = list[StepRecord]
"""The records of one rank in the order in which they were written."""

_decode = msgspec.json.Decoder(StepRecord | LatePart).decode


def groups_in(directory: Path) -> list[int]:
    """Return the numbers of the groups that have recorded a step, in ascending order."""
    return sorted({int(path.name[6:12]) for path in directory.glob("group-*.jsonl")})


def read_group(directory: Path, group: int) -> dict[int, RankRecords]:
    """Read the records of a group by rank, in the order of ranks; incomplete lines are ignored."""
    paths = sorted(directory.glob(f"group-{group:06d}.rank-*.jsonl"))
    return {int(path.stem[-5:]): list(_read_records(path)) for path in paths}


def common_steps(ranks: dict[int, RankRecords]) -> int:
    """Return how many steps all ranks of the group have recorded; 0 if a rank has none yet."""
    if not ranks or any(not records for records in ranks.values()):
        return 0
    is_whole = len(ranks) == next(iter(ranks.values()))[0].world
    return min(len(records) for records in ranks.values()) if is_whole else 0


def trim_to_common(ranks: dict[int, RankRecords]) -> dict[int, RankRecords]:
    """Remove the steps that not all ranks have recorded."""
    shortest = min(len(records) for records in ranks.values())
    return {rank: records[:shortest] for rank, records in ranks.items()}


def errors_in(directory: Path) -> str:
    """Return the logged errors of the recorder; empty if there are none."""
    with suppress(FileNotFoundError):
        return (directory / "recorder-errors.txt").read_text(encoding="utf-8", errors="replace")
    return ""


def _read_records(path: Path) -> Iterator[StepRecord]:
    step, late = None, LatePart()
    with path.open("rb") as file:
        for line in file:
            if not line.endswith(b"\n"):
                continue
            record: StepRecord | LatePart = _decode(line)
            if isinstance(record, LatePart):
                late += record
                continue
            if step is not None:
                yield msgspec.structs.replace(step, late=late + LatePart(is_complete=True))
            step, late = record, LatePart()
    if step is not None:
        yield msgspec.structs.replace(step, late=late)
