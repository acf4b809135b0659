"""Transformers' Trainer, Accelerate and Lightning under the agent: one added line each.

    trainer.add_callback(TransformersCallback(trainer))
    state = AccelerateState(accelerator)
    trainer = lightning.Trainer(callbacks=[LightningCallback()])

A `State` gets what the framework itself would put into a checkpoint. It is committed after every optimizer step and
restored at the next start. The position in the data is found by the framework's own means if it has them. No framework
is imported before its name here is used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from trainer_runtime.integrations.accelerate import AccelerateState
    from trainer_runtime.integrations.lightning import LightningCallback
    from trainer_runtime.integrations.transformers import TransformersCallback

__all__ = ["AccelerateState", "LightningCallback", "TransformersCallback"]

_FRAMEWORK = {
    "AccelerateState": "accelerate",
    "LightningCallback": "lightning",
    "TransformersCallback": "transformers",
}
"""The package that each class needs; our module has the same name."""


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
