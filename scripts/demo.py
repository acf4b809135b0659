"""The demo: a real job on this machine, which is broken and resized while it runs. Run by `scripts/demo`.

It starts etcd and an agent for each node, and trains on handwritten digits. The job's own trace gives the seconds from
a fault to the first finished step of the next group, and the number of replayed steps.
"""

from __future__ import annotations

import re
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from agent.local_etcd.embedded import EmbeddedEtcd
from agent.observe.log import configure
from agent.rehearse.cleanup import exit_on_signals
from agent.rehearse.cluster import LocalCluster, Timeout, TraceLine, read_trace, wait_for

EXAMPLE = Path(__file__).resolve().parent.parent / "examples" / "train_digits.py"
EPOCHS = 60
STEP_TIME_S = 0.04
SETUP_S = 3.0
"""How long the script takes before its first step: a real one reads its model and indexes its data."""
PATIENCE_S = 60.0
READY = re.compile(r"(\d+) of \1 (warm|set up), [^;]*")

console = Console(highlight=False)


@dataclass(frozen=True)
class Incident:
    """A disturbance of the job, and its cost."""

    cause: str
    seconds: float
    steps_lost: int
    """Steps that were replayed."""
    group: int
    """Number of the group that trained on."""
    world: int
    """Ranks of that group."""


class Demo:
    """One job, observed through its trace."""

    def __init__(self, cluster: LocalCluster) -> None:
        self.cluster = cluster
        self.trace = cluster.directory / "trace.jsonl"
        self.command = [
            str(EXAMPLE),
            f"--epochs={EPOCHS}",
            f"--step_time_s={STEP_TIME_S}",
            f"--setup_s={SETUP_S}",
            f"--trace={self.trace}",
        ]
        self.incidents: list[Incident] = []

    def say(self, sentence: str) -> None:
        """Print a line."""
        console.print(f"[bold cyan]{time.strftime('%H:%M:%S')}[/bold cyan] {sentence}", soft_wrap=True)

    def start(self, name: str, np: str) -> None:
        """Start a node."""
        self.say(
            f"$ elastic-agent --elastic_server={self.cluster.server} --np={np} --job_id=demo --standby=hot "
            f"train_digits.py   # {name}"
        )
        self.cluster.start(name, np, self.command, ["--standby=hot"])

    def train(self, steps: int) -> TraceLine:
        """Wait until the job has done this many more steps; return the last one."""
        start = self._last()
        goal = (start.step if start else 0) + steps
        wait_for(lambda: (line := self._last()) is not None and line.step >= goal, PATIENCE_S, f"step {goal}")
        line = self._last()
        assert line is not None  # noqa: S101 - just waited for
        self.say(f"  … training: group {line.group}, {line.world} ranks, step {line.step}, loss {line.loss:.3f}")
        return line

    def warm_up(self) -> None:
        """Wait until the standby processes of all nodes are ready, as in a job that has trained for a while."""
        self.say("  … beside each rank a standby process imports what the script did, and sets up the script")
        wait_for(
            lambda: all(READY.fullmatch(node["standby"]) for node in self.cluster.status()["nodes"]),
            PATIENCE_S,
            "ready standby processes",
        )

    def disturb(self, cause: str, do: Callable[[], object], world: int) -> None:
        """Disturb the job, and wait until a new group of `world` ranks has finished a step."""
        self.train(40)
        self.warm_up()
        before = self.train(1)
        self.say(f"[bold]{cause}[/bold]")
        at = time.time()
        do()
        first: TraceLine = wait_for(
            lambda: self._first_after(before.group, world), PATIENCE_S, f"a step after this: {cause}"
        )
        lost = {line.step for line in read_trace(self.trace) if line.group < first.group and line.step >= first.step}
        incident = Incident(cause, first.t - at, len(lost), first.group, first.world)
        self.incidents.append(incident)
        self.say(f"  … trains again after {incident.seconds:.1f} s: {first.world} ranks, from step {first.step}")

    def finish(self) -> str:
        """Wait until all nodes have ended; return the accuracy."""
        self.say("the rest of the training, undisturbed")
        codes = {node.name: node.wait(2 * PATIENCE_S) for node in list(self.cluster.living())}
        if any(codes.values()):
            raise SystemExit(f"demo: an agent failed: exit codes {codes}; see {self.cluster.directory}")
        texts = "".join(node.text() for node in self.cluster.nodes.values())
        found = re.findall(r"accuracy: (\d\.\d+)", texts)
        if not found:
            raise SystemExit(f"demo: no accuracy was printed; see {self.cluster.directory}")
        return found[-1]

    def _last(self) -> TraceLine | None:
        lines = read_trace(self.trace)
        return lines[-1] if lines else None

    def _first_after(self, group: int, world: int) -> TraceLine | None:
        lines = read_trace(self.trace)
        return next((line for line in lines if line.group > group and line.world == world), None)


def main() -> None:
    """Run the demo. The exit code is 0 if everything worked."""
    exit_on_signals()
    configure("demo")
    directory = Path(tempfile.mkdtemp(prefix="elastic-agent-demo-"))
    console.print(f"outputs, logs and checkpoints: {directory}", soft_wrap=True)
    try:
        run(directory)
    except Timeout as late:
        sys.exit(f"demo: {late}; what the nodes have printed is in {directory}")


def run(directory: Path) -> None:
    """Run the job in this directory, and print what happened. Raises `Timeout`."""
    with EmbeddedEtcd() as etcd, LocalCluster(directory, etcd.endpoint, "demo") as cluster:
        demo = Demo(cluster)
        demo.start("node-a", "2")
        demo.start("node-b", "2")
        demo.disturb("a worker is killed (SIGKILL)", cluster.nodes["node-b"].kill_worker, 2)

        def replace_node() -> None:
            cluster.nodes["node-b"].kill()
            status = wait_for(
                lambda: (s := cluster.status())["state"] == "waiting" and s, PATIENCE_S, "a job that waits for a node"
            )
            demo.say(f"  … {status['reason']}")
            demo.start("node-c", "2")

        demo.disturb("a node is lost (all its processes), another one comes", replace_node, 2)
        demo.start("node-d", "2")
        wait_for(lambda: len(cluster.status()["nodes"]) == 3, PATIENCE_S, "node-d, which was started")
        demo.disturb("$ elastic-agent scale --np=3", lambda: cluster.scale("3"), 3)
        demo.disturb("$ elastic-agent scale --np=2", lambda: cluster.scale("2"), 2)
        accuracy = demo.finish()
    table = Table("cause", "seconds", "steps lost", "group", "ranks", title="What happened")
    for incident in demo.incidents:
        table.add_row(
            incident.cause,
            f"{incident.seconds:.2f}",
            str(incident.steps_lost),
            str(incident.group),
            str(incident.world),
        )
    console.print(table)
    console.print(f"accuracy: {accuracy}")
    if float(accuracy) < 0.9:
        sys.exit("demo: the accuracy is too low: training did not go on as it should")


if __name__ == "__main__":
    main()
