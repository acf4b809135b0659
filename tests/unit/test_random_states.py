"""The random states of a rank with several CUDA devices. CUDA is faked: this needs no GPU."""

from __future__ import annotations

import pytest
import torch

from trainer_runtime import random_states
from trainer_runtime.random_states import RandomStates


class Gpus:
    """The generators of some devices; the rank's own is the one with this number."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, count: int, own: int) -> None:
        self.states = [torch.tensor([number]) for number in range(count)]
        monkeypatch.setattr(random_states, "device", lambda: torch.device("cuda", own))
        monkeypatch.setattr("torch.cuda.device_count", lambda: count)
        monkeypatch.setattr("torch.cuda.get_rng_state", lambda which: self.states[self._number(which)].clone())
        monkeypatch.setattr("torch.cuda.set_rng_state", self._set)

    def _set(self, state: torch.Tensor, which: torch.device | int) -> None:
        self.states[self._number(which)] = state

    def _number(self, which: torch.device | int) -> int:
        number = which if isinstance(which, int) else which.index
        assert number is not None
        return number

    def drawn(self) -> list[int]:
        return [int(state) for state in self.states]


def test_every_device_of_a_rank_continues_with_its_own_state(monkeypatch: pytest.MonkeyPatch) -> None:
    gpus = Gpus(monkeypatch, count=3, own=1)
    saved = RandomStates({}).read()
    gpus.states = [torch.tensor([9])] * 3
    RandomStates({}).load(saved)
    assert gpus.drawn() == [0, 1, 2]


def test_on_a_node_with_fewer_devices_the_ranks_own_device_gets_its_state(monkeypatch: pytest.MonkeyPatch) -> None:
    Gpus(monkeypatch, count=3, own=2)
    saved = RandomStates({}).read()
    fewer = Gpus(monkeypatch, count=1, own=0)
    RandomStates({}).load(saved)
    assert fewer.drawn() == [2]


def test_a_checkpoint_with_the_state_of_one_device_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    gpus = Gpus(monkeypatch, count=2, own=1)
    saved = RandomStates({}).read()
    del saved["cuda_devices"]
    gpus.states = [torch.tensor([9])] * 2
    RandomStates({}).load(saved)
    assert gpus.drawn() == [9, 1]
