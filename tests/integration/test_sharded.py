"""Sharded models: each rank has a part of every tensor, and another number of ranks takes over."""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from cases import some
from integration.conftest import Job
from integration.test_snapshots_job import (
    MOST_LOST,
    assert_identical,
    away_from_checkpoints,
    lost_steps,
    steps_of,
    with_frequent_snapshots,
)
from ranks import run
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard

import trainer_runtime as tr
from agent.rehearse.cluster import read_trace, wait_for
from trainer_runtime import contract, writer

JOB = Path(__file__).with_name("sharded_job.py")
STEPS = 250
WIDE = str(1 << 16)
"""A width of the hidden layer with which the part of each of three ranks is larger than what agents send over links."""
ON_DISK = "copies of another node's snapshots are kept on disk, in "

Make = Callable[..., Job]


def run_alone(job: Job) -> dict[str, torch.Tensor]:
    """The result of one rank that nothing happens to."""
    job.start("a", "1", [str(JOB), str(job.directory), str(STEPS), "0"])
    job.finish()
    found: dict[str, torch.Tensor] = torch.load(job.weights, weights_only=True)
    return found


def test_a_sharded_model_goes_on_in_two_then_three_ranks_then_one_and_through_a_crash(job: Make) -> None:
    running = with_frequent_snapshots(job, "--max_restarts=2")
    command = [str(JOB), str(running.directory), str(STEPS), "0.15"]
    for name in ("a", "b"):
        running.start(name, "2", command)
    group = running.wait_for_step(25, world=2)
    running.nodes["b"].kill_worker()
    group = running.wait_for_step(30, after_group=group)
    assert lost_steps(running, group) <= MOST_LOST, running.log_text()
    assert "from memory" in running.log_text()
    running.scale("3")
    running.start("c", "3", command)
    group = running.wait_for_step(1, after_group=group, world=3)
    running.wait_for_step(read_trace(running.trace)[-1].step + 5, world=3)
    running.scale("1")
    running.wait_for_step(1, after_group=group, world=1)
    running.finish()
    resized = [line.step for line in read_trace(running.trace) if line.group >= group]
    assert len(resized) == len(set(resized)), "a planned change loses nothing"
    expected, found = run_alone(job()), torch.load(running.weights, weights_only=True)
    assert expected.keys() == found.keys()
    for key, tensor in expected.items():
        torch.testing.assert_close(found[key], tensor, rtol=1e-4, atol=1e-5)


@pytest.mark.long("integration/test_sharded_memory.py; test_snapshots_job.py, of models that are not sharded")
def test_killed_workers_and_a_lost_node_lose_three_steps_at_most_and_change_no_bit(job: Make) -> None:
    """What the lost node's ranks held is small, so its neighbour has it, and the spare is given it."""
    undisturbed = job("--nproc_per_node=2")
    running = with_frequent_snapshots(job, "--nproc_per_node=2", "--max_restarts=2")
    for each, step_time_s in ((undisturbed, "0"), (running, "0.15")):
        for name in ("a", "b"):
            each.start(name, "2", [str(JOB), str(each.directory), str(STEPS), step_time_s])
    group = running.wait_for_step(25, world=4)
    for _ in range(2):
        running.nodes["b"].kill_worker()
        group = running.wait_for_step(1, after_group=group, world=4)
        assert lost_steps(running, group) <= MOST_LOST, running.log_text()
        running.wait_for_step(max(steps_of(running, group)) + 5, world=4)
    running.start("spare", "2", [str(JOB), str(running.directory), str(STEPS), "0.15"])
    wait_for(lambda: len(running.status()["nodes"]) == 3, 60, "the spare")
    running.nodes["a"].kill()  # rank 0
    group = running.wait_for_step(1, after_group=group, world=4)
    assert lost_steps(running, group) <= MOST_LOST, running.log_text()
    running.finish()
    undisturbed.finish()
    assert_identical(running.weights, undisturbed.weights)


