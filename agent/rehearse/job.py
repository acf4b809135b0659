"""One job of a rehearsal: nodes on this machine whose ranks are recorded, held at steps, and killed."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self, TypeVar

from agent.rehearse.cluster import LocalCluster
from agent.rehearse.records import RankRecords, common_steps, errors_in, groups_in, read_group
from agent.rehearse.startup import RECORD_DIR, write_site
from agent.rehearse.step_gate import KILLED_IN_WRITE, StepGate, write_gate
from agent.rehearse.workspace import make_workspace
from trainer_runtime.manifest import MANIFEST, parse_stem

NO_LIMIT = 1 << 30
"""A step that no script reaches."""

FIRST_STEP_S = 60.0
"""How long a script may take until its first optimizer step."""
STEPS_S = 40.0
"""How long it may take for the steps until the one at which it is held."""

_POLL_S = 0.03
_RESIZE_DELAY_S = 0.1
"""Delay of each step during a resize, so that fast scripts do not end before it."""
_OPTIONS = (
    "--address=127.0.0.1",
    "--stop_grace=3",
    "--standby=off",
)  # restarts are not timed; standbys would need cores
_OTHER_JOB_VARIABLES = re.compile(
    r"(ELASTIC_AGENT|PADDLE_ELASTIC|TORCHELASTIC)_.*|POD_IP|RANK|LOCAL_RANK|WORLD_SIZE|MASTER_(ADDR|PORT)"
)
"""Environment variables that belong to another job."""
_TAIL_LINES = 12

T = TypeVar("T")


class ScriptEnded(Exception):  # noqa: N818 - says what happened
    """The job ended during a wait. The text is its last output."""

    def __init__(self, text: str, code: int) -> None:
        super().__init__(text)
        self.code = code
        """0: the training is complete."""


class WaitTimeout(Exception):  # noqa: N818 - says what happened
    """A condition was not met in time."""


class RehearsedJob:
    """A job of the rehearsed script, as a context.

    Args:
        server: etcd's endpoint.
        directory: for all files of this job; must not exist yet.
        command: script, as a path from the user's directory or absolute, and arguments.
        np: number of nodes, of one rank each.
        max_restarts: failures in a row after which the agents restart the workers.
        gate: where the script is held first.
    """

    def __init__(
        self, server: str, directory: Path, command: Sequence[str], np: int, *, max_restarts: int, gate: StepGate
    ) -> None:
        make_workspace(Path.cwd(), directory / "work")
        self.records = directory / "records"
        self.records.mkdir()
        write_gate(self.records, gate)
        write_site(directory / "site")
        environ = _environment(os.environ, self.records, directory / "site")
        options = (*_OPTIONS, f"--max_restarts={max_restarts}")
        self.cluster = LocalCluster(directory / "work", server, f"rehearsal-{directory.name}", options, environ)
        self.np = np
        self._command = command
        self._lost: set[str] = set()
        self._names = iter(f"node-{chr(ord('a') + number)}" for number in range(26))

    def __enter__(self) -> Self:
        for _ in range(self.np):
            self.add_node()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.cluster.__exit__(kind, error, trace)

    def add_node(self) -> None:
        """Start a further node."""
        self.cluster.start(next(self._names), str(self.np), self._command)

    def replace_node(self) -> None:
        """Kill the newest node and start a new one in its place."""
        node = list(self.cluster.living())[-1]
        node.kill()
        self._lost.add(node.name)
        self.add_node()

    def kill_worker(self) -> None:
        """Kill the worker of the newest node."""
        list(self.cluster.living())[-1].kill_worker()

    def hold(self, group: int, steps: int, others: int = NO_LIMIT) -> None:
        """Hold a group at the step `steps`, counted in this group, and other groups at the step `others`."""
        write_gate(self.records, StepGate(group, steps, others))

    def scale(self, np: int, group: int, others: int) -> None:
        """Change the number of nodes while a group continues slowly; the next group is held at the step `others`."""
        self.cluster.scale(str(np))
        write_gate(self.records, StepGate(group, 0, others, _RESIZE_DELAY_S))

    def ranks(self, group: int) -> dict[int, RankRecords]:
        """Return the records of a group."""
        return read_group(self.records, group)

    def wait_for_steps(self, group: int, steps: int, within_s: float) -> dict[int, RankRecords]:
        """Wait until all ranks of a group have recorded this many steps. Raises as `wait`."""

        def found() -> dict[int, RankRecords] | None:
            ranks = self.ranks(group)
            return ranks if common_steps(ranks) >= steps else None

        return self.wait(found, within_s, f"step {steps} of group {group}")

    def wait_for_group(self, after: int, world: int, steps: int, within_s: float) -> int:
        """Wait until a later group of this world size has recorded `steps`; return its number. Raises as `wait`."""

        def found() -> int | None:
            for group in groups_in(self.records):
                ranks = self.ranks(group)
                if group > after and len(ranks) == world and common_steps(ranks) >= steps:
                    return group
            return None

        return self.wait(found, within_s, f"optimizer step by all of {world} ranks after group {after}")

    def wait(self, condition: Callable[[], T | None], within_s: float, what: str, poll_s: float = _POLL_S) -> T:
        """Wait until a condition is met.

        Raises:
            ScriptEnded: the job ended first.
            WaitTimeout: the condition was not met within `within_s`.
        """
        until = time.monotonic() + within_s
        while True:
            codes = [node.process.poll() for node in self.cluster.nodes.values() if node.name not in self._lost]
            if (found := condition()) is not None:
                return found
            ended = [code for code in codes if code is not None]
            if len(ended) == len(codes):
                raise ScriptEnded(self.tail(), max(ended))
            if time.monotonic() > until:
                raise WaitTimeout(f"no {what} within {within_s:.0f} s; the script's last lines:\n{self.tail()}")
            time.sleep(poll_s)

    def newest_checkpoint(self) -> int | None:
        """Return the step of the newest checkpoint of a State in the working directory."""
        return newest_checkpoint_in(self.cluster.directory)

    def was_killed_in_write(self) -> bool:
        """Return whether a process was killed as it overwrote the file that the gate names."""
        return (self.records / KILLED_IN_WRITE).exists()

    def tail(self) -> str:
        """Return the last lines of a rank of the last group, or of an agent if no rank wrote any."""
        logs = sorted(self.cluster.directory.glob("log/*/*/group-*/rank-*.log"), key=lambda log: log.parent.name)
        last = [log.read_text(errors="replace") for log in logs if log.parent == logs[-1].parent]
        texts = [text for text in last if text.strip()] or [node.text() for node in self.cluster.nodes.values()]
        return "\n".join(max(texts, key=_has_traceback, default="").splitlines()[-_TAIL_LINES:])

    def recorder_errors(self) -> str:
        """Return the logged errors of the recorder; empty if there are none."""
        return errors_in(self.records)


def newest_checkpoint_in(directory: Path) -> int | None:
    """Return the step of the newest checkpoint of a State below a directory; None if there is none."""
    walk = os.walk(directory)  # ignores directories that are removed meanwhile
    found = (parse_stem(Path(path).name) for path, _, files in walk if MANIFEST in files)
    return max((step for _, _, step, _ in filter(None, found)), default=None)


def _has_traceback(text: str) -> bool:
    return "Traceback" in text


def _environment(base: Mapping[str, str], records: Path, site: Path) -> dict[str, str]:
    """Return the agents' environment: the user's without variables of another job, and those of the recorder."""
    environ = {name: value for name, value in base.items() if not _OTHER_JOB_VARIABLES.fullmatch(name)}
    paths = [str(site), *filter(None, [environ.get("PYTHONPATH", "")])]
    return environ | {"PYTHONPATH": os.pathsep.join(paths), RECORD_DIR: str(records)}
