"""The same digits, from the installed scikit-learn's own file."""

from __future__ import annotations

from importlib.metadata import distribution
from types import SimpleNamespace

import numpy as np


def load_digits() -> SimpleNamespace:
    """Return what scikit-learn's `load_digits` does: `data` (1797, 64), float64, and `target` (1797), int64."""
    path = distribution("scikit-learn").locate_file("sklearn/datasets/data/digits.csv.gz")
    table = np.loadtxt(str(path), delimiter=",")
    return SimpleNamespace(data=table[:, :-1], target=table[:, -1].astype(int))
