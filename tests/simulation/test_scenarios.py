"""Each scenario gives its transcript. `UPDATE_GOLDEN=1` writes the transcripts anew: look at the difference."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from simulation import scenario

_SCENARIOS = sorted((Path(__file__).parent / "scenarios").glob("*.txt"))


@pytest.mark.parametrize("path", _SCENARIOS, ids=[path.stem for path in _SCENARIOS])
def test_scenario(path: Path) -> None:
    """What is written, and what agents do, is what the file says."""
    events, expected = scenario.read(path)
    transcript = scenario.play(events)
    if os.environ.get("UPDATE_GOLDEN"):
        path.write_text("\n".join([*events, scenario.END, transcript]), encoding="utf-8")
        return
    assert transcript == expected
