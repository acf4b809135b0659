"""What a State is made of, under the user's names: objects and values equal on all ranks, and what differs."""

from __future__ import annotations

import sys
from importlib import import_module
from typing import TYPE_CHECKING, Any, TypeVar, cast

import torch
from torch import nn

from trainer_runtime.hostcopy import HostCopier
from trainer_runtime.parts import Parts, PerRank, is_stateful_loader
from trainer_runtime.sources import is_own_loader
from trainer_runtime.values import Stateful, is_sharded, load_state, read_state, require_loadable, restore_value

if TYPE_CHECKING:
    from trainer_runtime.sharded import Shards

T = TypeVar("T")


class Contents:
    """The objects and values of a State.

    Args:
        things: what the user gave, by name.

    Raises:
        ValueError: one of them is sharded in a way that cannot be saved.
    """

    def __init__(self, things: dict[str, object]) -> None:
        self._objects: dict[str, Stateful] = {}
        self._values: dict[str, object] = {}
        self._own: dict[str, Stateful] = {}
        self._generators: dict[str, torch.Generator] = {}
        for name, thing in things.items():
            self._sort_in(name, thing)
        modules = {name: thing for name, thing in self._objects.items() if isinstance(thing, nn.Module)}
        for name, module in modules.items():
            _refuse_fsdp1(name, module)
        self.shards = _find_shards(self._objects)
        """Of the sharded ones among the objects; None: there are none."""
        sharded = self.shards.names if self.shards is not None else frozenset()
        self._whole = {name: thing for name, thing in self._objects.items() if name not in sharded}
        self.parts = Parts(self._own, modules, self._generators)

    def get(self, name: str) -> Any:  # noqa: ANN401 - values have the types that the user gave them
        """Return an object or a value; AttributeError if there is none of this name."""
        for things in (self._values, self._objects, self._own, self._generators):
            if name in things:
                return things[name]
        raise AttributeError(f"State has no {name!r}; name it when making it: State({name}=...)")

    def set(self, name: str, value: object) -> None:
        """Replace a plain value; AttributeError if the name is unknown or that of an object."""
        self.get(name)
        if name not in self._values:
            raise AttributeError(f"State saves {name!r} by its own state; load into it instead of replacing it")
        self._values[name] = value

    def holds(self, thing: object) -> bool:
        """Tell whether this is one of the objects."""
        return any(thing is held for things in (self._objects, self._own) for held in things.values())

    def streams(self) -> dict[str, Stateful]:
        """Return the objects that items may be drawn from and that keep their own place, but for loaders of ours."""
        return {
            name: thing
            for name, thing in {**self._objects, **self._own}.items()
            if (hasattr(thing, "__iter__") or hasattr(thing, "__next__"))
            and not isinstance(thing, nn.Module)
            and not is_own_loader(thing)
        }

    def of_kind(self, kind: type[T]) -> list[T]:
        """Return the objects of this kind."""
        return list(self.by_kind(kind).values())

    def by_kind(self, kind: type[T]) -> dict[str, T]:
        """Return the same by name."""
        return {name: thing for name, thing in self._objects.items() if isinstance(thing, kind)}

    def read(self) -> dict[str, Any]:
        """Return what is whole on every rank and equal on all, as it is to be saved."""
        return {**{name: read_state(thing) for name, thing in self._whole.items()}, **self._values}

    def read_checked(self) -> dict[str, Any]:
        """Return the same; TypeError, naming it, if a part of it would not load back."""
        contents = self.read()
        for name, value in contents.items():
            require_loadable(name, value)
        if self.shards is not None:
            self.shards.check()
        return contents

    def copy_kept(self, saved: dict[str, Any]) -> dict[str, Any]:
        """Return what `load` is given with copies of all that it keeps: a module copies by itself."""
        copier = HostCopier()
        return {
            name: state if isinstance(self._whole.get(name), nn.Module) else copier.copy(state)
            for name, state in saved.items()
        }

    def load(self, saved: dict[str, Any], saved_part: dict[str, Any]) -> None:
        """Take on what `read` returned.

        Args:
            saved: that.
            saved_part: any rank's part of the same checkpoint; `parts` loads it.

        Raises:
            ValueError: they have other names.
        """
        own = {*self._own, *self._generators}
        saved_own = {*saved_part["objects"], *saved_part["random"]["generators"]}
        _require_same("", set(saved), {*self._whole, *self._values})
        _require_same(" for each rank", saved_own, own)
        for name, thing in self._whole.items():
            load_state(thing, saved[name])
        for name, given in self._values.items():
            self._values[name] = restore_value(name, given, saved[name])

    def _sort_in(self, name: str, thing: object) -> None:
        if isinstance(thing, PerRank):
            self._own[name] = thing.thing
        elif isinstance(thing, torch.Generator):
            self._generators[name] = thing
        elif isinstance(thing, Stateful):
            (self._own if is_stateful_loader(thing) else self._objects)[name] = thing
        else:
            self._values[name] = thing


def _refuse_fsdp1(name: str, module: nn.Module) -> None:
    """Its states are collectives, or one rank's own: they look like those of a module that is whole on every rank."""
    fsdp = sys.modules.get("torch.distributed.fsdp")  # where nobody imported it, nothing is wrapped in it
    if fsdp is not None and any(isinstance(each, fsdp.FullyShardedDataParallel) for each in module.modules()):
        raise ValueError(
            f"State cannot save {name}: wanted a module that is whole on every rank, or sharded by fully_shard "
            "(FSDP2), got one with FullyShardedDataParallel (FSDP1): use fully_shard"
        )


def _find_shards(objects: dict[str, Stateful]) -> Shards | None:
    modules = (thing for thing in objects.values() if isinstance(thing, nn.Module))
    if not any(is_sharded(parameter) for module in modules for parameter in module.parameters()):
        return None
    return cast("Shards", import_module("trainer_runtime.sharded").Shards(objects))


def _require_same(where: str, saved: set[str], given: set[str]) -> None:
    if saved != given:
        raise ValueError(
            f"the checkpoint holds {sorted(saved)}{where}, this State is made of {sorted(given)}{where}; "
            "give State the same names, or start over in another directory"
        )
