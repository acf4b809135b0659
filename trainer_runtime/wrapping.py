"""The modules that a script has wrapped in DistributedDataParallel, so that they can be wrapped again in another group.

DistributedDataParallel keeps its process group for life, and what it sends is laid out for it. So a module is wrapped
again by `__init__`, on the same object and with the same arguments. What the script has added to it, its hooks, and its
`training` flag are put back.

A copy of such a module, by `deepcopy` or in an `AveragedModel`, keeps the process group too, and was not made by
`__init__`. It is brought into the new group as torch does it when a copy is made, which is not collective: some ranks
may have copies that others do not have.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

from torch import nn
from torch.nn.parallel import DistributedDataParallel

_FOREIGN = ("process_group", "device_mesh", "mixed_precision", "delay_all_reduce_named_params")
"""Arguments of DistributedDataParallel with which a module cannot be wrapped again."""
_HOOKS = [name for name in vars(nn.Module()) if name.endswith(("_hooks", "_hooks_with_kwargs", "_hooks_always_called"))]


_OF_GROUP = ("process_group", "reducer", "logger")
"""Attributes of DistributedDataParallel that a copy gets anew."""
_REGISTERS = ("_modules", "_parameters", "_buffers")


@dataclass(frozen=True, slots=True)
class _Wrapping:
    """How a module was wrapped."""

    positional: tuple[Any, ...]
    """Arguments of `DistributedDataParallel.__init__`, without the module."""
    named: dict[str, Any]
    attributes: frozenset[str]
    """What `__init__` has set. Everything else was added by the script."""
    flags: tuple[bool, ...]
    """Whether each parameter was to be trained."""


_wrapped: WeakKeyDictionary[DistributedDataParallel, _Wrapping] = WeakKeyDictionary()
"""The modules that are wrapped, in the order in which they were."""


_copies: WeakKeyDictionary[DistributedDataParallel, tuple[bool, ...]] = WeakKeyDictionary()
"""The modules that were made as copies of others, and whether each parameter was to be trained."""


def _flags(module: nn.Module) -> tuple[bool, ...]:
    """Whether each parameter is to be trained."""
    return tuple(parameter.requires_grad for parameter in module.parameters())


def _set_flags(module: nn.Module, flags: tuple[bool, ...]) -> None:
    """Set that, unless the module has other parameters than it had then."""
    parameters = list(module.parameters())
    if len(parameters) == len(flags):
        for parameter, flag in zip(parameters, flags, strict=True):
            parameter.requires_grad_(flag)


@functools.cache
def record_wrapping() -> None:
    """Record from now on with which arguments modules are wrapped; further calls do nothing."""
    wrap = DistributedDataParallel.__init__

    @functools.wraps(wrap)
    def wrap_and_record(self: DistributedDataParallel, module: nn.Module, *given: Any, **named: Any) -> None:  # noqa: ANN401
        wrap(self, module, *given, **named)
        attributes = _wrapped[self].attributes if self in _wrapped else frozenset(vars(self))
        _wrapped[self] = _Wrapping(given, named, attributes, _flags(module))

    DistributedDataParallel.__init__ = wrap_and_record  # type: ignore[method-assign]
    copy = DistributedDataParallel.__setstate__

    @functools.wraps(copy)
    def copy_and_record(self: DistributedDataParallel, state: dict[str, Any]) -> None:
        copy(self, state)  # type: ignore[no-untyped-call]
        _copies[self] = _flags(self.module)

    DistributedDataParallel.__setstate__ = copy_and_record  # type: ignore[method-assign]


def wrapped_modules() -> list[DistributedDataParallel]:
    """Return the modules that are wrapped, in the order in which they were."""
    return list(_wrapped)


def copied_modules() -> list[DistributedDataParallel]:
    """Return the modules that are copies of wrapped ones."""
    return list(_copies)


def find_unusual_wrapping() -> str:
    """Return why a module cannot be wrapped again; empty: all can."""
    for module, wrapping in _wrapped.items():
        foreign = next((name for name in _FOREIGN if wrapping.named.get(name)), None)
        if foreign:
            return f"a module is wrapped in DistributedDataParallel with {foreign}"
        if module._comm_hooks:  # noqa: SLF001 - no public name
            return "DistributedDataParallel has a communication hook"
    return ""


def wrap_again(module: DistributedDataParallel) -> None:
    """Wrap a module again, in the present process group; a collective."""
    wrapping = _wrapped[module]
    kept = {name: value for name, value in vars(module).items() if name in _HOOKS or name not in wrapping.attributes}
    registers = {name: dict(vars(module)[name]) for name in _REGISTERS}
    transient = set(module._non_persistent_buffers_set)  # noqa: SLF001 - torch's own module keeps it there
    is_training, frozen = module.training, _flags(module.module)
    # What the script has frozen since is averaged again once it trains: as it is without a move.
    _set_flags(module.module, wrapping.flags)
    try:
        DistributedDataParallel.__init__(module, module.module, *wrapping.positional, **wrapping.named)
    finally:
        _set_flags(module.module, frozen)
    vars(module).update(kept)
    for name, register in registers.items():
        vars(module)[name].update(register)
    module._non_persistent_buffers_set.update(transient)  # noqa: SLF001 - as above
    module.training = is_training


def move_copy(module: DistributedDataParallel) -> None:
    """Bring a copy of a wrapped module into the present process group; not a collective."""
    state = {name: value for name, value in vars(module).items() if name not in _OF_GROUP}
    if module.static_graph:
        state["_static_graph_delay_allreduce_enqueued"] = False  # as in a new module: it is so in each first step
    frozen = _flags(module.module)
    _set_flags(module.module, _copies[module])
    try:
        module.__setstate__(state)  # type: ignore[no-untyped-call]
    finally:
        _set_flags(module.module, frozen)
