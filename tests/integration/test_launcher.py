"""fleetrun's lines, with elastic-agent in its place: which ranks, devices, endpoints, logs and banner they give."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from cases import some
from chaos.ledger import STEPS_PER_EPOCH, Ledger, faults_in
from chaos.training import digest
from integration.conftest import PATIENCE_S
from machines import Network, environment
from waiting import wait_for

from agent.local_etcd.etcd_program import find_binary, single_member_arguments
from agent.workers.numa import NumaBinding, bind_ranks, read_cpus

TRAINING = Path(__file__).resolve().parents[1] / "chaos" / "training.py"
TRAIN = """
import json, os, sys
from pathlib import Path
Path("seen").mkdir(exist_ok=True)
print("rank", os.environ["RANK"], "says so")
told = {"argv": sys.argv[1:], **os.environ}
Path("seen", os.environ["RANK"]).write_text(json.dumps(told))
"""


def seen(directory: Path) -> list[dict[str, Any]]:
    """What each rank was told, by rank."""
    return [json.loads(path.read_text()) for path in sorted((directory / "seen").iterdir(), key=lambda p: int(p.name))]


LINES = [
    # fleetrun.txt 5.3.1, one machine; distributed_faq.txt: choosing devices without touching the script
    ("elastic-agent --gpus=0 train.py", {}, [("0", "0")]),
    ("elastic-agent train.py", {"CUDA_VISIBLE_DEVICES": "0"}, [("0", "0")]),
    ("elastic-agent --gpus=0,1,2,3 train.py", {}, [("0,1,2,3", str(rank)) for rank in range(4)]),
    ("elastic-agent train.py", {"CUDA_VISIBLE_DEVICES": "0,1,2,3"}, [("0,1,2,3", str(rank)) for rank in range(4)]),
    ("python -m agent.launch --gpus=0,1 train.py", {}, [("0,1", "0"), ("0,1", "1")]),
    ('python3 -m agent.launch --gpus="1, 3" train.py', {}, [("1,3", "0"), ("1,3", "1")]),
    ("elastic-agent --ips=127.0.0.1 --gpus=2 train.py", {}, [("2", "0")]),
    # 5.4: nproc_per_node with GPUs, and without
    ("elastic-agent --gpus=0,1,2,3 --nproc_per_node=2 train.py", {}, [("0,1,2,3", "0,1"), ("0,1,2,3", "2,3")]),
    ("elastic-agent --nproc_per_node=2 train.py", {"CUDA_VISIBLE_DEVICES": ""}, [("", None), ("", None)]),
    ("python -m agent.launch train.py", {"PADDLE_DEVICES": "0,1", "PADDLE_NPROC_PER_NODE": "1"}, [("0,1", "0,1")]),
    # torchrun's way to the same
    ("elastic-agent --standalone --nnodes=1 --nproc-per-node=gpu train.py", {}, [(None, None)] * 4),
    ("elastic-agent train.py", {"PET_NPROC_PER_NODE": "2", "PET_STANDALONE": "1"}, [(None, None)] * 2),
]


@pytest.mark.parametrize(
    ("line", "environ", "expected"), LINES, ids=[" ".join([*environ, line]) for line, environ, _ in LINES]
)
def test_a_line_for_one_machine(
    tmp_path: Path, line: str, environ: dict[str, str], expected: list[tuple[str | None, str | None]]
) -> None:
    """The ranks, and for each what it sees and what is its own."""
    (tmp_path / "train.py").write_text(TRAIN)
    done = subprocess.run(
        shlex.split(line),
        cwd=tmp_path,
        env=environment(tmp_path, **environ),
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    ranks = seen(tmp_path)
    assert [(told.get("CUDA_VISIBLE_DEVICES"), told.get("FLAGS_selected_gpus")) for told in ranks] == expected
    assert [told["PADDLE_TRAINER_ID"] for told in ranks] == [str(rank) for rank in range(len(expected))]
    endpoints = ranks[0]["PADDLE_TRAINER_ENDPOINTS"].split(",")
    assert [told["PADDLE_CURRENT_ENDPOINT"] for told in ranks] == endpoints
    assert len(set(endpoints)) == len(expected)
    assert all(endpoint.startswith("127.0.0.1:") for endpoint in endpoints)
    logs = sorted((tmp_path / "log").rglob("*.log"))
    assert [f"rank {rank} says so" in log.read_text() for rank, log in enumerate(logs)] == [True] * len(expected)
    assert "[rank0]: rank 0 says so" in done.stdout


BANNER = """\
-----------  Configuration Arguments -----------
banner: True
gpus: 0,1,2,3
ips: 127.0.0.1
log_dir: log
standby: off
training_script: train.py
training_script_args: ['--lr=1']
------------------------------------------------
"""
TABLE = """\
Local start 4 processes. First process distributed environment info (Only For Debug):
=======================================================================================
            Distributed Envs              Value
