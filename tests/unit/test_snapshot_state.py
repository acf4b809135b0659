"""Snapshots of a State in a world of 1: what they hold, when they are taken, and resuming from one."""

from __future__ import annotations

import os
import random
from typing import TYPE_CHECKING, Any

import pytest
import torch
from fake_agent import FakeAgent
from torch import nn

import trainer_runtime as tr
from trainer_runtime import contract
from trainer_runtime import state as state_
from trainer_runtime.snapshot_page import Slot, create_memory, read_slots

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

BOUND_S = 60.0


@pytest.fixture
def memory() -> Iterator[int]:
    """What the agent keeps of the rank."""
    descriptor = create_memory("test")
    yield descriptor
    os.close(descriptor)


@pytest.fixture
def start(tmp_path: Path, memory: int, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., FakeAgent]]:
    """Begin a group as a worker of an agent that holds nothing, or a snapshot."""
    agents: list[FakeAgent] = []

    def begin(group: int, *, into: int = memory, **variables: str) -> FakeAgent:
        agents.append(FakeAgent())
        made = agents[-1].open()
        monkeypatch.setattr(state_, "open_channel", lambda: made)
        given = {contract.RUN_ID: "us", contract.GROUP: str(group), contract.CHECKPOINT_DIR: str(tmp_path)}
        given[contract.SNAPSHOT_FD] = str(into)
        for name, value in {**given, contract.SNAPSHOT_OVERHEAD: "1e6", **variables}.items():
            monkeypatch.setenv(name, value)
        return agents[-1]

    for name in (contract.FRESH, contract.CONTROL_FD, contract.SNAPSHOT_MEMORY, "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    tr.init()
    yield begin
    for agent in agents:
        agent.close()


class Training:
    """A small model with all kinds of things to be saved, that trains on noise."""

    def __init__(self, **options: Any) -> None:  # noqa: ANN401 - passed on
        torch.manual_seed(1)
        random.seed(1)
        self.model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
        self.opt = torch.optim.AdamW(self.model.parameters())
        self.state = tr.State(model=self.model, opt=self.opt, best=0.0, history=[], save_every=100, **options)

    def train(self, steps: int, *, until: int = 99) -> Training:
        """Take so many steps, with the random states that are there."""
        for _ in self.state.epochs(1):
            for item in self.state.steps(range(until)):
                self.opt.zero_grad()
                self.model(torch.randn(5, 3)).sum().backward()
                self.opt.step()
                self.state.history.append((item, random.random()))
                self.state.commit()
                steps -= 1
                if not steps:
                    return self
        return self

    def all(self) -> dict[str, Any]:
        """Everything that must be equal in the end."""
        return {
            **{name: value.tolist() for name, value in self.model.state_dict().items()},
            "opt": str(self.opt.state_dict()),
            "history": self.state.history,
            "step": self.state.step,
        }


def slots(memory: int) -> dict[int, Slot]:
    return {slot.step: slot for slot in read_slots(memory)}


def test_a_training_that_resumes_from_memory_ends_like_one_that_was_never_interrupted(
    start: Callable[..., FakeAgent], memory: int, capfd: pytest.CaptureFixture[str]
) -> None:
    start(1, into=create_memory("undisturbed"))
    undisturbed = Training().train(99).all()
    start(1)
    Training().train(7)
    agent = start(2, into=create_memory("next"))
    agent.hold(7, {0: memory})
    again = Training()
    again.state.restore()
    assert again.state.step == 7
    assert "resumed at step 7 from memory" in capfd.readouterr().err
    assert again.train(92).all() == undisturbed
