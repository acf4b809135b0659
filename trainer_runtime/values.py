"""Reading and loading the states of objects, and plain values that can be loaded back safely.

Checkpoints are read by `torch.load(weights_only=True)`, which builds tensors and plain values and runs nothing else. A
value that it would refuse must be rejected when it is saved, while the run that made it still exists.
"""

from __future__ import annotations

import io
import math
import weakref
from collections import OrderedDict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import torch
from torch import nn

from trainer_runtime.capture.local import is_sharded

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

_RECOMPUTED = "_checkpoint_wrapped_module"
"""The attribute under which torch's `checkpoint_wrapper` keeps the module that it wraps."""

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
    """Return a key of a module's state without the parts that torch.compile and activation checkpointing add."""
    return ".".join(part for part in key.split(".") if part not in {_COMPILED, _RECOMPUTED})


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


class GivenObjects:
    """The tensors, lists, dicts, sets and bytearrays in the values of a script as it gave them.

    A script that trains on in the same process has replaced some since, by others of another shape, or by views of
    something else: a sample of the data set, say. Nothing may be written into these.

    Args:
        values: the values.
    """

    def __init__(self, values: Iterable[object]) -> None:
        self._found: dict[int, Callable[[], object]] = {}
        """By identity. A tensor that was replaced is not kept for this."""
        for value in values:
            self._add(value)

    def __contains__(self, thing: object) -> bool:
        found = self._found.get(id(thing))
        return found is not None and found() is thing

    def _add(self, thing: object) -> None:
        if isinstance(thing, torch.Tensor):
            self._found[id(thing)] = weakref.ref(thing)
        elif isinstance(thing, _FILLED):
            self._found[id(thing)] = lambda: thing
        if isinstance(thing, dict | list | tuple):
            for part in thing.values() if isinstance(thing, dict) else thing:
                self._add(part)


