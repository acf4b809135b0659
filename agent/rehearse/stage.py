"""One job of a rehearsal: nodes on this machine whose ranks are recorded, held at steps, and broken."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self, TypeVar

from agent.rehearse.cluster import LocalCluster
from agent.rehearse.records import Rank, complete_steps, errors_in, groups_in, read_group
from agent.rehearse.startup import RECORD_DIR, write_site
from agent.rehearse.step_gate import TORN, StepGate, write_gate
from agent.rehearse.workspace import mirror
from trainer_runtime.manifest import MANIFEST, parse_stem

NO_END = 1 << 30
"""A step that no script comes to."""

FIRST_STEP_S = 60.0
"""How long a script may take to its first optimizer step."""
STEPS_S = 40.0
"""How long it may take for the steps up to where it is to be held."""

_POLL_S = 0.03
_PACE_S = 0.1
"""While a planned change is under way: fast scripts must not be through before it comes."""
_OPTIONS = ("--address=127.0.0.1", "--stop_grace=3", "--standby=off")  # restarts are not timed, and cores are few
_OWN = re.compile(
    r"(ELASTIC_AGENT|PADDLE_ELASTIC|TORCHELASTIC)_.*|POD_IP|RANK|LOCAL_RANK|WORLD_SIZE|MASTER_(ADDR|PORT)"
)
"""Variables that speak of another job than this one."""
_TAIL_LINES = 12

T = TypeVar("T")


class ScriptEnded(Exception):  # noqa: N818 - says what happened
    """The job is over while something was waited for. The text is what it said last."""

    def __init__(self, text: str, code: int) -> None:
        super().__init__(text)
        self.code = code
        """0: the training is complete."""


class TooLate(Exception):  # noqa: N818 - says what happened
    """Something was waited for in vain."""


class Stage:
    """A job of a script, as a context.

    Args:
        server: etcd's endpoint.
        directory: for all that this job leaves; must not be there yet.
        command: script, as a path from the user's directory or absolute, and arguments.
        np: nodes, of one rank each.
        max_restarts: failures in a row that the agents answer with a restart.
        gate: where the script is held at first.
    """

    def __init__(
        self, server: str, directory: Path, command: Sequence[str], np: int, *, max_restarts: int, gate: StepGate
    ) -> None:
        mirror(Path.cwd(), directory / "work")
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
        """Start another node."""
        self.cluster.start(next(self._names), str(self.np), self._command)

    def lose_node(self) -> None:
        """Kill the node that came last, and start another one in its place."""
        node = list(self.cluster.living())[-1]
        node.kill()
        self._lost.add(node.name)
        self.add_node()

    def kill_worker(self) -> None:
        """Kill the worker of the node that came last."""
        list(self.cluster.living())[-1].kill_worker()

    def hold(self, group: int, steps: int, others: int = NO_END) -> None:
        """Let a group go as far as that step of its own, and other groups as far as `others`."""
        write_gate(self.records, StepGate(group, steps, others))

    def scale(self, np: int, group: int, others: int) -> None:
        """Change the number of nodes while that group goes on, slowly; the next one stops at step `others`."""
        self.cluster.scale(str(np))
        write_gate(self.records, StepGate(group, 0, others, _PACE_S))

    def ranks(self, group: int) -> dict[int, Rank]:
        """What a group has recorded."""
        return read_group(self.records, group)

    def wait_for_steps(self, group: int, steps: int, within_s: float) -> dict[int, Rank]:
        """Wait until all ranks of that group have recorded so many steps. Raises as `wait`."""

        def found() -> dict[int, Rank] | None:
            ranks = self.ranks(group)
            return ranks if complete_steps(ranks) >= steps else None

        return self.wait(found, within_s, f"step {steps} of group {group}")

    def wait_for_group(self, after: int, world: int, steps: int, within_s: float) -> int:
        """Wait for a later group of that world to record so many steps; return its number. Raises as `wait`."""

        def found() -> int | None:
            for group in groups_in(self.records):
                ranks = self.ranks(group)
                if group > after and len(ranks) == world and complete_steps(ranks) >= steps:
                    return group
            return None

        return self.wait(found, within_s, f"optimizer step by all of {world} ranks after group {after}")

    def wait(self, condition: Callable[[], T | None], within_s: float, what: str, poll_s: float = _POLL_S) -> T:
        """Wait until a condition is met.

        Raises:
            ScriptEnded: the job is over first.
            TooLate: it was not met within `within_s`.
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
                raise TooLate(f"no {what} within {within_s:.0f} s; the script's last lines:\n{self.tail()}")
            time.sleep(poll_s)

    def newest_checkpoint(self) -> int | None:
        """The step of the newest checkpoint of a State in the working directory."""
        return newest_checkpoint_in(self.cluster.directory)

    def has_torn(self) -> bool:
        """Whether a process was killed as it overwrote the file that the gate names."""
        return (self.records / TORN).exists()

    def tail(self) -> str:
        """The last lines of the ranks of the last group, or of the agents if no rank wrote any."""
        logs = sorted(self.cluster.directory.glob("log/*/*/group-*/rank-*.log"), key=lambda log: log.parent.name)
        last = [log.read_text(errors="replace") for log in logs if log.parent == logs[-1].parent]
        texts = [text for text in last if text.strip()] or [node.text() for node in self.cluster.nodes.values()]
        return "\n".join(max(texts, key=_has_traceback, default="").splitlines()[-_TAIL_LINES:])

    def recorder_errors(self) -> str:
        """What went wrong in the recorder itself; empty if nothing did."""
        return errors_in(self.records)


def newest_checkpoint_in(directory: Path) -> int | None:
    """The step of the newest checkpoint of a State in a directory, or in one within it; None if there is none."""
    walk = os.walk(directory)  # which does not mind that directories go meanwhile
    found = (parse_stem(Path(path).name) for path, _, files in walk if MANIFEST in files)
    return max((step for _, _, step, _ in filter(None, found)), default=None)


def _has_traceback(text: str) -> bool:
    return "Traceback" in text


def _environment(base: Mapping[str, str], records: Path, site: Path) -> dict[str, str]:
    """The agents' environment: the user's own, less what speaks of another job, and the recorder."""
    environ = {name: value for name, value in base.items() if not _OWN.fullmatch(name)}
    paths = [str(site), *filter(None, [environ.get("PYTHONPATH", "")])]
    return environ | {"PYTHONPATH": os.pathsep.join(paths), RECORD_DIR: str(records)}
