"""The objects and values of a State under the user's names: those equal on all ranks, and those of each rank."""

from __future__ import annotations

import sys
from importlib import import_module
from typing import TYPE_CHECKING, Any, TypeVar, cast

import torch
from torch import nn
from torch.optim import Optimizer

from trainer_runtime.capture.local import has_shards
from trainer_runtime.flat import packed
from trainer_runtime.hostcopy import HostCopier
from trainer_runtime.parts import Parts, PerRank, is_stateful_loader
from trainer_runtime.sources import is_own_loader
from trainer_runtime.values import (
    GivenObjects,
    RestoredMemory,
    Stateful,
    is_equal,
    load_state,
    outline,
    read_state,
    require_loadable,
    restore_value,
)

if TYPE_CHECKING:
    from trainer_runtime.capture.engines import Engine
    from trainer_runtime.capture.shards import Shards

T = TypeVar("T")

_EXTRA_STATE = "_extra_state"
"""The end of the keys under which modules keep what is neither parameter nor buffer."""

_ENGINE = "DeepSpeedEngine"

SHARDED = "sharded"
"""The key of what a rank holds of sharded objects, in its part of a snapshot and in the content to load."""


class OtherWorldError(RuntimeError):
    """Something was saved by another number of ranks, and cannot be divided anew."""