@pytest.mark.parametrize("options", [(), ("--snapshot_memory=10M",)], ids=["in-memory", "on-disk"])
def test_a_lost_node_leaves_copies_of_its_large_parts_with_the_next_one(job: Make, options: tuple[str, ...]) -> None:
    """The ring is a, b, c. Each rank's part is 3.4 MB; once b is lost, only c has that of b's rank.

    Two snapshots of this node's own fit into 10 MB, and the copies of two more do not.
    """
    undisturbed = job()
    running = with_frequent_snapshots(job, "--max_restarts=2", *options)
    for each, step_time_s in ((undisturbed, "0"), (running, "0.15")):
        for name in ("a", "b", "c"):
            each.start(name, "3", [str(JOB), str(each.directory), "120", step_time_s, WIDE])
    running.wait_for_step(25, world=3)
    running.start("spare", "3", [str(JOB), str(running.directory), "120", "0.15", WIDE])
    wait_for(lambda: len(running.status()["nodes"]) == 4, 60, "the spare")
    # Else the newest state may be a checkpoint.
    wait_for(lambda: away_from_checkpoints(read_trace(running.trace)[-1]), 60, "a step between two checkpoints")
    running.nodes["b"].kill()
    group = running.wait_for_step(1, after_group=1, world=3)
    assert lost_steps(running, group) <= MOST_LOST, running.log_text()
    assert "from memory" in running.log_text()
    running.finish()
    undisturbed.finish()
    assert_identical(running.weights, undisturbed.weights)
    counts = {node.name: node.text().count(ON_DISK) for node in running.nodes.values()}
    assert [counts[name] for name in ("a", "c")] == [len(options)] * 2, running.log_text()
    assert "holds no copies" not in running.log_text()


SHARDED = """
import errno, os, sys
from pathlib import Path
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
import trainer_runtime as tr
from trainer_runtime.capture import shard_writer

def full(*_):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

def weights():
    return [round(each.full_tensor().sum().item(), 4) for each in net.parameters()]

tr.init(timeout_s=60)
torch.manual_seed(0)
net = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 4))
fully_shard(net, mesh=init_device_mesh("cpu", (tr.world_size(),)))
opt = torch.optim.AdamW(net.parameters())
state = tr.State(model=net, opt=opt, save_every=1)

def step():
    net(torch.ones(2, 8)).sum().backward()
    opt.step()
"""

AGAIN = f"""{SHARDED}
how = sys.argv[1]
state.on_save(lambda _: full() if how == "hook" else None)
state.restore()
if how != "look":
    step()
    write, writer = shard_writer.write_blocks, state._saver.writer
    if how == "full" and not tr.is_main():
        shard_writer.write_blocks = full
    if how == "busy" and tr.is_main():
        writer.why_busy = lambda **_: "is busy"
    if how == "forged" and tr.is_main():  # by somebody who reaches the ranks' store
        state._saver.shards._messages.propose("shards/1/0", str(state._directory.with_name("elsewhere")))
    state.commit()
    if how in {"full", "forged"} and not tr.is_main():
        assert not state._saver.shards.finish()
    shard_writer.write_blocks, how = write, ""
    dist.barrier()
    state.save()
print("weights", state.step, weights(), flush=True)
"""


@pytest.mark.parametrize("how", some(["forged"], of=["full", "hook", "busy", "forged"]))
def test_what_was_not_saved_when_it_was_due_can_be_saved_by_all_ranks_at_once(tmp_path: Path, how: str) -> None:
    """One rank's disk is full, rank 0 cannot begin, or leaves the step out: in the end it has the shards of all.

    So where a stranger has chosen the directory: nothing is written there.
    """
    results = run(AGAIN, tmp_path, how, world=2, group=1)
    assert [code for code, _ in results] == [0, 0], results
    assert any("step 1 was NOT saved" in line for line in results[0][1])
    ((_, lines),) = run(AGAIN, tmp_path, "look", world=1, group=2)
    assert lines[-1] == results[0][1][-1] == results[1][1][-1]
    assert [path.name for path in tmp_path.iterdir()] == ["r-g000001-s000000001-1"]
    assert not tmp_path.with_name("elsewhere").exists()


