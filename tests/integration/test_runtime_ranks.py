"""Real ranks over gloo: resuming bit by bit, errors that nobody waits for, exits that do not hang."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch
from cases import some
from ports import free_port
from waiting import wait_for

from trainer_runtime import contract

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

EXAMPLES = Path(__file__).parents[2] / "examples"
BOUND_S = 120.0


class Ranks:
    """The processes of one group, started as an agent would."""

    def __init__(self, command: Sequence[str | Path], world: int, group: int, directory: Path) -> None:
        port = free_port()
        shared = {
            "WORLD_SIZE": str(world),
            "LOCAL_WORLD_SIZE": str(world),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "OMP_NUM_THREADS": "1",
            contract.RUN_ID: "r",
            contract.GROUP: str(group),
            contract.CHECKPOINT_DIR: str(directory),
        }
        self.pages: list[contract.ControlPage] = []
        self.processes = [self._start(command, rank, shared) for rank in range(world)]

    def _start(self, command: Sequence[str | Path], rank: int, shared: dict[str, str]) -> subprocess.Popen[str]:
        page, descriptor = contract.ControlPage.create(str(rank))
        self.pages.append(page)
        own = {"RANK": str(rank), "LOCAL_RANK": str(rank), contract.CONTROL_FD: str(descriptor)}
        try:
            return subprocess.Popen(
                [sys.executable, *command],
                env=os.environ | shared | own,
                pass_fds=[descriptor],
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
        finally:
            os.close(descriptor)

    def finish(self) -> list[tuple[int, str]]:
        """Wait for all; return exit codes and outputs in rank order."""
        return [
            (process.returncode, output)
            for process in self.processes
            for output in [process.communicate(timeout=BOUND_S)[0]]
        ]

    def kill(self) -> None:
        for process in self.processes:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            process.communicate()


@contextlib.contextmanager
def started(command: Sequence[str | Path], *, world: int, group: int, directory: Path) -> Iterator[Ranks]:
    ranks = Ranks(command, world, group, directory)
    try:
        yield ranks
    finally:
        ranks.kill()


def digits(out: Path, *more: str | Path) -> list[str | Path]:
    return [EXAMPLES / "train_digits.py", "--epochs", "2", "--out", out, *more]


def train_digits(directory: Path, out: Path, *, world: int, group: int) -> str:
    with started(digits(out), world=world, group=group, directory=directory) as ranks:
        results = ranks.finish()
    assert [code for code, _ in results] == [0] * world, results
    return results[0][1]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Weights of two ranks that trained without any trouble."""
    directory = tmp_path_factory.mktemp("undisturbed")
    train_digits(directory / "checkpoints", directory / "out.pt", world=2, group=1)
    return directory / "out.pt"


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The checkpoints that two ranks left which were killed in the middle of the first epoch."""
    directory = tmp_path_factory.mktemp("killed")
    trace = directory / "trace.jsonl"
    command = digits(directory / "never.pt", "--step_time_s", "0.25", "--trace", trace)
    with started(command, world=2, group=1, directory=directory) as ranks:
        wait_for((directory / "r-g000001-s000000020").exists, "the checkpoint of step 20", BOUND_S)
        wait_for(lambda: all(page.step >= 25 for page in ranks.pages), "step 25 on every control page", BOUND_S)
        for process in ranks.processes:
            process.send_signal(signal.SIGKILL)
    lines = [json.loads(line) for line in trace.read_text().splitlines()]
    assert [line["step"] for line in lines] == list(range(1, len(lines) + 1))
    assert lines[0].items() >= {"group": 1, "world": 2}.items()
    assert not (directory / "never.pt").exists()
    return directory


def weights(path: Path) -> dict[str, torch.Tensor]:
    loaded: dict[str, torch.Tensor] = torch.load(path, weights_only=True)
    return loaded


def test_resumed_weights_are_the_same_bit_by_bit(undisturbed: Path, killed: Path, tmp_path: Path) -> None:
    directory = shutil.copytree(killed, tmp_path / "checkpoints")
    output = train_digits(directory, tmp_path / "out.pt", world=2, group=2)
    newest = max(int(path.name[-9:]) for path in killed.glob("r-g000001-s*"))
    assert f"group 2: 2 workers, from step {newest} " in output
    assert "accuracy: 0.9" in output
    expected = weights(undisturbed)
    assert all(torch.equal(tensor, expected[name]) for name, tensor in weights(tmp_path / "out.pt").items())


def test_another_world_size_learns_the_same(undisturbed: Path, killed: Path, tmp_path: Path) -> None:
    """The batches are the same; the sums are made in another order."""
    directory = shutil.copytree(killed, tmp_path / "checkpoints")
    train_digits(directory, tmp_path / "out.pt", world=3, group=2)
    expected = weights(undisturbed)
    for name, tensor in weights(tmp_path / "out.pt").items():
        torch.testing.assert_close(tensor, expected[name], rtol=1e-3, atol=1e-4)


RESTORE = """
import trainer_runtime as tr
tr.init()
state = tr.State(best=0.0)
@state.on_load
def load(path):
    raise ZeroDivisionError