---------------------------------------------------------------------------------------
"""


def test_a_variable_of_torchrun_s_that_means_nothing_is_named(tmp_path: Path) -> None:
    """Kubernetes operators set them, whoever starts the script."""
    (tmp_path / "train.py").write_text(TRAIN)
    environ = environment(tmp_path, CUDA_VISIBLE_DEVICES="", PET_RDZV_BACKEND="c10d", PET_MAX_RESTARTS="3")
    line = ["elastic-agent", "train.py"]
    done = subprocess.run(
        line, cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=PATIENCE_S, check=False
    )
    assert done.returncode == 0
    assert "warning: not used: PET_RDZV_BACKEND (agents meet in etcd" in done.stderr
    assert seen(tmp_path)[0]["TORCHELASTIC_MAX_RESTARTS"] == "3"


def test_the_banner_and_the_first_process_s_table(tmp_path: Path) -> None:
    """As in fleetrun.txt 5.5.2."""
    (tmp_path / "train.py").write_text(TRAIN)
    done = subprocess.run(
        ["elastic-agent", "--banner", "train.py", "--lr=1"],
        cwd=tmp_path,
        env=environment(tmp_path, CUDA_VISIBLE_DEVICES="0,1,2,3"),
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert BANNER in done.stderr
    _, _, table = done.stderr.partition(TABLE)
    rows = dict(line.split(maxsplit=1) for line in table.partition("=====")[0].splitlines())
    first = seen(tmp_path)[0]
    for name in ("PADDLE_CURRENT_ENDPOINT", "PADDLE_TRAINERS_NUM", "FLAGS_selected_gpus", "PADDLE_TRAINER_ID"):
        assert rows[name] == first[name]
    assert first["PADDLE_TRAINER_ENDPOINTS"].endswith(rows["PADDLE_TRAINER_ENDPOINTS"].removeprefix("... "))
    assert done.stderr.count("Distributed Envs") == 1
    assert first["argv"] == ["--lr=1"]


def test_ranks_run_on_the_cpus_that_they_are_bound_to(tmp_path: Path) -> None:
    """Of this machine: cores that each has alone, where there are two."""
    (tmp_path / "train.py").write_text("import os; open(os.environ['RANK'], 'w').write(repr(os.sched_getaffinity(0)))")
    how: NumaBinding = "exclusive" if len({cpu.core for cpu in read_cpus(os.sched_getaffinity(0))}) > 1 else "node"
    line = ["elastic-agent", "--nproc_per_node=2", f"--numa-binding={how}", "train.py"]
    environ = environment(tmp_path, CUDA_VISIBLE_DEVICES="")
    subprocess.run(line, cwd=tmp_path, env=environ, check=True, timeout=PATIENCE_S)
    bound = bind_ranks(how, 2, [])
    assert [(tmp_path / str(rank)).read_text() for rank in range(2)] == [repr(set(each)) for each in bound]
    assert how == "node" or not set(bound[0]) & set(bound[1])


def test_two_machines_are_named_and_need_no_etcd(tmp_path: Path, network: Callable[..., Network]) -> None:
    """fleetrun.txt 5.3.1, two machines: the same line on each; eight ranks, four of them on each."""
    (tmp_path / "train.py").write_text(TRAIN)
    machines = network(1, 2)
    line = f'elastic-agent --ips="{",".join(machines.addresses)}" --gpus=0,1,2,3 train.py'
    agents = [machines.start(n, shlex.split(line), tmp_path, environment(tmp_path)) for n in (1, 0)]
    outputs = [agent.communicate(timeout=PATIENCE_S)[0] for agent in agents]
    assert [agent.returncode for agent in agents] == [0, 0], outputs
    ranks = seen(tmp_path)
    assert [told["FLAGS_selected_gpus"] for told in ranks] == ["0", "1", "2", "3"] * 2
    hosts = [told["PADDLE_CURRENT_ENDPOINT"].rpartition(":")[0] for told in ranks]
    assert [len({*pair}) for pair in pairwise(hosts)] == [1, 1, 1, 2, 1, 1, 1], "a machine's ranks are neighbours"
    assert {*hosts} == {*machines.addresses}
    assert all("etcd runs on 10.0.0.1, port 9988: while that machine is lost" in output for output in outputs)


class Job:
    """The training whose result tells whether a step was left out or done twice, on several machines."""

    def __init__(self, directory: Path, machines: Network, command: str) -> None:
        self.directory = directory
        self.machines = machines
        self.command = command
        self.written = Path(tempfile.mkdtemp(prefix="ledger", dir=directory))
        self.ledger = Ledger(self.written)
        self.agents: dict[int, subprocess.Popen[str]] = {}

    def start(self, machine: int, **environ: str) -> None:
        line = f"{self.command} {self.written} --step_time_s=0.05"
        environ = environment(self.directory, CUDA_VISIBLE_DEVICES="", OMP_NUM_THREADS="1", **environ)
        self.agents[machine] = self.machines.start(machine, shlex.split(line), self.directory, environ)

    def wait_for_world(self, size: int, steps: int) -> int:
        """Wait until a group of that size has made so many steps; return its number."""

        def has_trained() -> bool:
            self.ledger.follow()
            newest = [line for line in self.ledger.lines if line.group == self.ledger.newest_group]
            return len({line.step for line in newest}) > steps and newest[-1].world == size

        wait_for(has_trained, f"{steps} steps of {size} ranks", PATIENCE_S)
        return self.ledger.newest_group

    def stop(self) -> Mapping[int, int]:
        """Have it end after all steps that were ever taken; return the exit codes."""
        self.ledger.follow()
        told = self.written / ".stop"
        told.write_text(str(max(line.step for line in self.ledger.lines)))
        told.rename(told.with_name("stop"))
        return self.wait()

    def wait(self) -> Mapping[int, int]:
        """The exit codes."""
        for agent in self.agents.values():
            agent.communicate(timeout=PATIENCE_S)
        self.ledger.follow()
        return {machine: agent.returncode for machine, agent in self.agents.items()}

    @property
    def steps(self) -> list[int]:
        """All that were taken. Of the one that a rank leaves after, it does not say any more that it is committed."""
        self.ledger.follow()
        return sorted({line.step for line in self.ledger.lines})

    def assert_right(self) -> int:
        """The result is the one of a training that nothing happened to. Return its number of steps."""
        result = torch.load(self.written / "weights.pt", weights_only=True)
        assert digest(result["weights"]) == undisturbed(self.directory / "alone", result["step"])
        return int(result["step"])


def undisturbed(directory: Path, step: int) -> str:
    """What comes of a training that nothing happens to, at the end of the epoch of that step."""
    directory.mkdir()
    epochs = -(-step // STEPS_PER_EPOCH)
    command = [sys.executable, str(TRAINING), ".", f"--epochs={epochs}", "--save_every=1000000000"]
    subprocess.run(command, cwd=directory, check=True, capture_output=True, timeout=PATIENCE_S)
    return dict(line.split() for line in (directory / "digests").read_text().splitlines())[str(step)]


@pytest.mark.long("unit/test_messages.py; simulation/scenarios")
def test_missing_nodes_are_named_while_the_job_waits(tmp_path: Path, network: Callable[..., Network]) -> None:
    """First who does not answer where etcd is to be, then who has not joined."""
    (tmp_path / "train.py").write_text(TRAIN)
    machines = network(1, 2, 3)
    line = ["elastic-agent", "--ips=10.0.0.1,10.0.0.2,10.0.0.3", "train.py"]
    agents = [machines.start(0, line, tmp_path, environment(tmp_path))]
    wait_for_line(agents[0], "10.0.0.2 and 10.0.0.3 do not answer: start the same line there")
    agents.append(machines.start(1, line, tmp_path, environment(tmp_path)))
    said = [wait_for_line(agent, "waiting for ") for agent in agents]
    while not any("waiting for 1 of 3 nodes; here: 10.0.0.1, 10.0.0.2; missing: 10.0.0.3 (" in each for each in said):
        said = [wait_for_line(agent, " s)") for agent in agents]
    agents.append(machines.start(2, line, tmp_path, environment(tmp_path)))
    outputs = [agent.communicate(timeout=PATIENCE_S)[0] for agent in agents]
    assert [agent.returncode for agent in agents] == [0, 0, 0], outputs


def wait_for_line(agent: subprocess.Popen[str], words: str) -> str:
    """Read what it says as far as that."""
    assert agent.stdout is not None
    for line in agent.stdout:
        if words in line:
            return line
    raise AssertionError(f"it never said: {words}")


def lose_one_and_get_it_back(job: Job, lost: int, **environ: str) -> None:
    """Of three machines; the result is what it would have been."""
    for machine in range(3):
        job.start(machine, **environ)
    job.wait_for_world(3, 20)
    job.machines.lose(lost)
    job.wait_for_world(2, 20)
    job.start(lost, **environ)
    job.wait_for_world(3, 20)
    assert job.stop() == {0: 0, 1: 0, 2: 0}
    assert faults_in(job.ledger.lines, job.assert_right()) == []


@pytest.mark.timeout(900)
@pytest.mark.parametrize("lost", some([2], of=[0, 2]))
def test_of_three_machines_any_may_be_lost_and_comes_back(
    tmp_path: Path, network: Callable[..., Network], lost: int
) -> None:
    """Also the first. Each runs a member of the job's etcd, and goes with it.

    A firewall lets in no connection but to etcd and to the range of ports that the kernel chooses from.
    """
    machines = network(1, 2, 3)
    machines.open_only(9988, 9989, local=range(50000, 50200))
    ips = ",".join(machines.addresses)
    job = Job(tmp_path, machines, f"elastic-agent --ips={ips} --np=2:3 --settle=3 {TRAINING}")
    lose_one_and_get_it_back(job, lost)


IN_SCRIPT = """
import sys
import trainer_runtime as tr

