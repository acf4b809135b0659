"""`scripts/gpu-check` at its smoke size: on the CPU, so that the script is not found broken once there is a GPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
WITHIN_S = 240.0


@pytest.mark.parametrize(
    ("row", "results"), [(3, 1), *(pytest.param(*each, marks=pytest.mark.long) for each in ((1, 5), (7, 4)))]
)
def test_each_row_that_needs_no_gpu_is_fine(row: int, results: int, tmp_path: Path) -> None:
    argv = [sys.executable, "-m", "gpu_check.main", "--smoke", f"--rows={row}", f"--out={tmp_path}"]
    environ = {**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT}/tests"}
    done = subprocess.run(argv, env=environ, cwd=ROOT, capture_output=True, text=True, timeout=WITHIN_S, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads((tmp_path / "gpu-check.json").read_text())
    assert [result["is_fine"] for result in found] == [True] * results, found
