"""The modules in State of which each rank holds a part, and their optimizers: what this rank holds, by name and place.

A captured state is made of plain values and tensors only:

| of | captured |
|---|---|
| a module | `{name: {place: local tensor}}`, for parameters and persistent buffers |
| an optimizer | `{"tensors": {name: {kind: {place: local tensor}}}, "plain": {name: {kind: value}}, "groups": [...]}` |

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
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from trainer_runtime.capture.blocks import Place, place_of, replica_of
from trainer_runtime.capture.gathering import COUNTER, Block, Captured, Gathering, TensorPath
from trainer_runtime.capture.local import LayoutError, has_shards, is_sharded, local_of
from trainer_runtime.structure import take_apart
from trainer_runtime.values import RestoredMemory, plain_key, require_loadable, restore_value, unwrap

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

PlacedTensor = tuple[Place, torch.Tensor]

_OF_OPTIMIZER = 3
"""Names in the path of an optimizer's tensor."""


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
        modules = {name: thing for name, thing in objects.items() if has_shards(thing)}
        for module in modules.values():
            _reshard(module)
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

    def check(self) -> None:
        """Check that everything could be loaded back.

        Raises:
            LayoutError: as `read`.
            TypeError: a module or an optimizer has something else than tensors and plain values.
        """
        for name, group in self._groups.items():
            for path, part in unwrap(group.module).named_modules():  # `state_dict` would reshard, on this rank alone
                if type(part).get_extra_state is not nn.Module.get_extra_state:
                    other = f"{path}._extra_state".lstrip(".")
                    raise TypeError(f"State cannot save {name}: wanted tensors only in a sharded module, got {other}")
            for each, optimizer in group.optimizers.items():
                require_loadable(each, [{**options, "params": None} for options in optimizer.param_groups])
        self.read()

    def read(self) -> Captured:
        """Return what this rank holds. Its tensors are the objects' own, not copies.

        Raises:
            LayoutError: a tensor is laid out in a way that no block describes; the message has its name.
        """
        captured: Captured = {}
        for name, group in self._groups.items():
            tensors = _once(dict(_tensors(group)))
            names = {id(tensor): key for key, tensor in tensors.items()}
            captured[name] = {key: _placed(tensor, name, key) for key, tensor in tensors.items()}
            for each, optimizer in group.optimizers.items():
                captured[each] = _capture_optimizer(each, optimizer, names)
        return captured

    def places_to_write(self, rank: int, world_size: int) -> dict[TensorPath, Place]:
        """Return the places of the blocks of which this rank writes the one copy that a checkpoint has.

        Blocks without elements are not written. The names are those of `get_state_dict`. What several ranks hold is
        divided among them by its name.

        Raises:
            LayoutError: as `read`.
        """
        places: dict[TensorPath, Place] = {}
        for path, tensor in self._whole():
            local = local_of(tensor)
            index, replicas = replica_of(tensor, rank, world_size)
            if crc32("/".join(path).encode()) % replicas == index and (local.numel() or not tensor.numel()):
                places[path] = _named_place(tensor, path[0], ".".join(path[1:]))
        return places

    def pick(self, captured: Captured, path: TensorPath) -> torch.Tensor:
        """Return a tensor in what `read` returned."""
        of = captured[path[0]]["tensors"][path[1]] if len(path) == _OF_OPTIMIZER else captured[path[0]]
        return _only(of[path[-1]])

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

    def plain_of(self, captured: Captured) -> dict[str, Any]:
        """Return what the optimizers had besides tensors: the rest of their states, and the groups of parameters."""
        return {
            each: {"state": captured[each]["plain"], "param_groups": captured[each]["groups"]}
            for group in self._groups.values()
            for each in group.optimizers
        }

    def paths(self) -> list[TensorPath]:
        """Return the paths of all tensors that this rank knows, of some of which it writes nothing."""
        return [path for path, _ in self._whole()]

    def _whole(self) -> Iterator[tuple[TensorPath, torch.Tensor]]:
        """Yield the path of each tensor, and the tensor, which may be sharded."""
        for name, group in self._groups.items():
            for key, tensor in _once(dict(_tensors(group))).items():
                yield (name, key), tensor
            for each, optimizer in group.optimizers.items():
                for key, state in _split_optimizer(each, optimizer, _first_names(group))[0].items():
                    for kind, tensor in state.items():
                        yield (each, key, kind), tensor

    def gather(self) -> Gathering:
        """Return an object that collects what this rank needs."""
        own: dict[TensorPath, Block] = {
            (name, key): Block(*_named_place(tensor, name, key), tuple(local_of(tensor).shape))
            for name, group in self._groups.items()
            for key, tensor in _once(dict(_tensors(group))).items()
        }
        of_optimizers = {each: name for name, group in self._groups.items() for each in group.optimizers}
        return Gathering(own, of_optimizers, self.aliases())

    def load(self, captured: Captured) -> None:
        """Load what `Gathering.result` returned.

        Raises:
            ValueError: it does not fit the objects; the message says what differs.
        """
        for name, group in self._groups.items():
            _reshard(group.module)  # what was gathered for a forward pass would be used once more
            tensors = dict(_tensors(group))
            with torch.no_grad():
                for key, tensor in _once(tensors).items():
                    local_of(tensor).copy_(_only(captured[name][key]))
            parameters = {key: tensor for key, tensor in _once(tensors).items() if isinstance(tensor, nn.Parameter)}
            for each, optimizer in group.optimizers.items():
                _load_optimizer(each, optimizer, parameters, captured[each])