TOLD = f"""{SHARDED}
import trainer_runtime.writer

state.restore()
step()
if tr.is_main():
    trainer_runtime.writer.write_state = full
state.commit()
for save in (state.save, state.save, lambda: state._saver.save_for_handoff(7) or full()):
    try:
        save()
    except OSError as error:
        print(error.strerror, flush=True)
"""


def test_state_that_was_not_saved_and_cannot_be_is_reported_each_time(tmp_path: Path) -> None:
    """Rank 0 could not write what is common; the others have written their shards, and learn nothing of it."""
    results = run(TOLD, tmp_path, world=2, group=1)
    assert [code for code, _ in results] == [0, 0], results
    assert [line for line in results[0][1] if "NOT saved" not in line] == ["No space left on device"] * 3
    assert not results[1][1]
    assert not list(tmp_path.iterdir())


UNSHARED = f"""{SHARDED}
from pathlib import Path

state.restore()
step()
state.commit()
state.save()
here = Path(os.environ["ELASTIC_AGENT_CHECKPOINT_DIR"])
if not tr.is_main():
    here.unlink()
    here.mkdir()
dist.barrier()
step()
state.commit()
if tr.is_main():
    state._saver.writer.wait_for_disk()
else:
    assert not state._saver.shards.finish()
print("left")
"""


@pytest.mark.long("no test in every run")
def test_where_a_node_no_longer_sees_the_shared_directory_no_step_counts_without_its_shards(tmp_path: Path) -> None:
    """Its mount has gone: a directory of its own, which torch would make for it, is seen by nobody else."""
    shared = tmp_path / "shared"
    shared.mkdir()
    mounts = [tmp_path / f"mount-{rank}" for rank in range(2)]
    for mount in mounts:
        mount.symlink_to(shared)
    own = {rank: {contract.CHECKPOINT_DIR: str(mount)} for rank, mount in enumerate(mounts)}
    results = run(UNSHARED, shared, world=2, group=1, own=own)
    assert [(code, lines[-1]) for code, lines in results] == [(0, "left")] * 2, results
    told = [line for line in results[0][1] if "step 2 was NOT saved" in line]
    assert ["is the directory still shared" in line for line in told] == [True]
    assert sorted(path.name for path in shared.iterdir()) == ["r-g000001-s000000001", "r-g000001-s000000001-1"]
    assert not list(mounts[1].iterdir())


SLOW = f"""{SHARDED}
import threading, time

state.restore()
step()
saved = weights()
may_write, write = threading.Event(), shard_writer.write_blocks

def wait_and_write(*args):
    assert may_write.wait(60)
    return write(*args)

shard_writer.write_blocks = wait_and_write
state.commit()
step()
assert weights() != saved
state._pos.due = 99  # the next save would wait for this one
state.commit()
print("training", state.step, flush=True)
may_write.set()
if tr.is_main():
    state._saver.writer.finish()
state._saver.shards.finish()
print("saved", saved, flush=True)
"""


def test_training_continues_while_shards_are_written_and_what_is_saved_is_the_committed_step(tmp_path: Path) -> None:
    results = run(SLOW, tmp_path, world=2, group=1)
    assert [code for code, _ in results] == [0, 0], results
    assert [lines[0] for _, lines in results] == ["training 2"] * 2
    ((_, lines),) = run(AGAIN, tmp_path, "look", world=1, group=2)
    assert lines[-1].removeprefix("weights 1 ") == results[0][1][-1].removeprefix("saved ")


