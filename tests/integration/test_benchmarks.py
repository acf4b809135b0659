"""Each word of `scripts/bench` at its smoke size: measurements that nobody runs break unnoticed."""

from __future__ import annotations

import ast
import json
import math
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from benchmarks import main, smoke
from benchmarks.guard import RATIOS

ROOT = Path(__file__).resolve().parents[2]
BENCHMARKS = ROOT / "tests" / "benchmarks"
WITHIN_S = 300.0

RUNS = {
    "recovery": ((), {"recovery": 2}),
    "micro": (("micro",), {"micro": 22}),
    "lost": (("lost",), {"lost": 3}),
    "store": (("store",), {"store": 10}),
    "meet": (("meet",), {"meet": 3, "stay": 15}),
    "turns": (("turns",), {"turns": 5}),
    "ps-wire": (("ps", "--parts=wire"), {"ps_wire": 8}),
    "ps-rates": (("ps", "--parts=rates"), {"ps_rates": 4}),
    "ps-faults": (("ps", "--parts=faults"), {"ps_servers": 6, "ps_workers": 1}),
    "guard": (("guard",), {"guard": len(RATIOS)}),
}
"""The words of each run, and how many rows each table has."""
CHARTS = {"recovery": "recovery.png"}
LONG = {"ps-rates", "ps-faults", "guard"}
"""Parts of a word of which another part is run; `scripts/test` runs `guard` itself, at its full size."""


@pytest.mark.parametrize("name", [pytest.param(name, marks=pytest.mark.long if name in LONG else ()) for name in RUNS])
def test_each_word_measures_all_at_its_smoke_size(name: str, tmp_path: Path) -> None:
    words, tables = RUNS[name]
    argv = [sys.executable, "-m", "benchmarks.main", *words, "--smoke", f"--out={tmp_path}"]
    environ = {**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT}/tests"}
    with subprocess.Popen(
        argv, env=environ, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as run:
        try:
            said, _ = run.communicate(timeout=WITHIN_S)
        except subprocess.TimeoutExpired:
            run.terminate()  # it ends its jobs
            said, _ = run.communicate()
    assert run.returncode == 0, said
    for table, count in tables.items():
        rows = [line for line in (tmp_path / f"{table}.md").read_text().splitlines() if line.startswith("|")][2:]
        assert len(rows) == count, rows
    written = list(tmp_path.glob("*.json"))
    assert len(written) == 1
    figures = list(numbers(json.loads(written[0].read_text())))
    assert figures
    assert all(map(math.isfinite, figures))
    if name in CHARTS:
        assert (tmp_path / CHARTS[name]).stat().st_size > 0


def test_there_is_a_smoke_size_and_a_run_for_each_word() -> None:
    assert {words[0] if words else "recovery" for words, _ in RUNS.values()} == smoke.SIZES.keys() == main.words()


@pytest.mark.parametrize(
    ("found", "problem"),
    [
        ({"seconds": [0.1, 0]}, []),
        ({"seconds": None}, ["seconds is not a finite number"]),
        ({"seconds": math.inf}, ["seconds is not a finite number"]),
        ({"seconds": []}, ["seconds has no samples"]),
        ({"samples": [{"seconds": 1.0, "incidents": [], "note": ""}]}, []),
        ({"samples": [{"has_started": False, "note": "no step"}]}, ["samples[0]: the job did not start: no step"]),
        ({"samples": [{"seconds": None, "note": "all ended"}]}, ["samples[0]: all ended"]),
    ],
)
def test_a_smoke_run_without_a_sample_or_a_figure_fails(found: object, problem: list[str]) -> None:
    assert list(smoke.problems(found)) == problem


def test_every_benchmark_module_is_used_by_a_word() -> None:
    there = {path.name for path in BENCHMARKS.glob("*.py")}
    used, left = set[str](), {"main.py"}
    while left:
        used |= left
        left = {name for path in left for name in mentioned(BENCHMARKS / path) if name in there} - used
    assert there - used == set(), "scripts/bench does not come to these: give each a word, or remove it"


def mentioned(path: Path) -> Iterator[str]:
    """File names of the modules that a module imports, and of the scripts that it starts."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (f"{alias.name}.py" for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            name = (node.module or "").removeprefix("benchmarks")
            yield from (f"{name.removeprefix('.')}.py", *(f"{alias.name}.py" for alias in node.names if not name))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value


def numbers(found: Any) -> Iterator[float]:  # noqa: ANN401 - of any JSON
    if isinstance(found, dict):
        for each in found.values():
            yield from numbers(each)
    elif isinstance(found, list):
        for each in found:
            yield from numbers(each)
    elif isinstance(found, int | float) and not isinstance(found, bool):
        yield found
