"""What somebody who comes from torchrun does first: on a terminal, with a pipe, with a line from elsewhere."""

from __future__ import annotations

import fcntl
import os
import pty
import select
import signal
import socket
import struct
import subprocess
import termios
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from integration.conftest import PATIENCE_S
from machines import environment
from waiting import wait_for

ALONE = ["elastic-agent", "--standalone"]
BAR = """
import os, sys, time
for step in range(50):
    print(f"\\rstep {step}", end="", file=sys.stderr)
    time.sleep(0.02)
while not os.path.exists("seen"):
    time.sleep(0.01)
print(file=sys.stderr)
breakpoint()
print("after", os.isatty(0))
"""


class Terminal:
    """A program on a terminal of its own, and what it has shown."""

    def __init__(self, line: list[str], directory: Path) -> None:
        environ = environment(directory, CUDA_VISIBLE_DEVICES="", TERM="xterm")
        self.pid, self._fd = pty.fork()
        if self.pid == 0:
            os.chdir(directory)
            os.execvpe(line[0], line, environ)  # noqa: S606 - without a shell on purpose
        fcntl.ioctl(self._fd, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
        self.shown = b""

    def wait_for(self, words: bytes) -> None:
        self._read(lambda: words in self.shown, f"{words!r} is shown")

    def type(self, words: bytes) -> None:
        os.write(self._fd, words)

    def end(self) -> int:
        """Its exit code, once it has ended."""
        status: list[int] = []

        def has_ended() -> bool:
            pid, code = os.waitpid(self.pid, os.WNOHANG)
            status[:] = [code] if pid else []
            return bool(status)

        self._read(has_ended, "it ends")
        os.close(self._fd)
        return os.waitstatus_to_exitcode(status[0])

    def _read(self, is_so: Callable[[], object], what: str) -> None:
        give_up_at = time.monotonic() + PATIENCE_S
        while not is_so():
            assert time.monotonic() < give_up_at, f"not in time: {what}; there is {self.shown!r}"
            if select.select([self._fd], [], [], 0.05)[0]:
                try:
                    self.shown += os.read(self._fd, 1 << 16)
                except OSError:  # nobody has it open any more
                    time.sleep(0.05)


def test_a_bar_moves_and_a_breakpoint_takes_what_is_typed(tmp_path: Path) -> None:
    """The bar is seen while the script still waits; the log has all of its states."""
    (tmp_path / "train.py").write_text(BAR)
    agent = Terminal([*ALONE, "train.py"], tmp_path)
    agent.wait_for(b"[rank0]: step 49")
    (tmp_path / "seen").touch()
    agent.wait_for(b"(Pdb) ")
    agent.type(b"p 6 * 7\n")
    agent.wait_for(b"42")
    agent.type(b"c\n")
    assert agent.end() == 0, agent.shown
    assert b"after True" in agent.shown
    lines = agent.shown.replace(b"\r\n", b"\n").split(b"\n")
    assert not [line for line in lines if b"step" in line and b"elastic-agent[" in line.rsplit(b"\x1b[K", 1)[-1]]
    (log,) = (tmp_path / "log").rglob("*.log")
    assert b"\rstep 0\rstep 1\rstep 2" in log.read_bytes()


def run(
    directory: Path, *line: str, given: str = "", within_s: float = PATIENCE_S, **environ: str
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        line,
        cwd=directory,
        env=environment(directory, **{"CUDA_VISIBLE_DEVICES": "", **environ}),
        input=given,
        capture_output=True,
        text=True,
        timeout=within_s,
        check=False,
    )


READ = """
import os, sys
print("got", os.read(0, 2).decode().strip())
sys.exit(0 if os.environ["TORCHELASTIC_RESTART_COUNT"] == "1" else 3)
"""


def test_what_is_piped_in_reaches_the_only_rank_and_after_a_restart_its_successor(tmp_path: Path) -> None:
    (tmp_path / "read.py").write_text(READ)
    done = run(tmp_path, *ALONE, "read.py", given="a\nb\n")
    assert done.returncode == 0, done.stderr
    assert done.stdout == "[rank0]: got a\n[rank0]: got b\n"
    assert "Configuration Arguments" not in done.stderr


def test_of_several_ranks_one_can_be_chosen_and_a_script_can_be_piped_in(tmp_path: Path) -> None:
    script = "import os, sys; print(sys.argv, os.environ['RANK'], repr(sys.stdin.read()))\n"
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "__main__.py").write_text(script)
    several = [*ALONE, "--nproc-per=2", "--console_ranks=all", "--log_line_prefix_template="]
    done = run(tmp_path, *several, "--stdin_rank=1", "package", given="x\n")
    assert sorted(done.stdout.splitlines()) == ["['package'] 0 ''", "['package'] 1 'x\\n'"], done.stderr
    done = run(tmp_path, *several, "-", "arg", given=script.replace("repr(sys.stdin.read())", "__name__"))
    assert sorted(done.stdout.splitlines()) == [f"['-', 'arg'] {rank} __main__" for rank in range(2)], done.stderr


