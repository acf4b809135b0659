"""Agents of one job as processes on this machine, each standing for a node, and faults to inject into them.

A "node" is an agent with all of its descendants. Killing a node kills all of them at the same instant: no process can
announce its end, but the kernel closes their connections. Silencing a node stops all of them with SIGSTOP: their
connections stay open, as after a loss of power or network, and only the end of the lease shows the loss.
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

from agent.children import at_parents_end
from agent.workers.process import OOM_SCORE_MAX

_STAT_FLAGS = 6
"""Index of the field in /proc/PID/stat, counted after the process name."""
_PF_EXITING = 0x4


class Timeout(Exception):  # noqa: N818 - says what happened
    """A condition was not met in time."""


def wait_for(condition: Callable[[], Any], within_s: float, what: str) -> Any:  # noqa: ANN401 - what it returned
    """Wait until the condition returns a true value, and return it. Raises `Timeout`."""
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
    """Read all complete lines of a trace; none if the file does not exist yet."""
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
        """File with the output of the agent and, passed on by it, of rank 0."""

    def descendants(self) -> list[psutil.Process]:
        """Return all descendants of the agent."""
        with contextlib.suppress(psutil.NoSuchProcess):
            return psutil.Process(self.process.pid).children(recursive=True)
        return []

    def guardians(self) -> list[psutil.Process]:
        """Return the guardian processes of the workers."""
        with contextlib.suppress(psutil.NoSuchProcess):
            return [child for child in psutil.Process(self.process.pid).children() if _is_guardian(child)]
        return []

    def workers(self) -> list[psutil.Process]:
        """Return the rank processes, without standbys, in no particular order."""
        found: list[psutil.Process] = []
        for guardian in self.guardians():
            with contextlib.suppress(psutil.NoSuchProcess):
                found += [child for child in guardian.children() if _is_rank(child)]
        return found

    def kill_worker(self) -> None:
        """Kill one rank process; wait up to 10 s for one to start."""
        workers = wait_for(self.workers, 10.0, f"a worker on {self.name}")
        with contextlib.suppress(psutil.NoSuchProcess):
            workers[0].kill()

    def kill(self) -> None:
        """Kill the agent and all of its descendants at once, if the agent is running."""
        if self.process.poll() is not None:
            return  # another process may have its process id by now
        pids = self._process_ids()
        self.silence()  # first, so that none of them sees another one die
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.wait()

    def silence(self) -> None:
        """Stop the agent and all of its descendants with SIGSTOP; `kill` ends them."""
        for pid in self._process_ids():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGSTOP)

    def _process_ids(self) -> list[int]:
        return [self.process.pid, *(child.pid for child in self.descendants())]

    def terminate(self) -> None:
        """Send SIGTERM to the agent, so that it leaves the job."""
        self.process.terminate()

    def wait(self, within_s: float) -> int:
        """Wait until the agent has ended and return its exit code. Raises `subprocess.TimeoutExpired`."""
        return self.process.wait(within_s)

    def text(self) -> str:
        """Return the output so far."""
        return self.output.read_text(encoding="utf-8", errors="replace")


class LocalCluster:
    """Nodes of one job on this machine. Leaving the context kills those that still run.

    Args:
        directory: working directory of the nodes, for outputs, logs and checkpoints.
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
        # The nodes share this machine's cores: a thread for each core in each node would be too many.
        self.environ.setdefault("OMP_NUM_THREADS", "1")
        self.nodes: dict[str, LocalNode] = {}
        # A signal may interrupt the main thread while it starts a node. The start is completed on a thread of its own,
        # and if no context is left afterwards, the finalizer kills the node.
        self._start_thread = ThreadPoolExecutor(1)
        weakref.finalize(self, _kill, self.nodes)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_exc: object) -> None:
        self._start_thread.shutdown()
        _kill(self.nodes)

    def start(self, name: str, np: str, command: Sequence[str], options: Sequence[str] = ()) -> LocalNode:
        """Start a node with additional options. A name can be used again once its node has ended."""
        argv = [sys.executable, "-m", "agent", *self._job_options(), f"--np={np}", f"--node_id={name}"]
        return self._start_thread.submit(self._start, name, [*argv, *self.options, *options, *command]).result()

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
                preexec_fn=at_parents_end(signal.SIGKILL),  # noqa: PLW1509 - if this process is killed, nobody ends it
            )
        node = LocalNode(name, process, output)
        self.nodes[name] = node
        return node

    def scale(self, np: str) -> str:
        """Change the desired number of nodes with `elastic-agent scale`; return its output."""
        return self.ask("scale", f"--np={np}")

    def status(self) -> dict[str, Any]:
        """Return the output of `elastic-agent status --json`."""
        found: dict[str, Any] = json.loads(self.ask("status", "--json"))
        return found

    def living(self) -> Iterator[LocalNode]:
        """Return the nodes whose agent is running."""
        return (node for node in self.nodes.values() if node.process.poll() is None)

    def _job_options(self) -> tuple[str, str]:
        return f"--elastic_server={self.server}", f"--job_id={self.job_id}"

    def ask(self, command: str, *arguments: str) -> str:
        """Run a command of elastic-agent on the job; return its output."""
        argv = [sys.executable, "-m", "agent", command, *self._job_options(), *arguments]
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
    """Return whether it is a rank, and neither a standby nor ending.

    A standby has the memory file open through which it gets its start order; one that sets up the script has not, but
    the highest OOM score. An ending process closes its files one after another, so a missing one says nothing.
    """
    waits = any(name.startswith("/memfd:elastic-agent:order") for name in _open_files(process.pid))
    return not waits and not _sets_up(process.pid) and not _is_ending(process.pid)


def _sets_up(pid: int) -> bool:
    with contextlib.suppress(OSError):
        return int(Path(f"/proc/{pid}/oom_score_adj").read_text(encoding="utf-8")) == OOM_SCORE_MAX
    return False


def _open_files(pid: int) -> Iterator[str]:
    """Yield the targets of the open descriptors of a process."""
    with contextlib.suppress(OSError):
        for path in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(FileNotFoundError):  # closed in the meantime
                yield os.readlink(path)  # noqa: PTH115 - the target is no path


def _is_ending(pid: int) -> bool:
    with contextlib.suppress(OSError):
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8")
        return bool(int(stat.rpartition(")")[2].split()[_STAT_FLAGS]) & _PF_EXITING)
    return True
