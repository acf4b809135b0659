"""How `scripts/bench guard` compares ratios with their bounds."""

from __future__ import annotations

import math
import re
import tomllib
from importlib.util import find_spec
from pathlib import Path

import pytest
from benchmarks import guard
from benchmarks.guard import Bound, judge, measure, read_bounds

BOUNDS = {"commit": Bound("what", bound=3.0, measured=1.5, commit="abc1234", date="2026-11-26")}


@pytest.mark.parametrize(
    ("measured", "problem"),
    [
        ({"commit": [3.0]}, ""),
        ({"commit": [3.01]}, "over its bound"),
        ({"commit": [3.01, 2.9]}, ""),
        ({"commit": [3.01, 3.02]}, "over its bound"),
        ({"commit": [math.inf]}, "over its bound"),
        ({"commit": [math.nan]}, "could not be measured"),
        ({"commit": [math.nan, 2.9]}, ""),
        ({"commit": [0.0]}, "could not be measured"),
        ({"commit": [-math.inf]}, "could not be measured"),
        ({}, "was not measured"),
    ],
)
def test_a_ratio_fails_over_its_bound_or_if_it_is_missing(measured: dict[str, list[float]], problem: str) -> None:
    [verdict] = judge(BOUNDS, measured)
    assert verdict.problem.startswith(problem)
    assert bool(verdict.problem) == bool(problem)


def test_a_ratio_without_a_bound_fails() -> None:
    [verdict] = judge({}, {"commit": [0.1]})
    assert verdict.problem.startswith("has no bound")


@pytest.mark.parametrize(
    ("values", "taken"),
    [([2.0, 9.0], (2.0,)), ([4.0, 2.0], (4.0, 2.0)), ([4.0, 5.0, 1.0], (4.0, 5.0))],
)
def test_a_ratio_over_its_bound_is_measured_once_more(
    monkeypatch: pytest.MonkeyPatch, values: list[float], taken: tuple[float, ...]
) -> None:
    left = iter(values)
    monkeypatch.setattr(guard, "RATIOS", {"commit": lambda _repetitions: next(left)})
    assert measure(["commit"], BOUNDS, 3) == {"commit": taken}


def test_a_job_that_fails_once_is_measured_once_more(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    left = iter([TimeoutError("no agents"), 2.0])

    def ratio(_repetitions: int) -> float:
        found = next(left)
        if isinstance(found, Exception):
            raise found
        return found

    monkeypatch.setattr(guard, "RATIOS", {"commit": ratio})
    [verdict] = judge(BOUNDS, measure(["commit"], BOUNDS, 3))
    assert not verdict.problem
    assert capsys.readouterr().err == "bench: guard: commit: no agents\n"


def test_each_ratio_has_a_bound_above_what_was_measured() -> None:
    bounds = read_bounds()
    assert bounds.keys() == guard.RATIOS.keys()
    assert all(each.measured < each.bound < 4 * each.measured for each in bounds.values())


def test_a_bound_without_a_field_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "bounds.toml"
    path.write_text("[commit]\nbound = 3.0\ndate = 2026-11-26\n", encoding="utf-8")
    with pytest.raises(TypeError, match="missing"):
        read_bounds(path)


def test_the_docs_list_every_ratio() -> None:
    page = (Path(__file__).parents[2] / "docs" / "performance.md").read_text(encoding="utf-8")
    section = page.partition("## Guard\n")[2].partition("\n## ")[0]
    assert set(re.findall(r"^\| `([\w-]+)` \|", section, re.MULTILINE)) == guard.RATIOS.keys()


def test_every_module_whose_coverage_is_required_exists() -> None:
    """Coverage only warns of a name that no module has, and then requires nothing of it."""
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text(encoding="utf-8"))
    sources = project["tool"]["coverage"]["run"]["source"]
    assert sources
    assert all(find_spec(name) for name in sources)
