"""What keeps tensors that no optimizer updates: modules, and the script's variables.

An average of the weights, a target network, a queue of features: training changes them, and an evaluation or a later
step reads them. They are found where they are kept:

- A *module* is any living `nn.Module` that is not a part of another. Its parameters and buffers count, but for those
  that an optimizer trains: these are the weights.
- A *tensor* is what a variable of the running functions, an attribute of their `self`, or an attribute of a module
  leads to: itself, in containers, or in objects that are not torch's. It counts only if training changes it in place:
  what is made anew in each step, as a batch is, is not kept. A single number is taken for a measurement, and left out.
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

from agent.rehearse.live_objects import held_by, names_in, variables_in

_DEEPEST = 4
_MOST_LOOKED_AT = 10_000
"""Objects per step. A variable may lead to anything; what comes after so many is not looked at."""
_LARGEST = 1000
"""A container with more entries holds data."""
_CLOSED = (type, ModuleType, FunctionType, BuiltinFunctionType, MethodType)
_CLOSED_PACKAGES = {"agent", "logging", "threading", "torch", "trainer_runtime"}
_REGISTERED = {"_buffers", "_modules", "_parameters"}


@dataclass(frozen=True)
class TensorOwner:
    """Something that keeps tensors."""

    kind: str
    """module or tensor."""
    type: str
    name: str
    """The script's variable, or an empty string."""
    tensors: list[Any]
    is_held: bool
    """Whether a State saves all of them."""
    is_old: bool
    """Whether it had these very tensors when it was looked at last."""


