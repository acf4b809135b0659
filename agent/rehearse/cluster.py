"""Agents of one job as processes on this machine, each playing a node, and the faults to try on them.

A "node" is an agent with all of its descendants. To kill a node is to kill all of those at the same instant: nothing
says goodbye, but the kernel closes their connections. To silence it is to stop all of them: their connections stay
open, as those of a machine that lost its power or its network, and only the lease tells.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import psutil

_STAT_FLAGS = 6
"""Where /proc/PID/stat has them, after the name."""
_PF_EXITING = 0x4


class Timeout(Exception):  # noqa: N818 - says what happened
    """A condition did not come true in time."""


def wait_for(condition: Callable[[], Any], within_s: float, what: str) -> Any:  # noqa: ANN401 - what it returned
    """Wait until the condition returns something true, and return that. Raises `Timeout`."""
    give_up_at = time.monotonic() + within_s
    while not (found := condition()):
        if time.monotonic() > give_up_at:
            raise Timeout(f"not within {within_s:g} s: {what}")
        time.sleep(0.01)
    return found


@dataclass(frozen=True)
class TraceLine:
    """One committed step, as `examples/train_digits.py --trace` writes it."""

    t: float
    """Wall clock, seconds since 1970."""
    group: int
    step: int
    world: int
    loss: float


def read_trace(path: Path) -> list[TraceLine]:
    """All whole lines of a trace; none if there is no such file yet."""
    with contextlib.suppress(FileNotFoundError):
        lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
        return [TraceLine(**json.loads(line)) for line in lines if line.endswith("\n")]
    return []


class LocalNode:
    """One agent process with its descendants."""

    def __init__(self, name: str, process: subprocess.Popen[bytes], output: Path) -> None:
        self.name = name
        self.process = process
        self.output = output
        """What the agent printed, and rank 0 through it."""

    def descendants(self) -> list[psutil.Process]:
        """All processes below the agent."""
        with contextlib.suppress(psutil.NoSuchProcess):
            return psutil.Process(self.process.pid).children(recursive=True)
        return []

    def guardians(self) -> list[psutil.Process]:
        """The processes between agent and workers."""
        with contextlib.suppress(psutil.NoSuchProcess):
            return [child for child in psutil.Process(self.process.pid).children() if _is_guardian(child)]
        return []

    def workers(self) -> list[psutil.Process]:
        """The rank processes, in no particular order; not those that wait to become one."""
        found: list[psutil.Process] = []
        for guardian in self.guardians():
            with contextlib.suppress(psutil.NoSuchProcess):
                found += [child for child in guardian.children() if _is_rank(child)]
        return found

    def kill_worker(self) -> None:
        """Kill the first rank process that is there."""
        workers = wait_for(self.workers, 10.0, f"a worker on {self.name}")
        with contextlib.suppress(psutil.NoSuchProcess):
            workers[0].kill()

    def kill(self) -> None:
        """Lose the node, if it is there: the agent and all of its descendants, as one."""
        if self.process.poll() is not None:
            return  # its process id may be another's by now
        doomed = self._family()
        self.silence()  # first: none lives to see another die
        for pid in doomed:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.wait()

    def silence(self) -> None:
        """Stop the agent and all of its descendants, as one; `kill` ends them."""
        for pid in self._family():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGSTOP)

    def _family(self) -> list[int]:
        return [self.process.pid, *(child.pid for child in self.descendants())]

    def terminate(self) -> None:
        """Ask the agent to leave."""
        self.process.terminate()

    def wait(self, within_s: float) -> int:
        """Wait for the agent's end and return its exit code. Raises `subprocess.TimeoutExpired`."""
        return self.process.wait(within_s)

    def text(self) -> str:
        """What it has printed."""
        return self.output.read_text(encoding="utf-8", errors="replace")


