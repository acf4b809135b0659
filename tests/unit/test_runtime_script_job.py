"""A job that is described in its script: the agent's command line that becomes of it, and what is refused."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import trainer_runtime as tr
from agent.observe import script_calls
from trainer_runtime import contract, script_job

TWO = 'tr.env.machine([{"addr": "10.0.0.1"}, {"addr": "10.0.0.2"}])'
SCRIPT = """
import os, sys
import trainer_runtime as tr
os.execv = lambda program, argv: (print(*argv[1:]), sys.exit())
{calls}
tr.env.init()
"""


def became(tmp_path: Path, calls: str, *arguments: str, **environ: str) -> str:
    """The command line of the agent that a script becomes, or the last line of its complaint."""
    (tmp_path / "train.py").write_text(SCRIPT.format(calls=calls))
    plain = {name: value for name, value in os.environ.items() if name not in {"CUDA_VISIBLE_DEVICES", "RANK"}}
    done = subprocess.run(
        [sys.executable, *(arguments or ("train.py",))],
        cwd=tmp_path,
        env={**plain, "PYTHONPATH": os.pathsep.join(sys.path), **environ},
        capture_output=True,
        text=True,
        check=False,
    )
    return done.stdout.strip() or done.stderr.strip().splitlines()[-1]


@pytest.mark.parametrize(
    ("calls", "options"),
    [
        ("", "--standalone --nproc_per_node=1"),
        ("tr.config.gpu_device_num(2)", "--standalone --nproc_per_node=2"),
        (TWO, "--ips=10.0.0.1,10.0.0.2 --np=2 --nproc_per_node=1"),
        (TWO.replace("])", "], min_nodes=1)"), "--ips=10.0.0.1,10.0.0.2 --np=1:2 --nproc_per_node=1"),
        (f"{TWO}\ntr.env.ctrl_port(9988)", "--ips=10.0.0.1,10.0.0.2 --np=2 --ctrl_port=9988 --nproc_per_node=1"),
    ],
)
def test_the_script_becomes_an_agent_that_runs_it(tmp_path: Path, calls: str, options: str) -> None:
    assert became(tmp_path, calls, "train.py", "--lr", "1") == f"-P -m agent {options} {tmp_path}/train.py --lr 1"


def test_a_module_is_run_as_one(tmp_path: Path) -> None:
    expected = "-P -m agent --standalone --nproc_per_node=1 --module train --lr 1"
    assert became(tmp_path, "", "-m", "train", "--lr", "1") == expected


def test_the_first_gpus_are_taken(tmp_path: Path) -> None:
    calls = "tr.config.gpu_device_num(2)"
    expected = f"-P -m agent --standalone --nproc_per_node=2 --gpus=4,5 {tmp_path}/train.py"
    assert became(tmp_path, calls, CUDA_VISIBLE_DEVICES="4,5,6,7") == expected
    refused = became(tmp_path, calls, CUDA_VISIBLE_DEVICES="4")
    assert refused == "ValueError: gpu_device_num(2): the GPUs here are 4"


def test_without_a_script_there_is_nothing_to_start_anew(tmp_path: Path) -> None:
    refused = became(tmp_path, "", "-c", "import trainer_runtime as tr; tr.env.init()")
    assert refused.startswith("RuntimeError: trainer_runtime.env.init() starts the script again in each rank, but")


def test_once_cuda_is_used_it_is_too_late(tmp_path: Path) -> None:
    refused = became(tmp_path, "import torch; torch.cuda.is_initialized = lambda: True")
    assert refused.startswith("RuntimeError: trainer_runtime.env.init() must come before CUDA is used: move it up")


@pytest.mark.parametrize("nodes", [None, [], "10.0.0.1", ["10.0.0.1"], [{}], [{"addr": ""}], [{"addr": "a,b"}], [1]])
def test_what_is_no_list_of_nodes_is_refused_at_the_call(nodes: object) -> None:
    with pytest.raises(ValueError, match=r"machine\(\) wants a list of nodes with an address each"):
        tr.env.machine(nodes)  # type: ignore[arg-type]


def test_other_mistakes_are_refused_at_the_call() -> None:
    with pytest.raises(ValueError, match="names one address twice: a, a"):
        tr.env.machine([{"addr": "a"}, {"addr": "a"}])
    with pytest.raises(ValueError, match="min_nodes must be a whole number from 1 to 2, not 3"):
        tr.env.machine([{"addr": "a"}, {"addr": "b"}], min_nodes=3)
    with pytest.raises(ValueError, match="ctrl_port must be a whole number from 1 to 65534, not 0"):
        tr.env.ctrl_port(0)
    with pytest.raises(ValueError, match="gpu_device_num must be a whole number from 1 to 1024, not True"):
        tr.config.gpu_device_num(True)


def test_in_a_rank_it_joins_the_group(monkeypatch: pytest.MonkeyPatch) -> None:
    joined = []
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setattr("trainer_runtime.dist.init", lambda: joined.append(True))
    tr.env.init()
    assert joined == [True]


@pytest.mark.parametrize(("group_rank", "expected"), [(None, True), ("0", True), ("1", False)])
def test_the_master_is_the_node_of_rank_0(
    monkeypatch: pytest.MonkeyPatch, group_rank: str | None, *, expected: bool
) -> None:
    monkeypatch.delenv("GROUP_RANK", raising=False)
    if group_rank is not None:
        monkeypatch.setenv("GROUP_RANK", group_rank)
    assert tr.env.is_master() is expected


@pytest.fixture(autouse=True)
def _nothing_described(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(script_job, "description", script_job.JobDescription())


def test_a_message_about_an_option_names_the_call_that_it_stands_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shown = f"os.execv = lambda *_: (print(os.environ['{contract.SCRIPT_CALLS}']), sys.exit())"
    monkeypatch.setenv(contract.SCRIPT_CALLS, became(tmp_path, f"{TWO}\ntr.env.ctrl_port(9988)\n{shown}"))
    script_calls.take_calls()
    assert contract.SCRIPT_CALLS not in os.environ, "workers and what they start are other agents' business"
    assert script_calls.with_calls("port 9988 is taken: choose another --ctrl_port, the same on all") == (
        "port 9988 is taken: choose another tr.env.ctrl_port(9988) at train.py:6 (--ctrl_port), the same on all"
    )
    said = script_calls.with_calls("--ips=10.0.0.1,10.0.0.2: 10.0.0.2 is not there; --ips wants names")
    assert said == (f"{TWO} at train.py:5 (--ips=10.0.0.1,10.0.0.2): 10.0.0.2 is not there; --ips wants names")
    assert script_calls.with_calls("--no_python, --npx and x--np stand for nothing here") == (
        "--no_python, --npx and x--np stand for nothing here"
    )
    monkeypatch.delenv(contract.SCRIPT_CALLS, raising=False)
    script_calls.take_calls()
    assert script_calls.with_calls("another --ctrl_port") == "another --ctrl_port"
