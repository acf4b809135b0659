"""Everything that fuzzing has found to reach a line of its own, once more."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("uvicorn", reason="the extra `web` is not installed")
from fuzz.targets import LOOP, TARGETS

CORPUS = Path(__file__).with_name("corpus")
_INPUTS = [(path.parent.name, path) for path in sorted(CORPUS.glob("*/*"))]


@pytest.fixture(scope="session", autouse=True)
def _loop() -> Iterator[None]:
    """Of all targets. Not of the module: a process that runs tests may come back to it."""
    yield
    LOOP.close()


@pytest.mark.parametrize(("target", "path"), _INPUTS, ids=[f"{target}-{path.name[:12]}" for target, path in _INPUTS])
def test_it_is_answered_or_refused(target: str, path: Path) -> None:
    TARGETS[target](path.read_bytes())


def test_each_surface_has_inputs() -> None:
    assert {target for target, _ in _INPUTS} == set(TARGETS)
