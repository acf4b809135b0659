"""The benchmark of parameter servers, made small: it measures all that it says it does."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PATIENCE_S = 400.0


@pytest.mark.long
def test_parameter_servers_are_measured_beside_others(tmp_path: Path) -> None:
    argv = [sys.executable, "-m", "benchmarks.main", "ps", "--quick", "--sizes_kb=1", f"--out={tmp_path}"]
    environ = {**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT}/tests"}
    done = subprocess.run(argv, env=environ, cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE_S, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    requests = json.loads((tmp_path / "ps_wire.json").read_text())["requests"]
    assert {(each["what"], each["by"]) for each in requests} == {
        (what, by) for what in ("pull", "push") for by in ("ours", "torch-rpc", "torch-rpc-shm", "grpc")
    }
    rates = json.loads((tmp_path / "ps_rates.json").read_text())["rates"]
    assert len(rates) == 8
    assert all(each["rows_per_s"] > 0 for each in rates)
    faults = json.loads((tmp_path / "ps_faults.json").read_text())
    assert [len(faults[name]) for name in ("copies", "disk", "worker")] == [1, 1, 1]
    assert "gRPC" in (tmp_path / "ps_wire.md").read_text()
