"""Where the shards of a checkpoint are written is agreed in the ranks' store, which a stranger may reach."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch.distributed as dist
from torch import nn

from trainer_runtime.capture.shard_writer import ShardWriter
from trainer_runtime.capture.sharded_objects import ShardedObjects
from trainer_runtime.rank_messages import RankMessages

if TYPE_CHECKING:
    from pathlib import Path

KEY = bytes(range(32))


def test_a_checkpoint_whose_place_a_stranger_has_proposed_is_left_out(tmp_path: Path) -> None:
    store = dist.HashStore()
    messages = RankMessages(store, "board/", KEY)
    objects = ShardedObjects({"net": nn.Linear(2, 2)})
    writer = ShardWriter(objects, tmp_path, messages, messages, rank=0, world_size=2)
    store.set("board/shards/7/0", "../elsewhere")
    places = [tmp_path / f".step-{step}" for step in (7, 8)]
    for place in places:
        place.mkdir()
    with pytest.raises(OSError, match="was not written by a rank of this group; make MASTER_PORT reachable"):
        writer.offer((7, 0), places[0])
    writer.leave_out((7, 0))
    assert store.get("board/shards/7/0") == b"../elsewhere"
    writer.offer((8, 0), places[1])