def _reshard(module: nn.Module) -> None:
    """Let FSDP2 free what it has gathered. To be called on all ranks: the next forward pass gathers anew."""
    for part in module.modules():
        if isinstance(part, FSDPModule):
            part.reshard()


def _parameters(module: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    for key, parameter in unwrap(module).named_parameters(remove_duplicate=False):
        yield plain_key(key), parameter


def _tensors(group: _Group) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield parameters and persistent buffers by name, tied ones under each of their names."""
    for key, parameter in _parameters(group.module):
        given = group.parameters.get(key)
        # After a forward pass FSDP2 may keep parameters gathered, in whole or over a smaller mesh.
        yield key, given if given is not None and is_sharded(given) else parameter
    for path, part in unwrap(group.module).named_modules(remove_duplicate=False):
        for key, buffer in part.named_buffers(recurse=False, remove_duplicate=False):
            if key not in part._non_persistent_buffers_set:  # noqa: SLF001 - no public name
                yield plain_key(f"{path}.{key}" if path else key), buffer


def _first_names(group: _Group) -> dict[int, str]:
    """Return the first name of each tensor, by identity."""
    return {id(tensor): key for key, tensor in _once(dict(_tensors(group))).items()}


def _once(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return each tensor under the first of its names."""
    first: dict[int, str] = {}
    return {key: tensor for key, tensor in tensors.items() if first.setdefault(id(tensor), key) == key}


def _named_place(tensor: torch.Tensor, name: str, key: str) -> Place:
    try:
        return place_of(tensor)
    except LayoutError as error:
        raise LayoutError(f"State cannot save {name}.{key}: {error}") from None


def _placed(tensor: torch.Tensor, name: str, key: str) -> dict[Place, torch.Tensor]:
    return {_named_place(tensor, name, key): local_of(tensor).detach()}


def _only(placed: dict[Place, torch.Tensor]) -> torch.Tensor:
    (tensor,) = placed.values()
    return tensor


def _capture_optimizer(name: str, optimizer: Optimizer, names: dict[int, str]) -> dict[str, Any]:
    tensors, rest = _split_optimizer(name, optimizer, names)
    placed = {
        key: {kind: _placed(tensor, name, f"{key}.{kind}") for kind, tensor in state.items()}
        for key, state in tensors.items()
    }
    return {"tensors": placed, "plain": rest["state"], "groups": rest["param_groups"]}


def _split_optimizer(
    name: str, optimizer: Optimizer, names: dict[int, str]
) -> tuple[dict[str, dict[str, torch.Tensor]], dict[str, Any]]:
    """Return an optimizer's tensors by the names of its parameters, and everything else.

    Raises:
        LayoutError: it keeps something of another thing than a parameter, or a tensor that is not laid out like one.
    """
    tensors: dict[str, dict[str, torch.Tensor]] = {}
    rest: dict[str, dict[str, Any]] = {}
    for parameter, state in optimizer.state.items():
        if (key := names.get(id(parameter))) is None:
            raise LayoutError(f"State cannot save {name}: it keeps a state of what is none of its module's parameters")
        tensors[key] = {kind: value for kind, value in state.items() if isinstance(value, torch.Tensor)}
        rest[key] = {kind: value for kind, value in state.items() if not isinstance(value, torch.Tensor)}
        if any(isinstance(leaf, torch.Tensor) for leaf in take_apart(rest[key]).leaves):
            raise LayoutError(f"State cannot save {name}.{key}: wanted tensors by name, got some in a list or a dict")
        for kind, value in tensors[key].items():
            if kind != COUNTER:
                _require_alike(f"{name}.{key}.{kind}", value, parameter)
    groups = [{**group, "params": [names[id(each)] for each in group["params"]]} for group in optimizer.param_groups]
    return tensors, {"state": rest, "param_groups": groups}


def _require_alike(name: str, tensor: torch.Tensor, parameter: torch.Tensor) -> None:
    """Refuse a tensor of an optimizer that is neither laid out as its parameter nor whole on each rank."""
    if isinstance(parameter, DTensor) and tensor.shape == parameter.shape:
        of = (parameter.device_mesh, parameter.placements)
        if isinstance(tensor, DTensor) and (tensor.device_mesh, tensor.placements) == of:
            return
    elif not isinstance(tensor, DTensor) and (not is_sharded(parameter) or tensor.shape != local_of(parameter).shape):
        return
    got = f"{tuple(tensor.shape)}, {getattr(tensor, 'placements', 'not sharded')}"
    raise LayoutError(
        f"State cannot save {name}: wanted a tensor that is sharded as its parameter, or has another shape and is "
        f"whole on each rank, got {got}"
    )


def _load_optimizer(
    name: str, optimizer: Optimizer, parameters: Mapping[str, torch.Tensor], captured: dict[str, Any]
) -> None:
    names = {id(parameter): key for key, parameter in parameters.items()}
    own = [[names[id(each)] for each in group["params"]] for group in optimizer.param_groups]
    saved = [group["params"] for group in captured["groups"]]
    if saved != own:
        other = sorted({key for group in saved for key in group} ^ {key for group in own for key in group})
        raise ValueError(
            f"{name} has other parameters, or groups of them, than when it was saved: wanted groups of "
            f"{[len(group) for group in saved]}, got {[len(group) for group in own]}; on one side only: {other[:3]}"
        )
    memory = RestoredMemory()
    for group, options in zip(optimizer.param_groups, captured["groups"], strict=True):
        for key, value in options.items():
            if key != "params":
                group[key] = restore_value(name, group.get(key), value, memory)
    optimizer.state.clear()
    for key in dict.fromkeys((*captured["plain"], *captured["tensors"])):
        parameter = parameters[key]
        groups = (group for group in optimizer.param_groups if any(each is parameter for each in group["params"]))
        group = next(groups, {})
        step_device = torch.device("cpu") if _is_step_on_cpu(group) else local_of(parameter).device
        optimizer.state[parameter] = dict(captured["plain"].get(key, {}))
        for kind, placed in captured["tensors"].get(key, {}).items():
            ((shape, _), local), *_ = placed.items()
            if kind == COUNTER:
                restored = local.to(step_device, copy=True)
            else:
                copied = local.to(local_of(parameter).device, copy=True)
                restored = _wrap(copied, shape, parameter)
            optimizer.state[parameter][kind] = restored


def _is_step_on_cpu(group: Mapping[str, Any]) -> bool:
    """Return whether torch's optimizers keep their step counters on the CPU with these options."""
    return not (group.get("capturable") or group.get("fused"))


def _wrap(local: torch.Tensor, shape: tuple[int, ...], parameter: torch.Tensor) -> torch.Tensor:
    """Return the tensor of which this is the local part: it is sharded as the parameter if it has its shape."""
    if not isinstance(parameter, DTensor) or shape != tuple(parameter.shape):
        return local
    mesh, placements = parameter.device_mesh, parameter.placements
    stride = parameter.stride()
    return DTensor.from_local(local, mesh, placements, run_check=False, shape=parameter.shape, stride=stride)


def _belongs(its_name: str, optimizer: Optimizer, name: str, module: nn.Module) -> bool:
    mine = {id(parameter) for parameter in module.parameters()}
    is_mine = [id(parameter) in mine for group in optimizer.param_groups for parameter in group["params"]]
    if any(is_mine) and not all(is_mine):
        raise ValueError(
            f"State cannot save {its_name}: wanted an optimizer of the parameters of one sharded module, got one of "
            f"{name}'s and {is_mine.count(False)} others; make one for each module, or give State one module with all"
        )
    return any(is_mine)
