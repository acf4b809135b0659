"""The step gate: a small file with which the rehearsal holds a script; the recorder reads it at every step."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

KILLED_IN_WRITE = "killed-in-write"
"""A file that exists once a process was killed in a write; no other one is killed then."""


@dataclass(frozen=True)
class StepGate:
    """How far a script may run. Steps are counted from the start of its process, so from 1 in each group."""

    group: int
    """The group for which `steps` holds."""
    steps: int
    """Step at which this group stops, or from which it is delayed."""
    others: int
    """Step at which any other group stops."""
    delay_s: float = 0.0
    """0: the group stops there. Otherwise it continues and is delayed this long at each step."""
    kill_on_write: str = ""
    """A file: the first process that overwrites it is killed."""

    def holds(self, group: int, count: int) -> bool:
        """Return whether a rank must wait at this step."""
        if group == self.group:
            return not self.delay_s and count >= self.steps
        return count >= self.others

    def delay_at(self, group: int, count: int) -> float:
        """Return the delay at this step, in seconds."""
        return self.delay_s if group == self.group and count >= self.steps else 0.0


def read_gate(directory: Path) -> StepGate:
    """Read the gate of a directory. Raises OSError if there is none."""
    return StepGate(**json.loads((directory / "gate.json").read_text(encoding="utf-8")))


def write_gate(directory: Path, gate: StepGate) -> None:
    """Replace the gate by a rename, so that no reader sees a part of it."""
    private = directory / "gate.new"
    private.write_text(json.dumps(asdict(gate)), encoding="utf-8")
    private.replace(directory / "gate.json")
