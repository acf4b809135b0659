"""The checks that must notice a mutant: scenarios, tests of the core, random clusters and parameter-server jobs.

A check is a string, so that it can be named to another process:

| check | what it plays |
|---|---|
| `scenario NAME` | a file of `simulation/scenarios`; its transcript must be the one in the file |
| `test MODULE FUNCTION N` | a test function, with the N-th set of its parameters |
| `cluster SEED` | a random cluster |
| `roles SEED`, `emptied SEED` | a parameter-server job; one whose etcd comes back empty |
"""

from __future__ import annotations

import importlib
import inspect
import itertools
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).parents[2]
_SCENARIOS = ROOT / "tests/simulation/scenarios"
TESTS = (
    "simulation.test_edges",
    "unit.test_reachability",
    "unit.test_planner",
    "unit.test_local_workers",
    "unit.test_totals",
    "unit.test_explain",
    "unit.test_wording",
    "unit.test_hangs",
    "unit.test_roles",
    "unit.test_roles_shards",
    "unit.test_job_store",
    "unit.test_incident_recorder",
)
"""Test modules of the core and the recorder. With the scenarios they take every branch, as `scripts/quick` checks."""
_SEEDED = "simulation.test_seeded_scenarios"
_SEEDS = 1
"""Number of seeds of each seeded scenario."""
_CLUSTERS = 6
_JOBS = 30
MODULES = ("simulation.scenario", "simulation.random_clusters", "simulation.roles", _SEEDED, *TESTS)
"""All that is imported to play a check."""


def checks() -> list[str]:
    """Name all checks."""
    found = [f"scenario {path.stem}" for path in sorted(_SCENARIOS.glob("*.txt"))]
    for name in (*TESTS, _SEEDED):
        for function, test in vars(importlib.import_module(name)).items():
            if function.startswith("test_"):
                calls = _calls(test)[: _SEEDS if name == _SEEDED else None]
                found += [f"test {name} {function} {number}" for number in range(len(calls))]
    found += [f"cluster {seed}" for seed in range(_CLUSTERS)]
    return found + [f"{kind} {seed}" for kind in ("roles", "emptied") for seed in range(_JOBS)]


def is_random(check: str) -> bool:
    """Whether it is one of many with chance in them, which come last."""
    return check.startswith(("cluster ", "roles ", "emptied "))


def play(check: str) -> None:
    """Play one check, on the modules as they are imported now. Raises whatever shows that something is wrong."""
    kind, *words = check.split()
    match kind:
        case "scenario":
            scenario = importlib.import_module("simulation.scenario")
            events, expected = scenario.read(_SCENARIOS / f"{words[0]}.txt")
            assert scenario.play(events) == expected
        case "test":
            name, function, number = words
            _calls(getattr(importlib.import_module(name), function))[int(number)]()
        case "cluster":
            importlib.import_module("simulation.random_clusters").play(int(words[0]), steps=200)
        case "roles" | "emptied":
            importlib.import_module("simulation.roles").play(int(words[0]), wipes=kind == "emptied")
        case _:
            raise ValueError(check)


def _calls(test: Callable[..., object]) -> list[Callable[[], object]]:
    """The calls that pytest would make of a test and its parameters; none, if it also asks for a fixture."""
    sets: list[list[dict[str, object]]] = []
    for mark in getattr(test, "pytestmark", []):
        if mark.name == "parametrize":
            names, values = mark.args
            names = [name.strip() for name in names.split(",")] if isinstance(names, str) else list(names)
            sets.append([_named(names, getattr(value, "values", None), value) for value in values])
    calls = [{name: value for part in parts for name, value in part.items()} for parts in itertools.product(*sets)]
    is_hypothesis = hasattr(test, "hypothesis")
    asked = set() if is_hypothesis else set(inspect.signature(test).parameters)
    return [lambda given=given: test(**given) for given in calls if asked == set(given)]


def _named(names: list[str], param: tuple[object, ...] | None, value: object) -> dict[str, object]:
    """One set of parameters; `param` are those of a `pytest.param`."""
    if param is not None and not callable(param):
        return dict(zip(names, param, strict=True))
    return dict(zip(names, value if len(names) > 1 else (value,), strict=True))  # type: ignore[arg-type]


if __name__ == "__main__":  # for scripts/quick
    for module in ("simulation.test_scenarios", *TESTS):
        print(f"tests/{module.replace('.', '/')}.py")