FORWARD = f"""{SHARDED}
net(torch.ones(2, 8))  # FSDP2 leaves the outermost parameters gathered after it
state.restore()
print("sees", round(net(torch.ones(2, 8)).sum().item(), 4), flush=True)
for _ in range(2 if state.step == 0 else 0):
    step()
    opt.zero_grad()
    state.commit()
    with torch.no_grad():
        net(torch.ones(2, 8))
    state.save()
print("sees", round(net(torch.ones(2, 8)).sum().item(), 4), flush=True)
"""


def test_what_fsdp2_has_gathered_for_a_forward_pass_is_neither_saved_nor_used_after_a_restore(tmp_path: Path) -> None:
    saved, found = (run(FORWARD, tmp_path, world=2, group=group) for group in (1, 2))
    assert [code for code, _ in saved + found] == [0] * 4, saved + found
    assert saved[0][1][0] != saved[0][1][-1]
    seen = {line for _, lines in found for line in lines if line.startswith("sees")}
    assert seen == {saved[0][1][-1]}


BAD = f"""{SHARDED}
def fail(*_):
    raise MemoryError("no more")

state.restore()
if not tr.is_main():
    shard_writer.write_blocks = fail
step()
state.commit()
try:
    state.save()
except OSError as error:
    print(error, flush=True)
"""


def test_a_rank_that_cannot_write_for_whatever_reason_says_so(tmp_path: Path) -> None:
    """Rank 0 waits for it."""
    results = run(BAD, tmp_path, world=2, group=1)
    assert [code for code, _ in results] == [0, 0], results
    assert results[0][1][-1] == "shards could not be written: rank 1: MemoryError: no more"


FIRST = f"""{SHARDED}
state.restore()
state.save()
net(torch.ones(2, 8)).sum().backward()
before = [each.to_local().clone() for each in net.parameters()]
state.save()
assert all(torch.equal(one, each.to_local()) for one, each in zip(before, net.parameters(), strict=True))
for _ in range(3):
    step()
    state.commit()
print([of["step"].item() for of in opt.state.values()])
"""


def test_a_save_before_the_first_step_takes_none(tmp_path: Path) -> None:
    """Torch's `get_state_dict` does, to give an optimizer its state: its counter was 4 after 3 steps."""
    results = run(FIRST, tmp_path, world=2, group=1)
    assert [(code, lines[-1]) for code, lines in results] == [(0, f"{[3.0] * 4}")] * 2, results


CHANGING = """
import sys
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
import trainer_runtime as tr

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        return self.first(x) if sys.argv[1] == "unused" else self.second(self.first(x))

tr.init(timeout_s=60)
torch.manual_seed(0)
net = Net()
net.second.requires_grad_("frozen" not in sys.argv[1])
for each in (net.first, net.second, net):
    fully_shard(each, mesh=init_device_mesh("cpu", (tr.world_size(),)))
opt = torch.optim.AdamW(net.parameters())
stepped = []
opt.register_step_post_hook(lambda opt, *_: stepped.append(len(opt.state)))
state = tr.State(model=net, opt=opt, save_every=100)
state.restore()
assert not stepped
net.second.requires_grad_(sys.argv[1] != "frozen")
if state.step == 0:
    for _ in range(2):
        net(torch.ones(2, 4)).sum().backward()
        opt.step()
        opt.zero_grad()
        state.commit()
    state.save()
names = {parameter: name for name, parameter in net.named_parameters()}
own = {names[p]: (of["step"].item(), of["exp_avg"].full_tensor().sum().item()) for p, of in opt.state.items()}
print(state.step, sorted(own.items()), flush=True)
"""