class TensorOwners:
    """Finds them.

    Args:
        torch: the imported module.
    """

    def __init__(self, torch: Any) -> None:  # noqa: ANN401 - this package does not import torch
        self._torch = torch
        self._modules: dict[int, weakref.ref[Any]] = {}
        self._before: dict[tuple[str, str, int], list[weakref.ref[Any]]] = {}
        self.trained: list[str] = []
        """Names of the modules that optimizers train, as of the last time."""

    def watch(self) -> None:
        """Note each module from now on: when it is made, and when it is copied or unpickled."""
        for name in ("__init__", "__setstate__"):
            self._note_after(self._torch.nn.Module, name)

    def _note_after(self, owner: Any, name: str) -> None:  # noqa: ANN401 - a class of torch's
        original, modules = getattr(owner, name), self._modules

        @functools.wraps(original)
        def noted(module: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - passed through
            result = original(module, *args, **kwargs)
            modules.pop(id(module), None)  # one that is gone had this id
            modules[id(module)] = weakref.ref(module)
            return result

        setattr(owner, name, noted)

    def find(
        self, frame: FrameType, states: list[Any], others: Iterable[object], left_out: Iterable[Any]
    ) -> list[TensorOwner]:
        """Return all of them.

        Args:
            frame: the step's.
            states: the script's States.
            others: objects that are followed by other means, as optimizers are.
            left_out: tensors that are hashed elsewhere.
        """
        modules = self._living()
        inner = {id(child) for module in modules for child in list(module._modules.values())}  # noqa: SLF001
        tops = [module for module in modules if id(module) not in inner]
        held = held_by(states)
        held |= {id(tensor) for module in modules if id(module) in held for tensor in _registered(module)}
        elsewhere = {id(tensor) for tensor in left_out}
        registered = {id(tensor) for module in tops for tensor in _registered(module)}
        walk = _Walk(self._torch, elsewhere | registered, {id(each) for each in others})

        names, found = names_in(frame), []
        self.trained = []
        for name, thing in variables_in(frame):
            parts = list(walk.inside(thing))
            for part in parts:
                names.setdefault(id(part), name)
            found.append(("tensor", thing, name, walk.tensors(parts)))
        for top in tops:
            name = next((names[id(each)] for each in top.modules() if id(each) in names), "")
            if name and any(id(tensor) in elsewhere for tensor in top.parameters()):
                self.trained.append(name)
            tensors = [tensor for tensor in _registered(top) if id(tensor) not in elsewhere and _is_plain(tensor)]
            found.append(("module", top, name, tensors))
            for inside, value in _attributes(top):
                label = f"{name or type(top).__name__}.{inside}"
                found.append(("tensor", value, label, walk.tensors(walk.inside(value))))
        return self._keepers([each for each in found if each[3]], held)

    def _living(self) -> list[Any]:
        modules = {key: module for key, ref in list(self._modules.items()) if (module := ref()) is not None}
        for key in self._modules.keys() - modules.keys():
            self._modules.pop(key, None)
        return list(modules.values())

    def _keepers(self, found: list[tuple[str, Any, str, list[Any]]], held: set[int]) -> list[TensorOwner]:
        """Leave out what cannot be recognised in another process: modules of one class without a name."""
        before, self._before = self._before, {}
        unnamed = Counter(type(thing) for _, thing, name, _ in found if not name)
        place: Counter[tuple[str, str]] = Counter()
        keepers = []
        for kind, thing, name, tensors in found:
            if unnamed[type(thing)] > 1 and not name:
                continue
            key = (kind, name, place[kind, name])
            place[kind, name] += 1
            old = before.get(key, [])
            is_old = len(old) == len(tensors) and all(ref() is each for ref, each in zip(old, tensors, strict=True))
            self._before[key] = [weakref.ref(each) for each in tensors]
            is_held = id(thing) in held or all(id(each) in held for each in tensors)
            keepers.append(TensorOwner(kind, type(thing).__name__, name, tensors, is_held, is_old))
        return keepers


class _Walk:
    """Goes through variables for tensors and modules; each object is entered once.

    Args:
        torch: the imported module.
        left_out: ids of tensors that belong elsewhere.
        entered: ids of objects not to enter.
    """

    def __init__(self, torch: Any, left_out: set[int], entered: set[int]) -> None:  # noqa: ANN401 - as above
        self._ends = (torch.Tensor, torch.nn.Module)
        self._tensor = torch.Tensor
        self._left_out = left_out
        self._entered = entered
        self._left = _MOST_LOOKED_AT

    def inside(self, thing: Any, depth: int = 0) -> Iterator[Any]:  # noqa: ANN401 - any object
        """Yield the tensors and the modules that a thing is or leads to."""
        self._left -= 1
        if self._left < 0:
            return
        if isinstance(thing, self._ends):
            yield thing
        elif depth < _DEEPEST and id(thing) not in self._entered:
            parts = _parts(thing)
            if parts:
                self._entered.add(id(thing))
            for part in parts:
                yield from self.inside(part, depth + 1)

    def tensors(self, parts: Iterable[Any]) -> list[Any]:
        """Of these, the tensors that may be kept; each is returned once in a walk."""
        found = []
        for part in parts:
            if isinstance(part, self._tensor) and id(part) not in self._left_out and _is_kept(part):
                self._left_out.add(id(part))
                found.append(part)
        return found


def _parts(thing: Any) -> list[Any]:  # noqa: ANN401 - any object
    parts: Collection[Any]
    if isinstance(thing, dict):
        parts = thing.values()
    elif isinstance(thing, (list, tuple, set, deque)):
        parts = thing
    elif isinstance(thing, _CLOSED) or type(thing).__module__.partition(".")[0] in _CLOSED_PACKAGES:
        return []
    else:
        parts = getattr(thing, "__dict__", {}).values()
    return list(parts) if len(parts) <= _LARGEST else []


def _attributes(top: Any) -> Iterator[tuple[str, Any]]:  # noqa: ANN401 - a module of torch's
    """Attributes of a module and its parts that are no parameters, buffers or modules; not of torch's own classes."""
    for path, module in top.named_modules():
        if type(module).__module__.partition(".")[0] not in _CLOSED_PACKAGES:
            for name, value in list(vars(module).items()):
                if name not in _REGISTERED:
                    yield (f"{path}.{name}" if path else name), value


def _registered(module: Any) -> Iterator[Any]:  # noqa: ANN401 - as above
    return chain(module.parameters(), module.buffers())


def _is_kept(tensor: Any) -> bool:  # noqa: ANN401 - a tensor
    """Whether it is neither a result of this step's forward pass nor a single number."""
    return tensor.grad_fn is None and tensor.numel() > 1 and _is_plain(tensor)


def _is_plain(tensor: Any) -> bool:  # noqa: ANN401 - a tensor
    """Whether it has elements that can be read."""
    return str(tensor.layout) == "torch.strided" and not tensor.is_meta and not tensor.is_quantized
