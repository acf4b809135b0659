"""Paddle's ways to start parameter servers, by fleetrun's command lines and by environment, and a lost machine."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from cases import some
from integration.conftest import PATIENCE_S, ROOT
from machines import Network, environment
from waiting import wait_for

# A server serves until it is stopped; a worker ends once all servers are there.
TRAIN = """
import json, os, signal, sys, time
from pathlib import Path
process = {"argv": sys.argv[1:], **os.environ}
is_server = os.environ["TRAINING_ROLE"] == "PSERVER"
name = os.environ["PADDLE_CURRENT_ENDPOINT" if is_server else "PADDLE_TRAINER_ID"]
Path("seen").mkdir(exist_ok=True)
Path("seen", f"{os.environ['TRAINING_ROLE']} {name}").write_text(json.dumps(process))
print(os.environ["TRAINING_ROLE"], name, "says so", flush=True)
if is_server:
    signal.pause()
servers = os.environ["PADDLE_PSERVERS_IP_PORT_LIST"].split(",")
while len([*Path("seen").glob("PSERVER *")]) < len(servers):
    time.sleep(0.02)
"""
CTR = str(ROOT / "examples" / "train_ctr.py")
COUNTING = str(Path(__file__).with_name("ps_counting.py"))


def seen(directory: Path, role: str) -> list[dict[str, Any]]:
    """Return the environment and arguments of each process of a role, in their order."""
    processes = [json.loads(path.read_text()) for path in (directory / "seen").glob(f"{role} *")]
    key = "PADDLE_CURRENT_ENDPOINT" if role == "PSERVER" else "PADDLE_TRAINER_ID"
    return sorted(processes, key=lambda each: (len(each[key]), each[key]))


# fleetrun.txt 5.3.2.1 to 5.3.2.3, and 5.4: on one machine. Expected: servers, GPUs of workers, GPUs of heter workers.
LINES = [
    ("elastic-agent --server_num=1 --worker_num=4 train.py", "", 1, [""] * 4, []),
    ("elastic-agent --server_num=2 --worker_num=4 train.py", "0,1,2,3", 2, ["0", "1", "2", "3"], []),
    ("elastic-agent --server_num=2 --worker_num=2 train.py", "0", 2, ["0", "0"], []),
    ("elastic-agent --server_num=2 --worker_num=2 --heter_worker_num=2 train.py", "0,1", 2, ["", ""], ["0", "1"]),
    ("python -m agent.launch --server_num=2 --worker_num=2 train.py", "", 2, ["", ""], []),
    (
        "elastic-agent --servers=127.0.0.1:6270,127.0.0.1:6271 --workers=127.0.0.1,127.0.0.1:6273 train.py",
        *("", 2, ["", ""], []),
    ),
]


@pytest.mark.parametrize(("line", "gpus", "servers", "workers", "heter"), LINES, ids=[line for line, *_ in LINES])
def test_a_line_for_one_machine(
    tmp_path: Path, line: str, gpus: str, servers: int, workers: list[str], heter: list[str]
) -> None:
    (tmp_path / "train.py").write_text(TRAIN)
    done = subprocess.run(
        [*shlex.split(line), "--is_cloud=1"],
        cwd=tmp_path,
        env=environment(tmp_path, CUDA_VISIBLE_DEVICES=gpus),
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    served, trained, others = (seen(tmp_path, role) for role in ("PSERVER", "TRAINER", "HETER_TRAINER"))
    assert len(served) == servers
    assert [process["CUDA_VISIBLE_DEVICES"] for process in served] == [""] * servers
    assert [process["CUDA_VISIBLE_DEVICES"] for process in trained] == workers
    assert [process["CUDA_VISIBLE_DEVICES"] for process in others] == heter
    everybody = [*served, *trained, *others]
    assert {process["PADDLE_TRAINERS_NUM"] for process in everybody} == {str(len(workers) + len(heter))}
    assert [process["PADDLE_TRAINER_ID"] for process in [*trained, *others]] == [
        str(n) for n in range(len(workers) + len(heter))
    ]
    assert {process["PADDLE_CURRENT_ENDPOINT"] for process in served} == {
        *served[0]["PADDLE_PSERVERS_IP_PORT_LIST"].split(",")
    }
    assert len({process["PADDLE_CURRENT_ENDPOINT"] for process in everybody}) == len(everybody), "each has its own port"
    assert {tuple(process["argv"]) for process in everybody} == {("--is_cloud=1",)}
    logs = {path.name for path in (tmp_path / "log").rglob("*log.*")}
    assert {f"serverlog.{n}" for n in range(servers)} | {f"workerlog.{n}" for n in range(len(workers))} <= logs
    assert "[worker 0] TRAINER 0 says so" in done.stdout
    assert "Local start" in done.stderr


def test_a_new_run_starts_without_the_rows_of_a_finished_one(tmp_path: Path) -> None:
    """It has another etcd, so it could mistake only the rows on disk for its own."""
    enough = tmp_path / "enough"
    enough.touch()
    options = "--standalone --job_id=again --server_num=1 --worker_num=1 --checkpoint_dir=rows"
    printed = [
        subprocess.run(
            shlex.split(f"elastic-agent {options} {COUNTING} {enough}"),
            cwd=tmp_path,
            env=environment(tmp_path),
            capture_output=True,
            text=True,
            timeout=PATIENCE_S,
            check=True,
        ).stdout
        for _ in range(2)
    ]
    aside = tmp_path / "rows" / "servers" / "finished-shard-0-of-1"
    assert [f"the last run has finished; its rows are in {aside}" in text for text in printed] == [False, True]
    # A run that takes longer has also written the rows that were changed since.
    assert "whole-000001.rows" in [path.name for path in aside.iterdir()]


A, B = "10.0.0.1", "10.0.0.2"
WITH_PORTS = [f"{A}:{port}" for port in range(6172, 6176)] + [f"{B}:{port}" for port in range(6176, 6180)]
SEVERAL = [
    (f'--servers="{A}:6170,{B}:6171" --workers="{",".join([A] * 4 + [B] * 4)}"', "", [None] * 8),
    (
        f'--servers="{A}:6170,{B}:6171" --workers="{",".join(WITH_PORTS)}"',
        *("0,1,2,3", ["0", "1", "2", "3"] * 2),
    ),
    (f'--servers="{A}:6170,{B}:6171" --workers="{A}:6172,{B}:6173"', "0", ["0", "0"]),
]


@pytest.mark.parametrize(("line", "gpus", "expected"), SEVERAL, ids=["addresses", "ports-and-gpus", "one-gpu-each"])
def test_a_line_for_two_machines(
    tmp_path: Path, network: Callable[..., Network], line: str, gpus: str, expected: list[str | None]
) -> None:
    """fleetrun.txt 5.3.2, several machines: the same command line on each, and no etcd."""
    (tmp_path / "train.py").write_text(TRAIN)
    machines = network(1, 2)
    argv = shlex.split(f"elastic-agent {line} train.py")
    environ = environment(tmp_path, **({"CUDA_VISIBLE_DEVICES": gpus} if gpus else {}))
    if not gpus:
        environ["CUDA_VISIBLE_DEVICES"] = ""
    agents = [machines.start(n, argv, tmp_path, environ) for n in (1, 0)]
    outputs = [agent.communicate(timeout=PATIENCE_S)[0] for agent in agents]
    assert [agent.returncode for agent in agents] == [0, 0], outputs
    served, trained = seen(tmp_path, "PSERVER"), seen(tmp_path, "TRAINER")
    assert [process["PADDLE_CURRENT_ENDPOINT"] for process in served] == [f"{A}:6170", f"{B}:6171"]
    assert [process["POD_IP"] for process in trained] == [A] * (len(trained) // 2) + [B] * (len(trained) // 2)
    assert [process["CUDA_VISIBLE_DEVICES"] or None for process in trained] == expected
    endpoints = trained[0]["PADDLE_TRAINER_ENDPOINTS"].split(",")
    assert [process["PADDLE_CURRENT_ENDPOINT"] for process in trained] == endpoints
    assert len({*endpoints, f"{A}:6170", f"{B}:6171"}) == len(expected) + 2


class Machine:
    """One of PaddleRec's two machines: a server and a worker that are started by hand, without any agent."""

    SERVERS = f"{A}:36000,{B}:36000"

    def __init__(self, machines: Network, number: int, directory: Path) -> None:
        self._machines = machines
        self._number = number
        self._directory = directory

    def _start(self, environ: Mapping[str, str]) -> subprocess.Popen[str]:
        argv = [sys.executable, "-u", CTR, "--is_cloud=1", "--parts=6", "--views=64"]
        plain = environment(self._directory, PADDLE_PSERVERS_IP_PORT_LIST=self.SERVERS, PADDLE_TRAINERS_NUM="2")
        paths = {"PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
        return self._machines.start(self._number, argv, self._directory, {**plain, **paths, **environ})

    def start_server(self) -> subprocess.Popen[str]:
        address = self._machines.addresses[self._number]
        return self._start({"TRAINING_ROLE": "PSERVER", "POD_IP": address, "PADDLE_PORT": "36000"})

    def start_worker(self) -> subprocess.Popen[str]:
        return self._start({"TRAINING_ROLE": "TRAINER", "PADDLE_TRAINER_ID": str(self._number)})


@pytest.mark.long("test_a_line_for_two_machines, with options in place of variables")
@pytest.mark.parametrize("first", some(["servers"], of=["servers", "workers"]))
def test_paddlerecs_steps_by_environment_alone_in_either_order(
    tmp_path: Path, network: Callable[..., Network], first: str
) -> None:
    machines = network(1, 2, 3)
    hosts = [Machine(machines, number, tmp_path) for number in range(2)]
    if first == "servers":
        servers = [host.start_server() for host in hosts]
        output = [_line(server, "listens on") for server in servers]
        assert output == [f"server {n} listens on {address}:36000" for n, address in enumerate((A, B))]
        stranger = machines.start(2, _stranger(A, 36000), tmp_path, environment(tmp_path))
        assert stranger.communicate(timeout=PATIENCE_S)[0] == "let go\n"
        workers = [host.start_worker() for host in hosts]
    else:
        workers = [host.start_worker() for host in hosts]
        assert _line(workers[0], "not ready") == f"ps not ready: [{A}:36000, {B}:36000]"
        servers = [host.start_server() for host in hosts]
    outputs = [process.communicate(timeout=PATIENCE_S)[0] for process in (*workers, *servers)]
    assert [process.returncode for process in (*workers, *servers)] == [0] * 4, outputs
    assert re.search(r"AUC 0\.\d+", outputs[0])
    if first == "servers":
        assert "10.0.0.3 is refused: only the job's listed machines are let in, 10.0.0.1, 10.0.0.2" in outputs[2]


def _line(process: subprocess.Popen[str], words: str) -> str:
    """Wait for a line of a process's output that contains the words."""
    assert process.stdout is not None
    for line in process.stdout:
        if words in line:
            return line.strip()
    raise AssertionError(f"the process ended before it printed {words!r}")


def _stranger(host: str, port: int) -> list[str]:
    """Prints `let go` if the server closes the connection without an answer."""
    code = f"import socket; print(socket.create_connection(('{host}', {port})).recv(1) or 'let go')"
    return [sys.executable, "-c", code]


@pytest.mark.long("test_of_three_machines_any_may_be_lost_and_comes_back, test_ps_servers.py")
def test_a_machine_is_lost_and_comes_back(tmp_path: Path, network: Callable[..., Network]) -> None:
    """With replicas nothing is lost; the workers of the other machine continue in the same processes."""
    machines = network(1, 2)
    enough = tmp_path / "enough"
    line = f"elastic-agent --servers={A}:6170,{B}:6170 --workers={A},{B} --ps_replicas=1 {COUNTING} {enough}"
    paths = {"PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}

    def start(number: int) -> subprocess.Popen[str]:
        directory = tmp_path / str(number)  # each machine has its own logs and rows
        directory.mkdir(exist_ok=True)
        environ = environment(tmp_path, CUDA_VISIBLE_DEVICES="", **paths)
        return machines.start(number, shlex.split(line), directory, environ)

    def steps(worker: int) -> int:
        return _output(tmp_path, f"workerlog.{worker}").count("\nstep ")

    def wait_for_copies(times: int) -> None:
        words = f"has shard 0, and it is on server {1 if times == 1 else '.'}"
        wait_for(
            lambda: len(re.findall(words, _output(tmp_path, "serverlog.0"))) >= times,
            "the replica of shard 0",
            PATIENCE_S,
        )

    def wait_for_steps(worker: int, more: int) -> None:
        least = steps(worker) + more
        wait_for(lambda: steps(worker) >= least, f"{more} steps of worker {worker}", PATIENCE_S)

    agents = [start(0), start(1)]
    wait_for_copies(1)
    wait_for_steps(0, 5)
    wait_for_steps(1, 5)
    machines.lose(1)
    wait_for_steps(0, 5)
    agents[1] = start(1)
    wait_for_steps(1, 5)
    wait_for_copies(2)
    enough.touch()
    outputs = [agent.communicate(timeout=PATIENCE_S)[0] for agent in agents]
    assert [agent.returncode for agent in agents] == [0, 0], outputs
    output = _output(tmp_path, "workerlog.0")
    found = re.search(r"counted (\d+), servers have (\d+)", output)
    assert found, output[-2000:]
    assert found[1] == found[2]
    assert output.count("step 1\n") == 1, "the process was not restarted"


def _output(directory: Path, name: str) -> str:
    """Return all output of a process, on whichever machine."""
    return "".join("\n" + path.read_text() for path in directory.rglob(name))
