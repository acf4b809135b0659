"""The recorder of a rehearsal in a script's process: it observes and changes nothing."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from agent.rehearse.fingerprints import Fingerprints
from agent.rehearse.live_objects import epoch_in, names_in
from agent.rehearse.records import StepRecord, errors_in, read_group
from agent.rehearse.reference import Reference
from agent.rehearse.startup import RECORD_DIR, write_site
from agent.rehearse.step_gate import StepGate, write_gate

ROOT = Path(__file__).resolve().parents[2]
PRINTS = Fingerprints(torch)
FREE = StepGate(0, 0, 1 << 30)


def run(tmp_path: Path, script: str, *, is_recorded: bool = True, **environ: str) -> str:
    """Run a script as a rank of group 1; return its output."""
    path, records, site = tmp_path / "script.py", tmp_path / "records", tmp_path / "site"
    path.write_text(script)
    records.mkdir(exist_ok=True)
    write_gate(records, FREE)
    write_site(site)
    env = {"PATH": os.environ["PATH"], "OMP_NUM_THREADS": "1", **environ}
    if is_recorded:
        env |= {RECORD_DIR: str(records), "RANK": "0", "WORLD_SIZE": "1", "ELASTIC_AGENT_GROUP": "1"}
        env["PYTHONPATH"] = os.pathsep.join([str(site), str(ROOT), *filter(None, [environ.get("PYTHONPATH")])])
    argv = [sys.executable, str(path)]
    done = subprocess.run(argv, env=env, cwd=tmp_path, capture_output=True, text=True, timeout=150, check=False)
    assert done.returncode == 0, done.stderr
    assert not errors_in(records)
    return done.stdout


def lines_of(tmp_path: Path) -> list[StepRecord]:
    return read_group(tmp_path / "records", 1)[0]


TRAINING = """
import random, numpy, torch
from torch import nn

torch.manual_seed(0), random.seed(0), numpy.random.seed(0)
net = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 1))
adam = torch.optim.Adam(net.parameters())
steps = torch.optim.lr_scheduler.StepLR(adam, 2)
scaler = torch.amp.GradScaler(device="cpu")
noise = torch.Generator().manual_seed(5)

def train(epoch):
    for _ in range(2):
        for _ in range(2):
            scaler.scale(net(torch.rand(6, 4, generator=noise)).square().mean()).backward()
        scaler.step(adam)
        scaler.update()
        steps.step()
        adam.zero_grad()
    with torch.no_grad():
        net(torch.rand(3, 4))

for epoch in range(2):
    train(epoch)
print([p.sum().item().hex() for p in net.parameters()], torch.rand(1).item().hex(), torch.rand(1, generator=noise))
print(random.random(), numpy.random.random(), isinstance(noise, torch.Generator), type(noise))
"""


@pytest.mark.long("integration/test_rehearse.py: a complete script has nothing missing, bit by bit")
def test_recording_does_not_change_what_a_script_computes(tmp_path: Path) -> None:
    """Weights and all random states are equal bit by bit."""
    first, second = (run(tmp_path, TRAINING, is_recorded=is_recorded) for is_recorded in (True, False))
    assert first.replace("torch.Generator", "Generator") == second.replace("torch._C.Generator", "Generator")


def test_a_record_has_all_of_a_step(tmp_path: Path) -> None:
    """Micro-batches belong to one step, a pass without gradients is ignored, names are those of the script."""
    run(tmp_path, TRAINING)
    lines = lines_of(tmp_path)
    assert [(line.count, line.step, line.epoch, line.epoch_name) for line in lines] == [
        (1, None, 0, "epoch"),
        (2, None, 0, "epoch"),
        (3, None, 1, "epoch"),
        (4, None, 1, "epoch"),
    ]
    first, second = lines[:2]
    assert [(len(line.losses), len(line.inputs), len(line.rows)) for line in lines] == [(2, 2, 12)] * 4
    assert all(loss is not None and loss < 100 for loss in first.losses), "a scaler's factor is no part of the loss"
    assert [(seen.kind, seen.type, seen.name, seen.is_in_state) for seen in first.objects] == [
        ("optimizer", "Adam", "adam", False),
        ("scheduler", "StepLR", "steps", False),
        ("scaler", "GradScaler", "scaler", False),
        ("generator", "Generator", "noise", False),
    ]
    assert first.model == "net"
    changed = [a.name for a, b in zip(first.objects, second.objects, strict=True) if a.digest != b.digest]
    assert changed == ["adam", "steps", "scaler", "noise"]
    assert first.weights != second.weights
    assert first.buffers != second.buffers
    assert first.random.keys() == {"Python", "NumPy", "torch"}


def test_objects_in_state_are_marked(tmp_path: Path) -> None:
    """A scheduler in State does not put its optimizer into State."""
    script = """
