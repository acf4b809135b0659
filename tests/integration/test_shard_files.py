"""Files of shards: plain torch reads what the ranks have written, and what torch has written is read."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from cases import some
from ranks import run
from torch import nn
from torch.distributed.checkpoint import save
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import trainer_runtime as tr
from trainer_runtime.capture.local import LayoutError
from trainer_runtime.capture.shard_files import load_files, write_blocks, write_list
from trainer_runtime.capture.shard_list import METADATA, read_list
from trainer_runtime.capture.sharded_objects import ShardedObjects

JOB = Path(__file__).with_name("sharded_snapshot_job.py")


def read_plainly(shard_dir: Path, into: Path) -> dict[str, Any]:
    """The whole tensors, as torch alone reads them."""
    dcp_to_torch_save(shard_dir, into)
    found: dict[str, Any] = torch.load(into, weights_only=True)
    return found


@pytest.mark.parametrize(("how", "world"), some([("2d", 4)], of=[("fsdp", 2), ("hsdp", 4), ("tensor", 2), ("2d", 4)]))
def test_each_block_is_there_once_and_torch_reads_them(how: str, world: int, tmp_path: Path) -> None:
    results = run(JOB.read_text(), tmp_path / "checkpoints", "0", "3", how, world=world, group=1)
    assert [code for code, _ in results] == [0] * world, results
    (checkpoint,) = (tmp_path / "checkpoints").iterdir()
    expected = json.loads(results[0][1][-1].removeprefix("became "))
    found = read_plainly(checkpoint / "shards", tmp_path / "whole.pt")
    assert found["model"].keys() == {key for key in expected if " " not in key}
    for key, tensor in found["model"].items():
        assert tensor.tolist() == expected[key], key
    for key, state in found["opt"].items():
        assert {kind: value.tolist() for kind, value in state.items()} == {
            kind: expected[f"{key} {kind}"] for kind in ("step", "exp_avg", "exp_avg_sq")
        }
    listed = read_list(checkpoint / "shards")
    for blocks in listed.values():
        assert sum(math.prod(block.sizes) for block in blocks) == math.prod(blocks[0].shape)
    files = {f"__{rank}_0.distcp" for rank in range(world)}
    assert {block.file for blocks in listed.values() for block in blocks} == files


def model() -> tuple[nn.Module, torch.optim.Optimizer]:
    """A sharded one of one rank, which has taken a step."""
    net = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    fully_shard(net, mesh=init_device_mesh("cpu", (1,)))
    opt = torch.optim.AdamW(net.parameters())
    net(torch.randn(3, 4)).sum().backward()
    opt.step()
    opt.zero_grad()
    return net, opt


def test_a_checkpoint_whose_shards_torch_has_written_is_read(tmp_path: Path) -> None:
    """All were, before."""
    tr.init()
    (net, opt), (other, its_opt) = model(), model()
    state, its = get_state_dict(net, opt)
    save({"model": state, "opt": its["state"]}, checkpoint_id=tmp_path)
    plain = {"opt": {"state": {key: {} for key in its["state"]}, "param_groups": its["param_groups"]}}
    load_files(ShardedObjects({"model": other, "opt": its_opt}), tmp_path, plain)
    for key, tensor in net.state_dict().items():
        torch.testing.assert_close(other.state_dict()[key], tensor, rtol=0, atol=0)
    found = ShardedObjects({"model": other, "opt": its_opt}).read()
    assert str(found) == str(ShardedObjects({"model": net, "opt": opt}).read())


def test_blocks_that_do_not_make_up_a_tensor_are_no_checkpoint(tmp_path: Path) -> None:
    first = write_blocks(tmp_path, 0, {("m", "w"): (((4, 2), (0, 0)), torch.ones(2, 2))}, [])
    second = write_blocks(tmp_path, 1, {("m", "w"): (((4, 2), (1, 0)), torch.ones(2, 2))}, [])
    third = write_blocks(tmp_path, 2, {("m", "w"): (((4, 2), (2, 0)), torch.ones(2, 2))}, [])
    for files in ([first], [first, second], [first, second, third]):
        with pytest.raises(OSError, match=r"do not make up m\.w: wanted disjoint blocks of one tensor with 8"):
            write_list(tmp_path, files, {})
    assert not (tmp_path / METADATA).exists()
    stored = write_list(tmp_path, [first, third], {("m", "tied"): ("m", "w")})
    assert [each.file for each in stored] == [f"shards/{name}" for name in (METADATA, "__0_0.distcp", "__2_0.distcp")]
    found = read_plainly(tmp_path, tmp_path / "whole.pt")
    assert torch.equal(found["m"]["w"], torch.ones(4, 2))
    assert torch.equal(found["m"]["tied"], torch.ones(4, 2))


def test_what_one_rank_knows_and_nobody_has_written_is_no_checkpoint(tmp_path: Path) -> None:
    file = write_blocks(tmp_path, 0, {("m", "w"): (((2,), (0,)), torch.ones(2))}, [("opt", "w", "exp_avg")])
    with pytest.raises(OSError, match=r"opt\.w\.exp_avg is known to some ranks only"):
        write_list(tmp_path, [file], {})


@pytest.mark.parametrize(
    ("made", "said"),
    [
        (lambda parameter: [torch.zeros_like(parameter)], "wanted tensors by name, got some in a list"),
        (lambda parameter: torch.zeros(parameter.shape), "wanted a tensor that is sharded as its parameter"),
    ],
)
def test_a_tensor_of_an_optimizer_that_no_other_rank_could_take_over_is_refused(
    made: Callable[[torch.Tensor], object], said: str, tmp_path: Path
) -> None:
    tr.init()
    net, opt = model()
    opt.state[net[0].weight]["more"] = made(net[0].weight)
    state = tr.State(checkpoint_dir=tmp_path, save_every=100, model=net, opt=opt)
    state.restore()
    with pytest.raises(LayoutError, match=rf"State cannot save opt\.0\.weight.*{said}"):
        state.commit()


def test_the_options_of_a_sharded_optimizer_are_changed_once_in_a_resumed_body(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The body steps a schedule before the items, and runs again after a restart."""
    tr.init()

    def train(items: int) -> float:
        monkeypatch.setattr(tr.State, "_restored", set())  # as in another process
        net = nn.Linear(2, 2)
        fully_shard(net, mesh=init_device_mesh("cpu", (1,)))
        opt = torch.optim.SGD(net.parameters(), lr=1.0)
        schedule = torch.optim.lr_scheduler.ExponentialLR(opt, 0.5)
        opt.step()  # there are no gradients; torch wants it before the schedule's step
        state = tr.State(checkpoint_dir=tmp_path, save_every=1, net=net, opt=opt, schedule=schedule)
        for _ in state.epochs(1):
            schedule.step()
            for item in state.steps(range(4)):
                state.commit()
                if item + 1 == items:
                    state.save()
                    return float(opt.param_groups[0]["lr"])
        raise AssertionError

    assert [train(2), train(3)] == [0.5, 0.5]


