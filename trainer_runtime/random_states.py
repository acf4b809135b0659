"""The random states of a rank: read for a checkpoint, restored, or derived for another world size.

A rank has one state each in Python, NumPy, torch's CPU and each CUDA device that it sees, since a script may use more
than its first one, and those of the `torch.Generator`s in State. If the world size is unchanged, each rank continues
with its own states. After a change of the world size no rank has states of its own. They are then derived from (seed,
step, rank), so that a repetition draws the same numbers and no two ranks draw the same.
"""

from __future__ import annotations

import random
import sys
from hashlib import blake2b
from typing import Any

import torch

from trainer_runtime.dist import device

_WORD_BYTES = 8


class RandomStates:
    """All random states of this process that training may depend on.

    Args:
        generators: the script's generators, by their names in State.
    """

    def __init__(self, generators: dict[str, torch.Generator]) -> None:
        self._generators = generators

    def read(self) -> dict[str, Any]:
        """Return the states as plain values and tensors."""
        states: dict[str, Any] = {
            "python": random.getstate(),
            "torch": torch.get_rng_state(),
            "generators": {name: generator.get_state() for name, generator in self._generators.items()},
        }
        if "numpy" in sys.modules:
            states["numpy"] = _read_numpy()
        if device().type == "cuda":
            states["cuda"] = torch.cuda.get_rng_state(device())
            # Reading a generator takes no memory on its device.
            states["cuda_devices"] = [torch.cuda.get_rng_state(number) for number in range(torch.cuda.device_count())]
        return states

    def load(self, states: dict[str, Any]) -> None:
        """Restore what `read` returned. States of libraries or devices that this process lacks are skipped."""
        random.setstate(states["python"])
        torch.set_rng_state(states["torch"])
        for name, generator in self._generators.items():
            generator.set_state(states["generators"][name])
        if "numpy" in states:
            _load_numpy(states["numpy"])
        if "cuda" in states and device().type == "cuda":
            here = range(torch.cuda.device_count())
            for number, state in zip(here, states.get("cuda_devices", ()), strict=False):
                torch.cuda.set_rng_state(state, number)
            torch.cuda.set_rng_state(states["cuda"], device())  # last: it may be another number on this node

    def derive(self, seed: int, step: int, rank: int) -> None:
        """Set all states from seed, step and rank."""
        random.seed(_word("python", seed, step, rank))
        torch.manual_seed(_word("torch", seed, step, rank))  # and CUDA
        for name, generator in self._generators.items():
            generator.manual_seed(_word(f"generator {name}", seed, step, rank))
        if "numpy" in sys.modules:
            sys.modules["numpy"].random.seed(_word("numpy", seed, step, rank) % 2**32)


def _word(kind: str, seed: int, step: int, rank: int) -> int:
    """Return 64 bits, different for each kind, because two generators of one algorithm must not begin alike."""
    return int.from_bytes(blake2b(f"{kind} {seed} {step} {rank}".encode(), digest_size=_WORD_BYTES).digest())


def _read_numpy() -> list[Any]:
    """Return NumPy's state with the array as a tensor, which can be loaded back safely."""
    name, words, *rest = sys.modules["numpy"].random.get_state()
    return [name, torch.from_numpy(words.astype("int64")), *rest]


def _load_numpy(state: list[Any]) -> None:
    import numpy as np  # noqa: PLC0415 - the script that saved used NumPy, so this one most likely does

    name, words, *rest = state
    np.random.set_state((name, words.numpy().astype("uint32"), *rest))  # noqa: NPY002 - it is what scripts use
