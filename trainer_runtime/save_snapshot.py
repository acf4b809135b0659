"""The process that writes a checkpoint from the snapshot in an agent's memory, when no rank is left that could.

The last agent of a job starts it before it leaves: `python -m trainer_runtime.save_snapshot`. It has a rank's channel
to the agent, over which it gets the snapshot and asks for the commit. Exit code: 0 if the checkpoint was committed,
else 1, after a line on stderr.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainer_runtime import contract
from trainer_runtime.agent_channel import AgentGoneError, open_channel
from trainer_runtime.capture.capturing import PLACE, CheckpointPlace
from trainer_runtime.capture.gathering import Captured, is_optimizers
from trainer_runtime.checkpoint import CheckpointError, warn
from trainer_runtime.contents import SHARDED
from trainer_runtime.flat import unflatten
from trainer_runtime.manifest import SHARDS
from trainer_runtime.object_store import open_place
from trainer_runtime.resume import inherit
from trainer_runtime.snapshot_load import read_local_pieces
from trainer_runtime.writer import SAVE_ERRORS, Completed, Content, Writer, warn_not_saved

if TYPE_CHECKING:
    from trainer_runtime.agent_channel import AgentChannel
    from trainer_runtime.snapshot_load import LocalPieces


class _Snapshot(Content):
    """A snapshot of which all pieces are here.

    Args:
        whole: the content of the state file.
        captured: what each rank held of sharded objects; empty: nothing is sharded.
        place: where checkpoints are.
    """

    def __init__(self, whole: dict[str, Any], captured: list[Captured], place: CheckpointPlace) -> None:
        super().__init__(whole)
        self._captured = captured
        self._place = place

    def read(self, private: Path) -> Completed:
        content, _ = super().read(private)
        if not self._captured:
            return content, ()
        from trainer_runtime.capture.shard_files import write_all  # noqa: PLC0415 - takes a while

        aliases = {tuple(alias): tuple(path) for alias, path in self._place.aliases}
        return content, write_all(private / SHARDS, self._captured, aliases)


def main() -> int:
    """Write the checkpoint; return the exit code."""
    channel = open_channel()
    if channel is None:
        warn(f"this module is started by an agent: {contract.CHANNEL_FD} is not set")
        return 1
    try:
        return 0 if _save(channel) else 1
    except AgentGoneError:  # nobody reads what is written here
        return 1
    except CheckpointError as error:
        warn(f"the snapshot in memory was NOT saved: {error}")
        return 1


def _save(channel: AgentChannel) -> bool:
    restore_point = channel.ask_restore_point()
    copy = restore_point.copy
    if copy is None:
        raise CheckpointError("the agent holds none")
    local = read_local_pieces(channel)
    missing = [rank for rank in range(local.world_size) if rank not in local.parts]
    if local.common is None or missing:
        what = f"the part of rank {missing[0]}" if missing else "the common part"
        raise CheckpointError(f"{what} of step {copy.step} is missing or damaged")
    content = unflatten(local.common)
    place = CheckpointPlace(**content.pop(PLACE))
    directory = open_place(place.directory)
    if place.has_hooks:
        warn(f"the checkpoint of step {copy.step} has no files of the script's own (on_save): no rank is left")
    writer = Writer(
        directory,
        copy.run,
        copy.group,
        keep=place.keep,
        start=inherit(restore_point.checkpoint),
        channel=channel,
        node=place.node and os.environ[contract.NODE_ID],  # if nodes share no directory, it is on this one's disk
    )
    whole = _content(content, local, place)
    try:
        writer.write(whole, step=copy.step, save=copy.save, world_size=local.world_size, metrics={})
    except OSError as error:
        warn_not_saved(copy.step, directory, error)
        return False
    try:
        return writer.finish()
    except SAVE_ERRORS:  # reported when it happened
        return False


def _content(content: dict[str, Any], local: LocalPieces, place: CheckpointPlace) -> Content:
    parts = [unflatten(local.parts[rank]) for rank in range(local.world_size)]
    captured = [part.pop(SHARDED) for part in parts if SHARDED in part]
    content["ranks"] = parts
    if captured:
        content[SHARDED] = {
            name: {"state": state["plain"], "param_groups": state["groups"]}
            for name, state in captured[0].items()
            if is_optimizers(state)
        }
    return _Snapshot(content, captured, place)


if __name__ == "__main__":
    sys.exit(main())
