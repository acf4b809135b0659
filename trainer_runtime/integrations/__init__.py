"""Transformers' Trainer, Accelerate and Lightning under the agent, TensorBoard and MLflow: one added line each.

    trainer.add_callback(TransformersCallback(trainer))
    state = AccelerateState(accelerator)
    trainer = lightning.Trainer(callbacks=[LightningCallback()])
    log_to_tensorboard(state, "runs/mine")
    log_to_mlflow(state)

A `State` gets what the framework itself would put into a checkpoint. It is committed after every optimizer step and
restored at the next start. The position in the data is found by the framework's own means if it has them. No package is
imported before its name here is used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from trainer_runtime.integrations.accelerate import AccelerateState
    from trainer_runtime.integrations.lightning import LightningCallback
    from trainer_runtime.integrations.mlflow import log_to_mlflow
    from trainer_runtime.integrations.tensorboard import log_to_tensorboard
    from trainer_runtime.integrations.transformers import TransformersCallback

__all__ = ["AccelerateState", "LightningCallback", "TransformersCallback", "log_to_mlflow", "log_to_tensorboard"]

_FRAMEWORK = {
    "AccelerateState": "accelerate",
    "LightningCallback": "lightning",
    "TransformersCallback": "transformers",
    "log_to_mlflow": "mlflow",
    "log_to_tensorboard": "tensorboard",
}
"""The package that each name needs; our module has the same name."""


def __getattr__(name: str) -> object:
    if name not in _FRAMEWORK:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}; it has {', '.join(__all__)}")
    framework = _FRAMEWORK[name]
    try:
        module = import_module(f"{__name__}.{framework}")
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != framework:
            raise
        raise ImportError(
            f"{name} needs the package {framework}, which is not installed: pip install {framework}"
        ) from error
    value: object = getattr(module, name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
