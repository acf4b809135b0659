"""Seeding of a rank's global random states before its script begins, so that scripts without seeds are deterministic.

A script's own seeding comes later and takes precedence. Without a rehearsal, unseeded random numbers differ at each
start. A restart must show that, so it gets other seeds than the undisturbed run.
"""

from __future__ import annotations

import functools
import random
from pathlib import Path
from typing import Any

from agent.rehearse.startup import when_imported

_BASE_SEED = 20_000
_SEEDS_PER_GROUP = 4096


def seed_of(directory: Path, group: int, rank: int) -> int:
    """Return the seed of a rank.

    Args:
        directory: of the records, which show whether there was an earlier group.
        group: number of the rank's group.
        rank: each rank has another seed, as without a rehearsal.
    """
    is_restart = any(path.name < f"group-{group:06d}" for path in directory.glob("group-*.jsonl"))
    return _BASE_SEED + rank + (_SEEDS_PER_GROUP * group if is_restart else 0)


class Seeding:
    """Seeds Python at once, NumPy when it is imported, and torch when `seed_torch` is called.

    Args:
        seed: for all of them.
    """

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._torch: Any = None
        self._numpy: Any = None
        self._seeded_by_script: set[str] = set()
        random.seed(seed)
        self._python_state = random.getstate()
        self._watch_seeding("Python", random)
        when_imported("numpy.random", self._seed_numpy)

    def seed_torch(self, torch: Any) -> None:  # noqa: ANN401 - this package does not import torch
        """Seed torch, which has just been imported."""
        torch.manual_seed(self._seed)
        self._torch, self._torch_state = torch, torch.get_rng_state()

    def in_use(self) -> list[str]:
        """Return the random states (Python, NumPy, torch) that were drawn from and not seeded by the script."""
        used = []
        if "Python" not in self._seeded_by_script and random.getstate() != self._python_state:
            used.append("Python")
        if (
            self._numpy is not None
            and "NumPy" not in self._seeded_by_script
            and _generator_state(self._numpy) != self._numpy_state
        ):
            used.append("NumPy")
        torch = self._torch
        if torch.initial_seed() == self._seed and not torch.equal(torch.get_rng_state(), self._torch_state):
            used.append("torch")
        return used

    def _seed_numpy(self, module: Any) -> None:  # noqa: ANN401 - numpy.random
        module.seed(self._seed)
        self._numpy, self._numpy_state = module, _generator_state(module)
        self._watch_seeding("NumPy", module)

    def _watch_seeding(self, name: str, module: Any) -> None:  # noqa: ANN401 - random or numpy.random
        """Record whether the script calls `seed` of this module."""
        original = module.seed

        @functools.wraps(original)
        def seed(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - passed through
            self._seeded_by_script.add(name)
            return original(*args, **kwargs)

        module.seed = seed


def _generator_state(module: Any) -> tuple[bytes, int]:  # noqa: ANN401 - numpy.random
    state = module.get_state()
    return state[1].tobytes(), state[2]