def test_a_line_of_torchrun_s_with_sigquit_at_its_end(tmp_path: Path) -> None:
    """It is what torchrun's own page has for one machine."""
    (tmp_path / "wait.py").write_text("import time; print('here', flush=True); time.sleep(600)")
    line = "torchrun --nnodes=1 --nproc-per-node=1 --rdzv-id=7 --rdzv-backend=c10d --rdzv-endpoint=localhost:0 wait.py"
    with subprocess.Popen(
        ["elastic-agent", *line.split()[1:]],
        cwd=tmp_path,
        env=environment(tmp_path, CUDA_VISIBLE_DEVICES="", PET_MASTER_PORT="29500"),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        # A shell that starts the tests in the background has them ignore it, and so would the agent.
        preexec_fn=lambda: signal.signal(signal.SIGQUIT, signal.SIG_DFL),  # noqa: PLW1509 - no thread holds a lock
    ) as agent:
        try:
            assert agent.stdout is not None
            assert agent.stdout.readline() == "[rank0]: here\n"
            agent.send_signal(signal.SIGQUIT)
            _, told = agent.communicate(timeout=PATIENCE_S)
        finally:
            agent.kill()
    assert agent.returncode == 0, told
    assert told.count("elastic-agent: warning: not used: ") == 1
    assert all(name in told for name in ("--rdzv_backend", "--rdzv_endpoint", "PET_MASTER_PORT"))


def test_a_slip_of_the_pen_ends_the_job_after_two_tries_and_is_shown_once_in_each(tmp_path: Path) -> None:
    (tmp_path / "typo.py").write_text("import torchh")
    done = run(tmp_path, *ALONE, "--nproc_per_node=2", "typo.py")
    assert done.returncode == 1, done.stderr
    assert done.stderr.count("Traceback (most recent call last):") == 2, done.stderr
    assert "as did every rank, twice in a row; --max_restarts=N tries N times" in done.stderr


STATE = """
import torch
import trainer_runtime as tr
tr.init()
state = tr.State(value=torch.zeros(()))
for _ in state.epochs(1):
    state.commit()
"""


@pytest.mark.parametrize(
    ("directory", "told"),
    [
        (
            "train.py/checkpoints",
            "wanted a directory for checkpoints, and {directory} is a file, or in one: give another",
        ),
        ("/proc/checkpoints", "cannot write checkpoints in {directory}: No such file or directory"),
        ("/sys", "cannot write checkpoints in {directory}: Permission denied"),
    ],
)
def test_a_place_where_no_checkpoint_can_be_ends_the_job_at_once_with_one_line(
    tmp_path: Path, directory: str, told: str
) -> None:
    (tmp_path / "train.py").write_text(STATE)
    directory = str(tmp_path / directory)
    done = run(tmp_path, *ALONE, "--nproc_per_node=2", f"--checkpoint_dir={directory}", "train.py")
    assert done.returncode == 93, done.stderr
    told = told.format(directory=directory)
    assert done.stderr.count(f"trainer_runtime: error: {told}") == 1, done.stderr
    assert f"failed: rank 0 on {socket.gethostname()} exited with code 93 ({told}" in done.stderr, done.stderr
    assert "Traceback" not in done.stderr
    assert "which asks for no restart" in done.stderr


SECOND = """
import os, time
if os.environ["RANK"] == "0":
    raise ConnectionResetError("Connection reset by peer")
time.sleep(0.5)
raise ValueError("the cause")
"""


def test_what_came_first_is_shown_before_what_it_led_to(tmp_path: Path) -> None:
    """Only rank 0 is on the console, and it was the first to end."""
    (tmp_path / "second.py").write_text(SECOND)
    done = run(tmp_path, *ALONE, "--nproc_per_node=2", "--max_restarts=0", "second.py")
    assert done.returncode == 1, done.stderr
    causes = [line for line in done.stderr.splitlines() if line == "  | ValueError: the cause"]
    assert len(causes) == 1, done.stderr
    assert done.stderr.index(causes[0]) < done.stderr.index("[rank0]: Traceback"), done.stderr


UNTIL = """
import os, time
print("here", flush=True)
while not os.path.exists("go"):
    time.sleep(0.05)
"""


def test_a_job_is_found_without_an_address_while_it_runs_and_after_its_end(tmp_path: Path) -> None:
    """And when its agent was killed: nobody takes it for one that runs."""
    runtime, elsewhere = tmp_path / "runtime", tmp_path / "elsewhere"
    for directory in (runtime, elsewhere):
        directory.mkdir(mode=0o700)
    (tmp_path / "until.py").write_text(UNTIL)
    environ = environment(tmp_path, CUDA_VISIBLE_DEVICES="", XDG_RUNTIME_DIR=str(runtime))

    def ask(*line: str) -> str:
        done = run(elsewhere, "elastic-agent", *line, XDG_RUNTIME_DIR=str(runtime))
        assert done.returncode == 0, done.stderr
        return done.stdout

    for is_killed in (False, True):
        with subprocess.Popen(
            [*ALONE, "until.py"], cwd=tmp_path, env=environ, stdout=subprocess.PIPE, text=True
        ) as job:
            try:
                assert job.stdout is not None
                assert job.stdout.readline() == "[rank0]: here\n"
                assert "  training: " in ask("status")
                wait_for(lambda: any(b"/group" in kept.read_bytes() for kept in runtime.glob("*/*.records")), "records")
                if not is_killed:
                    (tmp_path / "go").touch()
                    assert job.wait(PATIENCE_S) == 0
            finally:
                job.kill()
        assert ("its agent was killed" if is_killed else "  succeeded: ") in ask("status")
        assert ask("logs") == "[rank 0 vm group 1] here\n".replace("vm", socket.gethostname())
        assert "enough nodes were there" in ask("explain")
        (tmp_path / "go").unlink(missing_ok=True)