@pytest.mark.long("no test in every run")
@pytest.mark.parametrize("how", some(["frozen at first"], of=["unused", "frozen", "frozen at first"]))
def test_what_an_optimizer_has_of_each_parameter_comes_back_and_nothing_else(tmp_path: Path, how: str) -> None:
    """One that had no gradient has no state, not even for a moment; one that was frozen at the start only has one."""
    saved, found = (run(CHANGING, tmp_path, how, world=2, group=group) for group in (1, 2))
    assert [code for code, _ in saved + found] == [0] * 4, saved + found
    assert {lines[-1] for _, lines in found} == {saved[0][1][-1]}
    assert ("second" in saved[0][1][-1]) == (how == "frozen at first")


TWO = f"""{SHARDED}
second = tr.State(checkpoint_dir=sys.argv[1], model=net, opt=opt, save_every=1)
for each in (state, second):
    each.restore()
if second.step == 0:
    step()
    for each in (state, second):
        each.commit()
        each.save()
print("weights", second.step, weights(), flush=True)
"""


@pytest.mark.long("no other test")
def test_two_states_of_a_script_do_not_take_each_others_places(tmp_path: Path) -> None:
    """Both have a first attempt at a step 1, in directories of their own."""
    first, second = tmp_path / "first", tmp_path / "second"
    saved, found = (run(TWO, first, str(second), world=2, group=group) for group in (1, 2))
    assert [code for code, _ in saved + found] == [0] * 4, saved + found
    assert {lines[-1] for _, lines in saved + found} == {saved[0][1][-1]}


@pytest.mark.parametrize("is_other_sharded", [True, False])
def test_an_optimizer_over_several_modules_is_refused_by_its_name(tmp_path: Path, *, is_other_sharded: bool) -> None:
    """Rather than at its first save."""
    tr.init()
    model, other = torch.nn.Linear(2, 2), torch.nn.Linear(2, 3)
    for module in (model, other) if is_other_sharded else (model,):
        fully_shard(module, mesh=init_device_mesh("cpu", (1,)))
    opt = torch.optim.AdamW([*model.parameters(), *other.parameters()])
    said = (
        "State cannot save opt: wanted an optimizer of the parameters of one sharded module, got one of model's and 2"
    )
    with pytest.raises(ValueError, match=said):
        tr.State(checkpoint_dir=tmp_path, model=model, other=other, opt=opt)
    both = torch.nn.ModuleList([model, other])
    state = tr.State(checkpoint_dir=tmp_path, save_every=1, both=both, opt=opt)
    state.restore()
    state.commit()
    state.save()


class Extra(torch.nn.Linear):
    """A layer with a state that is no tensor."""

    def get_extra_state(self) -> dict[str, int]:
        return {"count": 1}


@pytest.mark.parametrize(
    ("layer", "rate", "kept", "said"),
    [
        (torch.nn.Linear, torch.ones(1).numpy()[0], {}, r"opt\[0\]\['lr'\]: .* got numpy.float32"),
        (Extra, 0.1, {}, "model: wanted tensors only in a sharded module, got _extra_state"),
        (torch.nn.Linear, 0.1, {"ema": 1}, r"ema\['weight'\]: .*DTensor; .* sharded tensors belong in a module"),
    ],
    ids=["param group", "extra state", "sharded value"],
)
def test_what_would_not_load_back_is_refused_at_the_first_commit(
    tmp_path: Path, layer: type[torch.nn.Linear], rate: float, kept: dict[str, object], said: str
) -> None:
    tr.init()
    model = layer(2, 2)
    fully_shard(model, mesh=init_device_mesh("cpu", (1,)))
    opt = torch.optim.AdamW(model.parameters(), lr=rate)
    own = {name: {key: value.clone() for key, value in model.named_parameters()} for name in kept}
    state = tr.State(checkpoint_dir=tmp_path, save_every=100, model=model, opt=opt, **own)
    state.restore()
    with pytest.raises(TypeError, match=f"State cannot save {said}"):
        state.commit()


