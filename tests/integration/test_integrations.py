"""A tiny program of each framework, on two nodes: it loses one, or both are told to leave, and nobody can tell."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from cases import some
from integration.conftest import PATIENCE_S, PATIENT, Job
from integration.integrations.bench import EPOCHS, SAVE_EVERY, SLOW_FROM, STEPS_PER_EPOCH

from agent.local_etcd.embedded import EmbeddedEtcd
from agent.rehearse.cluster import wait_for
from trainer_runtime import integrations
from trainer_runtime.integrations.common import join

PROGRAMS = Path(__file__).with_name("integrations")
STEPS = EPOCHS * STEPS_PER_EPOCH

FRAMEWORKS = ("transformers", "transformers_fsdp2", "accelerate", "accelerate_fsdp2", "lightning", "lightning_fsdp2")


class Program(Job):
    """A cluster on one of the programs."""

    framework = ""

    @property
    def command(self) -> list[str]:
        return [str(PROGRAMS / f"with_{self.framework}.py")]

    @property
    def groups_that_finished(self) -> list[int]:
        """Groups in which rank 0 has come to what follows the training."""
        path = self.directory / "finished.0"
        return [int(line) for line in path.read_text().splitlines()] if path.exists() else []

    def begin(self) -> None:
        """Start both nodes."""
        for name in "ab":
            self.join(name, "2")

    def samples(self) -> dict[tuple[int, int], list[list[int]]]:
        """What each rank put into each step, once for each time that it was taken, in the order of groups."""
        taken: dict[tuple[int, int], list[list[int]]] = {}
        paths = sorted(self.directory.glob("ledger.*"), key=lambda path: int(path.suffixes[0][1:]))
        for path in paths:
            for line in map(json.loads, path.read_text().splitlines()):
                taken.setdefault((int(path.suffix[1:]), line["step"]), []).append(line["samples"])
        return taken

    def weights_of(self, rank: int) -> dict[str, torch.Tensor]:
        found: dict[str, torch.Tensor] = torch.load(self.directory / f"weights.{rank}", weights_only=True)
        return found


Make = Callable[..., Program]


@pytest.fixture(scope="module")
def programs(etcd: EmbeddedEtcd, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Make]:
    """Make clusters: `programs(framework, name, step_time_s=...)`."""
    with ExitStack() as stack:

        def make(framework: str, name: str, *, step_time_s: float) -> Program:
            directory = tmp_path_factory.mktemp(f"{framework}-{name}")
            program = stack.enter_context(Program(directory, etcd.endpoint, directory.name, PATIENT))
            program.framework = framework
            program.environ |= {"TEST_DIRECTORY": str(directory), "TEST_STEP_TIME_S": str(step_time_s)}
            return program

        yield make


@pytest.fixture(scope="module")
def undisturbed(programs: Make) -> Callable[[str], Program]:
    """A run to the end in which nothing happened."""
    known: dict[str, Program] = {}

    def run(framework: str) -> Program:
        if framework not in known:
            program = programs(framework, "undisturbed", step_time_s=0.0)
            program.begin()
            program.finish()
            known[framework] = program
        return known[framework]

    return run


def assert_same_result(program: Program, reference: Program) -> None:
    """The same samples in every step, however often it was taken, and the same weights bit by bit on each rank."""
    expected, found = reference.samples(), program.samples()
    assert found.keys() == expected.keys()
    for place, times in found.items():
        assert all(samples == expected[place][0] for samples in times), f"(rank, step) {place} of {program.directory}"
    for rank in range(2):
        weights = reference.weights_of(rank)
        assert all(torch.equal(value, weights[name]) for name, value in program.weights_of(rank).items())


@pytest.mark.parametrize("framework", some(["transformers"], of=FRAMEWORKS))
def test_a_node_is_killed_in_mid_epoch_and_replaced(
    programs: Make, undisturbed: Callable[[str], Program], framework: str
) -> None:
    """At most the steps since the last save are taken again, with the same samples, and the result is the same."""
    program = programs(framework, "killed", step_time_s=1.0)
    program.begin()
    group = program.wait_for_step(SLOW_FROM)
    program.nodes["b"].kill()
    program.join("c", "2")
    program.finish()

    lost = [step for (rank, step), times in program.samples().items() if rank == 0 and len(times) > 1]
    # A step is committed when the next one begins, and a save is on disk a moment after that.
    assert len(lost) <= 2 * SAVE_EVERY
    assert len(program.groups_that_finished) == 1
    assert program.groups_that_finished[0] > group
    assert_same_result(program, undisturbed(framework))


@pytest.mark.parametrize("framework", some([], of=FRAMEWORKS))
def test_both_nodes_are_asked_to_leave_and_the_job_is_started_again(
    programs: Make, undisturbed: Callable[[str], Program], framework: str
) -> None:
    """They end with code 0, what follows the training is not done yet, and no step is taken twice."""
    program = programs(framework, "drained", step_time_s=1.0)
    program.begin()
    program.wait_for_step(SLOW_FROM)
    for node in program.living():
        node.terminate()
    assert [node.wait(PATIENCE_S) for node in program.nodes.values()] == [0, 0], program.log_text()
    assert not program.groups_that_finished
    wait_for(lambda: not list(program.living()), PATIENCE_S, "both agents are gone")

    program.begin()
    program.finish()
    twice = [place for place, times in program.samples().items() if len(times) > 1]
    assert not twice
    assert len(program.groups_that_finished) == 1
    assert_same_result(program, undisturbed(framework))


@pytest.mark.parametrize("name", integrations.__all__)
def test_a_framework_that_is_not_installed_is_named(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    framework = integrations._FRAMEWORK[name]
    monkeypatch.setitem(sys.modules, framework, None)  # so it cannot be imported
    monkeypatch.delitem(sys.modules, f"trainer_runtime.integrations.{framework}", raising=False)
    monkeypatch.delitem(vars(integrations), name, raising=False)
    with pytest.raises(ImportError, match=rf"{name} needs the package {framework}, .*: pip install {framework}"):
        getattr(integrations, name)


class Prepared:
    """As an Accelerator that was told to shard."""

    def __init__(self, kind: str) -> None:
        self.distributed_type = import_module("accelerate").DistributedType[kind]
        self.num_processes = 1
        self._models = [torch.nn.Linear(2, 2)]


@pytest.mark.parametrize(
    ("kind", "said"), [("FSDP", "wants parameters that fully_shard has sharded"), ("DEEPSPEED", "got DEEPSPEED")]
)
def test_what_accelerate_shards_otherwise_than_by_fsdp2_is_refused(kind: str, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        integrations.AccelerateState(Prepared(kind))


def test_what_trainer_shards_otherwise_than_by_fsdp2_is_refused(tmp_path: Path) -> None:
    """And a model that was to be sharded and is not, as without a GPU; and weights that Trainer is to load itself."""
    accelerate, transformers = import_module("accelerate"), import_module("transformers")
    arguments = transformers.TrainingArguments(output_dir=str(tmp_path), use_cpu=True, report_to=[])

    def sharding(version: int) -> Any:  # noqa: ANN401 - a Trainer
        trainer = transformers.Trainer(torch.nn.Linear(2, 2), arguments, train_dataset=[{"input": torch.ones(2)}])
        plugin = accelerate.FullyShardedDataParallelPlugin(fsdp_version=version, cpu_ram_efficient_loading=False)
        trainer.accelerator.state.fsdp_plugin, trainer.is_fsdp_enabled = plugin, True
        return trainer

    try:
        with pytest.raises(ValueError, match="wants FSDP2, got FSDP1"):
            integrations.TransformersCallback(sharding(1))
        trainer = sharding(2)
        trainer.add_callback(integrations.TransformersCallback(trainer))
        with pytest.raises(ValueError, match="no resume_from_checkpoint with FSDP"):
            trainer.train(str(tmp_path))
        with pytest.raises(ValueError, match=r"parameters that fully_shard has sharded.*got whole ones"):
            trainer.train()
    finally:
        accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)  # the plugin is kept for all


def test_workers_that_each_train_alone_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a GPU Accelerate and Trainer do so unless they are told to use the CPU; all would save as one."""
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(RuntimeError, match=r"all 2 workers that were started, got 1; do something"):
        join(1, "do something")
