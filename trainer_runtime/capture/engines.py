"""DeepSpeed's engines in State: what each rank holds of one, and how it is put back.

ZeRO divides the fp32 weights and what the optimizer keeps of them into flat partitions, one per group of parameters,
which are equally large on all ranks; stage 3 divides the module's parameters too. Each partition is captured as this
rank's row of a tensor of shape (ranks, elements), in the form that `sharded_objects.py` describes:

| of an engine in State under NAME | captured on each rank |
|---|---|
| partitions of the fp32 weights, and of frozen parameters in stage 3 | `{NAME: {"weights.0": {place: row}}}` |
| the optimizer's state of these partitions, and its options | `{"NAME.optimizer": {"tensors", "plain", "groups"}}` |

What is equal on all ranks is in the common part: the module, in stage 3 without its divided parameters, the counters,
the learning rate schedule and the loss scaler. DeepSpeed's own `state_dict` and `load_state_dict` of the optimizer are
used. Nothing is gathered while training. `EngineShards.load` is a collective in stage 3: small parameters, which are
whole on every rank between the steps, are gathered as after DeepSpeed's own `load_checkpoint`.

As after `load_checkpoint`, `micro_steps` begins at 0. Rows are not divided anew, so the world size must stay the same.

Prior art: `DeepSpeedEngine.save_checkpoint` and `load_checkpoint` of DeepSpeed 0.19.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist

from trainer_runtime.capture.gathering import (
    COUNTER,
    Block,
    Captured,
    Gathering,
    TensorPath,
    is_optimizers,
    placed_tensors,
)
from trainer_runtime.capture.local import LayoutError
from trainer_runtime.dist import world_size
from trainer_runtime.structure import take_apart
from trainer_runtime.values import require_loadable

if TYPE_CHECKING:
    from collections.abc import Iterator

    from trainer_runtime.capture.blocks import Place

_COUNTERS = ("global_steps", "global_samples", "skipped_steps")
_OPTIMIZER = "{}.optimizer"
"""The name under which an engine's optimizer is captured. A keyword of State cannot have a dot."""


class _Names(NamedTuple):
    """What an optimizer of DeepSpeed calls what it has divided."""

    weights: str
    """The attribute with this rank's partitions of the fp32 weights."""
    weights_key: str
    """The same in the optimizer's state."""
    base_key: str
    """In the optimizer's state, that of the optimizer that DeepSpeed has wrapped."""


_FP32, _BASE = "single_partition_of_fp32_groups", "base_optimizer_state"
_DIVIDED = {
    "DeepSpeedZeroOptimizer": _Names(_FP32, _FP32, _BASE),
    "BF16_Optimizer": _Names("fp32_groups_flat_partition", _FP32, _BASE),
    "DeepSpeedZeroOptimizer_Stage3": _Names("fp32_partitioned_groups_flat", "fp32_flat_groups", "optimizer_state_dict"),
}
"""The optimizers that divide their state, by class."""
_ORDERING = ("round_robin_gradients", "parameter_alignment")
"""Options of ZeRO that change where a parameter is in a partition, but hardly the partition's size."""
_WHOLE = ("FP16_Optimizer", "FP16_UnfusedOptimizer")
_NUMBERS = (bool, int, float)


