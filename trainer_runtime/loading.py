"""Load the content of a checkpoint into the objects of a State, on every rank."""

from __future__ import annotations

from typing import IO, TYPE_CHECKING, Any, cast

import torch
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from trainer_runtime.checkpoint import CheckpointError
from trainer_runtime.dist import rank, world_size
from trainer_runtime.manifest import SHARDS, parse_stem
from trainer_runtime.saving import CONTENT_VERSION
from trainer_runtime.scaling import factor_of, rescale

if TYPE_CHECKING:
    import mmap
    from pathlib import Path

    from trainer_runtime.contents import Contents
    from trainer_runtime.position import Position
    from trainer_runtime.scaling import LrScaling


def read_content(data: mmap.mmap) -> dict[str, Any]:
    """Return the content of a checkpoint's state file."""
    stream = cast("IO[bytes]", data)  # an mmap has all methods that torch.load uses, and is not copied like a BytesIO
    with torch.device("cpu"):  # torch.load builds a sparse tensor on the default device, despite map_location
        content: dict[str, Any] = torch.load(stream, weights_only=True, map_location="cpu")
    return content


def _own_name(content: dict[str, Any]) -> str:
    """Return the final name of this content's checkpoint; ValueError if the name does not fit the position."""
    name, position = str(content["name"]), content["position"]
    _, _, *at = parse_stem(name) or ("", 0)
    if at != [position["step"], position["save"]]:
        raise ValueError(f"wanted the name of a checkpoint of step {position['step']}, got {name!r}")
    return name


def load_content(
    content: dict[str, Any],
    directory: Path,
    contents: Contents,
    pos: Position,
    *,
    seed: int | None,
    lr_scaling: LrScaling | None,
) -> int:
    """Load objects, values, this rank's own part and the position.

    Args:
        content: the saved content.
        directory: directory of the checkpoints; used if objects are sharded.
        contents: the objects and values.
        pos: the position, which is overwritten.
        seed: the seed that the user gave, if any.
        lr_scaling: how learning rates follow the world size, if they do.

    Returns:
        The effective seed: the user's, else the one in the checkpoint.

    Raises:
        CheckpointError: the content has another version.
        ValueError, RuntimeError: the content does not fit the objects.
    """
    if content["v"] != CONTENT_VERSION:
        raise CheckpointError(
            f"wanted a checkpoint of version {CONTENT_VERSION}, got {content['v']}: another version of trainer_runtime "
            "made it; continue with that version, or start over in another directory"
        )
    contents.load(content["objects"], next(part for part in content["ranks"] if part))
    if contents.shards is not None:
        contents.shards.load(directory / _own_name(content) / SHARDS, content["sharded"])
    if lr_scaling is not None:
        factor = factor_of(lr_scaling, content["world_size"], world_size())
        rescale(contents.of_type(Optimizer), contents.of_type(LRScheduler), factor)
    pos.load(content["position"])
    holds = content["seed"] if seed is None else seed
    contents.parts.load(content["ranks"], rank(), world_size(), seed=holds, step=pos.step)
    return int(holds)
