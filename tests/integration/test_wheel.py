"""The package as a wheel, installed with its dependencies outside of this repository, runs what the README shows."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from agent.local_etcd.embedded import EmbeddedEtcd

ROOT = Path(__file__).resolve().parents[2]
INSTALL_WITHIN_S = 1500.0
RUN_WITHIN_S = 240.0
BEFORE = """
import argparse
import torch
from torch.nn.parallel import DistributedDataParallel

parser = argparse.ArgumentParser()
parser.add_argument("--lr", type=float, default=0.1)
torch.manual_seed(0)
net = torch.nn.Linear(4, 1)
dataset = torch.utils.data.TensorDataset(torch.randn(2048, 4), torch.randn(2048, 1))
optimizer = torch.optim.SGD(net.parameters(), lr=parser.parse_args().lr)
schedule = torch.optim.lr_scheduler.StepLR(optimizer, 10)


def train_one(model, optimizer, schedule, batch, weight):
    optimizer.zero_grad()
    (weight * (model(batch[0]) - batch[1]).square().mean()).backward()
    optimizer.step()
    schedule.step()


"""
AFTER = """
print("trained", state.step, "steps on", tr.world_size(), "ranks with", tr.__file__)
"""
TRAINED = "trained 40 steps on {} ranks with {}"


class Installed:
    """The installed wheel, and a directory with a script."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.bin = directory / "venv" / "bin"
        kept = {name: os.environ[name] for name in ("HOME", "LANG", "TMPDIR") if name in os.environ}
        self.environ = {**kept, "PATH": f"{self.bin}:/usr/bin:/bin", "CUDA_VISIBLE_DEVICES": ""}
        (directory / "train.py").write_text(BEFORE + readme_script() + AFTER)

    def start(self, *line: str, **environ: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [self.bin / "elastic-agent", *line],
            cwd=self.directory,
            env={**self.environ, **environ},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def run(self, *line: str, **environ: str) -> str:
        return output_of(self.start(*line, **environ))

    @property
    def runtime(self) -> Path:
        (found,) = self.directory.glob("venv/lib/python*/site-packages/trainer_runtime/__init__.py")
        return found


def output_of(process: subprocess.Popen[str]) -> str:
    with process:
        try:
            output, _ = process.communicate(timeout=RUN_WITHIN_S)
        except subprocess.TimeoutExpired:
            process.kill()
            raise
    assert process.returncode == 0, output
    return output


def readme_script() -> str:
    """The script of the README."""
    (script,) = re.findall(r"^```python\n(.*?)^```", (ROOT / "README.md").read_text(), re.DOTALL | re.MULTILINE)
    return str(script)


def pip(python: Path | str, *arguments: str | Path) -> None:
    line = [python, "-m", "pip", "--disable-pip-version-check", "--quiet", *arguments]
    done = subprocess.run(line, check=False, capture_output=True, text=True, timeout=INSTALL_WITHIN_S)
    assert done.returncode == 0, done.stderr


@pytest.fixture(scope="module")
def installed() -> Iterator[Installed]:
    """Made once; it takes some gigabytes, so it is not kept as pytest keeps a test's directory."""
    with tempfile.TemporaryDirectory(prefix="elastic-agent-wheel-") as path:
        directory = Path(path)
        source = directory / "source"
        for package in ("agent", "trainer_runtime"):
            shutil.copytree(ROOT / package, source / package, ignore=shutil.ignore_patterns("__pycache__"))
        for name in ("pyproject.toml", "README.md"):
            shutil.copy(ROOT / name, source)
        pip(sys.executable, "wheel", "--no-deps", "--wheel-dir", directory, source)
        shutil.rmtree(source)
        (wheel,) = directory.glob("*.whl")
        subprocess.run([sys.executable, "-m", "venv", directory / "venv"], check=True)
        pip(directory / "venv/bin/python", "install", "-c", ROOT / "constraints.txt", f"{wheel}[embedded]")
        yield Installed(directory)


ALONE = "no other test; it installs torch and all else anew, which takes minutes"


@pytest.mark.long(ALONE)
@pytest.mark.timeout(2 * INSTALL_WITHIN_S)
def test_a_wheel_runs_what_the_readme_shows(installed: Installed) -> None:
    assert "elastic-agent" in installed.run("--help")
    assert "ok     torch: " in installed.run("doctor", "train.py")
    assert TRAINED.format(1, installed.runtime) in installed.run("train.py")

    with EmbeddedEtcd(port=0) as etcd:
        line = (f"--elastic_server={etcd.endpoint}", "--np=2", "--job_id=resnet", "--address=127.0.0.1")
        agents = [installed.start(*line, f"--node_id={name}", "train.py", "--lr=0.1") for name in ("a", "b")]
        outputs = [output_of(each) for each in agents]
        assert TRAINED.format(2, installed.runtime) in "".join(outputs), outputs
        target = {"ELASTIC_AGENT_ELASTIC_SERVER": etcd.endpoint, "ELASTIC_AGENT_JOB_ID": "resnet"}
        assert "job resnet" in installed.run("status", **target)
        installed.run("explain", **target)
