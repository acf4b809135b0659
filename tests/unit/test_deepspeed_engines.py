"""DeepSpeed's engines in State, in a world of 1: what is captured, put back and refused.

DeepSpeed is not installed for tests: these classes have the names, attributes and states of its own (0.19.8) that State
uses. `integration/test_deepspeed.py` runs DeepSpeed itself where it is installed.
"""

from __future__ import annotations

from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from unit.test_runtime_state import settle

import trainer_runtime as tr
from trainer_runtime import contract
from trainer_runtime.contents import Contents, OtherWorldError
from trainer_runtime.flat import Flattener
from trainer_runtime.snapshot_copy import SnapshotCopier
from trainer_runtime.snapshot_memory import SnapshotMemory

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@pytest.fixture(scope="module", autouse=True)
def _world_of_one() -> None:
    tr.init()


@pytest.fixture(autouse=True)
def _start(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (contract.RUN_ID, contract.GROUP, contract.FRESH, contract.CONTROL_FD, contract.CHECKPOINT_DIR):
        monkeypatch.delenv(name, raising=False)


class Scaler:
    def __init__(self) -> None:
        self.cur_scale, self.cur_iter, self.dtype = 4.0, 0, torch.float16


class DeepSpeedZeroOptimizer:
    """Stages 1 and 2: the weights of a module in bf16, and those in fp32 in one flat tensor."""

    def __init__(self, base: torch.optim.Optimizer) -> None:
        self.optimizer, self.loss_scaler, self.dp_process_group = base, Scaler(), dist.group.WORLD
        self.single_partition_of_fp32_groups = [group["params"][0] for group in base.param_groups]

    def state_dict(self) -> dict[str, Any]:
        return {
            "loss_scaler": self.loss_scaler,
            "base_optimizer_state": self.optimizer.state_dict(),
            "single_partition_of_fp32_groups": self.single_partition_of_fp32_groups,
        }

    def load_state_dict(
        self, states: dict[int, dict[str, Any]], *, load_optimizer_states: bool, load_from_fp32_weights: bool
    ) -> None:
        assert load_optimizer_states
        assert load_from_fp32_weights
        self.optimizer.load_state_dict(states[0]["base_optimizer_state"])
        saved = states[0]["single_partition_of_fp32_groups"]
        for partition, each in zip(self.single_partition_of_fp32_groups, saved, strict=True):
            partition.data.copy_(each)


class DeepSpeedZeroOptimizer_Stage3(DeepSpeedZeroOptimizer):  # noqa: N801 - DeepSpeed's name
    """Stage 3: the module's parameters are elsewhere, and the base optimizer has them while it steps or is read."""

    def __init__(self, base: torch.optim.Optimizer) -> None:
        super().__init__(base)
        self.fp32_partitioned_groups_flat = self.single_partition_of_fp32_groups
        self.events: list[str] = []
        base.param_groups[0]["params"] = []

    @contextmanager
    def with_groups(self) -> Iterator[None]:
        group = self.optimizer.param_groups[0]
        group["params"] = self.fp32_partitioned_groups_flat
        yield
        self.optimizer.param_groups[0]["params"] = []

    def state_dict(self) -> dict[str, Any]:
        with self.with_groups():
            state = self.optimizer.state_dict()
        return {"optimizer_state_dict": state, "fp32_flat_groups": self.fp32_partitioned_groups_flat}

    def load_state_dict(self, states: dict[int, dict[str, Any]], **options: bool) -> None:
        state = states[0]
        own = {
            "base_optimizer_state": state["optimizer_state_dict"],
            "single_partition_of_fp32_groups": state["fp32_flat_groups"],
        }
        with self.with_groups():
            super().load_state_dict({0: own}, **options)
        self.events.append("loaded")

    def checkpoint_event_prologue(self) -> None:
        self.events.append("freed")

    def checkpoint_event_epilogue(self) -> None:
        self.events.append("gathered")


class DeepSpeedEngine(nn.Module):
    """An engine with one group of parameters, which are zero until it has trained."""

    def __init__(self, kind: type[DeepSpeedZeroOptimizer] | None = DeepSpeedZeroOptimizer, size: int = 10) -> None:
        super().__init__()
        self.module = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)).bfloat16()
        self.weights = torch.zeros(size, requires_grad=True)
        self.basic_optimizer: torch.optim.Optimizer = torch.optim.Adam([self.weights])
        self.optimizer: Any = self.basic_optimizer if kind is None else kind(self.basic_optimizer)
        self.lr_scheduler = torch.optim.lr_scheduler.StepLR(self.basic_optimizer, 1)
        self.seq_dp_world_size = self.mp_world_size = 1
        self.has_moe_layers = False
        self.torch_autocast_z0_gradscaler = self.quantizer = self.progressive_layer_drop = None
        self._is_gradient_accumulation_boundary = None
        self.global_steps = self.global_samples = self.skipped_steps = self.micro_steps = 0
        if kind is DeepSpeedZeroOptimizer_Stage3:
            for parameter in self.module.parameters():
                parameter.ds_id, parameter.ds_shape = 0, parameter.shape  # type: ignore[attr-defined]
                parameter.ds_tensor = torch.zeros(parameter.numel())  # type: ignore[attr-defined]
            self.module[0].bias.requires_grad_(False)

    def gradient_accumulation_steps(self) -> int:
        return 2

    def managed_gradient_accumulation(self) -> bool:
        return True

    def random_ltd_enabled(self) -> bool:
        return False

    curriculum_learning_enabled = random_ltd_enabled

    def train_step(self) -> None:
        self.weights.grad = torch.arange(float(len(self.weights)))
        with getattr(self.optimizer, "with_groups", nullcontext)():
            self.basic_optimizer.step()
        self.lr_scheduler.step()
        with torch.no_grad():
            for parameter in self.module.parameters():
                parameter.add_(1)
        self.module[1].running_mean += 1
        self.global_steps += 1
        self.micro_steps += 2
        if hasattr(self.optimizer, "loss_scaler"):
            self.optimizer.loss_scaler.cur_iter += 1