class RestoredMemory:
    """What a restore has written already, so that nothing is written twice with different content.

    A script may give one object under several names (`[zeros] * 3`, or `best=net.state_dict()`, whose tensors are the
    model's) and replace them later. Then the checkpoint has different values for what is still one object at a restart.

    Args:
        given: what the script gave; None: all that is found.
    """

    def __init__(self, given: GivenObjects | None = None) -> None:
        self._given = given
        self._tensors: dict[int, list[torch.Tensor]] = {}
        """The tensors that were restored, by storage."""
        self._containers: dict[int, tuple[object, object]] = {}
        """By identity: a list, dict, set or bytearray that was restored, and its saved value."""

    def add(self, state: object) -> None:
        """Note all tensors in an object's state."""
        if isinstance(state, torch.Tensor):
            self._add(state)
        elif isinstance(state, dict | list | tuple):
            for part in state.values() if isinstance(state, dict) else state:
                self.add(part)

    def write(self, given: torch.Tensor, saved: torch.Tensor) -> bool:
        """Copy `saved` into `given`. If that would change a tensor that was restored before, do nothing: False."""
        with torch.no_grad():
            shared = [each for each in self._beside(given) if _overlap(each, given)]
            if not shared:
                given.copy_(saved)
                self._add(given)
                return True
            before, kept = given.clone(), [each.clone() for each in shared]
            given.copy_(saved)
            if not all(map(_is_same, shared, kept)):
                given.copy_(before)
                return False
            self._add(given)
            return True

    def is_given(self, thing: object) -> bool:
        """Return whether the script gave this object, which can change in place, so that it is restored in it."""
        return self._given is None or thing in self._given

    def may_fill(self, given: object, saved: object) -> bool:
        """Return whether this container was not filled yet, or with the same; note that it is filled now."""
        _, earlier = self._containers.setdefault(id(given), (given, saved))
        return earlier is saved or is_equal(earlier, saved)

    def _add(self, tensor: torch.Tensor) -> None:
        if _has_storage(tensor):
            self._tensors.setdefault(_storage(tensor), []).append(tensor)

    def _beside(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        return self._tensors.get(_storage(tensor), []) if _has_storage(tensor) else []


def _has_storage(tensor: torch.Tensor) -> bool:
    return tensor.layout is torch.strided and not is_sharded(tensor) and tensor.numel() > 0


def _storage(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)  # noqa: SLF001 - a data pointer may belong to any device


def _overlap(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Return whether two tensors of one storage may have elements in common."""
    (first, last), (begin, end) = _extent(one), _extent(other)
    return first < end and begin < last


def _extent(tensor: torch.Tensor) -> tuple[int, int]:
    """Return the bytes of its storage between the first and the last element of a tensor."""
    size, first = tensor.element_size(), int(tensor.storage_offset())
    last = first + sum((length - 1) * stride for length, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return first * size, int(last + 1) * size


def _is_same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Return whether two tensors of one shape have the same elements; NaN counts as equal to NaN."""
    return bool(((one == other) | (one.isnan() & other.isnan())).all())


def is_equal(one: object, other: object) -> bool:
    """Compare plain values that may contain tensors; NaN counts as equal to NaN."""
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return (one.shape, one.dtype) == (other.shape, other.dtype) and _is_same(one.cpu(), other.cpu())
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(is_equal(part, other[key]) for key, part in one.items())
    if isinstance(one, list | tuple) and isinstance(other, list | tuple):
        return len(one) == len(other) and all(map(is_equal, one, other))
    if isinstance(one, torch.Tensor) or isinstance(other, torch.Tensor) or type(one) is not type(other):
        return False
    return bool(one == other or (one != one and other != other))  # noqa: PLR0124 - true of NaN only


def restore_value(path: str, given: object, saved: object, memory: RestoredMemory) -> object:
    """Return the saved value, in the script's own object if that can change in place.

    A list, dict, set, bytearray or tensor that was given to State keeps its identity, and a tensor its device, so that
    the script also reads the restored value under its own names. This holds for nested values too. A value that was
    given as anything else, None for instance, is replaced; so is an object that was restored already with another
    content, and one that the script did not give.

    Args:
        path: the value's name, for messages.
        given: the value that the script gave to State.
        saved: the value in the checkpoint or snapshot.
        memory: what was restored before.

    Raises:
        ValueError: an object that can change in place was given, and the saved value has another type, or the saved
            tensor another shape or dtype.
    """
    if isinstance(given, (torch.Tensor, *_FILLED)) and not memory.is_given(given):
        has_device = isinstance(given, torch.Tensor) and isinstance(saved, torch.Tensor)
        return saved.to(given.device) if has_device else saved  # type: ignore[union-attr,attr-defined] # as asked
    if isinstance(given, torch.Tensor):
        if not isinstance(saved, torch.Tensor) or (given.shape, given.dtype) != (saved.shape, saved.dtype):
            raise _other_value(path, given, saved)
        return given if memory.write(given, saved) else saved.to(given.device)
    for kind in _FILLED:
        if isinstance(given, kind):
            if not isinstance(saved, kind):
                raise _other_value(path, given, saved)
            if not memory.may_fill(given, saved):
                return saved
            return _fill(path, given, saved, memory)
    if isinstance(given, tuple) and isinstance(saved, tuple) and len(given) == len(saved):
        parts = enumerate(zip(given, saved, strict=True))
        return tuple(restore_value(f"{path}[{index}]", *both, memory) for index, both in parts)
    return saved


_FILLED = (dict, list, set, bytearray)
"""Types, other than tensors, of values that change in place."""


def _fill(path: str, given: Any, saved: Any, memory: RestoredMemory) -> object:  # noqa: ANN401 - of the same kind
    if isinstance(given, dict):
        restored = {key: _restore_part(f"{path}[{key!r}]", given, key, value, memory) for key, value in saved.items()}
        given.clear()
        given.update(restored)
    elif isinstance(given, list):
        own = dict(enumerate(given))
        given[:] = [_restore_part(f"{path}[{index}]", own, index, value, memory) for index, value in enumerate(saved)]
    elif isinstance(given, set):
        given.clear()
        given.update(saved)
    else:
        given[:] = saved
    return given


def _restore_part(path: str, given: dict[Any, object], key: object, saved: object, memory: RestoredMemory) -> object:
    """Return an element of a list or dict; one that the script did not give has no object to restore into."""
    return restore_value(path, given[key], saved, memory) if key in given else saved


@dataclass(frozen=True, slots=True)
class Outline:
    """What a value that the script gave to State must be like, to be restored in the script's own objects."""

    kind: type
    shape: torch.Size | None = None
    dtype: torch.dtype | None = None
    parts: tuple[tuple[Any, Outline], ...] = ()
    """Of the elements that change in place, by key or index."""

    def find_other(self, path: str, value: object) -> str:
        """Return why `value` could not be restored into what the script gave; empty if it could."""
        if not isinstance(value, self.kind):
            return _cannot_change(path, f"a {self.kind.__name__}", value)
        if isinstance(value, torch.Tensor):
            is_alike = (value.shape, value.dtype) == (self.shape, self.dtype)
            return "" if is_alike else _cannot_change(path, _describe_tensor(self.shape, self.dtype), value)
        if isinstance(value, dict | list):
            own = value if isinstance(value, dict) else dict(enumerate(value))
            found = (part.find_other(f"{path}[{key!r}]", own[key]) for key, part in self.parts if key in own)
            return next(filter(None, found), "")
        return ""


def outline(given: object) -> Outline | None:
    """Return the outline of a value that changes in place; None of any other."""
    if isinstance(given, torch.Tensor):
        return Outline(torch.Tensor, given.shape, given.dtype)
    for kind in _FILLED:
        if isinstance(given, kind):
            items = given.items() if isinstance(given, dict) else enumerate(given) if isinstance(given, list) else ()
            parts = ((key, outline(part)) for key, part in items)
            return Outline(kind, parts=tuple((key, part) for key, part in parts if part is not None))
    return None


def _cannot_change(path: str, given: str, value: object) -> str:
    return (
        f"State cannot save {path}: the script gave {given}, and it is {_describe(value)} now, which could not be "
        "restored in place; keep type and shape, or give None at first and use the value as an attribute of State"
    )


def _other_value(path: str, given: object, saved: object) -> ValueError:
    return ValueError(
        f"State cannot restore {path} in place: the checkpoint holds {_describe(saved)}, the script gave "
        f"{_describe(given)}; give State the same type and shape, or, where these may change, give None at first and "
        "use the value as an attribute of State"
    )


def _describe(value: object) -> str:
    if isinstance(value, torch.Tensor):
        return _describe_tensor(value.shape, value.dtype)
    return f"a {type(value).__name__}"


def _describe_tensor(shape: torch.Size | None, dtype: torch.dtype | None) -> str:
    return f"a tensor of shape {tuple(shape or ())} and {str(dtype).removeprefix('torch.')}"


def as_floats(metrics: dict[str, float | torch.Tensor]) -> dict[str, float]:
    """Return metrics as numbers; this waits for the devices of those that are tensors.

    Raises:
        TypeError: a metric is not a number; the message has its name.
    """
    numbers = {}
    for name, value in metrics.items():
        try:
            numbers[name] = float(value.item() if isinstance(value, torch.Tensor) else value)
        except (TypeError, ValueError, RuntimeError, OverflowError) as error:
            raise TypeError(f"commit({name}=...) wants a number or a tensor with one element, got {value!r}") from error
    return numbers


def finite_or_none(numbers: dict[str, float]) -> dict[str, float | None]:
    """Return metrics in a form that JSON can hold: None for values that are not finite."""
    return {name: number if math.isfinite(number) else None for name, number in numbers.items()}


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
