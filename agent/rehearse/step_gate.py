"""Where the rehearsal holds a script: a small file that it writes and the recorder reads at every step."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

TORN = "torn"
"""A file that is there once a process was killed in a write, which happens once."""


@dataclass(frozen=True)
class StepGate:
    """How far a script may go. Steps are counted from the start of its process, so from 1 in each group."""

    group: int
    """The group that `steps` is about."""
    steps: int
    """Step at which that group stops, or from which on it is slow."""
    others: int
    """Step at which any other group stops."""
    pace_s: float = 0.0
    """0: the group stops there. Else it goes on, and loses so many seconds at each step."""
    torn: str = ""
    """A file whose first overwriting kills the process that does it."""

    def holds(self, group: int, count: int) -> bool:
        """Whether a rank that has come so far must wait."""
        if group == self.group:
            return not self.pace_s and count >= self.steps
        return count >= self.others

    def pace_of(self, group: int, count: int) -> float:
        """Seconds to lose at this step."""
        return self.pace_s if group == self.group and count >= self.steps else 0.0


def read_gate(directory: Path) -> StepGate:
    """Read the gate of a directory. Raises OSError if there is none."""
    return StepGate(**json.loads((directory / "gate.json").read_text(encoding="utf-8")))


def write_gate(directory: Path, gate: StepGate) -> None:
    """Replace the gate at once: no reader sees half of it."""
    private = directory / "gate.new"
    private.write_text(json.dumps(asdict(gate)), encoding="utf-8")
    private.replace(directory / "gate.json")