def test_a_file_that_rank_0_does_not_see_whole_is_no_checkpoint(tmp_path: Path) -> None:
    file = write_blocks(tmp_path, 0, {("m", "w"): (((2,), (0,)), torch.ones(2))}, [])
    with (tmp_path / file.name).open("ab") as more:
        more.write(b"1")
    with pytest.raises(FileNotFoundError, match="rank 0 does not see"):
        write_list(tmp_path, [file], {})


ENDS = """
import torch
import trainer_runtime as tr
from torch import nn
from torch.distributed.fsdp import fully_shard

tr.init()
net = nn.Linear(600, 600)  # enough to be copied by a thread
fully_shard(net)
opt = torch.optim.AdamW(net.parameters())
state = tr.State(save_every=2, model=net, opt=opt)
state.restore()
for _ in range(2):
    net(torch.ones(1, 600)).sum().backward()
    opt.step()
    state.commit()
"""


def test_a_script_that_ends_after_a_commit_has_saved_its_shards(tmp_path: Path) -> None:
    """Nothing else compares what was copied with what is there: no further step is taken."""
    results = run(ENDS, tmp_path / "checkpoints", world=2, group=1)
    assert [code for code, _ in results] == [0, 0], results
    assert [path.name.endswith("-s000000002") for path in (tmp_path / "checkpoints").iterdir()] == [True], results
    assert not any("was not settled" in line or "were not written" in line for _, lines in results for line in lines)
