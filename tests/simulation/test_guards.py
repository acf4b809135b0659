"""Each guard of the core is needed: without it, a story of the simulation fails."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator

import pytest
from simulation.guards import GUARDS, Guard
from simulation.mutant import ROOT
from simulation.role_guards import ROLE_GUARDS


@pytest.fixture(scope="module")
def without() -> Iterator[Callable[[Guard], str]]:
    """Play a guard's story without it: empty if the story fails then, else what happened."""
    with subprocess.Popen(
        [sys.executable, "-m", "simulation.mutant"],
        env={**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'tests'}"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as mutants:
        assert mutants.stdin is not None
        assert mutants.stdout is not None
        asking, answers = mutants.stdin, mutants.stdout

        def play(guard: Guard) -> str:
            print(json.dumps([guard.module, guard.code, guard.instead, guard.story]), file=asking, flush=True)
            answer = answers.readline()
            assert answer, f"the process that plays them has ended with {mutants.wait()}"
            return str(json.loads(answer))

        yield play


@pytest.mark.timeout(600)
@pytest.mark.parametrize("guard", [*GUARDS, *ROLE_GUARDS], ids=[guard.why for guard in (*GUARDS, *ROLE_GUARDS)])
def test_removing_a_guard_is_noticed(without: Callable[[Guard], str], guard: Guard) -> None:
    """The story, which holds on the core as it is, fails on one without the guard."""
    source = (ROOT / guard.module.replace(".", "/")).with_suffix(".py").read_text(encoding="utf-8")
    assert source.count(guard.code) == 1, "the guard's code has changed: look at it, and at guards.py"
    wrong = without(guard)
    assert not wrong, f"{guard.story!r} does not notice: {wrong}"
