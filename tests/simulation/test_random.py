"""Random clusters: whatever happens, the invariants hold, and the job trains again and finishes."""

from __future__ import annotations

import os

import pytest
from cases import some
from simulation.random_clusters import play

_STEPS = 200
_CHUNK = 15
_CLUSTERS = int(os.environ.get("SIMULATE_CLUSTERS", "300"))


@pytest.mark.parametrize("first", some([0], range(0, _CLUSTERS, _CHUNK)))
def test_whatever_happens_the_job_trains_again(first: int) -> None:
    """Faults for 200 steps; once they end, and there are nodes enough, the group is whole."""
    for seed in range(first, first + _CHUNK):
        play(seed, steps=_STEPS)