def config_distributed():
    print("distributed config")
    tr.config.gpu_device_num(1)
    tr.env.ctrl_port(9977)
    nodes = [{{"addr": "10.0.0.1"}}, {{"addr": "10.0.0.2"}}, {{"addr": "10.0.0.3"}}]
    tr.env.machine(nodes, min_nodes=2)
    tr.env.init()

config_distributed()
assert tr.env.is_master() == (tr.rank() == 0)
sys.path.insert(0, {directory!r})
import training
training.main()
"""


@pytest.mark.long("test_the_example_of_a_job_in_its_script")
@pytest.mark.timeout(900)
@pytest.mark.parametrize("lost", some([0], of=[0, 1]))
def test_a_job_that_is_described_in_its_script(tmp_path: Path, network: Callable[..., Network], lost: int) -> None:
    """oneflow_distributed.txt: the same `python3 distributed_train.py` on all machines."""
    (tmp_path / "distributed_train.py").write_text(IN_SCRIPT.format(directory=str(TRAINING.parent)))
    job = Job(tmp_path, network(1, 2, 3), "python3 distributed_train.py")
    lose_one_and_get_it_back(job, lost, ELASTIC_AGENT_SETTLE="3")


DOCS = Path(__file__).resolve().parents[2] / "docs" / "migrating.md"
EXAMPLES = re.findall(r"^\$ (elastic-agent .*)$", DOCS.read_text(), re.MULTILINE)


@pytest.mark.parametrize("line", EXAMPLES)
def test_an_example_of_the_docs(tmp_path: Path, network: Callable[..., Network], line: str) -> None:
    """As it stands in docs/migrating.md: four ranks on each of the machines that it is for."""
    (tmp_path / "train.py").write_text(TRAIN)
    machines = network(1, 2, 9)
    etcd = [str(find_binary()), f"--data-dir={tmp_path / 'etcd'}", *single_member_arguments("http://10.0.0.9:2379")]
    machines.start(2, etcd, tmp_path, environment(tmp_path))
    used = 1 if "--standalone" in line else 2
    agents = [machines.start(n, shlex.split(line), tmp_path, environment(tmp_path)) for n in range(used)]
    outputs = [agent.communicate(timeout=PATIENCE_S)[0] for agent in agents]
    assert [agent.returncode for agent in agents] == [0] * used, outputs
    assert len(seen(tmp_path)) == 4 * used


def test_the_example_of_a_job_in_its_script(tmp_path: Path, network: Callable[..., Network]) -> None:
    """As it stands in docs/migrating.md, with the machines that there are."""
    [example] = [each for each in re.findall(r"```python\n(.*?)```", DOCS.read_text(), re.DOTALL) if "tr.env" in each]
    here = example.replace("192.168.1.12", "10.0.0.1").replace("192.168.1.11", "10.0.0.2")
    (tmp_path / "train.py").write_text(here + TRAIN)
    machines = network(1, 2)
    agents = [machines.start(n, ["python3", "train.py"], tmp_path, environment(tmp_path)) for n in range(2)]
    outputs = [agent.communicate(timeout=PATIENCE_S)[0] for agent in agents]
    assert [agent.returncode for agent in agents] == [0, 0], outputs
    ranks = seen(tmp_path)
    assert [told["PADDLE_CURRENT_ENDPOINT"].split(":")[0] for told in ranks] == ["10.0.0.1", "10.0.0.2"], "as listed"
    assert "[rank0]: rank 0 says so" in outputs[0]
    assert "says so" not in outputs[1]


FAILS = """
import os, sys, time
from pathlib import Path

