"""How long N agents take to form one group: ours on etcd, and torch's dynamic rendezvous on its own store.

Both are played by processes of a few agents each, a thread or several for an agent: many more in one process would
stand in line for its interpreter, which agents on nodes of their own do not share. All are begun at one moment.
Measured is until the last agent knows the group.
"""

from __future__ import annotations

import math
import os
import secrets
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

from benchmarks.nodes import free_port
from benchmarks.staying import Stay, Watcher

from agent.local_etcd.embedded import EmbeddedEtcd

_HERE = Path(__file__).resolve().parent
_CROWD = 250
"""Most agents of one process. Many processes on a few cores would mostly switch between each other's threads."""

HEADINGS = ("agents", "launcher", "n", "median s", "worst s", "median CPU s", "an agent, ms")
Then = Callable[[str, Sequence[int]], None]
"""Called while all are there, with the job's id and the processes that play them."""


@dataclass(frozen=True)
class Meeting:
    """One try."""

    launcher: str
    agents: int
    run: int
    seconds: float
    """Until the last agent knew the group."""
    cpu_s: float
    """Of all agents; their store's is not in it."""


def measure(
    agents: Sequence[int], torch_agents: Sequence[int], runs: int, rest_s: float, outage_s: float
) -> tuple[list[Meeting], list[Stay]]:
    """In turns; each on a store of its own. After they have met, `staying.py` watches the agents."""
    found: list[Meeting] = []
    stays: list[Stay] = []
    for run in range(runs):
        for count in sorted({*agents, *torch_agents}):
            if count in agents:
                with EmbeddedEtcd(port=0) as etcd:
                    found.append(Meeting("bare client", count, run, *meet("meet_bare.py", etcd.endpoint, count)))
                with EmbeddedEtcd(port=0) as etcd:

                    def then(job_id: str, pids: Sequence[int], etcd: EmbeddedEtcd = etcd, count: int = count) -> None:
                        stays.append(Watcher(etcd, job_id, pids, count, rest_s).watch(outage_s))

                    met = meet("meet_ours.py", etcd.endpoint, count, then)
                    found.append(Meeting("elastic-agent", count, run, *met))
            if count in torch_agents:
                endpoint = f"127.0.0.1:{free_port()}"
                found.append(Meeting("torch", count, run, *meet("meet_torch.py", endpoint, count)))
    return found, stays


def meet(program: str, endpoint: str, count: int, then: Then | None = None) -> tuple[float, float]:
    """Seconds until all know the group, and processor seconds. Raises `RuntimeError` if they do not all meet."""
    job_id = f"meet-{secrets.token_hex(4)}"
    crowds = min(count, max(os.cpu_count() or 1, math.ceil(count / _CROWD)))
    with ExitStack() as stack:
        errors = stack.enter_context(tempfile.TemporaryFile("w+"))
        children = []
        for number in range(crowds):
            mine = f"{count * number // crowds}:{count * (number + 1) // crowds}"
            argv = [sys.executable, str(_HERE / program), endpoint, job_id, mine, str(count)]
            child = subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, text=True)
            stack.enter_context(child)
            stack.callback(child.kill)
            children.append(child)
        for child in children:
            _answer(child, errors)
        at = time.time()
        for child in children:
            assert child.stdin is not None
            child.stdin.write("go\n")
            child.stdin.flush()
        answers = [[float(part) for part in _answer(child, errors).split()] for child in children]
        if then is not None:
            then(job_id, [child.pid for child in children])
        return max(when for when, _ in answers) - at, sum(cpu_s for _, cpu_s in answers)


def _answer(child: subprocess.Popen[str], errors: TextIO) -> str:
    assert child.stdout is not None
    line = child.stdout.readline()
    if not line:
        errors.seek(0)
        raise RuntimeError(f"not all agents met: {errors.read()[-1000:]}")
    return line.strip()


def rows(found: Sequence[Meeting]) -> list[tuple[str, ...]]:
    """The cells under `HEADINGS`."""
    cells = []
    for agents, launcher in sorted({(each.agents, each.launcher) for each in found}):
        tries = [each for each in found if (each.agents, each.launcher) == (agents, launcher)]
        seconds = [each.seconds for each in tries]
        cpu_s = statistics.median(each.cpu_s for each in tries)
        times = (statistics.median(seconds), max(seconds), cpu_s)
        numbers = (*(f"{value:.2f}" for value in times), f"{1e3 * cpu_s / agents:.1f}")
        cells.append((str(agents), launcher, str(len(tries)), *numbers))
    return cells
