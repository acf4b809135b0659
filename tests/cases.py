"""Cases of one test, of which some show what all do."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def some(usual: Iterable[object], of: Iterable[object]) -> list[Any]:
    """Return parameters for all cases; a tuple has several. Those not usual run only with `scripts/test --all`."""
    chosen = [*usual]
    return [
        pytest.param(
            *(case if isinstance(case, tuple) else (case,)), marks=[] if case in chosen else [pytest.mark.long]
        )
        for case in of
    ]
