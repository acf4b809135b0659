"""What the shell is told that a word may become."""

from __future__ import annotations

import os
import pty
import select
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from agent.cli import _choose
from agent.completion import VARIABLE, complete

BIN = Path(sys.executable).parent


def suggested(line: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> list[str]:
    """What bash is told with the cursor at the end of a line, broken into words as bash breaks it."""
    words = line.replace("=", " = ").replace(":", " : ").split(" ")
    monkeypatch.setenv(VARIABLE, "bash_complete")
    monkeypatch.setenv("COMP_WORDS", "\n".join(words))
    monkeypatch.setenv("COMP_CWORD", str(len(words) - 1))
    assert complete(_choose) == 0
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


def test_a_real_bash_completes_at_the_key(tmp_path: Path) -> None:
    """At a terminal of its own: what is typed, two presses of the key, and what then stands there."""
    terminal, its_end = pty.openpty()
    environ = {**os.environ, "PATH": f"{BIN}:{os.environ['PATH']}", "PS1": "ready> ", "TERM": "dumb"}
    argv = ["bash", "--norc", "--noprofile", "-i"]
    with subprocess.Popen(
        argv, cwd=tmp_path, env=environ, stdin=its_end, stdout=its_end, stderr=its_end, start_new_session=True
    ) as bash:
        try:
            _read_until(terminal, "ready> ")
            os.write(terminal, b'eval "$(elastic-agent completion bash)"\n')
            _read_until(terminal, "ready> ")
            os.write(terminal, b"elastic-agent --np=2 sta\t")
            _read_until(terminal, "--np=2 status ")
            os.write(terminal, b"--wa\t")
            _read_until(terminal, "--watch ")
        finally:
            bash.kill()
            os.close(its_end)
            os.close(terminal)


def _read_until(terminal: int, wanted: str, within_s: float = 80.0) -> None:
    seen, give_up_at = "", time.monotonic() + within_s
    while wanted not in seen:
        ready, _, _ = select.select([terminal], [], [], max(0.0, give_up_at - time.monotonic()))
        assert ready, f"not within {within_s:g} s: {wanted!r} in {seen!r}"
        seen += os.read(terminal, 4096).decode(errors="replace")
