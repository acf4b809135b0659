"""Real ranks with everything that differs from rank to rank: random states, running statistics, per-rank objects."""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING

import pytest
from cases import some
from ranks import run

from trainer_runtime import contract

if TYPE_CHECKING:
    from pathlib import Path

TRAIN = """
import os, random, sys
import numpy as np, torch, torch.distributed as dist
from torch import nn
import trainer_runtime as tr

class Seen:
    def __init__(self): self.samples = []
    def state_dict(self): return {"samples": self.samples}
    def load_state_dict(self, state): self.samples = state["samples"]

tr.init(timeout_s=120)
stop_at = int(sys.argv[1])
for seed in (torch.manual_seed, random.seed, np.random.seed):
    seed(100 + tr.rank())
net = nn.Sequential(nn.Linear(1, 8), nn.BatchNorm1d(8), nn.Dropout(), nn.Linear(8, 1))
model = nn.parallel.DistributedDataParallel(net, broadcast_buffers=False)
opt = torch.optim.AdamW(model.parameters())
chance = torch.Generator().manual_seed(tr.rank())
data = torch.utils.data.TensorDataset(torch.arange(48.0)[:, None])
loader = torch.utils.data.DataLoader(data, batch_size=8, shuffle=True)
seen = Seen()
state = tr.State(model=model, opt=opt, chance=chance, seen=tr.PerRank(seen), save_every=1000)
for epoch in state.epochs(2):
    for (x,) in state.steps(loader):
        noise = random.random() + np.random.rand() + torch.rand((), generator=chance)
        loss = (model(x + noise) - x).square().mean()
        opt.zero_grad()
        loss.backward()
        opt.step()
        seen.samples += x.flatten().tolist()
        state.commit(loss=loss)
        mean = net[1].running_mean.sum().item()
        print("did", state.step, loss.item().hex(), mean.hex(), sum(seen.samples), flush=True)
        if state.step == stop_at - 1:
            state.save()
        if state.step == stop_at:
            dist.barrier()  # the others have saved too
            os._exit(9)
    with tr.phase("eval"):
        print("eval", epoch, torch.rand(()).item().hex(), flush=True)
"""


def did(lines: list[str]) -> list[str]:
    return [line for line in lines if line.split()[0] in {"did", "eval"}]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> list[list[str]]:
    """What two ranks do that nothing happens to."""
    results = run(TRAIN, tmp_path_factory.mktemp("undisturbed"), "0", world=2, group=1)
    assert [code for code, _ in results] == [0, 0], results
    return [did(lines) for _, lines in results]


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What two ranks left that died in step 4 of 6 of the first epoch, and had saved step 3."""
    directory = tmp_path_factory.mktemp("killed")
    results = run(TRAIN, directory, "4", world=2, group=1)
    assert [code for code, _ in results] == [9, 9], results
    return directory


def test_each_rank_goes_on_with_its_own_randomness_and_statistics(
    undisturbed: list[list[str]], killed: Path, tmp_path: Path
) -> None:
    """Bit by bit, with an order of samples that comes from the global random state."""
    results = run(TRAIN, shutil.copytree(killed, tmp_path / "checkpoints"), "0", world=2, group=2)
    assert [code for code, _ in results] == [0, 0], results
    for (_, lines), expected in zip(results, undisturbed, strict=True):
        assert did(lines) == expected[3:]
    assert undisturbed[0] != undisturbed[1], "else a rank could have had the other's"


def test_after_a_resize_no_two_ranks_draw_the_same_and_the_new_rank_is_reported(killed: Path, tmp_path: Path) -> None:
    results = run(TRAIN, shutil.copytree(killed, tmp_path / "checkpoints"), "0", world=3, group=2)
    assert [code for code, _ in results] == [0, 0, 0], results
    steps = [did(lines)[0].split() for _, lines in results]
    assert {step[1] for step in steps} == {"4"}
    assert len({step[2] for step in steps}) == 3
    warned = [any("its seen begins as the script made it" in line for line in lines) for _, lines in results]
    assert warned == [False, False, True]


LOOK = """
import os
from pathlib import Path
import trainer_runtime as tr
from trainer_runtime import contract
from trainer_runtime.shared_directory_check import check_shared_directory
tr.init(timeout_s=120)
directory = Path(os.environ[contract.CHECKPOINT_DIR])
owner = check_shared_directory(directory).owner
if tr.is_main():
    print("owner", repr(owner), list(directory.glob("*")))
"""


@pytest.mark.parametrize(
    ("places", "local_ranks", "owner", "said"),
    [
        (("a", "a"), (0, 0), "''", 0),
        (("a", "b"), (0, 0), "'node-0'", 1),
        pytest.param(("a", "a"), (0, 1), "None", 0, marks=pytest.mark.long),
    ],
    ids=["shared", "own disks", "one node"],
)
def test_a_probe_shows_whether_all_nodes_see_the_directory(
    tmp_path: Path, places: tuple[str, str], local_ranks: tuple[int, int], owner: str, said: int
) -> None:
    own = {
        rank: {
            contract.CHECKPOINT_DIR: str(tmp_path / places[rank]),
            contract.NODE_ID: f"node-{rank}",
            "LOCAL_RANK": str(local_ranks[rank]),
        }
        for rank in range(2)
    }
    results = run(LOOK, tmp_path, world=2, group=1, own=own)
    assert [code for code, _ in results] == [0, 0], results
    lines = results[0][1] + results[1][1]
    assert f"owner {owner} []" in lines
    assert sum("is not shared: 1 of 2 nodes do not see what rank 0 writes there" in line for line in lines) == said


STREAM = """
import os, sys
import torch, torch.distributed as dist
import trainer_runtime as tr
from torchdata.stateful_dataloader import StatefulDataLoader

class Stream(torch.utils.data.IterableDataset):
    '''Numbers without an index, of which each rank and each of its loader's workers has every so many.'''
    def __init__(self): self.at = 0
    def __iter__(self):
        worker = torch.utils.data.get_worker_info()
        share, shares = tr.rank() * worker.num_workers + worker.id, tr.world_size() * worker.num_workers
        while self.at < 10:
            self.at += 1
            yield share + (self.at - 1) * shares
        self.at = 0
    def state_dict(self): return {"at": self.at}
    def load_state_dict(self, state): self.at = state["at"]

tr.init(timeout_s=120)
stop_at = int(sys.argv[1])
loader = StatefulDataLoader(Stream(), batch_size=2, num_workers=2)
state = tr.State(loader=loader, save_every=1000)
for epoch in state.epochs(2):
    for batch in state.steps(loader):
        state.commit()
        print("did", state.step, epoch, *batch.tolist(), flush=True)
        if state.step == stop_at - 1:
            state.save()
        if state.step == stop_at:
            dist.barrier()
            os._exit(9)
"""


@pytest.mark.long("unit/test_runtime_steps.py; with a loader's workers, no test in every run")
@pytest.mark.parametrize("stop_at", some([13], of=[4, 13]))
def test_a_stream_goes_on_after_what_was_committed(tmp_path: Path, stop_at: int) -> None:
    """By torchdata's own loader, whose workers had read further."""
    whole = [did(lines) for _, lines in run(STREAM, tmp_path / "whole", "0", world=2, group=1)]
    assert [len(lines) for lines in whole] == [20, 20]
    assert [code for code, _ in run(STREAM, tmp_path / "cut", str(stop_at), world=2, group=1)] == [9, 9]
    results = run(STREAM, tmp_path / "cut", "0", world=2, group=2)
    assert [did(lines) for _, lines in results] == [lines[stop_at - 1 :] for lines in whole], results
