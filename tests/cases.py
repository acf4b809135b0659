"""Cases of one test, of which some show what all do."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def some(usual: Iterable[object], of: Iterable[object]) -> list[Any]:
    """Parameters, all of them; those that are not usual are for `scripts/test --all` alone."""
    chosen = [*usual]
    return [pytest.param(case, marks=[] if case in chosen else [pytest.mark.long]) for case in of]
