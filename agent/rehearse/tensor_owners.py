"""Owners of tensors that no optimizer updates: modules, and variables of the script.

Examples are an average of the weights, a target network or a queue of features: training changes them, and an
evaluation or a later step reads them. There are two kinds of owners:

- A *module* is any living `nn.Module` that is not a part of another one. Its parameters and buffers are compared,
  except for those that an optimizer trains, which are the weights.
- A *tensor* is reached from a variable of the running functions, an attribute of their `self`, or an attribute of a
  module: directly, in containers, or in objects that are not torch's. It is compared only if training changes it in
  place; tensors that are created again in each step, such as a batch, are not. A tensor of one element counts as a
  measurement and is left out.
"""

from __future__ import annotations

import functools
import weakref
from collections import Counter, deque
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from itertools import chain
from types import BuiltinFunctionType, FrameType, FunctionType, MethodType, ModuleType
from typing import Any

from agent.rehearse.live_objects import ids_in_states, names_in, variables_in

_MAX_DEPTH = 4
_MAX_OBJECTS = 10_000
"""Objects that are visited per step; a variable may lead to any number of them."""
_MAX_ENTRIES = 1000
"""Containers with more entries hold data and are not searched."""
_OPAQUE_TYPES = (type, ModuleType, FunctionType, BuiltinFunctionType, MethodType)
_OPAQUE_PACKAGES = {"agent", "logging", "threading", "torch", "trainer_runtime"}
_REGISTRIES = {"_buffers", "_modules", "_parameters"}


@dataclass(frozen=True)
class TensorOwner:
    """A module or variable with tensors that no optimizer updates."""

    kind: str
    """module or tensor."""
    type: str
    name: str
    """The script's variable that holds it, or an empty string."""
    tensors: list[Any]
    is_in_state: bool
    """Whether a State saves all of them."""
    is_persistent: bool
    """Whether it had the same tensor objects one step before."""