import torch, trainer_runtime as tr
tr.init()
net = torch.nn.Linear(1, 1)
opt = torch.optim.SGD(net.parameters(), lr=0.1)
sched = torch.optim.lr_scheduler.StepLR(opt, 2)
state = tr.State(net=net, sched=sched)
for epoch in state.epochs(1):
    for x in state.steps(range(3)):
        net(torch.ones(2, 1)).sum().backward()
        opt.step()
        state.commit()
"""
    run(tmp_path, script.replace("tr.init()", 'import os; del os.environ["RANK"]; tr.init()'))
    line = lines_of(tmp_path)[-1]
    assert (line.step, line.state_epoch) == (3, 0)
    assert {seen.name: seen.is_in_state for seen in line.objects} == {"opt": False, "sched": True}


def test_a_step_that_a_scaler_skips_counts(tmp_path: Path) -> None:
    script = """
import torch
net = torch.nn.Linear(1, 1)
opt = torch.optim.SGD(net.parameters(), lr=0.1)
scaler = torch.amp.GradScaler(device="cpu")
for factor in (1.0, float("inf"), 1.0):
    opt.zero_grad()
    scaler.scale(net(torch.ones(1, 1)).sum() * factor).backward()
    scaler.step(opt)
    scaler.update()
"""
    run(tmp_path, script)
    lines = lines_of(tmp_path)
    assert [len(line.losses) for line in lines] == [1, 1, 1]
    assert lines[1].losses == [None]


def test_a_step_goes_from_commit_to_commit(tmp_path: Path) -> None:
    """However many optimizers step in it; modules and tensors in State are marked."""
    script = """
import os; del os.environ["RANK"]
import torch, trainer_runtime as tr
from copy import deepcopy
tr.init()
one, two = torch.nn.Linear(1, 1), torch.nn.Linear(1, 1)
first, second = (torch.optim.SGD(net.parameters(), lr=0.1) for net in (one, two))
class Average:
    def __init__(self, net):
        self.shadow = {name: tensor.detach().clone().expand(2, -1).clone() for name, tensor in net.named_parameters()}
copied, held, own, queue = deepcopy(one), deepcopy(one), Average(one), torch.zeros(3)
state = tr.State(one=one, two=two, first=first, second=second, held=held, queue=queue)
for epoch in state.epochs(1):
    for x in state.steps(range(4)):
        one(torch.ones(2, 1)).sum().backward()
        first.step()
        if x % 2:
            two(torch.full((2, 1), float(x))).sum().backward()
            second.step()
        with torch.no_grad():
            copied.weight.mul_(0.9), held.weight.mul_(0.9), queue.add_(1)
            own.shadow["weight"].mul_(0.9)
        state.commit()
"""
    run(tmp_path, script)
    lines = lines_of(tmp_path)
    assert [(line.step, len(line.inputs), len(line.late.inputs), line.late.is_complete) for line in lines] == [
        (1, 1, 0, True),
        (2, 1, 1, True),
        (3, 1, 0, True),
        (4, 1, 1, True),
    ]
    kept = {
        seen.name: (seen.kind, seen.type, seen.is_in_state) for seen in lines[1].objects if seen.kind != "optimizer"
    }
    assert kept == {
        "copied": ("module", "Linear", False),
        "held": ("module", "Linear", True),
        "own": ("tensor", "Average", False),
        "queue": ("tensor", "Tensor", True),
    }
    assert {name for _, _, name, _ in Reference({0: lines}).changing_tensors} >= {"own", "queue"}


def test_without_state_a_step_begins_with_the_first_optimizer(tmp_path: Path) -> None:
    """The step by which torch creates an optimizer's state before a load does not count."""
    script = """
import torch
from torch.distributed.checkpoint.state_dict import get_state_dict
one, two = torch.nn.Linear(1, 1), torch.nn.Linear(1, 1)
first, second = (torch.optim.Adam(net.parameters(), lr=0.1) for net in (one, two))
get_state_dict(two, second), get_state_dict(one, first)
for x in range(3):
    for net, opt in ((one, first), (two, second), (two, second)):
        net(torch.full((2, 1), float(x))).sum().backward()
        opt.step()
"""
    run(tmp_path, script)
    lines = lines_of(tmp_path)
    assert [(line.count, len(line.inputs), len(line.late.inputs), line.late.is_complete) for line in lines] == [
        (1, 1, 2, True),
        (2, 1, 2, True),
        (3, 1, 2, False),
    ]


