"""What torch's own launcher tests assert of a command line, of `elastic-agent` in place of torchrun.

They are test/distributed/launcher and test/distributed/elastic/multiprocessing. docs/migrating.md lists their
assertions, with what differs here.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import subprocess
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from integration.conftest import PATIENCE_S
from machines import environment
from ports import free_ports
from waiting import has_ended

SEEN = """
import json, os, sys
from pathlib import Path
Path("seen").mkdir(exist_ok=True)
Path("seen", os.environ["RANK"]).write_text(json.dumps({"argv": sys.argv[1:], **os.environ}))
"""
SHELL = """#!/bin/sh
mkdir -p seen && echo "{\\"argv\\": [\\"$1\\"]}" > "seen/$RANK" && echo "creating $RANK"
"""
OPTIONS = "--monitor-interval=1 --start-method=spawn"
NO_GPU = {"CUDA_VISIBLE_DEVICES": ""}


def launch(directory: Path, line: str, **environ: str) -> subprocess.CompletedProcess[str]:
    (directory / "train.py").write_text(SEEN)
    (directory / "train.sh").write_text(SHELL)
    (directory / "train.sh").chmod(0o755)
    return subprocess.run(
        shlex.split(line),
        cwd=directory,
        env=environment(directory, **{**NO_GPU, **environ}),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )


def seen(directory: Path) -> dict[str, dict[str, Any]]:
    return {path.name: json.loads(path.read_text()) for path in (directory / "seen").iterdir()}


VARIABLES = {
    "PET_NNODES": "1",
    "PET_NPROC_PER_NODE": "2",
    "PET_RDZV_ID": "7",
    "PET_MONITOR_INTERVAL": "1",
    "PET_START_METHOD": "spawn",
    "PET_NO_PYTHON": "1",
    "PET_MODULE": "0",
}
LINES = [
    (f"--nnodes=1 --nproc-per-node=4 --rdzv-id=7 {OPTIONS} train.py x", {}, 4),
    (
        f"--nnodes=1 --nproc-per-node=2 {OPTIONS} --master-addr=localhost --master-port=1 --node-rank=0 train.py x",
        {},
        2,
    ),
    (f"--standalone --run-path --nnodes=1 --nproc-per-node=2 {OPTIONS} train.py x", {}, 2),
    (f"--nnodes=1 --rdzv-id=7 {OPTIONS} --no-python ./train.sh x", {}, 1),
    (f"--nnodes=1 --nproc-per-node=auto --rdzv-id=7 {OPTIONS} train.py x", {}, len(os.sched_getaffinity(0))),
    (f"--nnodes=1 --nproc-per-node=auto {OPTIONS} train.py x", {"CUDA_VISIBLE_DEVICES": "0,1,2"}, 3),
    ("./train.sh x", VARIABLES, 2),
]


@pytest.mark.parametrize(("line", "environ", "ranks"), LINES, ids=[line for line, *_ in LINES])
def test_all_ranks_run(tmp_path: Path, line: str, environ: dict[str, str], ranks: int) -> None:
    """Once, with the script's arguments, and without anything to meet at."""
    done = launch(tmp_path, f"elastic-agent {line}", **environ)
    assert done.returncode == 0, done.stderr
    ran = seen(tmp_path)
    assert ran.keys() == {str(rank) for rank in range(ranks)}
    assert [each["argv"] for each in ran.values()] == [["x"]] * ranks


REFUSED = [
    ("--no-python --module ./train.sh", {}, "--module and --no_python exclude each other"),
    ("./train.sh", {"PET_NO_PYTHON": "1", "PET_MODULE": "1"}, "--module and --no_python exclude each other"),
    ("--nproc-per-node=unknown train.py", {}, "--nproc_per_node must be at least 1"),
    ("--nproc-per-node=gpu train.py", {}, "there is no GPU here"),
    ("--nnodes=2:20:30 train.py", {}, "not '2:20:30'"),
    ("--logs_specs=DOESNOT_EXIST train.py", {}, "use --log_dir"),
    ("--redirects=0:1, train.py", {}, "--redirects must be 0 (none)"),
    ("--tee=11 train.py", {}, "--tee must be 0 (none)"),
    ("--nnodes=1:2 --rdzv-backend=c10d --rdzv-endpoint=localhost:1 train.py", {}, "agents meet in etcd"),
    ("missing.py", {}, "no script 'missing.py'"),
]