class Contents:
    """The objects and values of a State.

    Args:
        things: the user's objects and values, by name.

    Raises:
        ValueError: a module is sharded in a way that cannot be saved.
    """

    def __init__(self, things: dict[str, object]) -> None:
        self._objects: dict[str, Stateful] = {}
        self._values: dict[str, object] = {}
        self._own: dict[str, Stateful] = {}
        self._generators: dict[str, torch.Generator] = {}
        for name, thing in things.items():
            if not _is_deepspeeds(thing, _ENGINE):
                _refuse_deepspeed(name, thing.thing if isinstance(thing, PerRank) else thing)
            self._add(name, thing)
        modules = {name: thing for name, thing in self._objects.items() if isinstance(thing, nn.Module)}
        for name, module in modules.items():
            _refuse_fsdp1(name, module)
        self.engines = _find_engines(self._objects)
        """DeepSpeed's engines."""
        self.shards = _find_shards(self._objects, self.engines)
        """The objects of which each rank holds a part; None if there are none."""
        sharded = self.shards.names if self.shards is not None else frozenset()
        self._whole = {name: thing for name, thing in self._objects.items() if name not in sharded}
        self._whole |= {engine.name: engine for engine in self.engines}
        self.parts = Parts(self._own, modules, self._generators)
        self._outlines = {name: found for name, value in self._values.items() if (found := outline(value)) is not None}
        self._given: GivenObjects | None = None
        """None: the script may still change what it gives."""
        self._committed: dict[str, Any] | None = None

    def get(self, name: str) -> Any:  # noqa: ANN401 - values have the types that the user gave them
        """Return the object or value of this name; AttributeError if there is none."""
        for things in (self._values, self._objects, self._own, self._generators):
            if name in things:
                return things[name]
        raise AttributeError(f"State has no {name!r}; pass it to the constructor: State({name}=...)")

    def set(self, name: str, value: object) -> None:
        """Replace a plain value; AttributeError if the name is unknown or belongs to an object."""
        self.get(name)
        if name not in self._values:
            raise AttributeError(f"State saves {name!r} by its own state; load into it instead of replacing it")
        self._values[name] = value

    def holds(self, thing: object) -> bool:
        """Return whether `thing` is one of the objects."""
        return any(thing is held for things in (self._objects, self._own) for held in things.values())

    def streams(self) -> dict[str, Stateful]:
        """Return the objects that can be iterated and save their own position, without `tr.DataLoader`s."""
        return {
            name: thing
            for name, thing in {**self._objects, **self._own}.items()
            if (hasattr(thing, "__iter__") or hasattr(thing, "__next__"))
            and not isinstance(thing, nn.Module)
            and not is_own_loader(thing)
        }

    def of_type(self, kind: type[T]) -> list[T]:
        """Return the objects of this type."""
        return list(self.by_type(kind).values())

    def by_type(self, kind: type[T]) -> dict[str, T]:
        """Return the objects of this type, by name."""
        return {name: thing for name, thing in self._objects.items() if isinstance(thing, kind)}

    def optimizers(self) -> list[Any]:
        """Return the optimizers, also those in engines; some wrap another one."""
        return [*self.of_type(Optimizer), *(engine.optimizer for engine in self.engines)]

    def read(self) -> dict[str, Any]:
        """Return what a checkpoint holds of the objects and values that are whole and equal on all ranks."""
        return {**{name: read_state(thing) for name, thing in self._whole.items()}, **self._values}

    def read_part(self) -> dict[str, Any]:
        """Return what a snapshot holds of this rank alone: its own part, and what it has of sharded objects.

        Raises:
            LayoutError: a sharded tensor is laid out in a way that cannot be described; the message has its name.
        """
        part = self.parts.read()
        # Some are new tensors each time, for which the layout of all others would be made anew.
        part["random"] = {name: state if name == "python" else packed(state) for name, state in part["random"].items()}
        return part if self.shards is None else {**part, SHARDED: self.shards.read()}

    def read_checked(self) -> dict[str, Any]:
        """Return the same as `read`; TypeError, with the name, if something could not be loaded back."""
        contents = self.read()
        for name, value in contents.items():
            require_loadable(name, value)
        self.check_outlines()
        if self.shards is not None:
            self.shards.check()
        return contents

    def check_outlines(self) -> None:
        """Raise TypeError if a value could not be restored in place any more; it could be at first."""
        for name, outline_ in self._outlines.items():
            if fault := outline_.find_other(name, self._values[name]):
                raise TypeError(fault)

    def copy_kept(self, saved: dict[str, Any]) -> dict[str, Any]:
        """Return `saved` with copies of all that `load` would keep by reference; a module copies tensors by itself."""
        copier = HostCopier()
        for name, state in saved.items():
            if not isinstance(self._whole.get(name), nn.Module):
                saved[name] = copier.copy(state)
                continue
            for key in state:
                if key.endswith(_EXTRA_STATE):
                    state[key] = copier.copy(state[key])
        return saved

    def load(self, saved: dict[str, Any], saved_part: dict[str, Any]) -> None:
        """Load what `read` returned.

        Args:
            saved: the result of `read`.
            saved_part: any rank's own part of the same checkpoint, to compare names; `parts` loads it.

        Raises:
            ValueError: the names of the checkpoint and of this State differ.
        """
        own = {*self._own, *self._generators}
        saved_own = {*saved_part["objects"], *saved_part["random"]["generators"]}
        _require_same("", set(saved), {*self._whole, *self._values})
        _require_same(" for each rank", saved_own, own)
        memory = RestoredMemory(self._given)
        modules = {**self.by_type(nn.Module), **{engine.name: engine.module for engine in self.engines}}
        for name, thing in self._whole.items():
            load_state(thing, saved[name])
            if name in modules:
                memory.add(read_state(modules[name]))
        for name, given in self._values.items():
            self._values[name] = restore_value(name, given, saved[name], memory)

    def require_boundary(self) -> None:
        """Raise RuntimeError if an engine is accumulating gradients, which are not saved."""
        for engine in self.engines:
            engine.require_boundary()

    def require_world(self, saved_size: int, size: int) -> None:
        """Raise OtherWorldError if something can only be restored by as many ranks as have saved it."""
        if self.engines and saved_size != size:
            raise OtherWorldError(
                f"State cannot restore {self.engines[0].name}: {saved_size} ranks saved what DeepSpeed has divided "
                f"among them, and this group has {size}; train with {saved_size} ranks (--np={saved_size}), or start "
                "over with --fresh"
            )

    def note_given(self) -> None:
        """Call before each restore. The first call notes what the script gave: nothing else is restored in place."""
        self._given = self._given or GivenObjects(self._values.values())
        self.parts.note_given()

    def note_committed(self) -> None:
        """Keep a copy of what `return_to_committed` brings back."""
        self._committed = self.copy_light()

    def return_to_committed(self) -> list[str]:
        """Undo what was changed since `note_committed`, and forget the copy; return the names of what had changed.

        This is about everything light: values, schedules and the like, and the options of optimizers, as a schedule
        sets them. It does nothing where nothing was noted.
        """
        committed, self._committed = self._committed, None
        if committed is None:
            return []
        now = self.read_light()
        changed = [name for name, state in committed.items() if not is_equal(state, now[name])]
        engines = {engine.name: engine for engine in self.engines}
        for name in changed:
            if name in self._values:
                self._values[name] = restore_value(
                    name, self._values[name], committed[name], RestoredMemory(self._given)
                )
            elif name in engines:
                _set_options(name, engines[name].groups, committed[name]["options"])
                if engines[name].schedule is not None:
                    load_state(engines[name].schedule, committed[name]["schedule"])
            elif isinstance(thing := self._objects[name], Optimizer):
                _set_options(name, thing.param_groups, committed[name])
            else:
                load_state(thing, committed[name])
        return changed

    def read_light(self) -> dict[str, Any]:
        """Return the values, the states of schedules and the like, and the options of optimizers, by name."""
        streams = self.streams()
        objects = {
            name: [_options(group) for group in thing.param_groups]
            if isinstance(thing, Optimizer)
            else read_state(thing)
            for name, thing in self._objects.items()
            if isinstance(thing, Optimizer)
            or not (isinstance(thing, nn.Module) or is_own_loader(thing) or name in streams)
        }
        return {**objects, **{engine.name: _light_of(engine) for engine in self.engines}, **self._values}

    def copy_light(self) -> dict[str, Any]:
        """Return a copy of `read_light`, which later steps do not change."""
        copied: dict[str, Any] = HostCopier().copy(self.read_light())
        return copied

    def versions(self) -> dict[str, list[int]]:
        """Return the version counters of the modules' parameters, which torch counts up at each change in place."""
        modules = {name: thing for name, thing in self._whole.items() if isinstance(thing, nn.Module)}
        return {
            name: [each._version for each in module.parameters() if not each.is_inference()]  # noqa: SLF001 - no public name
            for name, module in modules.items()
        }

    def _add(self, name: str, thing: object) -> None:
        if isinstance(thing, PerRank):
            self._own[name] = thing.thing
        elif isinstance(thing, torch.Generator):
            self._generators[name] = thing
        elif isinstance(thing, Stateful):
            (self._own if is_stateful_loader(thing) else self._objects)[name] = thing
        else:
            self._values[name] = thing