class LocalCluster:
    """Nodes of one job on this machine. Leaving the context kills what is left of them.

    Args:
        directory: for outputs, logs and checkpoints; the nodes' working directory.
        server: etcd's endpoint.
        job_id: the job's id.
        options: further options of every agent.
        environ: the environment of every agent.
    """

    def __init__(
        self,
        directory: Path,
        server: str,
        job_id: str,
        options: Sequence[str] = (),
        environ: Mapping[str, str] | None = None,
    ) -> None:
        self.directory = directory
        self.server = server
        self.job_id = job_id
        self.options = tuple(options)
        self.environ = dict(os.environ if environ is None else environ)
        # The nodes share this machine's cores; with as many threads each as there are cores they stand in line.
        self.environ.setdefault("OMP_NUM_THREADS", "1")
        self.nodes: dict[str, LocalNode] = {}
        # A signal may interrupt whoever starts a node, at any moment: the start itself goes on, on a thread of its own,
        # and what was started is killed at the very end, if no context came to it.
        self._starter = ThreadPoolExecutor(1)
        weakref.finalize(self, _kill, self.nodes)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_exc: object) -> None:
        self._starter.shutdown()
        _kill(self.nodes)

    def start(self, name: str, np: str, command: Sequence[str], options: Sequence[str] = ()) -> LocalNode:
        """Start a node, with options of its own. A name can be used again once its node is gone."""
        argv = [sys.executable, "-m", "agent", *self._where(), f"--np={np}", f"--node_id={name}"]
        return self._starter.submit(self._start, name, [*argv, *self.options, *options, *command]).result()

    def _start(self, name: str, argv: Sequence[str]) -> LocalNode:
        output = self.directory / f"{name}.out"
        with output.open("ab") as sink:
            process = subprocess.Popen(
                argv,
                cwd=self.directory,
                env=self.environ,
                stdin=subprocess.DEVNULL,
                stdout=sink,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        node = LocalNode(name, process, output)
        self.nodes[name] = node
        return node

    def scale(self, np: str) -> str:
        """Change the desired number of nodes, as a user does; return what the command printed."""
        return self.ask("scale", f"--np={np}")

    def status(self) -> dict[str, Any]:
        """What `elastic-agent status --json` says."""
        found: dict[str, Any] = json.loads(self.ask("status", "--json"))
        return found

    def living(self) -> Iterator[LocalNode]:
        """Nodes whose agent runs."""
        return (node for node in self.nodes.values() if node.process.poll() is None)

    def _where(self) -> tuple[str, str]:
        return f"--elastic_server={self.server}", f"--job_id={self.job_id}"

    def ask(self, command: str, *arguments: str) -> str:
        """Give one of elastic-agent's commands about the job; return what it printed."""
        argv = [sys.executable, "-m", "agent", command, *self._where(), *arguments]
        done = subprocess.run(argv, cwd=self.directory, env=self.environ, capture_output=True, text=True, check=True)
        return done.stdout


def _kill(nodes: Mapping[str, LocalNode]) -> None:
    for node in nodes.values():
        node.kill()


def _is_guardian(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess, psutil.ZombieProcess):
        return any(part.endswith("guardian.py") for part in process.cmdline())
    return False


def _is_rank(process: psutil.Process) -> bool:
    """It does not have the order open that a standby waits for; nor does it end, and close one thing after another."""
    waits = any(name.startswith("/memfd:elastic-agent:order") for name in _open_files(process.pid))
    return not waits and not _is_ending(process.pid)


def _open_files(pid: int) -> Iterator[str]:
    """What a process has open."""
    with contextlib.suppress(OSError):
        for path in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(FileNotFoundError):  # it has closed this one since; the others count
                yield os.readlink(path)  # noqa: PTH115 - no file


def _is_ending(pid: int) -> bool:
    with contextlib.suppress(OSError):
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8")
        return bool(int(stat.rpartition(")")[2].split()[_STAT_FLAGS]) & _PF_EXITING)
    return True
