"""The private names of torch that trainer_runtime uses, and what is off in a torch that lacks one of them.

torch may drop or rename a private name in any release. The names are listed here once, with what needs them. All of
them are in each of the `TESTED` versions. `init` prints a line if one is missing, so that nobody learns it from an
AttributeError at the first lost node; `elastic-agent doctor` prints it before the first start.

Names of `torch._C` that only type checkers read are not listed, nor are those of other packages
(`trainer_runtime/integrations`), whose tested versions pyproject.toml bounds.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator
from importlib import import_module
from types import CodeType, ModuleType
from typing import Any, NamedTuple

TESTED = ("2.13.0", "2.14.1", "2.15.0")
"""Versions of torch with which the quick tests pass (docs/testing.md)."""


class TorchName(NamedTuple):
    """A private name."""

    module: str
    """Module from which it is reached."""
    path: str
    """Dotted path in the module. Its last part is an attribute of the part before it, or occurs in its code: that of a
    function, or of the `__init__` of a class."""
    off: str
    """What does not work without it."""

    def is_in(self, module: ModuleType) -> bool:
        """Return whether it is there."""
        *parts, name = self.path.split(".")
        owner: Any = module
        for part in parts:
            owner = getattr(owner, part, None)
        return owner is not None and (hasattr(owner, name) or name in _names_in_code(owner))


NAMES = (
    TorchName("torch", "Tensor._version", "State cannot save"),
    TorchName("torch", "UntypedStorage._cdata", "State cannot save"),
    TorchName("torch", "_foreach_copy_", "no snapshots"),
    TorchName(
        "torch._C._distributed_c10d",
        "_dump_fr_trace_json",
        "a rank that waits in its own code may be blamed for a hang",
    ),
    TorchName("torch._C._dynamo.guards", "TensorGuards", "snapshots take longer"),
    TorchName("torch.amp", "GradScaler._per_optimizer_states", "no change of group within State.run with GradScaler"),
    TorchName("torch.autograd", "Variable._execution_engine", "DistributedDataParallel fails in its backward pass"),
    TorchName(
        "torch.distributed.algorithms._checkpoint.checkpoint_wrapper",
        "ActivationWrapper._checkpoint_wrapped_module",
        "names of checkpointed modules depend on the wrapper",
    ),
    TorchName("torch.distributed.checkpoint.filesystem", "_StorageInfo", "State cannot save sharded modules"),
    TorchName("torch.distributed.checkpoint.metadata", "_MEM_FORMAT_ENCODING", "sharded checkpoints are refused"),
    TorchName("torch.distributed.distributed_c10d", "_WorldMeta.WORLD", "init fails"),
    TorchName("torch.distributed.distributed_c10d", "_world", "no change of group within State.run"),
    TorchName("torch.distributed.rendezvous", "_create_c10d_store", "standbys and starts take up to 0.5 s longer"),
    TorchName("torch.distributed.tensor", "DTensor._local_tensor", "State cannot save sharded modules"),
    TorchName("torch.nn", "Module._buffers", "no change of group within State.run"),
    TorchName("torch.nn", "Module._modules", "State cannot save modules"),
    TorchName("torch.nn", "Module._non_persistent_buffers_set", "State cannot save sharded modules"),
    TorchName("torch.nn", "Module._parameters", "no change of group within State.run"),
    TorchName("torch.nn.modules.batchnorm", "_NormBase", "State cannot be imported"),
    TorchName("torch.nn.modules.module", "_EXTRA_STATE_KEY_SUFFIX", "extra states of modules are not copied"),
    TorchName("torch.nn.parallel", "DistributedDataParallel._comm_hooks", "no change of group within State.run"),
    TorchName(
        "torch.nn.parallel",
        "DistributedDataParallel._set_static_graph._static_graph_delay_allreduce_enqueued",
        "no change of group within State.run with static_graph",
    ),
    TorchName("torch.optim", "Optimizer._optimizer_step_pre_hooks", "no snapshots"),
    TorchName("torch.optim.lr_scheduler", "ChainedScheduler._schedulers", "its rates are not scaled"),
    TorchName(
        "torch.optim.lr_scheduler", "LRScheduler.get_last_lr._last_lr", "get_last_lr is wrong once rates were scaled"
    ),
    TorchName("torch.optim.lr_scheduler", "LRScheduler.step._opt_called", "schedulers of parameter-server jobs warn"),
    TorchName("torch.optim.lr_scheduler", "SequentialLR._schedulers", "its rates are not scaled"),
    TorchName("torch.serialization", "_get_layout", "sharded checkpoints are refused"),
    TorchName("torch.utils.data", "DataLoader._iterator", "persistent workers draw another order after a restart"),
    TorchName(
        "torch._dynamo.eval_frame", "OptimizedModule._orig_mod", "names of compiled modules depend on the wrapper"
    ),
)


def describe_missing(*, is_import_allowed: bool = False) -> str:
    """Return one line that names each missing name and what is off without it; empty: none is missing.

    Args:
        is_import_allowed: whether to import modules. If not, those that are not imported yet are left out.
    """
    missing = [each for each in NAMES if not _has(each, is_import_allowed=is_import_allowed)]
    if not missing:
        return ""
    listed = "; ".join(f"{each.module}.{each.path}: {each.off}" for each in missing)
    return f"torch {_version()} lacks what trainer_runtime needs ({listed}); install torch {' or '.join(TESTED)}"


def _has(name: TorchName, *, is_import_allowed: bool) -> bool:
    if not is_import_allowed:
        module = sys.modules.get(name.module)
        return module is None or name.is_in(module)
    try:
        return name.is_in(import_module(name.module))
    except ImportError:
        return False


def _version() -> str:
    return str(sys.modules["torch"].__version__)


def _names_in_code(owner: object) -> Iterator[str]:
    """Return the names and constants in the code of a function, or of the `__init__` of a class, which makes them."""
    function = inspect.unwrap(owner.__init__ if isinstance(owner, type) else owner)  # type: ignore[misc, arg-type]
    code = getattr(function, "__code__", None)
    if isinstance(code, CodeType):
        yield from code.co_names
        yield from (each for each in code.co_consts if isinstance(each, str))


def main() -> int:
    """Print the line of `describe_missing`, or that nothing is missing; return the exit code."""
    try:
        import_module("torch")
    except (ImportError, OSError) as error:  # OSError: a shared library is missing
        print(f"torch cannot be imported: {error}")  # noqa: T201
        return 1
    missing = describe_missing(is_import_allowed=True)
    print(missing or f"{_version()}, with all {len(NAMES)} private names that trainer_runtime uses")  # noqa: T201
    return int(bool(missing))


if __name__ == "__main__":
    sys.exit(main())
