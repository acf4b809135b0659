"""The modules in State of which each rank holds a part, and their optimizers: what this rank holds, by name and place.

A captured state is made of plain values and tensors only:

| of | captured |
|---|---|
| a module | `{name: {place: local tensor}}`, for parameters and persistent buffers |
| an optimizer | `{"tensors": {name: {key: {place: local tensor}}}, "plain": {name: {key: value}}, "groups": [...]}` |

Names are those of the parameters in the module, without the parts that wrappers add. A place is a dictionary's only
key, so it belongs to the structure of the state, which is described once and compared from step to step (`flat.py`).
Nothing here is a collective, and no method of torch is called that trains: `get_state_dict` takes an optimizer step
where an optimizer has no state yet.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple
from zlib import crc32

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from trainer_runtime.capture.blocks import Place, are_disjoint, copy_overlap, place_of, replica_of
from trainer_runtime.capture.local import LayoutError, is_sharded, local_of
from trainer_runtime.values import RestoredMemory, require_loadable, restore_value, unwrap

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

_WRAPPERS = frozenset({"_orig_mod", "_checkpoint_wrapped_module"})
"""Parts of names that torch.compile and activation checkpointing add."""

TensorPath = tuple[str, ...]
"""Names of an object and of a tensor in it; for an optimizer also the kind of its state, as `exp_avg`."""

PlacedTensor = tuple[Place, torch.Tensor]

Captured = dict[str, Any]
"""What one rank holds, by the names of the objects; see above."""


class _Group(NamedTuple):
    """A sharded module and its optimizers, by name."""

    module: nn.Module
    optimizers: dict[str, Optimizer]
    parameters: dict[str, nn.Parameter]
    """As they were given. FSDP2 replaces them in the module while it keeps them unsharded."""


class ShardedObjects:
    """The sharded objects of a State.

    Args:
        objects: modules and optimizers of a State, by name.

    Raises:
        ValueError: an optimizer has parameters of a sharded module and others, which have no common names.
    """

    def __init__(self, objects: Mapping[str, object]) -> None:
        modules = {
            name: thing
            for name, thing in objects.items()
            if isinstance(thing, nn.Module) and any(map(is_sharded, thing.parameters()))
        }
        optimizers = {name: thing for name, thing in objects.items() if isinstance(thing, Optimizer)}
        self._groups = {
            name: _Group(
                module,
                {each: o for each, o in optimizers.items() if _belongs(each, o, name, module)},
                dict(_parameters(module)),
            )
            for name, module in modules.items()
        }

    @property
    def names(self) -> frozenset[str]:
        """Names of the sharded objects."""
        return frozenset(self._groups) | {name for group in self._groups.values() for name in group.optimizers}

    def optimizers(self) -> Iterator[tuple[str, nn.Module, Optimizer]]:
        """Yield name, module and optimizer of each optimizer."""
        for group in self._groups.values():
            for name, optimizer in group.optimizers.items():
                yield name, group.module, optimizer

    def modules(self) -> Iterator[tuple[str, nn.Module]]:
        """Yield name and module of each module."""
        for name, group in self._groups.items():
            yield name, group.module

    def check(self) -> None:
        """Raise TypeError, with the name, if something could not be loaded back."""
        for name, module in self.modules():
            other = {key: value for key, value in module.state_dict().items() if not isinstance(value, torch.Tensor)}
            if other:
                raise TypeError(f"State cannot save {name}: wanted tensors only in a sharded module, got {min(other)}")
        for name, _, optimizer in self.optimizers():
            require_loadable(name, [{**group, "params": None} for group in optimizer.param_groups])

    def read(self) -> Captured:
        """Return what this rank holds. Its tensors are the objects' own, not copies.

        Raises:
            LayoutError: a tensor is laid out in a way that no block describes; the message has its name.
        """
        captured: Captured = {}
        for name, group in self._groups.items():
            tensors = _once(dict(_tensors(group)))
            captured[name] = {key: _placed(tensor, name, key) for key, tensor in tensors.items()}
            for each, optimizer in group.optimizers.items():
                captured[each] = _capture_optimizer(each, optimizer, _names(group))
        return captured

    def blocks_to_write(self, rank: int, world_size: int) -> dict[TensorPath, PlacedTensor]:
        """Return the blocks of which this rank writes the one copy that a checkpoint has; those without elements none.

        The names are those of `get_state_dict`. What several ranks hold is divided among them by its name.

        Raises:
            LayoutError: as `read`.
        """
        blocks: dict[TensorPath, PlacedTensor] = {}
        for path, tensor in self._whole():
            local = local_of(tensor).detach()
            index, replicas = replica_of(tensor, rank, world_size)
            if crc32("/".join(path).encode()) % replicas == index and (local.numel() or not tensor.numel()):
                blocks[path] = _named_place(tensor, path[0], ".".join(path[1:])), local
        return blocks

    def aliases(self) -> dict[TensorPath, TensorPath]:
        """Return the further paths of tied tensors, and the path under which each is captured and written."""
        aliases: dict[TensorPath, TensorPath] = {}
        for name, group in self._groups.items():
            tensors = dict(_tensors(group))
            first = {id(tensor): key for key, tensor in reversed([*tensors.items()])}
            aliases |= {
                (name, key): (name, first[id(tensor)]) for key, tensor in tensors.items() if first[id(tensor)] != key
            }
        return aliases

    def plain(self) -> dict[str, Any]:
        """Return what the optimizers have besides tensors: the rest of their states, and the groups of parameters."""
        return {
            each: _split_optimizer(optimizer, _names(group))[1]
            for group in self._groups.values()
            for each, optimizer in group.optimizers.items()
        }

    def _whole(self) -> Iterator[tuple[TensorPath, torch.Tensor]]:
        """Yield the path of each tensor, and the tensor, which may be sharded."""
        for name, group in self._groups.items():
            for key, tensor in _once(dict(_tensors(group))).items():
                yield (name, key), tensor
            for each, optimizer in group.optimizers.items():
                for key, state in _split_optimizer(optimizer, _names(group))[0].items():
                    for kind, tensor in state.items():
                        yield (each, key, kind), tensor

    def gather(self) -> Gathering:
        """Return an object that collects what this rank needs from what ranks have captured."""
        places = {
            (name, key): _Wanted(*_named_place(tensor, name, key), tuple(local_of(tensor).shape))
            for name, group in self._groups.items()
            for key, tensor in _once(dict(_tensors(group))).items()
        }
        of_optimizers = {each: name for name, group in self._groups.items() for each in group.optimizers}
        return Gathering(places, of_optimizers)

    def load(self, captured: Captured) -> None:
        """Load what `Gathering.result` returned.

        Raises:
            ValueError: it does not fit the objects; the message says what differs.
        """
        for name, group in self._groups.items():
            tensors = dict(_tensors(group))
            with torch.no_grad():
                for key, tensor in _once(tensors).items():
                    local_of(tensor).copy_(_only(captured[name][key]))
            parameters = {key: tensor for key, tensor in _once(tensors).items() if isinstance(tensor, nn.Parameter)}
            for each, optimizer in group.optimizers.items():
                _load_optimizer(each, optimizer, parameters, captured[each])


class _Wanted(NamedTuple):
    """The block of a tensor that this rank holds."""

    shape: tuple[int, ...]
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]


class _Filling:
    """One block, filled from blocks of the same tensor."""

    def __init__(self, wanted: _Wanted) -> None:
        self._wanted = wanted
        self._missing = torch.Size(wanted.sizes).numel()
        self._seen: set[tuple[tuple[int, ...], tuple[int, ...]]] = set()
        self._filled: torch.Tensor | None = None

    @property
    def is_complete(self) -> bool:
        return self._filled is not None and not self._missing

    def add(self, offsets: tuple[int, ...], block: torch.Tensor) -> None:
        wanted, seen = self._wanted, (offsets, tuple(block.shape))
        if self.is_complete or seen in self._seen:
            return
        self._seen.add(seen)
        if self._filled is None and seen == (wanted.offsets, wanted.sizes):
            self._filled, self._missing = block, 0  # usually: nothing is cut, and nothing copied
            return
        if self._filled is None:
            self._filled = torch.empty(wanted.sizes, dtype=block.dtype, device="cpu")
        self._missing -= copy_overlap(self._filled, wanted.offsets, block, offsets)

    def result(self, name: str) -> dict[Place, torch.Tensor]:
        filled = self._filled
        if filled is None or self._missing or not are_disjoint(self._seen):
            raise ValueError(
                f"the snapshot does not have all of {name}: wanted blocks that make up the one of shape "
                f"{self._wanted.sizes} at {self._wanted.offsets} in {self._wanted.shape}, got {sorted(self._seen)}"
            )
        return {(self._wanted.shape, self._wanted.offsets): filled}


class Gathering:
    """What one rank needs of a captured state, collected from what each of the ranks that made it has captured.

    Args:
        places: the blocks of this rank, by the names of module and tensor.
        of_optimizers: the name of the module to whose parameters each optimizer belongs.
    """

    def __init__(self, places: dict[tuple[str, str], _Wanted], of_optimizers: dict[str, str]) -> None:
        self._places = places
        self._of_optimizers = of_optimizers
        self._fillings: dict[TensorPath, _Filling] = {}
        self._plain: dict[str, dict[str, Any]] = {}

    def add(self, captured: Captured) -> None:
        """Take what is needed from one rank's captured state. Of equal blocks, the first one counts.

        Raises:
            ValueError: it is of other objects, or of tensors with other shapes.
        """
        self._require_same(captured)
        for path, (shape, offsets), block in _blocks(captured, self._of_optimizers):
            filling = self._fillings.get(path)
            if filling is None:
                filling = self._fillings[path] = _Filling(self._wanted(path, shape))
            filling.add(offsets, block)
        for name in self._of_optimizers:
            plain = self._plain.setdefault(name, {"plain": {}, "groups": captured[name]["groups"]})
            plain["plain"] = {**captured[name]["plain"], **plain["plain"]}

    @property
    def is_complete(self) -> bool:
        """Whether nothing is missing of all that was seen."""
        return self._fillings.keys() >= self._places.keys() and all(
            each.is_complete for each in self._fillings.values()
        )

    def result(self) -> Captured:
        """Return what this rank holds from now on.

        Raises:
            ValueError: something is missing.
        """
        captured: Captured = {name: {} for name, _ in self._places}
        for name, plain in self._plain.items():
            captured[name] = {"tensors": {}, **plain}
        for path in dict.fromkeys((*self._places, *self._fillings)):
            if path not in self._fillings:
                raise ValueError(f"the snapshot does not have {'.'.join(path)}")
            target = captured[path[0]] if len(path) == 2 else captured[path[0]]["tensors"].setdefault(path[1], {})
            target[path[-1]] = self._fillings[path].result(".".join(path))
        return captured

    def _wanted(self, path: TensorPath, shape: tuple[int, ...]) -> _Wanted:
        """Return this rank's block of a tensor; a tensor of an optimizer is as its parameter, or whole."""
        name, key = path[:2]
        own = self._places.get((self._of_optimizers.get(name, name), key))
        if own is not None and own.shape == shape:
            return own
        if name in self._of_optimizers and own is not None:
            return _Wanted(shape, (0,) * len(shape), shape)
        raise ValueError(
            f"the snapshot has {name}.{key} with shape {shape}, "
            + ("this State does not have it" if own is None else f"in this State it has {own.shape}")
        )

    def _require_same(self, captured: Captured) -> None:
        own = {*self._of_optimizers, *(name for name, _ in self._places)}
        if captured.keys() != own:
            raise ValueError(f"the snapshot holds {sorted(captured)} sharded, this State {sorted(own)}")


