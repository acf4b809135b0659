"""Seeds the global random states of a rank before its script begins: so a script that seeds nothing repeats itself.

A script's own seeding comes later and wins. What a script does not seed would be other numbers at each start; a restart
must show that, so it is given other seeds than the undisturbed run.
"""

from __future__ import annotations

import functools
import random
from pathlib import Path
from typing import Any

from agent.rehearse.startup import when_imported

_FIRST = 20_000
_PER_GROUP = 4096


def seed_of(directory: Path, group: int, rank: int) -> int:
    """Return the seed of a rank.

    Args:
        directory: of the records, which tell whether a group was at work before.
        group: the rank's.
        rank: another one has another seed, as without a rehearsal.
    """
    is_restart = any(path.name < f"group-{group:06d}" for path in directory.glob("group-*.jsonl"))
    return _FIRST + rank + (_PER_GROUP * group if is_restart else 0)


class Seeding:
    """Seeds Python at once, NumPy when it is imported, torch when it is given.

    Args:
        seed: for all of them.
    """

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._torch: Any = None
        self._numpy: Any = None
        self._is_own: set[str] = set()
        random.seed(seed)
        self._python_state = random.getstate()
        self._note_own("Python", random)
        when_imported("numpy.random", self._seed_numpy)

    def seed_torch(self, torch: Any) -> None:  # noqa: ANN401 - this package does not import torch
        """Seed torch, which has just been imported."""
        torch.manual_seed(self._seed)
        self._torch, self._torch_state = torch, torch.get_rng_state()

    def in_use(self) -> list[str]:
        """Return what was drawn from as it was seeded here: Python, NumPy, torch."""
        used = []
        if "Python" not in self._is_own and random.getstate() != self._python_state:
            used.append("Python")
        if self._numpy is not None and "NumPy" not in self._is_own and _words(self._numpy) != self._numpy_state:
            used.append("NumPy")
        torch = self._torch
        if torch.initial_seed() == self._seed and not torch.equal(torch.get_rng_state(), self._torch_state):
            used.append("torch")
        return used

    def _seed_numpy(self, module: Any) -> None:  # noqa: ANN401 - numpy.random
        module.seed(self._seed)
        self._numpy, self._numpy_state = module, _words(module)
        self._note_own("NumPy", module)

    def _note_own(self, name: str, module: Any) -> None:  # noqa: ANN401 - random or numpy.random
        """Note it if the script seeds for itself."""
        original = module.seed

        @functools.wraps(original)
        def seed(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - passed through
            self._is_own.add(name)
            return original(*args, **kwargs)

        module.seed = seed


def _words(module: Any) -> tuple[bytes, int]:  # noqa: ANN401 - numpy.random
    state = module.get_state()
    return state[1].tobytes(), state[2]
