"""TensorBoard: the metrics of a State's commits, without the points of steps that were made again.

Each group of ranks writes a file of its own, with the first step that it logs as `purge_step`: TensorBoard drops what
earlier files have from that step on.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch.utils.tensorboard import SummaryWriter

if TYPE_CHECKING:
    import os

    from trainer_runtime.state import State


def log_to_tensorboard(state: State, log_dir: str | os.PathLike[str], *, every: int = 10) -> None:
    """Log the metrics that `commit` is given, as rank 0 has them, and the group's number, which rises at each incident.

    Args:
        state: the State that is committed.
        log_dir: directory that each node can write that may have rank 0; of this training alone.
        every: steps between two points.

    Raises:
        ValueError: as `State.on_commit`.
    """
    writer: SummaryWriter | None = None
    group = 0

    def log(step: int, metrics: dict[str, float]) -> None:
        nonlocal writer, group
        if writer is None or group != state.group:
            if writer is not None:
                writer.close()
            writer, group = SummaryWriter(log_dir, purge_step=step), state.group
        for name, value in {**metrics, "elastic_agent/group": group}.items():
            writer.add_scalar(name, value, step)
        writer.flush()  # before the step is saved: what a killed process has not written would be missing

    state.on_commit(log, every=every)