class Engine:
    """An engine as State reads and loads it: `state_dict` has what is equal on all ranks.

    Args:
        name: its name in State.
        engine: what `deepspeed.initialize` returned.

    Raises:
        ValueError: it uses something that cannot be saved.
    """

    def __init__(self, name: str, engine: Any) -> None:  # noqa: ANN401 - DeepSpeed is not imported
        if fault := _find_fault(engine):
            raise ValueError(f"State cannot save {name}: {fault}; save with DeepSpeed's own save_checkpoint")
        self.name = name
        self._engine = engine
        self._names = _DIVIDED.get(type(engine.optimizer).__name__)
        self._divided = {
            key: parameter
            for key, parameter in engine.module.named_parameters(remove_duplicate=False)
            if hasattr(parameter, "ds_id")
        }
        """The parameters of which each rank has a part, in stage 3."""

    @property
    def is_divided(self) -> bool:
        """Whether ranks hold different parts."""
        return self._names is not None

    @property
    def hides_weights(self) -> bool:
        """Whether the module has no weights between the steps (stage 3): a check of them would see none."""
        return bool(self._divided)

    @property
    def module(self) -> torch.nn.Module:
        """The module that the engine trains."""
        module: torch.nn.Module = self._engine.module
        return module

    @property
    def schedule(self) -> Any:  # noqa: ANN401 - as below
        """The schedule of the learning rate. None: there is none."""
        return self._engine.lr_scheduler

    @property
    def groups(self) -> list[dict[str, Any]]:
        """The optimizer's groups of parameters, with their options."""
        groups: list[dict[str, Any]] = self._engine.basic_optimizer.param_groups
        return groups

    @property
    def optimizer(self) -> Any:  # noqa: ANN401 - as above
        """The engine's optimizer, which may wrap another one."""
        return self._engine.optimizer

    def owns(self, thing: object) -> bool:
        """Return whether this is an optimizer that the engine has, whose state it saves itself."""
        return thing in (self._engine.basic_optimizer, self.optimizer)

    def state_dict(self) -> dict[str, Any]:
        """Return what is equal on all ranks.

        Raises:
            RuntimeError: gradients are being accumulated.
        """
        self.require_boundary()
        engine = self._engine
        scaler = getattr(engine.optimizer, "loss_scaler", None) if self.is_divided else None
        return {
            "kind": self._kind(),
            "module": {key: value for key, value in engine.module.state_dict().items() if key not in self._divided},
            "counters": {each: getattr(engine, each) for each in _COUNTERS},
            "schedule": None if engine.lr_scheduler is None else engine.lr_scheduler.state_dict(),
            "scaler": {key: each for key, each in vars(scaler).items() if type(each) in _NUMBERS} if scaler else {},
            "optimizer": None if self.is_divided else engine.optimizer.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load what `state_dict` returned.

        Raises:
            ValueError: the engine, its stage of ZeRO or its module is another one.
        """
        engine, saved, own = self._engine, state["kind"], self._kind()
        if saved != own:
            what = next(key for key in own if saved.get(key) != own[key])
            raise ValueError(f"{self.name} was saved with another {what}: wanted {saved.get(what)}, got {own[what]}")
        missing, unexpected = engine.module.load_state_dict(state["module"], strict=False)
        if other := sorted({*missing, *unexpected} - self._divided.keys()):
            raise ValueError(f"{self.name} was saved with another module: on one side only: {', '.join(other[:3])}")
        for each, value in state["counters"].items():
            setattr(engine, each, value)
        if engine.lr_scheduler is not None:
            engine.lr_scheduler.load_state_dict(state["schedule"])
        if state["scaler"]:
            vars(engine.optimizer.loss_scaler).update(state["scaler"])
        if state["optimizer"] is not None:
            engine.optimizer.load_state_dict(state["optimizer"])

    def require_boundary(self) -> None:
        """Raise RuntimeError if gradients are being accumulated, which are not saved."""
        engine, of = self._engine, self._engine.gradient_accumulation_steps()
        if engine._is_gradient_accumulation_boundary is not None or not engine.managed_gradient_accumulation():  # noqa: SLF001 - no public name
            raise RuntimeError(
                f"State cannot save {self.name}: the script sets the boundaries of gradient accumulation itself; "
                "let DeepSpeed count micro-batches (gradient_accumulation_steps)"
            )
        if made := engine.micro_steps % of:
            raise RuntimeError(
                f"commit() after micro-batch {made} of {of} of {self.name}: commit only after the engine.step() that "
                "has updated the weights, which is where engine.is_gradient_accumulation_boundary() was true before it"
            )

    def check(self) -> None:
        """Raise LayoutError or TypeError if something that the optimizer keeps could not be loaded back."""
        captured = self.read()[_OPTIMIZER.format(self.name)]
        require_loadable(self.name, [captured["plain"], captured["groups"]])
        if any(isinstance(leaf, torch.Tensor) for leaf in take_apart(captured["plain"]).leaves):
            raise LayoutError(f"State cannot save {self.name}: its optimizer keeps tensors in a list or a dict")

    def read(self) -> Captured:
        """Return what this rank holds. Tensors are the engine's own, not copies.

        Raises:
            LayoutError: the optimizer keeps a tensor that is neither a number nor as large as the partition.
            RuntimeError: as `state_dict`.
        """
        self.require_boundary()
        partitions = self._partitions()
        base = self.optimizer.state_dict()[self._require_names().base_key]
        tensors: dict[str, dict[str, dict[Place, torch.Tensor]]] = {}
        plain: dict[str, dict[str, Any]] = {}
        for index, state in base["state"].items():
            key = _key(index)
            plain[key] = {kind: value for kind, value in state.items() if not isinstance(value, torch.Tensor)}
            tensors[key] = {
                kind: self._placed(f"{key}.{kind}", value, partitions[key].numel())
                for kind, value in state.items()
                if isinstance(value, torch.Tensor)
            }
        rows = {key: _row(partition) for key, partition in partitions.items()}
        rest = {"tensors": tensors, "plain": plain, "groups": base["param_groups"]}
        return {self.name: rows, _OPTIMIZER.format(self.name): rest}

    def blocks(self) -> dict[TensorPath, Block]:
        """Return the rows that this rank needs."""
        return {(self.name, key): Block(*_place(each), (1, each.numel())) for key, each in self._partitions().items()}

    def load(self, captured: Captured) -> None:
        """Load this rank's rows, after `load_state_dict`; a collective in stage 3."""
        names, optimizer = self._require_names(), self.optimizer
        rows = {key: _only(placed).flatten() for key, placed in captured[self.name].items()}
        kept = captured[_OPTIMIZER.format(self.name)]
        if hasattr(optimizer, "checkpoint_event_prologue"):  # stage 3: frees what it has gathered
            optimizer.checkpoint_event_prologue()
        state = optimizer.state_dict()
        state[names.weights_key] = [rows[_key(index)] for index in range(len(state[names.weights_key]))]
        state[names.base_key] = {
            "state": {
                index: {
                    **kept["plain"].get(key, {}),
                    **{kind: _whole(_only(placed)) for kind, placed in kept["tensors"].get(key, {}).items()},
                }
                for index, key in enumerate(map(_key, range(len(state[names.weights_key]))))
                if key in kept["plain"] or key in kept["tensors"]
            },
            "param_groups": kept["groups"],
        }
        # It wants the states of all ranks, and reads this rank's only.
        own = {dist.get_rank(optimizer.dp_process_group): state}
        optimizer.load_state_dict(own, load_optimizer_states=True, load_from_fp32_weights=True)
        for key, partition in self._frozen():
            partition.data.copy_(rows[key])
        if hasattr(optimizer, "checkpoint_event_epilogue"):
            optimizer.checkpoint_event_epilogue()

    def _kind(self) -> dict[str, Any]:
        """Return what must be the same when the engine is restored."""
        divided = {key: list(parameter.ds_shape) for key, parameter in self._divided.items()}
        options = {each: getattr(self.optimizer, each, None) for each in _ORDERING}
        return {"optimizer": type(self.optimizer).__name__, "shapes of parameters": divided, **options}

    def _partitions(self) -> dict[str, torch.Tensor]:
        weights = getattr(self.optimizer, self._require_names().weights)
        return {**{_key(index): each for index, each in enumerate(weights)}, **dict(self._frozen())}

    def _frozen(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield this rank's partitions of parameters that are not trained, in stage 3."""
        for key, parameter in self._divided.items():
            if not parameter.requires_grad:
                yield f"frozen.{key}", parameter.ds_tensor

    def _placed(self, key: str, tensor: torch.Tensor, size: int) -> dict[Place, torch.Tensor]:
        if not tensor.dim():
            return {((), ()): tensor.detach()}
        if tuple(tensor.shape) == (size,) and not key.endswith(f".{COUNTER}"):
            return _row(tensor)
        raise LayoutError(
            f"State cannot save {self.name}: wanted an optimizer whose tensors are numbers or as large as its "
            f"partition of {size} elements, got {key} of shape {tuple(tensor.shape)}"
        )

    def _require_names(self) -> _Names:
        assert self._names is not None  # noqa: S101 - only engines that are divided have shards
        return self._names


class EngineShards:
    """What this rank holds of divided engines; `shards.py` describes the methods.

    Args:
        engines: engines that are divided.
    """

    def __init__(self, engines: list[Engine]) -> None:
        self._engines = engines

    @property
    def names(self) -> frozenset[str]:
        """No object: each engine has something in the common part as well."""
        return frozenset()

    def check(self) -> None:
        """Raise as `Engine.check`."""
        for engine in self._engines:
            engine.check()

    def read(self) -> Captured:
        """Return what this rank holds; raises as `Engine.read`."""
        return {name: state for engine in self._engines for name, state in engine.read().items()}

    def places_to_write(self, rank: int, world_size: int) -> dict[TensorPath, Place]:  # noqa: ARG002 - as of other shards
        """Return the places of this rank's rows. Numbers, which are equal on all ranks, are written by rank 0."""
        return {path: place for path, place, _ in placed_tensors(self.read()) if place[0] or rank == 0}

    def paths(self) -> list[TensorPath]:
        """Return the paths of all tensors."""
        return [path for path, _, _ in placed_tensors(self.read())]

    def pick(self, captured: Captured, path: TensorPath) -> torch.Tensor:
        """Return a tensor in what `read` returned."""
        state = captured[path[0]]
        return _only((state["tensors"][path[1]] if is_optimizers(state) else state)[path[-1]])

    def plain_of(self, captured: Captured) -> dict[str, Any]:
        """Return what the optimizers had besides tensors."""
        return {
            name: {"state": state["plain"], "param_groups": state["groups"]}
            for name, state in captured.items()
            if is_optimizers(state)
        }

    def aliases(self) -> dict[TensorPath, TensorPath]:
        """Return nothing: partitions are not tied."""
        return {}

    def gather(self) -> Gathering:
        """Return an object that collects this rank's rows."""
        blocks = {path: block for engine in self._engines for path, block in engine.blocks().items()}
        return Gathering(blocks, {_OPTIMIZER.format(engine.name): engine.name for engine in self._engines}, {})

    def load(self, captured: Captured) -> None:
        """Load what `Gathering.result` returned; a collective in stage 3."""
        for engine in self._engines:
            engine.load(captured)


def _find_fault(engine: Any) -> str:  # noqa: ANN401 - DeepSpeed is not imported
    """Return why an engine cannot be saved; empty: it can."""
    optimizer = engine.optimizer
    kind = type(optimizer).__name__
    is_whole = kind in _WHOLE or isinstance(optimizer, torch.optim.Optimizer)
    base = type(engine.basic_optimizer)
    if type(engine).__name__ != "DeepSpeedEngine" or not (kind in _DIVIDED or is_whole) or "onebit" in base.__module__:
        wanted = ", ".join([*_DIVIDED, *_WHOLE])
        found = f"a {type(engine).__name__} with {kind} of {base.__name__}"
        return f"wanted a DeepSpeedEngine with one of {wanted}, or an optimizer of torch's kind, got {found}"
    if (ranks := engine.seq_dp_world_size) != world_size() or engine.mp_world_size > 1 or engine.has_moe_layers:
        return (
            f"wanted data parallelism alone, over all {world_size()} ranks, got it over {ranks} with model parallelism "
            f"of {engine.mp_world_size}{' and experts' if engine.has_moe_layers else ''}"
        )
    used = {
        "offloading to NVMe": any(
            getattr(optimizer, each, False) for each in ("swap_optimizer", "params_in_nvme_and_cpu")
        ),
        "elastic_checkpoint": getattr(optimizer, "elastic_checkpoint", False),
        "offloading of a part (ratio)": hasattr(optimizer, "backup_optimizer"),
        "zero_quantized_nontrainable_weights": any(
            hasattr(getattr(each, "ds_tensor", None), "ds_quant_scale") for each in engine.module.parameters()
        ),
        "a gradient scaler for torch_autocast": getattr(engine, "torch_autocast_z0_gradscaler", None)
        or getattr(optimizer, "torch_autocast_gradscaler", None),
        "a quantizer": getattr(engine, "quantizer", None),  # this one and the next in versions before 0.19.8
        "progressive layer drop": getattr(engine, "progressive_layer_drop", None),
        "random layer token drop": engine.random_ltd_enabled(),
        "curriculum learning": engine.curriculum_learning_enabled(),
    }
    return next(
        (f"got an engine with {what}, whose state is not saved" for what, is_used in used.items() if is_used), ""
    )


def _key(index: int) -> str:
    return f"weights.{index}"


def _place(partition: torch.Tensor) -> Place:
    """Return where a rank's partition is among those of all ranks: its row."""
    return (world_size(), partition.numel()), (dist.get_rank(), 0)


def _row(partition: torch.Tensor) -> dict[Place, torch.Tensor]:
    return {_place(partition): partition.detach().view(1, -1)}


def _whole(found: torch.Tensor) -> torch.Tensor:
    """Return a copy of an optimizer's tensor as the optimizer keeps it, which it may keep by reference."""
    return found.flatten().clone() if found.dim() else found.clone()


def _only(placed: dict[Place, torch.Tensor]) -> torch.Tensor:
    (tensor,) = placed.values()
    return tensor
