"""Each guard of the core is needed: without it, a story of the simulation fails."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from simulation.guards import GUARDS, Guard
from simulation.mutant import ROOT
from simulation.role_guards import ROLE_GUARDS

_WITHIN_S = 500


@pytest.mark.timeout(600)
@pytest.mark.parametrize("guard", [*GUARDS, *ROLE_GUARDS], ids=[guard.why for guard in (*GUARDS, *ROLE_GUARDS)])
def test_removing_a_guard_is_noticed(guard: Guard) -> None:
    """The story, which holds on the core as it is, fails on one without the guard."""
    source = (ROOT / guard.module.replace(".", "/")).with_suffix(".py").read_text(encoding="utf-8")
    assert source.count(guard.code) == 1, "the guard's code has changed: look at it, and at guards.py"
    changed = (guard.module, guard.code, guard.instead, guard.story)
    played = subprocess.run(
        [sys.executable, "-m", "simulation.mutant", *changed],
        env={**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'tests'}"},
        capture_output=True,
        text=True,
        timeout=_WITHIN_S,
        check=False,
    )
    assert played.returncode == 0, f"{guard.story!r} does not notice\n{played.stderr}"