memory = b"x" * (0 if os.environ["RANK"] == sys.argv[1] else 2 << 30)
Path(f"there-{os.environ['RANK']}").touch()
if os.environ["RANK"] == sys.argv[1]:
    while len(list(Path().glob("there-*"))) < 2:
        time.sleep(0.01)
    raise ValueError("this rank cannot go on")
sys.stdin.read()
time.sleep(1000)
"""


@pytest.mark.parametrize("failing", [0, 1])
def test_the_last_output_of_a_rank_is_shown_on_another_node(
    tmp_path: Path, network: Callable[..., Network], failing: int
) -> None:
    """The others' output is in files; but why the job has failed is on every console.

    Also where a worker takes its time to end, with memory to give back, and the machine with etcd has left by then.
    """
    (tmp_path / "train.py").write_text(FAILS)
    machines = network(1, 2)
    line = f"elastic-agent --ips=10.0.0.1,10.0.0.2 --nproc_per_node=1 --max_restarts=0 train.py {failing}"
    agents = [machines.start(n, shlex.split(line), tmp_path, environment(tmp_path)) for n in range(2)]
    outputs = [agent.communicate(timeout=PATIENCE_S)[0] for agent in agents]
    assert [agent.returncode for agent in agents] == [1, 1]
    for output in outputs:
        assert f"rank {failing} on 10.0.0.{failing + 1} exited with code 1" in output
        lines = [line for line in output.splitlines() if line.endswith("ValueError: this rank cannot go on")]
        assert lines in (["  | ValueError: this rank cannot go on"], ["[rank0]: ValueError: this rank cannot go on"])


def test_the_doctor_compares_machines(tmp_path: Path, network: Callable[..., Network]) -> None:
    """Both directions, versions, and the script, which differs."""
    machines = network(1, 2)
    doctors = []
    for n in range(2):
        (tmp_path / str(n)).mkdir()
        (tmp_path / str(n) / "train.py").write_text(TRAIN + "#" * n)
        line = "elastic-agent doctor --ips=10.0.0.1,10.0.0.2 train.py"
        doctors.append(machines.start(n, shlex.split(line), tmp_path / str(n), environment(tmp_path)))
    for n, doctor in enumerate(doctors):
        output, _ = doctor.communicate(timeout=PATIENCE_S)
        assert doctor.returncode == 1
        assert f"ok     address: 10.0.0.{n + 1} on eth0" in output
        assert f"WRONG  machine 10.0.0.{2 - n}: different contents of train.py; do: make them equal" in output
        assert f"ok     ports 9988 and 9989: are free at 10.0.0.{n + 1}" in output