state.restore()
"""


def test_a_damaged_checkpoint_ends_all_ranks(tmp_path: Path) -> None:
    """Rank 0 says what is wrong; the others must not wait for its bytes."""
    (tmp_path / "r-g000001-s000000001").mkdir()
    (tmp_path / "r-g000001-s000000001" / "manifest.json").write_text("{")
    with started(["-c", RESTORE], world=2, group=2, directory=tmp_path) as ranks:
        (code_0, output_0), (code_1, output_1) = ranks.finish()
    assert (code_0, code_1) == (1, 1)
    assert "CheckpointError: wanted a checkpoint to resume from, found 1" in output_0
    assert "PeerError: rank 0 could not read the checkpoint" in output_1


SAVE_WITH_HOOK = """
import trainer_runtime as tr
tr.init()
state = tr.State(best=0.0)
state.on_save(lambda path: (path / "x").write_text("x"))
state.restore()
state.commit()
state.save()
"""


def test_a_failing_hook_ends_all_ranks(tmp_path: Path) -> None:
    with started(["-c", SAVE_WITH_HOOK], world=2, group=1, directory=tmp_path) as ranks:
        assert [code for code, _ in ranks.finish()] == [0, 0]
    with started(["-c", RESTORE], world=2, group=2, directory=tmp_path) as ranks:
        (code_0, output_0), (code_1, output_1) = ranks.finish()
    assert (code_0, code_1) == (1, 1)
    assert "ZeroDivisionError" in output_0
    assert "PeerError: another rank could not load the checkpoint" in output_1


BEREFT = """
import os
import torch
import torch.distributed as dist
import trainer_runtime as tr
from trainer_runtime.dist import do_on_all

def load():
    dist.barrier()
    if tr.is_main():
        os._exit(0)
    raise ZeroDivisionError

tr.init(timeout_s=60)
do_on_all(load)
"""


def test_a_local_failure_is_reported_although_the_others_are_gone(tmp_path: Path) -> None:
    with started(["-c", BEREFT], world=2, group=1, directory=tmp_path) as ranks:
        _, (code, output) = ranks.finish()
    assert code == 1
    assert output.splitlines()[-1].endswith(": ZeroDivisionError")


LEAVE = """
import os, signal, sys, torch, torch.distributed as dist
import trainer_runtime as tr
tr.init(timeout_s=300)
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 2))
if not tr.is_main():
    os.kill(os.getpid(), signal.SIGSTOP)
work = dist.all_reduce(torch.ones(2), async_op=True)
{leave}
"""


@pytest.mark.parametrize(
    ("leave", "code"), [("pass", 0), ("sys.exit(101)", 101), ("raise ValueError", 1)], ids=["end", "exit", "error"]
)
def test_an_exit_does_not_wait_for_a_stuck_peer(tmp_path: Path, leave: str, code: int) -> None:
    """Left to itself it would, for the timeout of the group (300 s here), however the script ends."""
    with started(["-c", LEAVE.format(leave=leave)], world=2, group=1, directory=tmp_path) as ranks:
        output, _ = ranks.processes[0].communicate(timeout=BOUND_S)
        assert ranks.processes[0].returncode == code, output
        assert ("Error" in output) == ("Error" in leave), output


UNEQUAL = """
import os, torch, torch.distributed as dist
os.environ["LOCAL_WORLD_SIZE"] = "1"
has_gpu = os.environ["RANK"] == "{with_gpu}"
torch.cuda.is_available, torch.cuda.device_count = lambda: has_gpu, lambda: int(has_gpu)
torch.cuda.set_device = torch.cuda.get_device_properties = lambda index: None
import trainer_runtime as tr
tr.init(timeout_s=120)
wire = torch.ones(1)
dist.all_reduce(wire)
print(dist.get_backend(), wire.item())
"""


@pytest.mark.parametrize("with_gpu", some([1], of=[0, 1]))
def test_nodes_that_differ_agree_on_a_backend(tmp_path: Path, with_gpu: int) -> None:
    """Where each chose for itself, the one waited in NCCL for the other in gloo."""
    script = UNEQUAL.format(with_gpu=with_gpu)
    with started(["-c", script], world=2, group=1, directory=tmp_path) as ranks:
        results = ranks.finish()
    assert [code for code, _ in results] == [0, 0], results
    assert all("gloo 2.0" in output for _, output in results), results


ALONE = """
import os
import trainer_runtime as tr
tr.init()
tr.init()
print(tr.rank(), tr.world_size(), tr.is_main())
sockets = set()
for entry in os.scandir("/proc/self/fd"):
    try:
        sockets.add(os.readlink(entry.path))
    except FileNotFoundError:  # the descriptor of the listing itself
        pass
rows = [line.split() for line in open("/proc/self/net/tcp")][1:]
print({row[1].split(":")[0] for row in rows if f"socket:[{row[9]}]" in sockets})
"""


def test_a_script_alone_uses_no_network(tmp_path: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "RANK"}
    done = subprocess.run(
        [sys.executable, "-c", ALONE], env=environment, cwd=tmp_path, check=True, capture_output=True, text=True
    )
    assert done.stdout.splitlines() == ["0 1 True", "{'0100007F'}"]  # 127.0.0.1


@pytest.mark.long("test_plain_scripts.py, under the agent")
def test_a_plain_script_runs_under_torchrun_and_resumes(tmp_path: Path) -> None:
    def run(epochs: int) -> str:
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
        torchrun.append(f"--log_dir={tmp_path}")  # else it leaves a directory behind
        command = [EXAMPLES / "plain_ddp.py", "--epochs", str(epochs), "--checkpoint", tmp_path / "c.pt"]
        done = subprocess.run(
            [*torchrun, *command],
            env=os.environ | {"OMP_NUM_THREADS": "1"},
            check=True,
            capture_output=True,
            text=True,
            timeout=BOUND_S,
        )
        return done.stdout

    assert "2 workers, from epoch 0" in run(1)
    output = run(2)
    assert "2 workers, from epoch 1" in output
    assert "accuracy: 0.9" in output