class TensorOwners:
    """Finds the tensor owners of a script.

    Args:
        torch: the imported module.
    """

    def __init__(self, torch: Any) -> None:  # noqa: ANN401 - this package does not import torch
        self._torch = torch
        self._modules: dict[int, weakref.ref[Any]] = {}
        self._last_tensors: dict[tuple[str, str, int], list[weakref.ref[Any]]] = {}
        self.trained: list[str] = []
        """Variables that hold modules with trained parameters, as of the last call of `find`."""

    def watch(self) -> None:
        """Register each module from now on: when it is created, copied or unpickled."""
        for name in ("__init__", "__setstate__"):
            self._track_after(self._torch.nn.Module, name)

    def _track_after(self, owner: Any, name: str) -> None:  # noqa: ANN401 - a class of torch's
        original, modules = getattr(owner, name), self._modules

        @functools.wraps(original)
        def tracked_call(module: Any, /, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - passed through
            result = original(module, *args, **kwargs)
            modules.pop(id(module), None)  # a deleted module had this id
            modules[id(module)] = weakref.ref(module)
            return result

        setattr(owner, name, tracked_call)

    def find(
        self, frame: FrameType, states: list[Any], tracked: Iterable[object], excluded: Iterable[Any]
    ) -> list[TensorOwner]:
        """Return all tensor owners.

        Args:
            frame: in which the step is made.
            states: the script's States.
            tracked: objects that are recorded elsewhere, such as optimizers.
            excluded: tensors that are hashed elsewhere.
        """
        modules = self._live_modules()
        inner = {id(child) for module in modules for child in list(module._modules.values())}  # noqa: SLF001
        tops = [module for module in modules if id(module) not in inner]
        held = ids_in_states(states)
        held |= {id(tensor) for module in modules if id(module) in held for tensor in _registered(module)}
        elsewhere = {id(tensor) for tensor in excluded}
        registered = {id(tensor) for module in tops for tensor in _registered(module)}
        walk = _Walk(self._torch, elsewhere | registered, {id(each) for each in tracked})

        names, found = names_in(frame), []
        self.trained = []
        for name, value in variables_in(frame):
            parts = list(walk.find_within(value))
            for part in parts:
                names.setdefault(id(part), name)
            found.append(("tensor", value, name, walk.tensors(parts)))
        for top in tops:
            name = next((names[id(each)] for each in top.modules() if id(each) in names), "")
            if name and any(id(tensor) in elsewhere for tensor in top.parameters()):
                self.trained.append(name)
            tensors = [tensor for tensor in _registered(top) if id(tensor) not in elsewhere and _is_plain(tensor)]
            found.append(("module", top, name, tensors))
            for attribute, value in _attributes(top):
                label = f"{name or type(top).__name__}.{attribute}"
                found.append(("tensor", value, label, walk.tensors(walk.find_within(value))))
        return self._identifiable([each for each in found if each[3]], held)

    def _live_modules(self) -> list[Any]:
        modules = {key: module for key, ref in list(self._modules.items()) if (module := ref()) is not None}
        for key in self._modules.keys() - modules.keys():
            self._modules.pop(key, None)
        return list(modules.values())

    def _identifiable(self, found: list[tuple[str, Any, str, list[Any]]], held: set[int]) -> list[TensorOwner]:
        """Return the owners that can be found again in another process: not several unnamed modules of one class."""
        before, self._last_tensors = self._last_tensors, {}
        unnamed = Counter(type(value) for _, value, name, _ in found if not name)
        place: Counter[tuple[str, str]] = Counter()
        owners = []
        for kind, value, name, tensors in found:
            if unnamed[type(value)] > 1 and not name:
                continue
            key = (kind, name, place[kind, name])
            place[kind, name] += 1
            old = before.get(key, [])
            is_persistent = len(old) == len(tensors) and all(
                ref() is each for ref, each in zip(old, tensors, strict=True)
            )
            self._last_tensors[key] = [weakref.ref(each) for each in tensors]
            is_in_state = id(value) in held or all(id(each) in held for each in tensors)
            owners.append(TensorOwner(kind, type(value).__name__, name, tensors, is_in_state, is_persistent))
        return owners


class _Walk:
    """A search for tensors and modules in variables; each object is entered once.

    Args:
        torch: the imported module.
        excluded: ids of tensors that have another owner.
        entered: ids of objects not to enter.
    """

    def __init__(self, torch: Any, excluded: set[int], entered: set[int]) -> None:  # noqa: ANN401 - as above
        self._leaf_types = (torch.Tensor, torch.nn.Module)
        self._tensor = torch.Tensor
        self._excluded = excluded
        self._entered = entered
        self._budget = _MAX_OBJECTS

    def find_within(self, value: Any, depth: int = 0) -> Iterator[Any]:  # noqa: ANN401 - any object
        """Yield the tensors and modules that a value is or contains."""
        self._budget -= 1
        if self._budget < 0:
            return
        if isinstance(value, self._leaf_types):
            yield value
        elif depth < _MAX_DEPTH and id(value) not in self._entered:
            parts = _parts(value)
            if parts:
                self._entered.add(id(value))
            for part in parts:
                yield from self.find_within(part, depth + 1)

    def tensors(self, parts: Iterable[Any]) -> list[Any]:
        """Return those parts that are tensors which training may keep; each is returned once per search."""
        found = []
        for part in parts:
            if isinstance(part, self._tensor) and id(part) not in self._excluded and _may_be_kept(part):
                self._excluded.add(id(part))
                found.append(part)
        return found


def _parts(value: Any) -> list[Any]:  # noqa: ANN401 - any object
    parts: Collection[Any]
    if isinstance(value, dict):
        parts = value.values()
    elif isinstance(value, (list, tuple, set, deque)):
        parts = value
    elif isinstance(value, _OPAQUE_TYPES) or type(value).__module__.partition(".")[0] in _OPAQUE_PACKAGES:
        return []
    else:
        parts = getattr(value, "__dict__", {}).values()
    return list(parts) if len(parts) <= _MAX_ENTRIES else []


def _attributes(top: Any) -> Iterator[tuple[str, Any]]:  # noqa: ANN401 - a module of torch's
    """Yield the other attributes of a module and its submodules: no parameters, buffers or modules of torch."""
    for path, module in top.named_modules():
        if type(module).__module__.partition(".")[0] not in _OPAQUE_PACKAGES:
            for name, value in list(vars(module).items()):
                if name not in _REGISTRIES:
                    yield (f"{path}.{name}" if path else name), value


def _registered(module: Any) -> Iterator[Any]:  # noqa: ANN401 - as above
    return chain(module.parameters(), module.buffers())


def _may_be_kept(tensor: Any) -> bool:  # noqa: ANN401 - a tensor
    """Return whether it is neither a result of this step's forward pass nor a single number."""
    return tensor.grad_fn is None and tensor.numel() > 1 and _is_plain(tensor)


def _is_plain(tensor: Any) -> bool:  # noqa: ANN401 - a tensor
    """Return whether it has elements that can be read."""
    return str(tensor.layout) == "torch.strided" and not tensor.is_meta and not tensor.is_quantized