for _kind in (DeepSpeedEngine, DeepSpeedZeroOptimizer, DeepSpeedZeroOptimizer_Stage3):
    _kind.__module__ = "deepspeed.runtime.engine"


def new_state(directory: Path, **objects: object) -> tr.State:
    return tr.State(checkpoint_dir=directory, save_every=1, **objects)


@pytest.mark.parametrize("kind", [None, DeepSpeedZeroOptimizer, DeepSpeedZeroOptimizer_Stage3])
def test_an_engine_comes_back_with_all_that_it_has(tmp_path: Path, kind: type[DeepSpeedZeroOptimizer] | None) -> None:
    one, two = DeepSpeedEngine(kind), DeepSpeedEngine(kind)
    state = new_state(tmp_path, engine=one)
    state.restore()
    for _ in range(2):
        one.train_step()
        if kind is DeepSpeedZeroOptimizer_Stage3:
            one.module[0].bias.ds_tensor += 1
        state.commit()
    settle(state)
    new_state(tmp_path, engine=two).restore()
    if kind is not None:  # else the module has the weights
        assert torch.equal(two.weights, one.weights)
        assert two.weights.any()
    for name in ("exp_avg", "exp_avg_sq", "step"):
        assert torch.equal(two.basic_optimizer.state[two.weights][name], one.basic_optimizer.state[one.weights][name])
    assert two.basic_optimizer.param_groups[0]["lr"] == one.basic_optimizer.param_groups[0]["lr"]
    assert two.lr_scheduler.state_dict() == one.lr_scheduler.state_dict()
    assert (two.global_steps, two.micro_steps) == (2, 0)
    assert torch.equal(two.module[1].running_mean, one.module[1].running_mean)
    if kind is DeepSpeedZeroOptimizer:
        assert two.optimizer.loss_scaler.cur_iter == 2
    if kind is DeepSpeedZeroOptimizer_Stage3:
        assert two.optimizer.events == ["freed", "loaded", "gathered"]
        assert torch.equal(two.module[0].bias.ds_tensor, torch.full((2,), 2.0))
        assert not torch.equal(two.module[0].weight, one.module[0].weight), "its partitions have it"
    else:
        assert torch.equal(two.module[0].weight, one.module[0].weight)


