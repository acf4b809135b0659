"""The suggestions that the shell gets for a word."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from agent.cli.command_line import find_command
from agent.cli.completion import VARIABLE, complete

BIN = Path(sys.executable).parent


def suggested(line: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> list[str]:
    """The suggestions for bash with the cursor at the end of a line, which is split into words as bash splits it."""
    words = line.replace("=", " = ").replace(":", " : ").split(" ")
    monkeypatch.setenv(VARIABLE, "bash_complete")
    monkeypatch.setenv("COMP_WORDS", "\n".join(words))
    monkeypatch.setenv("COMP_CWORD", str(len(words) - 1))
    assert complete(find_command) == 0
    return [line.replace("plain,", "") for line in capsys.readouterr().out.splitlines()]


@pytest.mark.parametrize(
    ("line", "wanted"),
    [
        ("elastic-agent sta", ["file,sta", "status"]),
        ("elastic-agent --np=2 --elastic_server=h:1 dr", ["file,dr", "drain"]),
        ("elastic-agent --np 2 dr", ["file,dr", "drain"]),
        ("elastic-agent --standa", ["--standalone"]),
        ("elastic-agent --job-", ["--job_id"]),
        ("elastic-agent status --wat", ["--watch"]),
        ("elastic-agent --np=2 status --wat", ["--watch"]),
        ("elastic-agent completion ", ["bash", "zsh", "fish"]),
        ("elastic-agent help re", ["recovery"]),
        ("elastic-agent --fault_tolerance_level ", ["0", "1", "2"]),
        ("elastic-agent --fault_tolerance_level=", ["0", "1", "2"]),
        ("elastic-agent --np ", []),
        ("elastic-agent --etcd_ca=ro", ["file,ro"]),
        ("elastic-agent --log_dir ro", ["dir,ro"]),
        ("elastic-agent train.py --standa", ["file,--standa"]),
        ("elastic-agent train.py dr", ["file,dr"]),
        ("elastic-agent drain --elastic_server=127.0.0.1:9 ", []),
        ("elastic-agent status --nope=1 --wat", ["--watch"]),
    ],
)
def test_words_are_completed_by_where_they_stand(
    line: str, wanted: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert suggested(line, monkeypatch, capsys) == wanted


def test_all_commands_are_suggested(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    found = suggested("elastic-agent ", monkeypatch, capsys)
    assert {"run", "status", "explain", "drain", "stop", "reset", "completion"} < set(found)


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_each_shell_gets_its_script(shell: str) -> None:
    done = subprocess.run([BIN / "elastic-agent", "completion", shell], capture_output=True, text=True, check=True)
    assert f"{VARIABLE}={shell}_complete" in done.stdout
    assert done.stderr == ""
    if shutil.which(shell):
        subprocess.run([shell, "-n"], input=done.stdout, text=True, check=True)