@pytest.mark.filterwarnings("ignore:FSDP is switching to use `NO_SHARD`")
def test_fsdp1_is_refused_by_its_name(tmp_path: Path) -> None:
    """Its state looks whole, and is one rank's own."""
    tr.init()
    model = torch.nn.Sequential(FullyShardedDataParallel(torch.nn.Linear(2, 2), device_id=torch.device("cpu")))
    with pytest.raises(ValueError, match=r"State cannot save net: .*FSDP1\): use fully_shard"):
        tr.State(checkpoint_dir=tmp_path, net=model)


def test_what_changes_while_it_is_written_is_saved_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A learning rate that is a tensor, which a schedule fills anew."""
    tr.init()
    write = writer.write_state

    def write_late(*args: Any) -> Any:  # noqa: ANN401 - the function's own
        opt.param_groups[0]["lr"].fill_(7.0)
        return write(*args)

    def new() -> tuple[torch.optim.Optimizer, tr.State]:
        model = torch.nn.Linear(2, 2)
        fully_shard(model, mesh=init_device_mesh("cpu", (1,)))
        opt = torch.optim.AdamW(model.parameters(), lr=torch.tensor(0.5))
        return opt, tr.State(checkpoint_dir=tmp_path, save_every=1, model=model, opt=opt)

    monkeypatch.setattr(writer, "write_state", write_late)
    opt, state = new()
    state.restore()
    state.commit()
    assert state._saver is not None
    assert state._saver.writer is not None
    state._saver.writer.finish()  # `state.save()` would save the new learning rate, too
    monkeypatch.setattr(tr.State, "_restored", set())  # as in another process
    found, again = new()
    again.restore()
    assert [again.step, found.param_groups[0]["lr"].item()] == [1, 0.5]


class Evil:
    """What runs a function when it is read."""

    def __init__(self, *call: object) -> None:
        self._call = call

    def __reduce__(self) -> tuple[object, ...]:
        return self._call[0], self._call[1:]


def test_a_list_of_shards_that_names_anything_else_is_not_read(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from trainer_runtime.capture.shard_list import METADATA, UnsafeListError, read_list  # noqa: PLC0415 - takes a second

    (tmp_path / METADATA).write_bytes(pickle.dumps(Evil(print, "it ran")))
    with pytest.raises(UnsafeListError, match=r"builtins\.print"):
        read_list(tmp_path)
    (tmp_path / METADATA).write_bytes(pickle.dumps(Evil(getattr, torch.Size, "__init__")))
    with pytest.raises(UnsafeListError, match="asks for an attribute"):
        read_list(tmp_path)
    (tmp_path / METADATA).write_bytes(b"cpathlib._local\nPosixPath\n.")  # as Python 3.13 names it
    with pytest.raises(UnsafeListError, match="wanted a list of shards, got _Sealed"):
        read_list(tmp_path)
    (tmp_path / METADATA).write_bytes(pickle.dumps([]))
    with pytest.raises(UnsafeListError, match="wanted a list of shards, got list"):
        read_list(tmp_path)
    assert not capsys.readouterr().out


@pytest.mark.parametrize(
    "changed",
    [
        b"cpathlib\nPosixPath\n",
        b"ctorch.serialization\n_get_layout\n",
        b"ctorch.distributed.checkpoint.metadata\nTensorProperties\n",
        b"ctorch.distributed.checkpoint.metadata\n_MEM_FORMAT_ENCODING\n",
        b"cbuiltins\ngetattr\n",
        b"ctorch\nfloat32\n",
    ],
)
@pytest.mark.parametrize(
    "state", [b"}X\x04\x00\x00\x00openctorch\nSize\ns", b"N}X\x04\x00\x00\x00openctorch\nSize\ns\x86"]
)
def test_a_list_of_shards_changes_nothing_of_the_process(tmp_path: Path, changed: bytes, state: bytes) -> None:
    """A pickle may set attributes of all that it can name, of a class or a function too."""
    from torch.distributed.checkpoint.metadata import _MEM_FORMAT_ENCODING, TensorProperties  # noqa: PLC0415
    from torch.serialization import _get_layout  # noqa: PLC0415

    from trainer_runtime.capture.shard_list import METADATA, UnsafeListError, _member, read_list  # noqa: PLC0415

    named = (type(Path()), _get_layout, TensorProperties, _MEM_FORMAT_ENCODING, _member)
    before = [dict(vars(each)) for each in named]
    (tmp_path / METADATA).write_bytes(b"\x80\x02" + changed + state + b"b.")
    with pytest.raises(UnsafeListError):
        read_list(tmp_path)
    assert [dict(vars(each)) for each in named] == before


def test_a_list_of_shards_does_not_change_the_member_of_an_enumeration(tmp_path: Path) -> None:
    """There is one of each in the process."""
    from torch.distributed.checkpoint.metadata import _MEM_FORMAT_ENCODING  # noqa: PLC0415

    from trainer_runtime.capture.shard_list import METADATA, UnsafeListError, read_list  # noqa: PLC0415

    before = dict(vars(_MEM_FORMAT_ENCODING(0)))
    kind = b"ctorch.distributed.checkpoint.metadata\n_MEM_FORMAT_ENCODING\n"
    for made in (
        kind + b"K\x00\x85R",
        kind + b"K\x00\x85\x81",
        b"cbuiltins\ngetattr\n" + kind + b"X\x17\x00\x00\x00TORCH_CONTIGUOUS_FORMAT\x86R",
    ):
        (tmp_path / METADATA).write_bytes(b"\x80\x02" + made + b"}X\x07\x00\x00\x00_value_K\x07sb.")
        with pytest.raises(UnsafeListError):
            read_list(tmp_path)
    assert dict(vars(_MEM_FORMAT_ENCODING(0))) == before


def test_a_list_of_shards_names_files_beside_it_only(tmp_path: Path) -> None:
    from torch.distributed.checkpoint.filesystem import _StorageInfo  # noqa: PLC0415
    from torch.distributed.checkpoint.metadata import (  # noqa: PLC0415
        ChunkStorageMetadata,
        Metadata,
        MetadataIndex,
        StorageMeta,
        TensorProperties,
        TensorStorageMetadata,
    )

    from trainer_runtime.capture.shard_list import METADATA, UnsafeListError, read_list  # noqa: PLC0415

    for name, is_read in (("__0_0.distcp", True), ("../x", False), ("/etc/passwd", False), ("..", False), ("", False)):
        shards = {MetadataIndex("w", [0]): _StorageInfo(name, 0, 1)}
        chunk = ChunkStorageMetadata(torch.Size([0]), torch.Size([2]))
        tensor = TensorStorageMetadata(TensorProperties(), torch.Size([2]), [chunk])
        found = Metadata({"w": tensor}, {"w": ("w",)}, shards, StorageMeta())
        (tmp_path / METADATA).write_bytes(pickle.dumps(found))
        with nullcontext() if is_read else pytest.raises(UnsafeListError, match="the name of a file beside"):
            assert read_list(tmp_path) == {("w",): [(name, 0, 1, (2,), (0,), (2,))]}


@pytest.mark.parametrize("name", [".metadata", "__0_0.distcp"])
def test_shards_that_are_no_regular_files_are_not_waited_for(tmp_path: Path, name: str) -> None:
    from trainer_runtime.capture.shard_files import _read_block  # noqa: PLC0415
    from trainer_runtime.capture.shard_list import METADATA, ListedBlock, read_list  # noqa: PLC0415
    from trainer_runtime.checkpoint import DamagedError  # noqa: PLC0415

    os.mkfifo(tmp_path / name)
    block = ListedBlock("__0_0.distcp", 0, 1, (2,), (0,), (2,))
    with pytest.raises(DamagedError, match="not a regular file"):
        read_list(tmp_path) if name == METADATA else _read_block(tmp_path, block)