@pytest.mark.parametrize(("line", "environ", "words"), REFUSED, ids=[f"{words}: {line}" for line, _, words in REFUSED])
def test_what_torch_refuses_is_refused(tmp_path: Path, line: str, environ: dict[str, str], words: str) -> None:
    done = launch(tmp_path, f"elastic-agent {line}", **environ)
    assert (done.returncode, words in done.stderr) == (2, True), done.stderr
    assert not (tmp_path / "seen").exists()


def test_a_script_may_get_its_local_rank_as_an_argument(tmp_path: Path) -> None:
    """As from torch.distributed.launch, which adds it by itself."""
    line = "elastic-agent --nproc-per-node=2 --no_python sh -c 'exec python train.py --local-rank=$LOCAL_RANK'"
    done = launch(tmp_path, line)
    assert done.returncode == 0, done.stderr
    assert [each["argv"] for _, each in sorted(seen(tmp_path).items())] == [["--local-rank=0"], ["--local-rank=1"]]


def test_options_behind_the_script_are_its_own_and_noted(tmp_path: Path) -> None:
    done = launch(tmp_path, "elastic-agent --standalone train.py --np=2 --standalone --nproc-per-node 2 --lr=1")
    assert done.returncode == 0, done.stderr
    note = "elastic-agent: note: --np=2, --nproc-per-node are passed to train.py; options of elastic-agent come before"
    assert done.stderr.startswith(note)
    assert seen(tmp_path)["0"]["argv"] == ["--np=2", "--standalone", "--nproc-per-node", "2", "--lr=1"]


GROUP = """
import sys
import torch
import torch.distributed as dist
assert dist.is_torchelastic_launched()
dist.init_process_group("gloo", init_method=sys.argv[1], world_size=int(sys.argv[2]), rank=int(sys.argv[3]))
ones = torch.nn.functional.one_hot(torch.tensor(dist.get_rank()), dist.get_world_size())
dist.all_reduce(ones)
assert ones.tolist() == [1, 1]
print("Done")
"""


@pytest.mark.parametrize("method", ["env://", "tcp://localhost:{port}"])
def test_ranks_meet_by_either_method(tmp_path: Path, method: str) -> None:
    """With `tcp://` the script itself chooses the port, so the agent must leave it free."""
    (tmp_path / "group.py").write_text(GROUP)
    [port] = free_ports(1)
    script = f"sh -c 'exec python group.py {method.format(port=port)} $WORLD_SIZE $RANK'"
    options = f"--run-path --nnodes=1 --nproc-per-node=2 --master-addr=localhost --master-port={port}"
    done = launch(tmp_path, f"elastic-agent {options} --no-python {script}")
    assert done.returncode == 0, done.stderr
    assert "[rank0]: Done" in done.stdout


TALK = """
import os, sys
print("out", flush=True)
print("err", file=sys.stderr)
"""


@pytest.mark.parametrize("launcher", ["elastic-agent", "torchrun"])
def test_lines_have_the_prefix_of_the_template_and_nothing_more(tmp_path: Path, launcher: str) -> None:
    """The same lines as from torchrun itself."""
    (tmp_path / "talk.py").write_text(TALK)
    line = f"{launcher} --nproc-per-node=2 --redirect=3 --tee=3 talk.py"
    done = launch(tmp_path, line, TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE="<${role_name} ${rank}.${local_rank}>")
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == ["<default 0.0>out", "<default 1.1>out"]
    assert {"<default 0.0>err", "<default 1.1>err"} <= {*done.stderr.splitlines()}


CONSOLES = [
    ("--tee=3", {"0 out", "0 err", "1 out", "1 err"}),
    ("--console_ranks=all --redirects=0:2 --tee=1:2", {"0 out", "1 out", "1 err"}),
    ("--redirects=3 --tee=0:1,1:2", {"0 out", "1 err"}),
    ("--redirects=3", set()),
    ("--tee=3 --local-ranks-filter=1", {"1 out", "1 err"}),
]


