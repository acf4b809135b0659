"""Runtime library for training scripts: joins the process group, and saves and restores the training in a `State`.

    import trainer_runtime as tr

    tr.init()
    model = DistributedDataParallel(Net().to(tr.device()))
    loader = tr.DataLoader(dataset, global_batch=512)
    state = tr.State(model=model, opt=opt, data=loader, best=0.0)
    for epoch in state.epochs(10):
        for batch in state.steps(loader):
            train_one(model, opt, batch, loader.weight)
            state.commit()
        with tr.phase("eval"):
            state.best = max(state.best, evaluate(model))

The agent imports `trainer_runtime.contract` and must not import torch with it. Therefore each name below is imported on
first use (PEP 562).
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from trainer_runtime import config, env, integrations
    from trainer_runtime.checkpoint import CheckpointError
    from trainer_runtime.data import DataLoader
    from trainer_runtime.dist import device, init, is_main, local_rank, rank, world_size
    from trainer_runtime.fetching import sample_rng
    from trainer_runtime.parts import PerRank
    from trainer_runtime.phases import phase
    from trainer_runtime.state import State

__all__ = [
    "CheckpointError",
    "DataLoader",
    "PerRank",
    "State",
    "config",
    "device",
    "env",
    "init",
    "integrations",
    "is_main",
    "local_rank",
    "phase",
    "rank",
    "sample_rng",
    "world_size",
]

_MODULES = ("config", "env", "integrations")
_SUBMODULE = dict.fromkeys(__all__, "trainer_runtime.dist") | {
    "CheckpointError": "trainer_runtime.checkpoint",
    "DataLoader": "trainer_runtime.data",
    "PerRank": "trainer_runtime.parts",
    "State": "trainer_runtime.state",
    "phase": "trainer_runtime.phases",
    "sample_rng": "trainer_runtime.fetching",
    **{name: f"trainer_runtime.{name}" for name in _MODULES},
}


def __getattr__(name: str) -> object:
    if name not in _SUBMODULE:
        raise AttributeError(f"module 'trainer_runtime' has no attribute {name!r}; it has {', '.join(__all__)}")
    module = import_module(_SUBMODULE[name])
    value: object = module if name in _MODULES else getattr(module, name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
