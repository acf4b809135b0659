"""What the tests on real processes share: one etcd, clusters of agents on it, and a reference run."""

from __future__ import annotations

import itertools
import os
import shutil
import signal
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import pytest
from machines import Network
from ports import free_port
from waiting import freeze

from agent.local_etcd.embedded import EmbeddedEtcd
from agent.observe.incidents import incident_json
from agent.observe.status import job_status
from agent.operate.jobs import open_job, read_history, read_view
from agent.operate.target import Target
from agent.rehearse.cluster import LocalCluster, LocalNode, read_trace, wait_for
from agent.store.access import Access, Credentials, User, parse_endpoints
from agent.store.etcd import EtcdStore

if TYPE_CHECKING:
    from integration.ps_cluster import Job as ServerJob

ROOT = Path(__file__).resolve().parents[2]
DIGITS = ROOT / "examples" / "train_digits.py"
PACED_DIGITS = Path(__file__).with_name("paced_digits.py")
LIGHT = ROOT / "tests" / "light"
"""Packages in place of those of which the examples need little."""
PATIENCE_S = 120.0

PATIENT = ("--detect_within=20", "--settle=1", "--handoff_wait=10", "--handoff_timeout=60")
"""Options of agents that are not about how soon something is noticed: what a busy machine stops for some seconds is
neither lost nor late."""

# Two cores that import torch for the next restart, beside every job, are too few for the rest. What shows restarts with
# standbys says so (`--standby=learned` wins over this).
os.environ.setdefault("ELASTIC_AGENT_STANDBY", "off")

_serial = itertools.count()


@pytest.fixture(scope="session")
def etcd() -> Iterator[EmbeddedEtcd]:
    """A real etcd for all tests; each job has an id of its own."""
    with EmbeddedEtcd(port=0) as running:
        yield running


class Job(LocalCluster):
    """A cluster on the digits example, followed through its trace."""

    epochs = 20
    step_time_s = 0.04
    """Until the test has nothing more to do, and waits for the end; then none."""
    group = 0
    """The group that a test means to stay in."""

    def __init__(
        self,
        directory: Path,
        server: str,
        job_id: str,
        options: Sequence[str] = (),
        environ: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(directory, server, job_id, options, environ)
        self.environ["PYTHONPATH"] = os.pathsep.join([str(LIGHT), self.environ.get("PYTHONPATH", "")]).strip(os.pathsep)

    @property
    def trace(self) -> Path:
        return self.directory / "trace.jsonl"

    @property
    def hurry(self) -> Path:
        """Once it is there steps take no longer than they must."""
        return self.directory / "hurry"

    @property
    def weights(self) -> Path:
        return self.directory / "weights.pt"

    @property
    def digits(self) -> list[str]:
        return [
            str(PACED_DIGITS),
            str(self.hurry),
            str(DIGITS),
            f"--epochs={self.epochs}",
            f"--step_time_s={self.step_time_s}",
            f"--trace={self.trace}",
            f"--out={self.weights}",
        ]

    @property
    def steps(self) -> int:
        """Steps of the whole training: 30 an epoch."""
        return 30 * self.epochs

    @property
    def command(self) -> list[str]:
        """What its nodes run."""
        return self.digits

    def join(self, name: str, np: str, *options: str) -> LocalNode:
        """Start a node."""
        return self.start(name, np, self.command, options)

    def wait_for_step(self, step: int, *, after_group: int = 0, world: int | None = None) -> int:
        """Wait for that step, or a later one, of a later group; return the group's number."""

        def found() -> int | None:
            lines = (
                line
                for line in read_trace(self.trace)
                if line.group > after_group and line.step >= step and world in {None, line.world}
            )
            return next((line.group for line in lines), None)

        return int(wait_for(found, PATIENCE_S, f"step {step} after group {after_group}; {self.log_text()}"))

    def wait_for_state(self, state: str) -> str:
        """Wait until `status` shows that state; return its reason."""

        def found() -> str | None:
            status = self.status()
            return str(status["reason"]) if status["state"] == state else None

        return str(wait_for(found, PATIENCE_S, f"state {state}; {self.log_text()}"))

    def status(self) -> dict[str, Any]:
        """What `elastic-agent status --json` says, asked within this process: tests that wait for it ask often.

        Raises:
            ConfigError: etcd knows no such job.
        """
        with open_job(self._target, only_live=False) as (store, keys):
            found = job_status(self.job_id, read_view(store, keys))
        return dict(msgspec.json.decode(msgspec.json.encode(found)))

    def history(self) -> list[dict[str, Any]]:
        """What `elastic-agent history --json` says, asked as `status`."""
        with open_job(self._target, only_live=False) as (store, keys):
            found = [incident_json(incident) for incident in read_history(store, keys)]
        return list(msgspec.json.decode(msgspec.json.encode(found)))

    @property
    def _target(self) -> Target:
        name = self.environ.get("ELASTIC_AGENT_ETCD_USER")
        user = User(name, self.environ["ELASTIC_AGENT_ETCD_PASSWORD"]) if name else None
        return Target(Access(parse_endpoints(self.server), Credentials(user=user)), self.job_id, PATIENCE_S)

    def finish(self) -> None:
        """Wait for all living agents; all must succeed. The test must be done with the training: it ends soon."""
        self.hurry.touch()
        codes = {node.name: node.wait(3 * PATIENCE_S) for node in list(self.living())}
        assert not any(codes.values()), f"{codes}; {self.log_text()}"

    def log_text(self) -> str:
        """What the agents printed, for a failed test's reader."""
        texts = (f"--- {node.name}\n{node.text()[-3000:]}" for node in self.nodes.values())
        return "\n".join(texts)


def open_store(server: str) -> EtcdStore:
    """A connection of the test's own, which an etcd that hangs for some seconds does not break."""
    return EtcdStore((server,), retry_for_s=PATIENCE_S)


@pytest.fixture
def job(etcd: EmbeddedEtcd, tmp_path: Path) -> Iterator[Callable[..., Job]]:
    """Make jobs: `job(*options)`. What is left of them is killed at the end."""
    with ExitStack() as stack:

        def make(*options: str) -> Job:
            directory = tmp_path / f"job{next(_serial)}"
            directory.mkdir()
            name = f"{os.getpid()}-{directory.name}"
            return stack.enter_context(Job(directory, etcd.endpoint, name, (*PATIENT, *options)))

        yield make


@pytest.fixture(scope="session")
def reference(etcd: EmbeddedEtcd, tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], Path]:
    """Final weights of an undisturbed run of two nodes, by number of epochs."""
    known: dict[int, Path] = {}

    def weights(epochs: int) -> Path:
        if epochs not in known:
            directory = tmp_path_factory.mktemp("reference")
            with Job(directory, etcd.endpoint, f"{os.getpid()}-reference-{epochs}", PATIENT) as undisturbed:
                undisturbed.epochs, undisturbed.step_time_s = epochs, 0.0
                undisturbed.join("a", "2")
                undisturbed.join("b", "2")
                undisturbed.finish()
                known[epochs] = undisturbed.weights
        return known[epochs]

    return weights


