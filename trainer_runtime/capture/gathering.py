"""What one rank needs of a captured state, collected from the blocks that ranks have captured or written."""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from trainer_runtime.capture.blocks import Place, are_disjoint, copy_overlap

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

Captured = dict[str, Any]
"""What one rank holds, by the names of the objects; `sharded_objects.py` has the form."""

TensorPath = tuple[str, ...]
"""Names of an object and of a tensor in it; for an optimizer also the kind of its state, as `exp_avg`."""


COUNTER = "step"
"""The name under which torch's optimizers count their steps for each parameter, in a number on each rank."""


class Block(NamedTuple):
    """The block of a tensor that this rank is to hold."""

    shape: tuple[int, ...]
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]


class Gathering:
    """Collects blocks until nothing is missing.

    Args:
        own: what this rank is to hold of parameters and buffers, by the names of module and tensor.
        of_optimizers: by name of each optimizer, that of the module to whose parameters it belongs.
        aliases: paths of tied tensors under further names, which are not collected.
    """

    def __init__(
        self,
        own: Mapping[TensorPath, Block],
        of_optimizers: Mapping[str, str],
        aliases: Mapping[TensorPath, TensorPath],
    ) -> None:
        self._own = own
        self._of_optimizers = of_optimizers
        self._aliases = aliases
        self._fillings: dict[TensorPath, _Filling] = {}
        self._rest: dict[str, dict[str, Any]] = {}

    @property
    def is_complete(self) -> bool:
        """Whether nothing is missing of all that was seen."""
        return self._fillings.keys() >= self._own.keys() and all(each.is_complete for each in self._fillings.values())

    def add(self, captured: Captured) -> None:
        """Take what is needed from one rank's captured state. Of equal blocks, the first one counts.

        Raises:
            ValueError: it is of other objects, or of tensors with other shapes.
        """
        self.require_names(captured.keys())
        for name in self._of_optimizers:
            state = captured[name]
            self.add_plain(name, state["plain"], state["groups"])
        for path, place, tensor in placed_tensors(captured):
            self.add_block(path, place, tensor)

    def require_names(self, saved: set[str] | Any) -> None:  # noqa: ANN401 - a dictionary's keys
        """Raise ValueError if other objects were sharded when the state was captured."""
        own = {*self._of_optimizers, *(path[0] for path in self._own)}
        if saved != own:
            raise ValueError(f"what was saved holds {sorted(saved)} sharded, this State {sorted(own)}")

    def add_plain(self, name: str, plain: dict[str, Any], groups: list[dict[str, Any]]) -> None:
        """Take what an optimizer has besides tensors."""
        rest = self._rest.setdefault(name, {"plain": {}, "groups": groups})
        rest["plain"] = {**plain, **rest["plain"]}

    def wants(self, path: TensorPath, shape: tuple[int, ...], place: tuple[int, ...], sizes: tuple[int, ...]) -> bool:
        """Return whether a block has something that is missing.

        Raises:
            ValueError: as `add_block`.
        """
        return path not in self._aliases and self._filling(path, shape).wants(place, sizes)

    def needed_rows(
        self, path: TensorPath, shape: tuple[int, ...], place: tuple[int, ...], sizes: tuple[int, ...]
    ) -> tuple[int, int]:
        """Return the first row of a block that has something that is missing, and the number of such rows.

        Of a number without dimensions, the one row is itself.

        Raises:
            ValueError: as `add_block`.
        """
        return (0, 0) if path in self._aliases else self._filling(path, shape).needed_rows(place, sizes)

    def add_block(self, path: TensorPath, place: Place, found: torch.Tensor) -> None:
        """Take what is needed from a block.

        Raises:
            ValueError: it is of an unknown tensor, or of one with another shape.
        """
        shape, offsets = place
        self._filling(path, shape).add(offsets, found)

    def result(self) -> Captured:
        """Return what this rank holds from now on.

        Raises:
            ValueError: something is missing.
        """
        captured: Captured = {path[0]: {} for path in self._own}
        for name in self._of_optimizers:
            if name not in self._rest:
                raise ValueError(f"what was saved does not have {name}")
            captured[name] = {"tensors": {}, **self._rest[name]}
        for path in dict.fromkeys((*self._own, *self._fillings)):
            if path not in self._fillings:
                raise ValueError(f"what was saved does not have {'.'.join(path)}")
            of = captured[path[0]]
            target = of["tensors"].setdefault(path[1], {}) if path[0] in self._of_optimizers else of
            target[path[-1]] = self._fillings[path].result(".".join(path))
        return captured

    def _filling(self, path: TensorPath, shape: tuple[int, ...]) -> _Filling:
        filling = self._fillings.get(path)
        if filling is None:
            filling = self._fillings[path] = _Filling(self._wanted(path, shape))
        return filling

    def _wanted(self, path: TensorPath, shape: tuple[int, ...]) -> Block:
        """Return this rank's block of a tensor: that of its own tensor, or of an optimizer's that goes with it."""
        name = path[0]
        own = self._own.get((self._of_optimizers.get(name, name), path[1]))
        if own is None:
            raise ValueError(f"what was saved has {'.'.join(path)}, this State does not")
        is_counter = name in self._of_optimizers and path[-1] == COUNTER
        if own.shape == shape and not is_counter:
            return own
        if name not in self._of_optimizers:
            raise ValueError(f"{'.'.join(path)} was saved with shape {shape}, in this State it has {own.shape}")
        return Block(shape, (0,) * len(shape), shape)