def _options(group: dict[str, Any]) -> dict[str, Any]:
    """Return the options of an optimizer's group of parameters."""
    return {name: value for name, value in group.items() if name != "params"}


def _light_of(engine: Engine) -> dict[str, Any]:
    """Return the options of an engine's optimizer, and the state of its schedule."""
    return {
        "options": [_options(group) for group in engine.groups],
        "schedule": None if engine.schedule is None else read_state(engine.schedule),
    }


def _set_options(name: str, groups: list[dict[str, Any]], saved: list[dict[str, Any]]) -> None:
    for group, options in zip(groups, saved, strict=False):
        restored = {key: restore_value(name, group.get(key), each, RestoredMemory()) for key, each in options.items()}
        group.update(restored)


def _refuse_fsdp1(name: str, module: nn.Module) -> None:
    """Raise ValueError for FSDP1: its `state_dict` looks like that of a module that is whole on every rank."""
    fsdp = sys.modules.get("torch.distributed.fsdp")  # not imported: no module can be wrapped
    if fsdp is not None and any(isinstance(each, fsdp.FullyShardedDataParallel) for each in module.modules()):
        raise ValueError(
            f"State cannot save {name}: wanted a module that is whole on every rank, or sharded by fully_shard "
            "(FSDP2), got one with FullyShardedDataParallel (FSDP1): use fully_shard"
        )


def _refuse_deepspeed(name: str, thing: object) -> None:
    """Raise ValueError for a part of an engine: ZeRO's weights are not in `state_dict`, or copies of them elsewhere."""
    within = list(thing.modules()) if isinstance(thing, nn.Module) else [thing]
    divided = next((each for each in within if _is_deepspeeds(each, _ENGINE, "DeepSpeedOptimizer")), None)
    if divided is not None:
        kind = f"a {type(divided).__name__}"
    elif isinstance(thing, nn.Module) and any(getattr(each, "ds_id", None) is not None for each in thing.parameters()):
        kind = "one of whose parameters each rank has a part (ZeRO 3)"
    else:
        return
    raise ValueError(
        f"State cannot save {name}: got {kind} of DeepSpeed; give State the engine itself, which has model, optimizer "
        "and schedule: State(engine=engine)"
    )


def _is_deepspeeds(thing: object, *names: str) -> bool:
    kinds = {kind.__name__ for kind in type(thing).__mro__ if kind.__module__.partition(".")[0] == "deepspeed"}
    return not kinds.isdisjoint(names)


def _find_engines(objects: dict[str, Stateful]) -> list[Engine]:
    found = {name: thing for name, thing in objects.items() if _is_deepspeeds(thing, _ENGINE)}
    if not found:
        return []
    make = import_module("trainer_runtime.capture.engines").Engine
    engines: list[Engine] = [make(name, thing) for name, thing in found.items()]
    for name, thing in objects.items():
        if any(engine.owns(thing) for engine in engines):
            raise ValueError(f"State cannot save {name}: it belongs to {engines[0].name}, which saves it; leave it out")
    return engines


def _find_shards(objects: dict[str, Stateful], engines: list[Engine]) -> Shards | None:
    sharded = [name for name, thing in objects.items() if has_shards(thing)]
    divided = [engine for engine in engines if engine.is_divided]
    if sharded and engines:
        raise ValueError(
            f"State cannot save {sharded[0]}: wanted either DeepSpeed or sharded modules, got {engines[0].name} as well"
        )
    if divided:
        return cast("Shards", import_module("trainer_runtime.capture.engines").EngineShards(divided))
    if not sharded:
        return None
    return cast("Shards", import_module("trainer_runtime.capture.sharded_objects").ShardedObjects(objects))


def _require_same(where: str, saved: set[str], given: set[str]) -> None:
    if saved != given:
        raise ValueError(
            f"the checkpoint holds {sorted(saved)}{where}, this State is made of {sorted(given)}{where}; "
            "give State the same names, or start over in another directory"
        )
