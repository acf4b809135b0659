"""Completion of the command line in a real shell."""

from __future__ import annotations

import os
import pty
import select
import subprocess
import time
from pathlib import Path

from machines import BIN


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