def _blocks(captured: Captured, of_optimizers: Mapping[str, str]) -> Iterator[tuple[TensorPath, Place, torch.Tensor]]:
    """Yield path, place and block of each tensor."""
    for name, state in captured.items():
        if name not in of_optimizers:
            for key, placed in state.items():
                for place, tensor in placed.items():
                    yield (name, key), place, tensor
            continue
        for key, of_parameter in state["tensors"].items():
            for kind, placed in of_parameter.items():
                for place, tensor in placed.items():
                    yield (name, key, kind), place, tensor


def _parameters(module: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    for key, parameter in unwrap(module).named_parameters(remove_duplicate=False):
        yield _plain_name(key), parameter


def _tensors(group: _Group) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield parameters and persistent buffers by name, tied ones under each of their names."""
    for key, parameter in _parameters(group.module):
        given = group.parameters.get(key)
        # FSDP2 keeps a module unsharded after `unshard()`; a change of the sharded parameters reaches it later.
        yield key, given if given is not None and is_sharded(given) and not is_sharded(parameter) else parameter
    for path, part in unwrap(group.module).named_modules(remove_duplicate=False):
        for key, buffer in part.named_buffers(recurse=False, remove_duplicate=False):
            if key not in part._non_persistent_buffers_set:  # noqa: SLF001 - no public name
                yield _plain_name(f"{path}.{key}" if path else key), buffer


def _names(group: _Group) -> dict[int, str]:
    """Return the first name of each tensor, by identity."""
    return {id(tensor): key for key, tensor in _once(dict(_tensors(group))).items()}


def _plain_name(key: str) -> str:
    return ".".join(part for part in key.split(".") if part not in _WRAPPERS)


def _once(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return each tensor under the first of its names."""
    first: dict[int, str] = {}
    return {key: tensor for key, tensor in tensors.items() if first.setdefault(id(tensor), key) == key}


def _named_place(tensor: torch.Tensor, name: str, key: str) -> Place:
    try:
        return place_of(tensor)
    except LayoutError as error:
        raise LayoutError(f"{name}.{key}: {error}") from None


def _placed(tensor: torch.Tensor, name: str, key: str) -> dict[Place, torch.Tensor]:
    return {_named_place(tensor, name, key): local_of(tensor).detach()}


def _only(placed: dict[Place, torch.Tensor]) -> torch.Tensor:
    (tensor,) = placed.values()
    return tensor


def _capture_optimizer(name: str, optimizer: Optimizer, names: dict[int, str]) -> dict[str, Any]:
    tensors, plain = _split_optimizer(optimizer, names)
    placed: dict[str, dict[str, Any]] = {}
    parameters = {names[id(each)]: each for group in optimizer.param_groups for each in group["params"]}
    for key, state in tensors.items():
        for kind, tensor in state.items():
            if is_sharded(tensor) != (is_sharded(parameters[key]) and tensor.shape == parameters[key].shape):
                raise LayoutError(
                    f"{name}.{key}.{kind}: wanted a tensor that is sharded as its parameter, or has another shape and "
                    "is whole on each rank"
                )
        placed[key] = {kind: _placed(tensor, name, f"{key}.{kind}") for kind, tensor in state.items()}
    return {"tensors": placed, "plain": plain["state"], "groups": plain["param_groups"]}


def _split_optimizer(optimizer: Optimizer, names: dict[int, str]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return an optimizer's tensors by the names of its parameters, and everything else."""
    tensors: dict[str, dict[str, torch.Tensor]] = {}
    rest: dict[str, dict[str, Any]] = {}
    for parameter, state in optimizer.state.items():
        if (key := names.get(id(parameter))) is None:
            raise LayoutError("an optimizer keeps a state of something that is none of its module's parameters")
        tensors[key] = {kind: value for kind, value in state.items() if isinstance(value, torch.Tensor)}
        rest[key] = {kind: value for kind, value in state.items() if not isinstance(value, torch.Tensor)}
    groups = [{**group, "params": [names[id(each)] for each in group["params"]]} for group in optimizer.param_groups]
    return tensors, {"state": rest, "param_groups": groups}


def _load_optimizer(
    name: str, optimizer: Optimizer, parameters: Mapping[str, torch.Tensor], captured: dict[str, Any]
) -> None:
    names = {id(parameter): key for key, parameter in parameters.items()}
    own = [[names[id(each)] for each in group["params"]] for group in optimizer.param_groups]
    if (saved := [group["params"] for group in captured["groups"]]) != own:
        raise ValueError(f"{name} has the parameters {own}, in the snapshot it has {saved}")
    for group, options in zip(optimizer.param_groups, captured["groups"], strict=True):
        for key, value in options.items():
            if key != "params":
                group[key] = restore_value(name, group.get(key), value, RestoredMemory())
    optimizer.state.clear()
    for key in dict.fromkeys((*captured["plain"], *captured["tensors"])):
        parameter = parameters[key]
        group = next(group for group in optimizer.param_groups if any(each is parameter for each in group["params"]))
        tensors = {
            kind: _like_parameter(_only(placed), next(iter(placed))[0], parameter)
            if kind != "step"
            else _only(placed).to("cpu" if _is_step_on_cpu(group) else local_of(parameter).device, copy=True)
            for kind, placed in captured["tensors"].get(key, {}).items()
        }
        optimizer.state[parameter] = {**captured["plain"].get(key, {}), **tensors}


def _is_step_on_cpu(group: Mapping[str, Any]) -> bool:
    """Return whether torch's optimizers keep their step counters on the CPU with these options."""
    return not (group.get("capturable") or group.get("fused"))


def _like_parameter(local: torch.Tensor, shape: tuple[int, ...], parameter: torch.Tensor) -> torch.Tensor:
    """Return a copy of a local tensor on the parameter's device, sharded as the parameter if it has its shape."""
    copied = local.to(local_of(parameter).device, copy=True)
    if not isinstance(parameter, DTensor) or shape != tuple(parameter.shape):
        return copied
    return DTensor.from_local(
        copied,
        parameter.device_mesh,
        parameter.placements,
        run_check=False,
        shape=parameter.shape,
        stride=parameter.stride(),
    )


def _belongs(its_name: str, optimizer: Optimizer, name: str, module: nn.Module) -> bool:
    mine = {id(parameter) for parameter in module.parameters()}
    is_mine = [id(parameter) in mine for group in optimizer.param_groups for parameter in group["params"]]
    if any(is_mine) and not all(is_mine):
        raise ValueError(
            f"State cannot save {its_name}: wanted an optimizer of the parameters of one sharded module, got one of "
            f"{name}'s and {is_mine.count(False)} others; make one for each module, or give State one module with all"
        )
    return any(is_mine)
