"""The objects of a running script whose state a restart may lose: which there are, their names, who saves them."""

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
_DEEPEST = 6
_NOT_SCRIPTS = {"agent", "contextlib", "torch", "trainer_runtime"}


@dataclass(frozen=True)
class KnownObject:
    """An object that is followed."""

    kind: str
    """optimizer, scheduler, scaler, or generator."""
    thing: weakref.ref[Any]
    name: str
    """The script's variable, or an empty string."""
    is_held: bool
    """Whether a State saves it."""


class LiveObjects:
    """Finds and remembers the objects of interest.

    They are noted when they are made. To ask the garbage collector for them later would be simpler, but it also hands
    out what other threads are just building, and breaks that.

    Args:
        torch: the imported module.
    """

    def __init__(self, torch: Any) -> None:  # noqa: ANN401 - this package does not import torch
        self._torch = torch
        self._made: list[tuple[str, weakref.ref[Any]]] = []
        self._seen = 0
        self.known: list[KnownObject] = []
        self.states: list[Any] = []

    def watch(self) -> None:
        """Note each optimizer, scheduler, scaler and generator from now on."""
        torch = self._torch
        self.watch_class(torch.optim.Optimizer, "optimizer")
        self.watch_class(torch.optim.lr_scheduler.LRScheduler, "scheduler")
        self.watch_class(torch.amp.GradScaler, "scaler")
        self._watch_generators()

    def watch_class(self, owner: Any, kind: str) -> None:  # noqa: ANN401 - any class
        """Note each instance of a class from now on."""
        original = owner.__init__

        @functools.wraps(original)
        def initialise(thing: Any, *args: Any, **kwargs: Any) -> None:  # noqa: ANN401 - passed through
            original(thing, *args, **kwargs)
            if all(ref() is not thing for _, ref in self._made):
                self._made.append((kind, weakref.ref(thing)))

        owner.__init__ = initialise

    def _watch_generators(self) -> None:
        """Make `torch.Generator` a subclass of itself that draws the same numbers, as it has no Python `__init__`.

        What torch makes within does not count: it follows from the global random state.
        """
        torch, made = self._torch, self._made
        original = torch.Generator

        class Meta(type(original)):  # type: ignore[misc] # torch has one of its own
            def __instancecheck__(cls, thing: object) -> bool:
                return isinstance(thing, original)

        class Generator(original, metaclass=Meta):  # type: ignore[misc, valid-type]
            def __new__(cls, *args: object, **kwargs: object) -> Any:  # noqa: ANN401
                generator = original.__new__(cls, *args, **kwargs)
                maker = sys._getframe(1).f_globals.get("__name__", "")  # noqa: SLF001 - whose code it is
                if maker.partition(".")[0] not in _NOT_SCRIPTS:
                    made.append(("generator", weakref.ref(generator)))
                return generator

        Generator.__qualname__ = "Generator"
        Generator.__module__ = "torch"
        torch.Generator = Generator

    def has(self, kind: str) -> bool:
        """Whether there is one."""
        return any(each == kind and ref() is not None for each, ref in self._made)

    def optimizers(self) -> list[Any]:
        """Those that are known."""
        return [thing for each in self.known if each.kind == "optimizer" and (thing := each.thing()) is not None]

    def look(self, frame: FrameType) -> None:
        """Bring `known` up to date, with the names that the frames give what is new."""
        self._made[:] = [each for each in self._made if each[1]() is not None]
        made = [(kind, thing) for kind, ref in self._made if (thing := ref()) is not None]
        if len(made) == self._seen and all(each.thing() is not None for each in self.known):
            return
        self._seen = len(made)
        self.states = [thing for kind, thing in made if kind == "state"]
        names, held = names_in(frame), held_by(self.states)
        self.known = [
            KnownObject(kind, weakref.ref(thing), names.get(id(thing), ""), id(thing) in held)
            for kind, thing in made
            if kind != "state"
        ]


def names_in(frame: FrameType | None) -> dict[int, str]:
    """The names of objects, by id: variables of the running functions, and the attributes of their `self`."""
    names: dict[int, str] = {}
    for name, thing in variables_in(frame):
        names.setdefault(id(thing), name)
    return names


def variables_in(frame: FrameType | None) -> Iterator[tuple[str, Any]]:
    """The same as names and objects, the nearest first."""
    for each in _of_script(frame):
        for name, thing in list(each.f_locals.items()):
            if name == "self" and hasattr(thing, "__dict__"):
                for attribute, part in list(vars(thing).items()):
                    yield f"self.{attribute}", part
            elif not name.startswith("__"):
                yield name, thing


def held_by(states: list[Any]) -> set[int]:
    """Ids of all that the States hold, directly or in containers and objects that are not torch's.

    A scheduler holds its optimizer but does not save it, and so with all of torch's.
    """
    held: set[int] = set()
    level: list[Any] = list(states)
    for _ in range(_DEEPEST):
        inside = [part for thing in level if _is_open(thing) for part in gc.get_referents(*_content(thing))]
        level = [part for part in inside if id(part) not in held]
        held.update(id(part) for part in level)
    return held


def _content(thing: Any) -> list[Any]:  # noqa: ANN401 - of any object
    return [thing] if isinstance(thing, (dict, list, tuple, set)) else [vars(thing)]


def _is_open(thing: object) -> bool:
    if isinstance(thing, (dict, list, tuple, set)):
        return True
    is_plain = not isinstance(thing, (type, ModuleType)) and hasattr(thing, "__dict__")
    return is_plain and type(thing).__module__.partition(".")[0] != "torch" and not callable(thing)


def epoch_in(frame: FrameType | None) -> tuple[str, int] | None:
    """The script's own count of epochs: the nearest whole number that is called so."""
    for each in _of_script(frame):
        code = each.f_code
        names = tuple(each.f_globals) if code.co_name == "<module>" else code.co_varnames + code.co_cellvars
        for name in names:
            if _EPOCH.fullmatch(name) and type(value := each.f_locals.get(name)) is int:
                return name, value
    return None


def _of_script(frame: FrameType | None) -> Iterator[FrameType]:
    """This frame and those that called it, but for those whose names mean nothing to the user."""
    while frame is not None:
        if frame.f_globals.get("__name__", "").partition(".")[0] not in _NOT_SCRIPTS:
            yield frame
        frame = frame.f_back
