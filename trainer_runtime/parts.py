"""State that differs from rank to rank, so that a checkpoint has a part of its own for each rank.

This is: random states; running statistics of normalization layers, which every rank collects over its own samples;
objects that are wrapped in `PerRank`; and torchdata's stateful loaders. If the world size is unchanged, each rank gets
its own part back. After a change of the world size the statistics are those of rank 0 (the common part has them, with
the modules), random states are derived, and per-rank objects are loaded by the ranks that had them.
"""

from __future__ import annotations

import copy
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase

from trainer_runtime.checkpoint import warn
from trainer_runtime.random_states import RandomStates
from trainer_runtime.values import Stateful, load_state, plain_key, read_state, require_loadable, unwrap

if TYPE_CHECKING:
    from collections.abc import Iterator

_LOADERS = "torchdata.stateful_dataloader"


class PerRank:
    """Marks an object whose state differs from rank to rank: `State(sampler=tr.PerRank(sampler))`.

    Args:
        thing: object with `state_dict` and `load_state_dict`.

    Raises:
        TypeError: `thing` lacks one of these methods.
    """

    def __init__(self, thing: Stateful) -> None:
        if not isinstance(thing, Stateful):
            raise TypeError(f"PerRank wants an object with state_dict and load_state_dict, got {type(thing).__name__}")
        self.thing = thing


def is_stateful_loader(thing: object) -> bool:
    """Return whether it is torchdata's loader, which keeps its own position; does not import torchdata."""
    return any(kind.__module__.startswith(_LOADERS) for kind in type(thing).__mro__)


class Parts:
    """This rank's part of every checkpoint.

    Args:
        objects: objects whose state differs from rank to rank, by their names in State.
        modules: modules whose running statistics are saved per rank.
        generators: random generators of the script.
    """

    def __init__(
        self, objects: dict[str, Stateful], modules: dict[str, nn.Module], generators: dict[str, torch.Generator]
    ) -> None:
        self._objects = objects
        self._modules = modules
        self._random = RandomStates(generators)
        self._given: dict[str, dict[str, Any]] | None = None
        """The states of the objects as the script made them. None: they are not known yet."""
        self._are_restored = False
        """The objects may have other states by now."""
        self._epoch_began: dict[str, Any] | None = None
        self._restored: dict[str, Any] | None = None

    def note_given(self) -> None:
        """Call before each restore. The first call keeps the objects' states as the script made them."""
        self._are_restored = self._given is not None
        if self._given is None:
            self._given = {name: copy.deepcopy(read_state(thing)) for name, thing in self._objects.items()}

    def read(self) -> dict[str, Any]:
        """Return this rank's part in its present state."""
        return {
            "random": self._random.read(),
            "epoch_began": self._epoch_began,
            "buffers": {name: dict(_statistics(module)) for name, module in self._modules.items()},
            "objects": {name: read_state(thing) for name, thing in self._objects.items()},
        }

    def read_checked(self) -> dict[str, Any]:
        """Return the same as `read`; TypeError, with the object's name, if a state could not be loaded back."""
        part = self.read()
        for name, state in part["objects"].items():
            require_loadable(name, state)
        return part

    def load(self, parts: list[dict[str, Any]], rank: int, world_size: int, *, seed: int, step: int) -> None:
        """Load this rank's part of a checkpoint, after the common part.

        Args:
            parts: the parts of the world that saved, by rank.
            rank: this rank.
            world_size: size of this world.
            seed: seed from which random states are derived if the world size has changed.
            step: restored step, which enters that derivation together with the rank.
        """
        if rank < len(parts):
            self._load_objects(parts[rank]["objects"])
        elif self._are_restored and self._given is not None:  # this process was in a larger group
            self._load_objects(copy.deepcopy(self._given))
        if len(parts) == world_size:
            self._load_statistics(parts[rank]["buffers"])
            self._random.load(parts[rank]["random"])
        else:
            self._load_statistics(parts[0]["buffers"])
            self._random.derive(seed, step, rank)
            self._warn_of_dropped_state(rank, len(parts), world_size)
        # Even if the world size has changed: a new rank draws the order of the epoch with these states, like rank 0.
        self._epoch_began = parts[rank if rank < len(parts) else 0]["epoch_began"]
        self._restored = self._random.read()

    def begin_epoch(self, *, is_resumed: bool) -> None:
        """Save the random states at the beginning of the epoch; if the epoch is resumed, restore the saved ones.

        So an order that is drawn from the global random state is the same as before the restart, and the items that
        were committed already are drawn and dropped with the same random states.
        """
        if is_resumed and self._epoch_began is not None:
            self._random.load(self._epoch_began)
        else:
            self._epoch_began = self._random.read()

    def restore_random_states(self) -> None:
        """Set the random states of the restored step once more, after drawing the committed items has changed them."""
        if self._restored is not None:
            self._random.load(self._restored)

    @contextmanager
    def same_random_states(self) -> Iterator[None]:
        """Restore the random states of the block's beginning at its end."""
        states = self._random.read()
        try:
            yield
        finally:
            self._random.load(states)

    def _load_objects(self, saved: dict[str, dict[str, Any]]) -> None:
        for name, thing in self._objects.items():
            load_state(thing, saved[name])

    def _load_statistics(self, saved: dict[str, dict[str, torch.Tensor]]) -> None:
        with torch.no_grad():
            for name, module in self._modules.items():
                for key, buffer in _statistics(module):
                    buffer.copy_(saved[name][key])

    def _warn_of_dropped_state(self, rank: int, had: int, world_size: int) -> None:
        names = ", ".join(self._objects)
        if names and rank >= had:
            warn(f"rank {rank} is new (the checkpoint has {had}): its {names} begins as the script made it")
        if names and rank == 0 and world_size < had:
            warn(f"the checkpoint has {had} ranks, this world {world_size}: {names} of the others is left out")


def _statistics(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the running statistics in a module, under names that do not depend on wrappers."""
    for path, layer in unwrap(module).named_modules():
        if isinstance(layer, _NormBase):
            for name, buffer in layer.named_buffers(prefix=path, recurse=False):
                yield plain_key(name), buffer