@pytest.fixture
def network() -> Iterator[Callable[..., Network]]:
    """Make networks: `network(1, 2)` is of the machines 10.0.0.1 and 10.0.0.2."""
    with ExitStack() as stack:
        yield lambda *last: stack.enter_context(Network(*last))


class Coordinator:
    """An etcd that can be broken, always on the same port, with its data in a directory."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.port = free_port()
        self.etcd = EmbeddedEtcd(directory / "data", port=self.port)
        self.etcd.__enter__()
        self.endpoint = self.etcd.endpoint

    def freeze(self) -> None:
        freeze(self.etcd.pid)

    def thaw(self) -> None:
        os.kill(self.etcd.pid, signal.SIGCONT)

    def kill(self) -> None:
        os.kill(self.etcd.pid, signal.SIGKILL)
        self.etcd.__exit__(None, None, None)

    def restart(self, *, empty: bool = False) -> None:
        if empty:
            shutil.rmtree(self.directory / "data")
        self.etcd = EmbeddedEtcd(self.directory / "data", port=self.port)
        self.etcd.__enter__()

    def close(self) -> None:
        self.etcd.__exit__(None, None, None)


@pytest.fixture
def coordinator(tmp_path: Path) -> Iterator[Coordinator]:
    running = Coordinator(tmp_path)
    yield running
    running.close()


@pytest.fixture
def make_job() -> Iterator[Callable[..., ServerJob]]:
    """Parameter servers of a job within this process; they are closed at the end."""
    from integration.ps_cluster import Job as ServerJob  # noqa: PLC0415 - imports torch, which few of these tests need

    made: list[ServerJob] = []

    def make(*args: object, **kwargs: object) -> ServerJob:
        made.append(ServerJob(*args, **kwargs))
        return made[-1]

    yield make
    for job in made:
        job.close()
