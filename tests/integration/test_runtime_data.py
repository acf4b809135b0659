"""The data loader with real worker processes and real ranks."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch

import trainer_runtime as tr

if TYPE_CHECKING:
    from types import ModuleType

SCRIPT = Path(__file__).with_name("exact_data.py")
WORLDS = (2, 3)


@pytest.fixture(scope="module")
def exact_data() -> ModuleType:
    """The script's own parts, as this process can use them: it is a world of 1."""
    spec = importlib.util.spec_from_file_location("exact_data", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    tr.init()
    return module


@pytest.fixture(scope="module")
def worlds() -> dict[int, list[dict[str, Any]]]:
    """What the ranks of each world saw."""
    command = [sys.executable, str(SCRIPT), *map(str, WORLDS)]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    ) as program:
        try:
            output, errors = program.communicate(timeout=300)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(program.pid, signal.SIGKILL)  # its ranks and their workers too, if it is stuck
    assert program.returncode == 0, errors
    return {int(world): ranks for world, ranks in json.loads(output).items()}


@pytest.mark.parametrize("world", WORLDS)
def test_gradients_are_those_of_one_process_with_the_whole_batch(
    worlds: dict[int, list[dict[str, Any]]], world: int
) -> None:
    """With uneven shares, uneven micro-batches, a short last step, and a rank that has no sample of it."""
    ranks = worlds[world]
    assert len(ranks) == world
    assert max(rank["error"] for rank in ranks) < 1e-6
    assert all(rank["batches"] == [2, 2, 1, 2, 1] for rank in ranks)
    assert [rank["without"] for rank in ranks] == [0, 0, 2][:world]


@pytest.mark.parametrize("world", WORLDS)
def test_samples_are_the_same_in_every_world(
    worlds: dict[int, list[dict[str, Any]]], world: int, exact_data: ModuleType
) -> None:
    """Each counts once on one rank; noise from two worker processes on each rank is that of one process alone."""
    loader = exact_data.make_loader()
    for number, (epoch, done) in enumerate(exact_data.BEGINS):
        alone = [entry for batch in loader.begin(epoch, done) for entry in exact_data.as_ledger(batch)]
        assert len(alone) == exact_data.SAMPLES - done
        together = [tuple(entry) for rank in worlds[world] for entry in rank["samples"][number]]
        assert sorted(together) == sorted(alone)


def test_workers_that_stay_serve_every_beginning(exact_data: ModuleType) -> None:
    """Whole epochs, one left in its middle with batches loaded ahead, one begun in its middle: as without workers."""
    loader = exact_data.make_loader(micro_batch=3, num_workers=2, persistent_workers=True, prefetch_factor=4)
    alone = exact_data.make_loader(micro_batch=3)
    pids = set()
    for epoch, done, batches in [(0, 0, 99), (1, 0, 2), (1, 10, 1), (1, 10, 99), (5, 20, 99)]:
        expected = alone.begin(epoch, done)
        for number, (batch, same) in enumerate(zip(loader.begin(epoch, done), expected, strict=True), start=1):
            assert exact_data.as_ledger(batch) == exact_data.as_ledger(same)
            assert batch["index"].tolist() == list(loader.indices) == list(alone.indices)
            assert (loader.weight, loader.ends_step, loader.samples) == (alone.weight, alone.ends_step, alone.samples)
            pids |= set(batch["pid"].tolist())
            if number == batches:
                break
    assert len(pids) == 2, "the same two processes all the time"


def test_beginning_with_workers_leaves_the_random_state_of_training_alone(exact_data: ModuleType) -> None:
    """A plain loader draws from it each time, so a restart within an epoch would change dropout."""
    before = torch.get_rng_state()
    next(exact_data.make_loader(num_workers=1).begin(0, 10))
    assert torch.equal(torch.get_rng_state(), before)