@pytest.mark.parametrize(("options", "shown"), CONSOLES, ids=[options for options, _ in CONSOLES])
def test_streams_of_some_ranks_are_shown_and_all_are_in_files(tmp_path: Path, options: str, shown: set[str]) -> None:
    (tmp_path / "talk.py").write_text(TALK)
    done = launch(tmp_path, f"elastic-agent --nproc-per-node=2 --log-dir=logs {options} talk.py")
    assert done.returncode == 0, done.stderr
    lines = [*done.stdout.splitlines(), *done.stderr.splitlines()]
    assert {line.removeprefix("[rank").replace("]:", "") for line in lines if line.startswith("[rank")} == shown
    logs = sorted((tmp_path / "logs").rglob("rank-*.log"))
    assert [log.read_text() for log in logs] == ["out\nerr\n"] * 2


def test_a_script_that_always_fails_is_tried_as_often_as_asked_for(tmp_path: Path) -> None:
    """Ranks learn how often they were restarted; the agent's own error file gets the failure that ends the job."""
    (tmp_path / "bad.py").write_text(
        "import os\n"
        "from pathlib import Path\n"
        "Path(f\"{os.environ['TORCHELASTIC_RESTART_COUNT']} of {os.environ['TORCHELASTIC_MAX_RESTARTS']}\").touch()\n"
        "raise RuntimeError('this script fails')\n"
    )
    line = "elastic-agent --nnodes=1 --nproc-per-node=2 --rdzv-id=7 --max-restarts=2 bad.py"
    done = launch(tmp_path, line, TORCHELASTIC_ERROR_FILE=str(tmp_path / "error.json"))
    assert done.returncode == 76, done.stderr
    assert {path.name for path in tmp_path.glob("* of *")} == {"0 of 2", "1 of 2", "2 of 2"}
    message = json.loads((tmp_path / "error.json").read_text())["message"]
    assert message["message"] == "RuntimeError: this script fails"
    assert "raise RuntimeError('this script fails')" in message["extraInfo"]["py_callstack"]


BOTH = """
import os, sys, time
print(os.getpid(), flush=True)
{then}
time.sleep(1000)
"""


def pids_in(lines: Iterable[str]) -> list[int]:
    return [int(line.split()[1]) for line in lines if line.startswith("[rank")]


ENDS = [("os.kill(os.getpid(), 11)", 139, "SIGSEGV"), ("sys.exit(38)", 38, "exited with code 38")]


@pytest.mark.parametrize(("end", "code", "words"), ENDS, ids=[end for end, *_ in ENDS])
def test_the_first_failure_is_named_and_ends_the_others(tmp_path: Path, end: str, code: int, words: str) -> None:
    until_both_are_there = "while len(os.listdir('there')) < 2: open('there/' + os.environ['RANK'], 'w')"
    then = f"{until_both_are_there}\nos.environ['RANK'] == '1' and {end}"
    (tmp_path / "there").mkdir()
    (tmp_path / "die.py").write_text(BOTH.format(then=then))
    done = launch(tmp_path, "elastic-agent --nproc-per-node=2 --console_ranks=all --max-restarts=0 die.py")
    assert done.returncode == code
    assert re.search(rf"job .* failed: rank 1 on \S+ .*{words}", done.stderr)
    pids = pids_in(done.stdout.splitlines())
    assert len(pids) == 2
    assert all(map(has_ended, pids))


SIGNALS = [(signal.SIGTERM, 0), (signal.SIGQUIT, 0), (signal.SIGINT, 130), (signal.SIGHUP, 129)]


@pytest.mark.parametrize(("number", "code"), SIGNALS, ids=[number.name for number, _ in SIGNALS])
def test_a_signal_to_the_launcher_leaves_no_process_behind(tmp_path: Path, number: signal.Signals, code: int) -> None:
    (tmp_path / "wait.py").write_text(BOTH.format(then=""))
    with subprocess.Popen(
        ["elastic-agent", "--nproc-per-node=2", "--console_ranks=all", "wait.py"],
        cwd=tmp_path,
        env=environment(tmp_path, **NO_GPU),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        # A shell that starts the tests in the background has them ignore SIGINT and SIGQUIT, and so would the agent.
        preexec_fn=lambda: signal.signal(number, signal.SIG_DFL),  # noqa: PLW1509 - no thread holds a lock
    ) as agent:
        try:
            assert agent.stdout is not None
            pids = pids_in([agent.stdout.readline(), agent.stdout.readline()])
            agent.send_signal(number)
            assert agent.wait(PATIENCE_S) == code
        finally:
            agent.kill()
    assert len(pids) == 2
    assert all(map(has_ended, pids))