def test_what_was_restored_does_not_refer_to_the_checkpoint(tmp_path: Path) -> None:
    """The optimizer keeps what it is given: its tensors must not be views of the memory that is released."""
    one, two = DeepSpeedEngine(), DeepSpeedEngine()
    state = new_state(tmp_path, engine=one)
    state.restore()
    one.train_step()
    state.commit()
    settle(state)
    new_state(tmp_path, engine=two).restore()
    kept = two.basic_optimizer.state[two.weights]["exp_avg"]
    assert kept.untyped_storage().nbytes() == kept.nbytes


@pytest.mark.parametrize("kind", [DeepSpeedZeroOptimizer, DeepSpeedZeroOptimizer_Stage3])
def test_partitions_are_copied_by_a_thread_until_the_next_step(kind: type[DeepSpeedZeroOptimizer]) -> None:
    engine, told = DeepSpeedEngine(kind, 1 << 17), list[int]()
    contents, memory = Contents({"engine": engine}), SnapshotMemory(None, 0)
    copier = SnapshotCopier(contents, memory, told.append)
    engine.train_step()
    flat = Flattener().flatten(contents.read()), Flattener().flatten(contents.read_part())
    expected = engine.weights.detach().clone()
    capture = copier.copy(memory.begin(1, 1, *flat), may_defer=True)
    assert copier.is_copying
    engine.train_step()
    assert not copier.is_copying
    copier.join()
    assert told == [1]
    _, part = capture.read()
    (copied,) = part["sharded"]["engine"]["weights.0"].values()
    assert torch.equal(copied[0], expected)


def test_an_engine_of_another_stage_or_module_is_refused(tmp_path: Path) -> None:
    one = DeepSpeedEngine()
    state = new_state(tmp_path, engine=one)
    state.restore()
    one.train_step()
    state.commit()
    settle(state)
    other = DeepSpeedEngine(DeepSpeedZeroOptimizer_Stage3)
    with pytest.raises(ValueError, match="engine was saved with another optimizer: wanted DeepSpeedZeroOptimizer, got"):
        new_state(tmp_path, engine=other).restore()
    two = DeepSpeedEngine()
    two.optimizer.round_robin_gradients = True
    with pytest.raises(ValueError, match="saved with another round_robin_gradients: wanted None, got True"):
        new_state(tmp_path, engine=two).restore()
    two = DeepSpeedEngine()
    two.module.append(nn.Linear(1, 1))
    with pytest.raises(ValueError, match=r"engine was saved with another module: on one side only: 2\.bias, 2\.weight"):
        new_state(tmp_path, engine=two).restore()


def test_another_world_size_is_refused_with_what_to_do() -> None:
    contents = Contents({"engine": DeepSpeedEngine()})
    contents.require_world(2, 2)
    with pytest.raises(OtherWorldError, match=r"restore engine: 3 ranks saved .* group has 2; train with 3 ranks"):
        contents.require_world(3, 2)
    Contents({"net": nn.Linear(1, 1)}).require_world(3, 2)


def test_a_commit_where_gradients_are_accumulated_is_refused(tmp_path: Path) -> None:
    engine = DeepSpeedEngine()
    state = new_state(tmp_path, engine=engine)
    state.restore()
    engine.micro_steps = 3
    with pytest.raises(RuntimeError, match=r"commit\(\) after micro-batch 1 of 2 of engine: commit only after"):
        state.commit()
    engine._is_gradient_accumulation_boundary = True  # type: ignore[assignment]
    with pytest.raises(RuntimeError, match="the script sets the boundaries of gradient accumulation itself"):
        state.commit()


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"seq_dp_world_size": 2}, "wanted data parallelism alone, over all 1 ranks, got it over 2"),
        ({"mp_world_size": 2}, "wanted data .* with model parallelism of 2"),
        ({"has_moe_layers": True}, "wanted data .* of 1 and experts"),
        ({"quantizer": object()}, "got an engine with a quantizer, whose state is not saved"),
        ({"torch_autocast_z0_gradscaler": object()}, "got an engine with a gradient scaler for torch_autocast"),
        ({"optimizer": None}, "wanted a DeepSpeedEngine with one of .*, got a DeepSpeedEngine with NoneType"),
    ],
)
def test_what_is_not_saved_is_refused_by_its_name(tmp_path: Path, changed: dict[str, Any], message: str) -> None:
    engine = DeepSpeedEngine()
    vars(engine).update(changed)
    with pytest.raises(ValueError, match=f"State cannot save engine: {message}.*; save with DeepSpeed's own"):
        new_state(tmp_path, engine=engine)


