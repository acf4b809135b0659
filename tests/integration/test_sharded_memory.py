"""Sharded models that resume from memory, in the same and in other numbers of ranks, however they are sharded."""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from cases import some
from fake_agent import FakeAgent
from integration.test_snapshots_runtime import KILLED_AFTER, Memories, Ranks, run
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from trainer_runtime import contract
from trainer_runtime.snapshot_page import create_memory, read_slots

JOB = str(Path(__file__).with_name("sharded_snapshot_job.py"))

Weights = dict[str, object]


def start(directory: Path, agents: list[FakeAgent], how: str, *, group: int = 2, killed_after: int = 0) -> Ranks:
    """Run a group of this job to its end."""
    return run(directory, group, agents, killed_after=killed_after, job=[JOB, how])


def became(ranks: Ranks) -> Weights:
    """What all ranks have come to, which must be the same."""
    assert set(ranks.codes) == {0}, ranks.outputs
    found = set(ranks.said("became"))
    assert len(found) == 1
    weights: Weights = json.loads(found.pop().removeprefix("became "))
    return weights


@functools.cache
def undisturbed(how: str, world: int, base: Path) -> Weights:
    """What ranks become that nothing happens to."""
    return became(start(base / f"undisturbed-{how}-{world}", [FakeAgent() for _ in range(world)], how, group=1))


@functools.cache
def killed(how: str, world: int, base: Path) -> Memories:
    """What ranks left that were killed right after a step."""
    agents = [FakeAgent() for _ in range(world)]
    ranks = start(base / f"killed-{how}-{world}", agents, how, group=1, killed_after=KILLED_AFTER)
    assert ranks.codes == [1] * world, ranks.outputs
    assert [agent.snapshots for agent in agents] == [[*range(1, KILLED_AFTER + 1, 2)]] * world
    return ranks.memories


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """For what several tests use."""
    return tmp_path_factory.mktemp("groups")


def holding(memories: Memories, world: int) -> list[FakeAgent]:
    """Agents of ranks, each on a node of its own, which have those memories between them."""
    agents = [FakeAgent() for _ in range(world)]
    for place, agent in enumerate(agents):
        own = {rank: memory for rank, memory in memories.items() if rank % world == place}
        agent.hold(KILLED_AFTER, own, only_parts={rank for rank in own if rank})
    return agents


@pytest.mark.parametrize(
    ("how", "world"), some([], of=[("fsdp", 2), ("fsdp", 4), ("hsdp", 4), ("tensor", 2), ("2d", 4)])
)
def test_ranks_continue_from_what_they_held_with_the_same_bits(
    how: str, world: int, tmp_path: Path, base: Path
) -> None:
    ranks = start(tmp_path, holding(killed(how, world, base), world), how)
    assert became(ranks) == undisturbed(how, world, base)
    assert ranks.said("from") == [f"from {KILLED_AFTER}"] * world


@pytest.mark.parametrize(
    ("how", "world", "after", "then"),
    some(
        [("fsdp", 2, 4, "fsdp")],
        of=[
            ("fsdp", 4, 3, "fsdp"),
            ("fsdp", 2, 4, "fsdp"),
            ("hsdp", 4, 2, "fsdp"),
            ("tensor", 2, 4, "tensor"),
            ("2d", 4, 3, "fsdp"),
            ("2d", 4, 4, "tensor"),
        ],
    ),
)
def test_another_number_of_ranks_or_another_mesh_is_given_the_blocks_that_it_needs(
    how: str, world: int, after: int, then: str, tmp_path: Path, base: Path
) -> None:
    """Each rank had a node of its own, so all that is cut comes from others."""
    ranks = start(tmp_path, holding(killed(how, world, base), after), then)
    if how == then == "fsdp":
        came = next(line for line in ranks.outputs[0].splitlines() if "came from other nodes' memory" in line)
        assert came.split()[1] == str(missing_bytes(world, after))
    found = became(ranks)
    expected = undisturbed(how, world, base)
    assert found.keys() == expected.keys()
    for key, value in expected.items():
        torch.testing.assert_close(torch.tensor(found[key]), torch.tensor(value), rtol=1e-5, atol=1e-5)


def missing_bytes(before: int, after: int) -> int:
    """What ranks lack of their rows if the part of each old rank is on the node of that number, modulo theirs."""
    nodes_without = max(0, after - before)
    missing = 28 * nodes_without  # a buffer, and six counters of the optimizer
    for rows, row_bytes in ((12, 32), (12, 4), (8, 48), (8, 4), (1, 32), (1, 4)):  # of the layers up, down and odd
        old, new = -(-rows // before), -(-rows // after)
        moved = sum((row // old) % after != row // new for row in range(rows))
        missing += 3 * row_bytes * moved  # AdamW keeps two more tensors of each
    return missing


def damaged(memory: int) -> int:
    """A copy of a memory with a byte of the newest part changed."""
    data = bytearray(os.pread(memory, os.fstat(memory).st_size, 0))
    slot = read_slots(memory)[0]
    data[slot.part_at + slot.part_bytes // 2] ^= 1
    made = create_memory("damaged")
    os.write(made, data)
    return made


def test_a_damaged_part_is_taken_from_a_node_that_has_it_and_a_lost_one_ends_the_group(
    tmp_path: Path, base: Path
) -> None:
    memories = killed("fsdp", 2, base)
    first, second = FakeAgent(), FakeAgent()
    first.hold(KILLED_AFTER, {0: damaged(memories[0])})
    second.hold(KILLED_AFTER, memories, only_parts={0})
    assert became(start(tmp_path, [first, second], "fsdp")) == undisturbed("fsdp", 2, base)
    assert first.damaged == [{"kind": "part", "rank": 0}]
    first, second = FakeAgent(), FakeAgent()
    first.hold(KILLED_AFTER, {0: memories[0]})
    second.hold(KILLED_AFTER, {1: damaged(memories[1])})
    ranks = start(tmp_path, [first, second], "fsdp", group=3)
    assert ranks.codes == [1, 1]
    assert first.unreadable == ["the snapshot in memory: no node has the part of rank 1"]


def save(memories: Memories, agent: FakeAgent) -> str:
    """What the process says that saves such memories, as the last agent of a job lets it do."""
    agent.hold(KILLED_AFTER, memories)
    channel = agent.theirs.fileno()
    env = {**os.environ, contract.CHANNEL_FD: str(channel), contract.NODE_ID: "a"}
    argv = [sys.executable, "-P", "-m", "trainer_runtime.save_snapshot"]
    done = subprocess.run(argv, env=env, pass_fds=[channel], capture_output=True, text=True, timeout=120, check=False)
    agent.close()
    return done.stderr


def test_what_agents_hold_is_saved_as_the_ranks_would_save_it(tmp_path: Path, base: Path) -> None:
    """Plain torch reads it, with all names of tied tensors. What is damaged is not saved."""
    memories, agent = killed("fsdp", 2, base), FakeAgent()
    assert not save(memories, agent)
    (asked,) = agent.asked
    directory = base / "killed-fsdp-2" / asked["private"].removeprefix(".").rpartition(".")[0]
    dcp_to_torch_save(directory / "shards", tmp_path / "whole.pt")
    model = torch.load(tmp_path / "whole.pt", weights_only=True)["model"]
    assert model["again.weight"].equal(model["up.weight"])
    assert {"down.weight", "odd.bias", "scale"} <= model.keys()
    broken = FakeAgent()
    assert "the part of rank 1 of step" in save({**memories, 1: damaged(memories[1])}, broken)
    assert not broken.asked
    assert broken.damaged == [{"kind": "part", "rank": 1}]
