"""The mutation tests themselves: which mutants a module has, and that the runner tells killed from survived.

The random sample of `scripts/mutate` takes minutes, and is run by command. This plays a few chosen mutants.
"""

from __future__ import annotations

import ast
import random
from dataclasses import replace

import pytest
from mutation import runner, suite
from mutation.mutants import Mutant, mutants
from mutation.runner import Reach, path_of

FENCE = "agent.core.fence"
SAMPLE = '''
"""A module."""
from dataclasses import replace

LIMIT = 3

class Door:
    is_open: bool = False

    def __repr__(self) -> str:
        return "open" if self.is_open else "closed"

def first(items: list[int], wait_s: float = 0.0) -> int | None:
    """Return something."""
    assert items, "none"
    if not items:
        return None
    items = [each for each in items if 0 < each <= 9]
    log.debug("seen", count=len(items) + 1)
    return min(items, key=abs)

def close(door: Door, at: float) -> bool:
    door = replace(door, is_open=False, at=at)
    match door.state:
        case "shut" | "locked":
            return True
        case _:
            raise ValueError("a" if at > 1 else "b")
'''
EXPECTED = """
:number: 3 -> 4
Door:flag: False -> True
first:number: 0.0 -> 1.0
first:condition: if not items -> if False
first:condition: if not items -> if True
first:not: not items -> items
first:delete: items = [each for each in items if 0 < each <= 9] -> pass
first:condition: if 0 < each <= 9 -> no such filter
first:condition: if 0 < each <= 9 -> if False
first:compare: 0 < each <= 9 -> 0 <= each <= 9
first:compare: 0 < each <= 9 -> 0 < each < 9
first:link: 0 < each <= 9 -> each <= 9
first:link: 0 < each <= 9 -> 0 < each
first:link: 0 < each <= 9 -> 0 <= 9
first:number: 0 -> 1
first:number: 9 -> 10
first:none: return min(items, key=abs) -> return None
first:swap: min(items, key=abs) -> max(items, key=abs)
first:keyword: min(items, key=abs) -> min(items)
close:delete: door = replace(door, is_open=False, at=at) -> pass
close:keyword: replace(door, is_open=False, at=at) -> replace(door, at=at)
close:keyword: replace(door, is_open=False, at=at) -> replace(door, is_open=False)
close:unchanged: replace(door, is_open=False, at=at) -> door
close:flag: False -> True
close:case: case 'shut' | 'locked' -> no such case
close:case: case _ -> no such case
close:flag: True -> False
"""


def test_a_module_has_these_mutants() -> None:
    """Strings, annotations, assertions, errors, logging and `__repr__` are left alone."""
    found = [f"{each.function}:{each.operator}: {each.before} -> {each.after}" for each in mutants(SAMPLE, "m")]
    assert sorted(found) == sorted(EXPECTED.strip().splitlines())


def test_a_mutant_differs_from_its_module_in_one_place() -> None:
    for each in mutants(SAMPLE, "m"):
        changed = each.apply(SAMPLE)
        compile(changed, "m", "exec")
        assert ast.dump(changed) != ast.dump(ast.parse(SAMPLE)), each.name


def test_names_stay_the_same_when_other_code_changes() -> None:
    names = [each.name for each in mutants(SAMPLE, "m")]
    assert len(set(names)) == len(names)
    moved = "def other(a: int) -> int:\n    return a + 1\n\n" + SAMPLE.replace("items", "many")
    assert set(names) < {each.name for each in mutants(moved, "m")}


PLAYED = ("scenario fence-", "scenario wiped-and", "test simulation.test_edges ", "test unit.")


@pytest.fixture(scope="module")
def reach() -> Reach:
    """What some checks run of the fence."""
    return runner.measure((FENCE,), [each for each in suite.checks() if each.startswith(PLAYED)])


@pytest.fixture(scope="module")
def conditions() -> list[Mutant]:
    """Changed conditions of the fence, drawn by a fixed seed."""
    found = mutants(path_of(FENCE).read_text(encoding="utf-8"), FENCE)
    return random.Random(1).sample([each for each in found if each.operator == "condition"], 4)


def test_a_change_of_the_fence_is_killed(reach: Reach, conditions: list[Mutant]) -> None:
    outcomes = list(runner.run(conditions, reach, jobs=2))
    assert all(each.killed_by in reach.seconds for each in outcomes), outcomes


def test_a_change_that_changes_nothing_survives(reach: Reach, conditions: list[Mutant]) -> None:
    """All checks pass on modules that were imported anew, in whatever order."""
    same = ast.If(ast.Constant(value=True), [_original(conditions[0])], [])
    mutant = replace(conditions[0], replacement=same, span=None)
    (outcome,) = runner.run([mutant], reach, jobs=1)
    assert (outcome.killed_by, outcome.checks) == ("", len(reach.seconds))


def test_a_change_that_never_ends_is_killed(
    reach: Reach, conditions: list[Mutant], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runner, "_LEAST_S", 0.1)
    mutant = replace(conditions[0], replacement=ast.While(ast.Constant(value=True), [ast.Pass()], []))
    (outcome,) = runner.run([mutant], reach, jobs=1)
    assert outcome.killed_by == runner.TIMED_OUT


def test_checks_that_do_not_reach_a_change_are_not_played(reach: Reach, conditions: list[Mutant]) -> None:
    nowhere = replace(conditions[0], span=(10**6, 10**6))
    assert reach.checks(nowhere, {}) == []
    assert set(reach.checks(replace(nowhere, span=None), {})) == set(reach.seconds), "it runs at import"


def _original(mutant: Mutant) -> ast.stmt:
    """The statement that a mutant replaces."""
    node: ast.AST = ast.parse(path_of(mutant.module).read_text(encoding="utf-8"))
    for field, index in mutant.places:
        value = getattr(node, field)
        node = value if index is None else value[index]
    assert isinstance(node, ast.stmt)
    return node
