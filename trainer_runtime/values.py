"""Reading and loading the states of objects, and plain values that can be loaded back safely.

Checkpoints are read by `torch.load(weights_only=True)`, which builds tensors and plain values and runs nothing else. A
value that it would refuse must be rejected when it is saved, while the run that made it still exists.
"""

from __future__ import annotations

import io
import math
import sys
from collections import OrderedDict
from typing import Any, Protocol, runtime_checkable

import torch
from torch import nn

_COMPILED = "_orig_mod"
"""The attribute, and part of a state's keys, under which torch.compile keeps the module that it wraps."""


@runtime_checkable
class Stateful(Protocol):
    """An object with a state that can be saved and loaded: a module, optimizer, scheduler or scaler."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state."""

    def load_state_dict(self, state_dict: dict[str, Any], /) -> object:
        """Load a state."""


def read_state(target: Stateful) -> dict[str, Any]:
    """Return the object's state; that of a module is as if neither DDP nor torch.compile had wrapped it."""
    if not isinstance(target, nn.Module):
        return target.state_dict()
    state = unwrap(target).state_dict()
    if not any(_COMPILED in key for key in state):
        return state
    return {plain_key(key): value for key, value in state.items()}


def load_state(target: Stateful, state: dict[str, Any]) -> None:
    """Load a state from `read_state` into the object, however a module was wrapped then and is wrapped now."""
    if isinstance(target, nn.Module):
        target = unwrap(target)
        present = {plain_key(key): key for key in target.state_dict()}
        if any(_COMPILED in key for key in present.values()):
            state = {present.get(key, key): value for key, value in state.items()}
    target.load_state_dict(state)


def unwrap(module: nn.Module) -> nn.Module:
    """Return the user's own module inside DataParallel, DDP and torch.compile, which may be nested in any order."""
    while True:
        if isinstance(module, nn.parallel.DistributedDataParallel | nn.DataParallel):
            module = module.module
        elif _COMPILED in module._modules:  # noqa: SLF001 - named_children would iterate over all submodules
            module = module.get_submodule(_COMPILED)
        else:
            return module


def plain_key(key: str) -> str:
    """Return a key of a module's state without the parts that torch.compile adds."""
    return ".".join(part for part in key.split(".") if part != _COMPILED)


def require_loadable(name: str, value: object) -> None:
    """Check that `value` can be loaded back.

    Raises:
        TypeError: it cannot; the message names the part that could not.
    """
    blamed = _find_refused(name, value)
    if blamed is not None:
        path, part = blamed
        kind = f"{type(part).__module__}.{type(part).__qualname__}"
        do = "convert it (float(x), for instance) or give the object state_dict/load_state_dict"
        if is_sharded(part):
            do = "leave it out: sharded tensors belong in a module"
        raise TypeError(
            f"State cannot save {path}: wanted a tensor, int, float, str, bool, None or lists, tuples and dicts of "
            f"these, got {kind}; {do}"
        )


def restore_value(path: str, given: object, saved: object) -> object:
    """Return the saved value, in the script's own object if that can change in place.

    A list, dict or tensor that was given to State keeps its identity, and a tensor its device, so that the script also
    reads the restored value under its own names. This holds for nested values too. A value that was given as anything
    else, None for instance, is replaced.

    Args:
        path: the value's name, for messages.
        given: the value that the script gave to State.
        saved: the value in the checkpoint or snapshot.

    Raises:
        ValueError: a list, dict or tensor was given, and the saved value has another type, or the saved tensor another
            shape or dtype.
    """
    if isinstance(given, torch.Tensor):
        if not isinstance(saved, torch.Tensor) or (given.shape, given.dtype) != (saved.shape, saved.dtype):
            raise _other_value(path, given, saved)
        with torch.no_grad():
            given.copy_(saved)
        return given
    if isinstance(given, dict):
        if not isinstance(saved, dict):
            raise _other_value(path, given, saved)
        restored = {key: _restore_part(f"{path}[{key!r}]", given, key, value) for key, value in saved.items()}
        given.clear()
        given.update(restored)
        return given
    if isinstance(given, list):
        if not isinstance(saved, list):
            raise _other_value(path, given, saved)
        own = dict(enumerate(given))
        given[:] = [_restore_part(f"{path}[{index}]", own, index, value) for index, value in enumerate(saved)]
        return given
    if isinstance(given, tuple) and isinstance(saved, tuple) and len(given) == len(saved):
        parts = enumerate(zip(given, saved, strict=True))
        return tuple(restore_value(f"{path}[{index}]", *both) for index, both in parts)
    return saved


def _restore_part(path: str, given: dict[Any, object], key: object, saved: object) -> object:
    """Return an element of a list or dict; one that the script did not give has no object to restore into."""
    return restore_value(path, given[key], saved) if key in given else saved


def _other_value(path: str, given: object, saved: object) -> ValueError:
    return ValueError(
        f"State cannot restore {path} in place: the checkpoint holds {_describe(saved)}, the script gave "
        f"{_describe(given)}; give State the same type and shape, or, where these may change, give None at first and "
        "use the value as an attribute of State"
    )


def _describe(value: object) -> str:
    if isinstance(value, torch.Tensor):
        return f"a tensor of shape {tuple(value.shape)} and {str(value.dtype).removeprefix('torch.')}"
    return f"a {type(value).__name__}"


def is_sharded(value: object) -> bool:
    """Return whether this is a tensor of which each rank has a part."""
    tensor = sys.modules.get("torch.distributed.tensor")  # not imported: nothing can be sharded
    return tensor is not None and isinstance(value, tensor.DTensor)


def as_numbers(metrics: dict[str, float | torch.Tensor]) -> dict[str, float | None]:
    """Return metrics in a form that JSON can hold: None for values that are not finite.

    Raises:
        TypeError: a metric is not a number; the message has its name.
    """
    numbers = {}
    for name, value in metrics.items():
        try:
            number = float(value.item() if isinstance(value, torch.Tensor) else value)
        except (TypeError, ValueError, RuntimeError) as error:
            raise TypeError(f"commit({name}=...) wants a number or a tensor of one, got {value!r}") from error
        numbers[name] = number if math.isfinite(number) else None
    return numbers


def _find_refused(path: str, value: object) -> tuple[str, object] | None:
    if _loads_back(value):
        return None
    for key, part in _parts(value):
        blamed = _find_refused(f"{path}[{key!r}]", part)
        if blamed is not None:
            return blamed
    return path, value


def _parts(value: object) -> list[tuple[object, object]]:
    if isinstance(value, dict):
        return list(value.items())
    if isinstance(value, list | tuple):
        return list(enumerate(value))
    return []


def _without_tensors(value: object) -> object:
    """Copy the structure without the tensors: these are known to load back, and may be gigabytes.

    Raises:
        TypeError: a tensor is sharded: it would be loaded back as the shard of the rank that saved it.
    """
    kind = type(value)
    if is_sharded(value):
        raise TypeError("it is sharded")
    if kind in (torch.Tensor, nn.Parameter):
        return None
    if kind in (dict, OrderedDict):
        return {key: _without_tensors(part) for key, part in _parts(value)}
    if kind in (list, tuple):
        return [_without_tensors(part) for _, part in _parts(value)]
    return value


def _loads_back(value: object) -> bool:
    """Try `torch.load` itself, because its list of safe types grows with torch's versions."""
    buffer = io.BytesIO()
    try:
        torch.save(_without_tensors(value), buffer)
        buffer.seek(0)
        torch.load(buffer, weights_only=True)
    except Exception:  # noqa: BLE001 - pickling can raise anything; any error means no
        return False
    return True