SEEDING = """
import random, numpy, torch
net = torch.nn.Linear(1, 1)
opt = torch.optim.SGD(net.parameters(), lr=0.1)
numpy.random.seed(0)
print(random.random(), numpy.random.random(), torch.rand(1).item())
open("read.bin", "rb").read()
for _ in range(2):
    net(torch.ones(1, 1)).sum().backward()
    opt.step()
    torch.save(net.state_dict(), "own.pt")
"""


@pytest.mark.long("unit/test_rehearse_comparison.py; integration/test_rehearse.py")
def test_unseeded_random_states_get_other_seeds_after_a_restart(tmp_path: Path) -> None:
    """Files that the script reads at its start and overwrites in place are recorded."""
    (tmp_path / "read.bin").write_bytes(b"data")
    first, again = run(tmp_path, SEEDING), ""
    line = lines_of(tmp_path)[-1]
    (tmp_path / "records" / "group-000001.rank-00000.jsonl").unlink()
    again = run(tmp_path, SEEDING)
    assert first == again
    assert line.seeded == ["Python", "torch"]
    assert "read.bin" in lines_of(tmp_path)[0].read
    assert lines_of(tmp_path)[1].overwritten == ["own.pt"]
    (tmp_path / "records" / "group-000000.rank-00000.jsonl").touch()
    restarted = run(tmp_path, SEEDING)
    assert restarted.split()[1] == first.split()[1], "its own seeding wins"
    assert restarted.split()[0] != first.split()[0]
    assert restarted.split()[2] != first.split()[2]


def test_torch_is_not_imported_before_the_script_does_it(tmp_path: Path) -> None:
    assert run(tmp_path, "import sys; print('torch' in sys.modules, 'numpy' in sys.modules)") == "False False\n"


def test_the_sitecustomize_of_the_user_runs_too(tmp_path: Path) -> None:
    """Scripts import it under this name."""
    own = tmp_path / "own"
    own.mkdir()
    (own / "sitecustomize.py").write_text("import builtins; builtins.mine = 41; yours = 1\n")
    script = "import sitecustomize; print(mine + sitecustomize.yours)"
    assert run(tmp_path, script, PYTHONPATH=str(own)) == "42\n"


def test_a_gate_holds_a_group_at_a_step() -> None:
    gate = StepGate(group=2, steps=10, others=1)
    assert not gate.holds(2, 9)
    assert gate.holds(2, 10)
    assert gate.holds(3, 1)
    slow = StepGate(group=2, steps=10, others=1, delay_s=0.5)
    assert not slow.holds(2, 12)
    assert (slow.delay_at(2, 9), slow.delay_at(2, 10), slow.delay_at(3, 5)) == (0.0, 0.5, 0.0)


@pytest.mark.parametrize(
    ("value", "same"),
    [
        (torch.arange(6.0), torch.arange(12.0)[::2] / 2),
        ({"b": 1, "a": [2.5, None]}, {"a": (2.5, None), "b": 1}),
        (torch.zeros(200_000, dtype=torch.bfloat16), torch.zeros(200_000, dtype=torch.bfloat16)),
    ],
)
def test_equal_values_have_equal_hashes(value: object, same: object) -> None:
    """Whatever the memory layout of a tensor, the order of a dict, and whether a list became a tuple."""
    assert PRINTS.of(value) == PRINTS.of(same)


@pytest.mark.parametrize(
    ("value", "other"),
    [
        (torch.zeros(2, 3), torch.zeros(3, 2)),
        (torch.tensor([0.1]), torch.tensor([0.1]).nextafter(torch.tensor([1.0]))),
        ([1, [2]], [[1], 2]),
        ({"lr": 0.1}, {"lr": 0.2}),
    ],
)
def test_different_values_have_different_hashes(value: object, other: object) -> None:
    assert PRINTS.of(value) != PRINTS.of(other)


def test_objects_are_named_after_variables_and_attributes() -> None:
    class Trainer:
        def __init__(self) -> None:
            self.thing = object()

        def names(self) -> dict[int, str]:
            return names_in(sys._getframe())

    trainer = Trainer()
    names = trainer.names()
    assert names[id(trainer.thing)] == "self.thing"
    assert names[id(trainer)] == "trainer"


def test_the_epoch_is_the_nearest_integer_with_such_a_name() -> None:
    def inner() -> tuple[str, int] | None:
        epochs, steps_per_epoch, n_epoch_len = 10, 5, 3
        assert epochs * steps_per_epoch * n_epoch_len
        return epoch_in(sys._getframe())

    cur_epoch = 4
    assert inner() == ("cur_epoch", cur_epoch)
