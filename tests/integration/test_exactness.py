"""The reference job, broken at moments that have names; what counts is the result and the samples that made it."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch
from cases import some
from integration.conftest import PATIENT, Job
from integration.reference_job import MOMENTS, SAMPLES, STEPS_PER_EPOCH

from agent.local_etcd.embedded import EmbeddedEtcd

JOB = Path(__file__).with_name("reference_job.py")
EPOCHS = 3


class ReferenceJob(Job):
    """A cluster on the reference job."""

    arguments: tuple[str, ...] = ()

    @property
    def command(self) -> list[str]:
        return [str(JOB), str(self.directory), *self.arguments]

    @property
    def result(self) -> dict[str, torch.Tensor]:
        found: dict[str, torch.Tensor] = torch.load(self.weights, weights_only=True)
        return found

    def train(self, nodes: int, *arguments: str) -> dict[str, torch.Tensor]:
        """From the start to the end on so many nodes."""
        self.begin(nodes, *arguments)
        self.finish()
        return self.result

    def begin(self, nodes: int, *arguments: str) -> None:
        """Start so many nodes."""
        self.arguments = arguments
        for name in "abcd"[:nodes]:
            self.join(name, str(nodes))

    def samples(self) -> dict[int, list[int]]:
        """What each epoch was made of: of each step, what the ranks of the last group that took it put in."""
        taken: dict[int, dict[int, tuple[int, list[int]]]] = {}
        for path in self.directory.glob("ledger.*"):
            group = int(path.suffixes[-2][1:])
            for line in map(json.loads, path.read_text().splitlines()):
                by_group = taken.setdefault(line["step"], {})
                epoch, samples = by_group.get(group, (line["epoch"], []))
                by_group[group] = epoch, samples + line["samples"]
        epochs: dict[int, list[int]] = {}
        for step in sorted(taken):
            epoch, samples = taken[step][max(taken[step])]
            epochs.setdefault(epoch, []).extend(samples)
        return epochs

    def assert_each_sample_once(self) -> None:
        for epoch, samples in self.samples().items():
            assert Counter(samples) == Counter(range(SAMPLES)), f"epoch {epoch} of {self.directory}"


def difference(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> float:
    """The largest, relative to the largest value of its tensor."""
    assert one.keys() == other.keys()
    return max(
        float((one[key] - other[key]).double().abs().max() / other[key].double().abs().max().clamp_min(1e-12))
        for key in one
    )


@pytest.fixture
def reference_job(etcd: EmbeddedEtcd, tmp_path: Path) -> Iterator[Callable[[str], ReferenceJob]]:
    """Make such a job, with options for its agents."""
    with ExitStack() as stack:

        def make(name: str, *options: str) -> ReferenceJob:
            directory = tmp_path / name
            directory.mkdir()
            job_id = f"{tmp_path.name}-{name}".replace("[", "-").replace("]", "")
            options = (*PATIENT, "--max_restarts=2", *options)
            return stack.enter_context(ReferenceJob(directory, etcd.endpoint, job_id, options))

        yield make


@pytest.fixture(scope="session")
def undisturbed(etcd: EmbeddedEtcd, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., dict[str, torch.Tensor]]:
    """The result of a run in which nothing happens, by nodes and arguments."""
    known: dict[tuple[object, ...], dict[str, torch.Tensor]] = {}

    def result(nodes: int, *arguments: str) -> dict[str, torch.Tensor]:
        if (nodes, *arguments) not in known:
            directory = tmp_path_factory.mktemp("undisturbed")
            with ReferenceJob(directory, etcd.endpoint, directory.name, [*PATIENT, "--max_restarts=0"]) as running:
                known[nodes, *arguments] = running.train(nodes, *arguments)
                running.assert_each_sample_once()
        return known[nodes, *arguments]

    return result


HARDEST = ("all-reduce", "before commit", "before rename", "unanswered")
"""Of all moments those at which the others of the group, or the disk, know a part of a step."""
Make = Callable[..., ReferenceJob]
Undisturbed = Callable[..., dict[str, torch.Tensor]]


@pytest.mark.parametrize("moments", some([(HARDEST,)], of=[(HARDEST,), (MOMENTS,)]))
def test_a_rank_that_dies_at_any_moment_changes_no_bit(
    reference_job: Make, undisturbed: Undisturbed, moments: tuple[str, ...]
) -> None:
    """In the middle of whatever it does: each of the moments comes once, in one training."""
    running = reference_job("killed", f"--max_restarts={len(moments)}")
    result = running.train(2, "--epochs=4", "--save_every=2", "--die_in", *moments)
    came = Counter(path.suffix[1:] for path in running.directory.glob("killed.*"))
    assert came == dict.fromkeys(moments, 1)
    assert running.status()["group"] == 1 + len(moments)
    running.assert_each_sample_once()
    assert difference(result, undisturbed(2, "--epochs=4")) == 0.0


@pytest.mark.long("test_a_rank_that_dies_at_any_moment_changes_no_bit, with two ranks")
def test_three_ranks_with_fixed_buckets_change_no_bit(reference_job: Make, undisturbed: Undisturbed) -> None:
    running = reference_job("three")
    result = running.train(3, "--die_as=2", "--die_in", "all-reduce")
    assert running.status()["group"] == 2
    running.assert_each_sample_once()
    assert difference(result, undisturbed(3)) == 0.0


@pytest.mark.parametrize("left_out", some([], of=["optimizer", "schedule", "noise"]))
def test_the_comparison_notices_what_is_not_in_state(
    reference_job: Make, undisturbed: Undisturbed, left_out: str
) -> None:
    running = reference_job("lacking")
    result = running.train(2, f"--without={left_out}", "--epochs=4", "--die_at=10", "--die_in", "forward")
    assert difference(result, undisturbed(2, "--epochs=4")) > 1e-6


@pytest.mark.long(
    "test_another_world_size_learns_the_same in integration/test_runtime_ranks.py; integration/test_runtime_data.py"
)
def test_other_worlds_make_the_same_result_of_the_same_samples(reference_job: Make, undisturbed: Undisturbed) -> None:
    arguments = ("--any_world", "--epochs=30", "--step_time_s=0.3")
    running = reference_job("resized", "--stop_grace=5")
    running.begin(3, *arguments)
    group, steps = running.wait_for_step(10, world=3), []
    for np in (2, 4, 1):
        running.scale(str(np))
        if np == 4:
            running.join("d", "4")
        group = running.wait_for_step(1, after_group=group, world=np)
        steps.append(running.wait_for_step(1, after_group=group - 1, world=np))
    running.finish()
    running.assert_each_sample_once()
    assert max(running.samples()) == 29
    assert difference(running.result, undisturbed(2, "--any_world", "--epochs=30")) < 1e-5
    assert STEPS_PER_EPOCH * 30 > 100, "room for all of it"
