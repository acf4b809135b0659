"""Real ranks: what one rank has read is once in the memory of each node, whoever maps it."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from ranks import run

from trainer_runtime import contract

if TYPE_CHECKING:
    from pathlib import Path

SIZE = 40 << 20

READ = f"""
import os, sys, json, mmap
import torch.distributed as dist
import trainer_runtime as tr
from trainer_runtime import node_memory, sharing

nodes, forbidden, source, wanting = json.loads(sys.argv[1])
SIZE = {SIZE}

tr.init()
me = tr.rank()
os.environ["{contract.NODE_ID}"] = nodes[me]
if me in forbidden:
    def refuse(*_args):
        raise PermissionError
    node_memory.os.open = refuse
received, broadcast = [], dist.broadcast
def count(tensor, src):
    if tensor.numel() > 1000:
        received.append(tensor.numel())
    broadcast(tensor, src=src)
sharing.dist.broadcast = count
own = None
if me == source:
    own = node_memory.allocate(SIZE)
    own.data[:] = bytes(range(1, 201)) * (SIZE // 200) + bytes(SIZE % 200)
got = sharing.spread(own, source, is_wanted=me in wanting)
if got is not None:
    assert bytes(got.data[:200]) == bytes(range(1, 201)) and len(got.data) == SIZE
    assert bytes(got.data[-400:-200]) == (bytes(range(1, 201)) * (SIZE // 200) + bytes(SIZE % 200))[-400:-200]
memory = None if got is None or got.descriptor < 0 else os.fstat(got.descriptor).st_ino
dist.barrier()
print(json.dumps({{"memory": memory, "has": got is not None, "took_part": sum(received)}}))
"""


def spread(tmp_path: Path, nodes: str, forbidden: list[int], source: int, wanting: list[int]) -> list[dict[str, Any]]:
    """What each rank has in the end. A rank's node has the name at its place."""
    given = json.dumps([nodes, forbidden, source, wanting])
    return said(run(READ, tmp_path, given, world=len(nodes), group=1))


def said(results: list[tuple[int, list[str]]]) -> list[Any]:
    """The last line of each rank, which has succeeded."""
    assert [code for code, _ in results] == [0] * len(results), results
    return [json.loads(lines[-1]) for _, lines in results]


def memories(found: list[dict[str, Any]]) -> list[int | None]:
    """The memories of the ranks, numbered in the order in which they first occur."""
    order = dict.fromkeys(each["memory"] for each in found if each["memory"] is not None)
    return [None if each["memory"] is None else [*order].index(each["memory"]) for each in found]


def test_the_ranks_of_one_node_map_one_memory_and_nothing_is_sent(tmp_path: Path) -> None:
    found = spread(tmp_path, "aaa", [], 0, [0, 1, 2])
    assert memories(found) == [0, 0, 0]
    assert [each["took_part"] for each in found] == [0, 0, 0]


def test_another_node_receives_it_once(tmp_path: Path) -> None:
    found = spread(tmp_path, "abab", [], 0, [0, 1, 2, 3])
    assert memories(found) == [0, 1, 0, 1]
    assert {each["took_part"] for each in found} == {SIZE}


def test_only_the_ranks_that_want_it_have_it(tmp_path: Path) -> None:
    found = spread(tmp_path, "aabb", [], 1, [2, 3])
    assert [each["has"] for each in found] == [False, False, True, True]
    assert memories(found) == [None, None, 0, 0]


def test_a_rank_that_may_not_open_it_receives_a_copy_of_its_own(tmp_path: Path) -> None:
    found = spread(tmp_path, "aaa", [2], 0, [0, 1, 2])
    assert [each["has"] for each in found] == [True] * 3
    assert memories(found) == [0, 0, None]


RESTORE = """
import json
from pathlib import Path
import torch
import trainer_runtime as tr
from torch import nn
from trainer_runtime.contents import Contents

def own_mb():
    lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(lines["RssAnon"].split()[0]) / 1024

tr.init()
model = nn.Linear(4096, 4096, bias=False)  # 64 MB
opt = torch.optim.SGD(model.parameters(), lr=1.0, momentum=0.9)
state = tr.State(model=model, opt=opt)
began, grown, load = own_mb(), [], Contents.load
def measured(self, *given):
    grown.append(own_mb() - began)
    load(self, *given)
Contents.load = measured
state.restore()
if not grown:
    nn.init.constant_(model.weight, 2.0)
    model.weight.grad = torch.ones_like(model.weight)
    opt.step()
    state.commit()
    state.save()
momentum = opt.state[model.weight]["momentum_buffer"]
print(json.dumps([state.step, model.weight.unique().tolist(), momentum.unique().tolist(), grown]))
"""


def test_a_restored_checkpoint_is_once_in_the_memory_of_the_node(tmp_path: Path) -> None:
    """A rank copies what its objects keep, here half of it, and nothing else."""
    for step in (0, 1):
        found = said(run(RESTORE, tmp_path, world=3, group=1))
        assert [each[:3] for each in found] == [[1, [1.0], [1.0]]] * 3
        assert all(len(each[3]) == step for each in found)
    assert all(grown < 64 + 16 for *_, [grown] in found), found
