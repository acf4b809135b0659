"""The objects of a running script whose state a restart may lose, with their names and whether a State saves them."""

from __future__ import annotations

import functools
import gc
import re
import sys
import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from types import FrameType, ModuleType
from typing import Any

_EPOCH = re.compile(r"(?!.*(epochs|num|max|per_|first|start|total|last|best|len|size|steps|every))\w*epoch\w*")
_MAX_DEPTH = 6
_NOT_SCRIPTS = {"agent", "contextlib", "torch", "trainer_runtime"}


@dataclass(frozen=True)
class TrackedObject:
    """An object whose state is recorded."""

    kind: str
    """optimizer, scheduler, scaler or generator."""
    ref: weakref.ref[Any]
    name: str
    """The script's variable that holds it, or an empty string."""
    is_in_state: bool
    """Whether a State saves it."""


class LiveObjects:
    """The optimizers, schedulers, scalers, generators and States of the script.

    They are registered when they are created. Asking the garbage collector later would be simpler, but it also returns
    objects that other threads are just building, and breaks these.

    Args:
        torch: the imported module.
    """

    def __init__(self, torch: Any) -> None:  # noqa: ANN401 - this package does not import torch
        self._torch = torch
        self._created: list[tuple[str, weakref.ref[Any]]] = []
        self._count = 0
        self.tracked: list[TrackedObject] = []
        self.states: list[Any] = []

    def watch(self) -> None:
        """Register each optimizer, scheduler, scaler and generator from now on."""
        torch = self._torch
        self.watch_class(torch.optim.Optimizer, "optimizer")
        self.watch_class(torch.optim.lr_scheduler.LRScheduler, "scheduler")
        self.watch_class(torch.amp.GradScaler, "scaler")
        self._watch_generators()

    def watch_class(self, owner: Any, kind: str) -> None:  # noqa: ANN401 - any class
        """Register each instance of a class from now on."""
        original = owner.__init__

        @functools.wraps(original)
        def initialise(value: Any, /, *args: Any, **kwargs: Any) -> None:  # noqa: ANN401 - passed through
            original(value, *args, **kwargs)
            if all(ref() is not value for _, ref in self._created):
                self._created.append((kind, weakref.ref(value)))

        owner.__init__ = initialise

    def _watch_generators(self) -> None:
        """Replace `torch.Generator` by a subclass that registers its instances: the class has no Python `__init__`.

        Generators that torch itself creates are left out, because they follow from the global random state.
        """
        torch, created = self._torch, self._created
        original = torch.Generator

        class Meta(type(original)):  # type: ignore[misc] # torch has a metaclass
            def __instancecheck__(cls, value: object) -> bool:
                return isinstance(value, original)

        class Generator(original, metaclass=Meta):  # type: ignore[misc, valid-type]
            def __new__(cls, *args: object, **kwargs: object) -> Any:  # noqa: ANN401
                generator = original.__new__(cls, *args, **kwargs)
                maker = sys._getframe(1).f_globals.get("__name__", "")  # noqa: SLF001 - to see which module creates it
                if maker.partition(".")[0] not in _NOT_SCRIPTS:
                    created.append(("generator", weakref.ref(generator)))
                return generator

        Generator.__qualname__ = "Generator"
        Generator.__module__ = "torch"
        torch.Generator = Generator

    def has(self, kind: str) -> bool:
        """Return whether an object of this kind exists."""
        return any(each == kind and ref() is not None for each, ref in self._created)

    def optimizers(self) -> list[Any]:
        """Return the tracked optimizers."""
        return [value for each in self.tracked if each.kind == "optimizer" and (value := each.ref()) is not None]

    def update(self, frame: FrameType) -> None:
        """Update `tracked` and `states`; objects are named after variables in the frame and its callers."""
        self._created[:] = [each for each in self._created if each[1]() is not None]
        created = [(kind, value) for kind, ref in self._created if (value := ref()) is not None]
        if len(created) == self._count and all(each.ref() is not None for each in self.tracked):
            return
        self._count = len(created)
        self.states = [value for kind, value in created if kind == "state"]
        names, held = names_in(frame), ids_in_states(self.states)
        self.tracked = [
            TrackedObject(kind, weakref.ref(value), names.get(id(value), ""), id(value) in held)
            for kind, value in created
            if kind != "state"
        ]


def names_in(frame: FrameType | None) -> dict[int, str]:
    """Return the names of objects by id: variables of the running functions, and attributes of their `self`."""
    names: dict[int, str] = {}
    for name, value in variables_in(frame):
        names.setdefault(id(value), name)
    return names


def variables_in(frame: FrameType | None) -> Iterator[tuple[str, Any]]:
    """Yield these variables and attributes as (name, object), the innermost function first."""
    for each in _script_frames(frame):
        for name, value in list(each.f_locals.items()):
            if name == "self" and hasattr(value, "__dict__"):
                for attribute, part in list(vars(value).items()):
                    yield f"self.{attribute}", part
            elif not name.startswith("__"):
                yield name, value


def ids_in_states(states: list[Any]) -> set[int]:
    """Return the ids of all objects that the States hold, directly or in containers and objects that are not torch's.

    Objects of torch are not searched: a scheduler, for example, holds its optimizer but does not save it.
    """
    held: set[int] = set()
    level: list[Any] = list(states)
    for _ in range(_MAX_DEPTH):
        inside = [part for value in level if _is_traversed(value) for part in gc.get_referents(*_parts_of(value))]
        level = [part for part in inside if id(part) not in held]
        held.update(id(part) for part in level)
    return held


def _parts_of(value: Any) -> list[Any]:  # noqa: ANN401 - of any object
    return [value] if isinstance(value, (dict, list, tuple, set)) else [vars(value)]


def _is_traversed(value: object) -> bool:
    if isinstance(value, (dict, list, tuple, set)):
        return True
    is_plain = not isinstance(value, (type, ModuleType)) and hasattr(value, "__dict__")
    return is_plain and type(value).__module__.partition(".")[0] != "torch" and not callable(value)


def epoch_in(frame: FrameType | None) -> tuple[str, int] | None:
    """Return the script's own epoch counter, as (name, value): the nearest integer variable with such a name."""
    for each in _script_frames(frame):
        code = each.f_code
        names = tuple(each.f_globals) if code.co_name == "<module>" else code.co_varnames + code.co_cellvars
        for name in names:
            if _EPOCH.fullmatch(name) and type(value := each.f_locals.get(name)) is int:
                return name, value
    return None


def _script_frames(frame: FrameType | None) -> Iterator[FrameType]:
    """Yield this frame and its callers, without those of libraries, whose variables mean nothing to the user."""
    while frame is not None:
        if frame.f_globals.get("__name__", "").partition(".")[0] not in _NOT_SCRIPTS:
            yield frame
        frame = frame.f_back
