"""One job of a launcher on this machine: started, trained for a while, and watched through its trace."""

from __future__ import annotations

import json
import secrets
import signal
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from benchmarks.launchers import Launcher, Place
from benchmarks.nodes import Marked, Node, free_port, strike

_LOOPBACK = {"GLOO_SOCKET_IFNAME": "lo", "TP_SOCKET_IFNAME": "lo"}
_THREADS = {"OMP_NUM_THREADS": "1"}
"""The nodes share this machine's cores; with as many threads each as there are cores they stand in line."""
_START_WITHIN_S = 100.0
_LEAVE_WITHIN_S = 60.0
_POLL_S = 0.005


class NotStartedError(Exception):
    """The job did not begin to train: nothing can be said of its recovery."""


@dataclass(frozen=True)
class Step:
    """A finished step, as one rank noted it."""

    t: float
    """Wall clock, seconds since 1970."""
    step: int
    pid: int
    rank: int
    world: int


class TraceReader:
    """Follows a trace."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = 0
        self.steps: list[Step] = []

    def read(self) -> list[Step]:
        """What was noted since the last call."""
        try:
            with self._path.open("rb") as file:
                file.seek(self._offset)
                content = file.read()
        except FileNotFoundError:
            return []
        whole = content[: content.rfind(b"\n") + 1]
        self._offset += len(whole)
        new = [Step(**json.loads(line)) for line in whole.splitlines()]
        self.steps += new
        return new


class Job:
    """A job of one launcher. Leaving the context ends all of its processes.

    Args:
        launcher: whose.
        directory: for its outputs and checkpoints; made here.
        etcd: endpoint.
        np: as the first nodes are started with.
        setup_s: how long its script sets up.
    """

    def __init__(self, launcher: Launcher, directory: Path, etcd: str, np: str, setup_s: float = 0.0) -> None:
        self.launcher = launcher
        self.np = np
        self.nodes: dict[str, Node] = {}
        self.place = Place(
            job_id=f"bench-{secrets.token_hex(4)}",
            etcd=etcd,
            port=free_port(),
            trace=directory / "trace.jsonl",
            checkpoint=directory / "plain.pt",
        )
        self.trace = TraceReader(self.place.trace)
        self._marked = Marked(directory, {**_LOOPBACK, **_THREADS, "BENCH_SETUP_S": f"{setup_s}", **launcher.environ})

    def __enter__(self) -> Self:
        """Nothing is started yet."""
        self._marked.__enter__()
        return self

    def __exit__(self, *_exc: object) -> None:
        self._marked.end()

    def start(self, *names: str) -> None:
        """Start nodes."""
        for name in names:
            self.nodes[name] = self._marked.start(name, self.launcher.argv(self.place, name, self.np))

    def ask(self, argv: list[str]) -> None:
        """Run a command beside it."""
        self._marked.ask(argv)

    def restart(self, np: str, *names: str) -> None:
        """What a user of a launcher that cannot be resized does: end it, and start it with another size."""
        for node in self.nodes.values():
            strike([node.process.pid], signal.SIGTERM)
        for node in self.nodes.values():
            try:
                node.process.wait(_LEAVE_WITHIN_S)
            except subprocess.TimeoutExpired:
                strike(node.family(), signal.SIGKILL)
        self.np = np
        self.start(*names)

    def train(self, world: int, for_s: float) -> None:
        """Wait until a world of that size has trained for so long. Raises `NotStartedError`."""
        first = self.wait_for_step(lambda step: step.world == world, time.monotonic() + _START_WITHIN_S)
        if first is None:
            raise NotStartedError(f"no step in a world of {world} within {_START_WITHIN_S:g} s of its start")
        until = first.t + for_s
        if self.wait_for_step(lambda step: step.t >= until, time.monotonic() + _START_WITHIN_S) is None:
            raise NotStartedError("it began to train, and stopped by itself")

    def wait_for_step(self, is_wanted: Callable[[Step], bool], give_up_at: float) -> Step | None:
        """Wait for a finished step among those not read yet. None: there was none by then, or all launchers ended."""
        while time.monotonic() < give_up_at:
            has_ended = self.has_ended()  # first: what was noted before that counts
            found = next((step for step in self.trace.read() if is_wanted(step)), None)
            if found is not None or has_ended:
                return found
            time.sleep(_POLL_S)
        return None

    def has_ended(self) -> bool:
        """Whether no launcher of it runs any more."""
        return all(node.process.poll() is not None for node in self.nodes.values())

    def codes(self) -> str:
        """Exit codes of those that have ended."""
        codes = {name: node.process.poll() for name, node in self.nodes.items()}
        return ", ".join(f"{name}: {code}" for name, code in codes.items() if code is not None)