@pytest.mark.parametrize(
    ("attribute", "message"),
    [("backup_optimizer", "offloading of a part"), ("torch_autocast_gradscaler", "a gradient scaler")],
)
def test_what_its_optimizer_keeps_elsewhere_is_refused(tmp_path: Path, attribute: str, message: str) -> None:
    engine = DeepSpeedEngine()
    setattr(engine.optimizer, attribute, object())
    with pytest.raises(ValueError, match=f"State cannot save engine: got an engine with {message}"):
        new_state(tmp_path, engine=engine)


def test_frozen_weights_in_integers_are_refused(tmp_path: Path) -> None:
    engine = DeepSpeedEngine(DeepSpeedZeroOptimizer_Stage3)
    engine.module[0].bias.ds_tensor.ds_quant_scale = 1.0
    with pytest.raises(ValueError, match="got an engine with zero_quantized_nontrainable_weights"):
        new_state(tmp_path, engine=engine)


def test_a_check_that_would_see_no_weights_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="check_finite cannot check engine: between the steps ZeRO 3"):
        new_state(tmp_path, engine=DeepSpeedEngine(DeepSpeedZeroOptimizer_Stage3), check_finite=True)
    new_state(tmp_path, engine=DeepSpeedEngine(), check_finite=True)


def test_a_value_that_shares_the_weights_at_first_does_not_overwrite_them(tmp_path: Path) -> None:
    one, two = DeepSpeedEngine(None), DeepSpeedEngine(None)
    state = new_state(tmp_path, engine=one, best=one.module.state_dict())
    state.restore()
    one.train_step()
    state.best = {name: torch.full_like(each, 9) for name, each in one.module.state_dict().items()}
    state.commit()
    settle(state)
    again = new_state(tmp_path, engine=two, best=two.module.state_dict())
    again.restore()
    assert torch.equal(two.module[0].weight, one.module[0].weight)
    assert torch.equal(again.best["0.weight"], state.best["0.weight"])


@pytest.mark.filterwarnings("ignore:Detected call of")
@pytest.mark.parametrize("kind", [None, DeepSpeedZeroOptimizer])
def test_a_schedule_that_the_body_steps_before_its_items_counts_once(
    tmp_path: Path, kind: type[DeepSpeedZeroOptimizer] | None
) -> None:
    def train(engine: DeepSpeedEngine, until: int) -> None:
        state = new_state(tmp_path, engine=engine)
        for _ in state.epochs(1):
            engine.lr_scheduler.step()
            for _ in state.steps(range(4)):
                engine.train_step()
                state.commit()
                if state.step == until:
                    settle(state)
                    return

    one, two, whole = DeepSpeedEngine(kind), DeepSpeedEngine(kind), DeepSpeedEngine(kind)
    train(one, 2)
    train(two, 4)
    whole.lr_scheduler.step()
    for _ in range(4):
        whole.train_step()
    assert two.lr_scheduler.last_epoch == whole.lr_scheduler.last_epoch
    assert two.basic_optimizer.param_groups[0]["lr"] == whole.basic_optimizer.param_groups[0]["lr"]


def test_an_engine_saves_its_optimizer_itself_and_stands_beside_no_sharded_module(tmp_path: Path) -> None:
    engine = DeepSpeedEngine()
    with pytest.raises(ValueError, match="State cannot save opt: it belongs to engine, which saves it; leave it out"):
        new_state(tmp_path, engine=engine, opt=engine.basic_optimizer)


@pytest.mark.parametrize(
    ("kept", "message"),
    [
        ({"sums": torch.zeros(3)}, r"numbers or as large as its partition of 10 elements, got weights.0.sums of shape"),
        ({"sums": [torch.zeros(10)]}, "its optimizer keeps tensors in a list or a dict"),
        ({"sums": object()}, "State cannot save engine"),
    ],
)
def test_an_optimizer_with_other_tensors_is_refused_at_the_first_commit(
    tmp_path: Path, kept: dict[str, Any], message: str
) -> None:
    engine = DeepSpeedEngine()
    state = new_state(tmp_path, engine=engine)
    state.restore()
    engine.train_step()
    engine.basic_optimizer.state[engine.weights].update(kept)
    with pytest.raises((TypeError, ValueError), match=message):
        state.commit()
