"""What the recorder left, read back; the one place that knows the form of its lines."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import msgspec


class Seen(msgspec.Struct, frozen=True):
    """One object of the script, as it was before a step."""

    kind: str
    """optimizer, scheduler, scaler, or generator."""
    type: str
    """Its class."""
    name: str
    """The script's variable, or an empty string."""
    is_held: bool
    """Whether a State saves it."""
    mark: str
    """Hash of its state."""


class Line(msgspec.Struct, frozen=True):
    """One optimizer step of one rank. All hashes are equal for equal content."""

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
    """Of each backward pass of this step, without a scaler's factor; None: infinite or not a number."""
    inputs: list[str]
    """Of each forward pass of this step."""
    rows: list[str]
    """Of each sample of this step; empty where there are too many, or no tensors."""
    weights: str
    buffers: str
    random: dict[str, str]
    """The global random states: Python, NumPy, torch, CUDA."""
    objects: list[Seen]
    model: str
    """The script's variable that holds the model."""

    @property
    def ordinal(self) -> int:
        """The number of the step as far as this process knows it."""
        return self.count if self.step is None else self.step

    def keyed(self) -> dict[tuple[str, str, str, int], Seen]:
        """The objects by kind, class, name, and place among those that have these in common."""
        found: dict[tuple[str, str, str, int], Seen] = {}
        for seen in self.objects:
            place = sum(key[:3] == (seen.kind, seen.type, seen.name) for key in found)
            found[(seen.kind, seen.type, seen.name, place)] = seen
        return found


Rank = list[Line]
"""The lines of one rank in the order in which they were written."""

_decode = msgspec.json.Decoder(Line).decode


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


def _lines(path: Path) -> Iterator[Line]:
    with path.open("rb") as file:
        for line in file:
            if line.endswith(b"\n"):
                yield _decode(line)
