"""Every branch of the core is taken by a scenario, or by a test of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from mutation import suite

_ROOT = Path(__file__).parents[2]
_TESTS = ("tests/simulation/test_scenarios.py", *(f"tests/{name.replace('.', '/')}.py" for name in suite.TESTS))


@pytest.mark.timeout(600)
def test_every_branch_of_the_core_is_taken(tmp_path: Path) -> None:
    """Measured in a process of its own; what is missing is in the report."""
    environ = {name: value for name, value in os.environ.items() if name != "UPDATE_GOLDEN"}

    def coverage(*words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "coverage", *words],
            cwd=_ROOT,
            env={**environ, "COVERAGE_FILE": str(tmp_path / "coverage")},
            capture_output=True,
            text=True,
            timeout=500,
            check=False,
        )

    tested = coverage("run", "-m", "pytest", "-q", "-p", "no:cacheprovider", *_TESTS)
    assert tested.returncode == 0, tested.stdout
    report = coverage("report")
    assert report.returncode == 0, report.stdout