def placed_tensors(captured: Captured) -> Iterator[tuple[TensorPath, Place, torch.Tensor]]:
    """Yield path, place and block of each captured tensor."""
    for name, state in captured.items():
        kinds = state["tensors"] if is_optimizers(state) else {"": state}
        for key, placed in kinds.items():
            for kind, found in placed.items():
                path = (name, key, kind) if key else (name, kind)
                for place, tensor in found.items():
                    yield path, place, tensor


def is_optimizers(state: dict[str, Any]) -> bool:
    """Return whether a captured state is that of an optimizer, not of a module, which has tensors only."""
    return isinstance(state.get("groups"), list)


class _Filling:
    """One block, filled from blocks of the same tensor."""

    def __init__(self, wanted: Block) -> None:
        self._wanted = wanted
        self._missing = prod(wanted.sizes)
        self._seen: set[tuple[tuple[int, ...], tuple[int, ...]]] = set()
        self._filled: torch.Tensor | None = None

    @property
    def is_complete(self) -> bool:
        return self._filled is not None and not self._missing

    def wants(self, offsets: tuple[int, ...], sizes: tuple[int, ...]) -> bool:
        """Return whether a block is needed; one without elements only for its type."""
        wanted = self._wanted
        ends = zip(offsets, sizes, wanted.offsets, wanted.sizes, strict=True)
        overlaps = all(at < to + length and to < at + size for at, size, to, length in ends)
        return not self.is_complete and (overlaps or self._filled is None) and (offsets, sizes) not in self._seen

    def needed_rows(self, offsets: tuple[int, ...], sizes: tuple[int, ...]) -> tuple[int, int]:
        """Return the first needed row of a block, and the number of rows."""
        wanted = self._wanted
        if not self.wants(offsets, sizes):
            return 0, 0
        if not sizes:
            return 0, 1
        begins = [max(at, to) for at, to in zip(offsets, wanted.offsets, strict=True)]
        ends = [min(at + size, to + length) for at, size, to, length in zip(offsets, sizes, *wanted[1:], strict=True)]
        if any(end <= begin for begin, end in zip(begins, ends, strict=True)):
            return 0, 0  # it is added for its type only
        return begins[0] - offsets[0], ends[0] - begins[0]

    def add(self, offsets: tuple[int, ...], found: torch.Tensor) -> None:
        wanted, seen = self._wanted, (offsets, tuple(found.shape))
        if self.is_complete or seen in self._seen:
            return
        self._seen.add(seen)
        if self._filled is None and seen == (wanted.offsets, wanted.sizes):
            self._filled, self._missing = found, 0  # usually: nothing is cut, and nothing copied
            return
        if self._filled is None:
            self._filled = torch.empty(wanted.sizes, dtype=found.dtype, device="cpu")
        self._missing -= copy_overlap(self._filled, wanted.offsets, found, offsets)

    def result(self, name: str) -> dict[Place, torch.Tensor]:
        filled, wanted = self._filled, self._wanted
        if filled is None or self._missing or not are_disjoint(self._seen):
            raise ValueError(
                f"what was saved does not have all of {name}: wanted blocks that make up the one of shape "
                f"{wanted.sizes} at {wanted.offsets} in {wanted.shape}, got {sorted(self._seen)}"
            )
        return {(wanted.shape, wanted.offsets): filled}
