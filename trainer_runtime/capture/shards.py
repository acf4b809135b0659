"""What writes, copies and restores the parts that ranks hold of objects needs of these objects."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import torch

    from trainer_runtime.capture.blocks import Place
    from trainer_runtime.capture.gathering import Captured, Gathering, TensorPath


class Shards(Protocol):
    """Objects of which each rank holds a part. Only `load` may be a collective."""

    @property
    def names(self) -> frozenset[str]:
        """Names of the objects that have nothing in the common part of a State."""

    def check(self) -> None:
        """Check that everything could be loaded back; raises LayoutError or TypeError."""

    def read(self) -> Captured:
        """Return what this rank holds. Its tensors are the objects' own, not copies."""

    def places_to_write(self, rank: int, world_size: int) -> dict[TensorPath, Place]:
        """Return the places of the blocks of which this rank writes the one copy that a checkpoint has."""

    def paths(self) -> list[TensorPath]:
        """Return the paths of all tensors that this rank knows, of some of which it writes nothing."""

    def pick(self, captured: Captured, path: TensorPath) -> torch.Tensor:
        """Return a tensor in what `read` returned."""

    def plain_of(self, captured: Captured) -> dict[str, Any]:
        """Return what the optimizers had besides tensors: the rest of their states, and the groups of parameters."""

    def aliases(self) -> dict[TensorPath, TensorPath]:
        """Return the further paths of tied tensors, and the path under which each is captured and written."""

    def gather(self) -> Gathering:
        """Return an object that collects what this rank needs."""

    def load(self, captured: Captured) -> None:
        """Load what `Gathering.result` returned, on all ranks."""
