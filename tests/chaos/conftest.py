"""Jobs in containers: one compose project each, removed at the end whatever happened.

pytest-docker runs the commands and cleans up. Its own fixtures serve one project a session, and clean up only if
every start succeeded; so they give the commands here, and `ComposeJob` gives each job a project of its own.
"""

from __future__ import annotations

import itertools
import json
import os
import subprocess
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from pytest_docker.plugin import Services, get_docker_services

from agent.rehearse.cluster import TraceLine, read_trace, wait_for

ROOT = Path(__file__).resolve().parents[2]
PATIENCE_S = 120.0
_CLEAR_LINE = "\x1b[2K"  # compose prints it before each line, whatever it was told of colours


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests that need an engine come last: they take the longest, and tell least about where a fault lies."""
    items.sort(key=lambda item: item.get_closest_marker("docker") is not None)


def docker(*arguments: str) -> str:
    """Run a docker command and return what it printed."""
    done = subprocess.run(["docker", *arguments], capture_output=True, text=True, check=False, timeout=PATIENCE_S)
    assert done.returncode == 0, f"docker {' '.join(arguments)}: {done.stderr}"
    return done.stdout


class ComposeJob:
    """The digits example on nodes that are containers."""

    def __init__(self, services: Services, directory: Path) -> None:
        self._services = services
        self._directory = directory

    def compose(self, command: str) -> str:
        """Run a compose command in this job's project; return what it printed."""
        output: bytes = self._services._docker_compose.execute(command)
        return output.decode()

    def up(self, nodes: int) -> None:
        """Bring up etcd and so many nodes; those that are there stay as they are."""
        self.compose(f"up -d --no-build --no-recreate --scale node={nodes}")

    def nodes(self) -> list[str]:
        """Ids of the nodes' containers, also of those that have ended."""
        return self.compose("ps -a -q node").split()

    def running(self) -> list[str]:
        """Ids of the nodes' containers that run."""
        return self.compose("ps -q --status running node").split()

    def status(self) -> dict[str, Any]:
        """What `elastic-agent status --json` says in a node that runs."""
        found: dict[str, Any] = json.loads(docker("exec", self.running()[0], "elastic-agent", "status", "--json"))
        return found

    def node_of_rank(self, rank: int) -> str:
        """Id of the container that has this rank: a node's id is its host name, the id's first letters."""
        (node_id,) = (node["node_id"] for node in self.status()["nodes"] if rank in node["ranks"])
        (container,) = (container for container in self.running() if node_id.startswith(container[:12]))
        return container

    def trace(self) -> list[TraceLine]:
        """The steps committed so far."""
        return read_trace(self.fetch("trace.jsonl"))

    def fetch(self, name: str) -> Path:
        """Copy a file out of the volume of checkpoints; without one there is nothing at the path."""
        path = self._directory / name
        subprocess.run(
            ["docker", "cp", f"{self.nodes()[0]}:/checkpoints/{name}", path], capture_output=True, check=False
        )
        return path

    def wait_for_step(self, step: int) -> None:
        """Wait until that step, or a later one, has been committed."""

        def is_there() -> bool:
            return any(line.step >= step for line in self.trace())

        wait_for(is_there, PATIENCE_S, f"step {step}; {self.log_text()}")

    def wait_for_state(self, state: str) -> str:
        """Wait until `status` shows that state; return its reason."""

        def reason() -> str | None:
            status = self.status()
            return str(status["reason"]) if status["state"] == state else None

        return str(wait_for(reason, PATIENCE_S, f"state {state}; {self.log_text()}"))

    def joined_after(self, node: str) -> float:
        """Seconds from the container's last start until its agent had its place in the job."""
        started_at = datetime.fromisoformat(docker("inspect", "-f", "{{.State.StartedAt}}", node).strip()[:26])

        def joined() -> datetime | None:
            text = self.compose("logs --no-color --no-log-prefix --timestamps node").replace(_CLEAR_LINE, "")
            times = [datetime.fromisoformat(line[:26]) for line in text.splitlines() if "joined job" in line]
            return next((time for time in times if time > started_at), None)

        joined_at: datetime = wait_for(joined, PATIENCE_S, f"the node joins; {self.log_text()}")
        return (joined_at - started_at).total_seconds()

    def finish(self) -> list[int]:
        """Wait until no node runs; return the exit codes of all containers of nodes."""
        wait_for(lambda: not self.running(), 2 * PATIENCE_S, f"the end of all nodes; {self.log_text()}")
        return [int(docker("inspect", "-f", "{{.State.ExitCode}}", node)) for node in self.nodes()]

    def log_text(self) -> str:
        """What the nodes printed, for a failed test's reader."""
        return self.compose("logs --no-color --timestamps node")[-6000:]


MakeJob = Callable[..., ComposeJob]
MakeJobs = Callable[[], AbstractContextManager[MakeJob]]


@pytest.fixture(scope="session")
def docker_compose_file() -> list[str]:
    return [str(ROOT / "docker-compose.yml"), str(ROOT / "tests" / "chaos" / "compose.yml")]


@pytest.fixture(scope="session")
def docker_compose_project_name() -> str:
    return f"elastic-agent-test-{os.getpid()}"


@pytest.fixture(scope="session")
def docker_compose_command() -> str:
    return "docker compose --progress=quiet"


@pytest.fixture(scope="session")
def docker_cleanup() -> list[str]:
    return ["down -v -t 1 --remove-orphans"]


@pytest.fixture(scope="session")
def image() -> None:
    """Build the image of the working tree; skip where there is no engine, except in CI, where there has to be one."""
    try:
        missing = subprocess.run(["docker", "compose", "version"], capture_output=True, check=False).returncode
        missing = missing or subprocess.run(["docker", "info"], capture_output=True, check=False).returncode
    except FileNotFoundError:
        missing = 1
    if missing:
        reason = "no Docker engine with compose answers (scripts/docker-engine starts one)"
        (pytest.fail if os.environ.get("CI") == "true" else pytest.skip)(reason)
    built = subprocess.run([ROOT / "scripts" / "image"], capture_output=True, text=True, check=False)
    assert built.returncode == 0, built.stderr


@pytest.fixture(scope="session")
def make_jobs(
    image: None,  # noqa: ARG001 - has to be there first
    docker_compose_command: str,
    docker_compose_file: list[str],
    docker_compose_project_name: str,
    docker_cleanup: list[str],
    tmp_path_factory: pytest.TempPathFactory,
) -> MakeJobs:
    """Make jobs with a step time in seconds, and a number of nodes, within a context: all are taken down at its end.

    A node that a busy machine stops for some seconds keeps its lease.
    """
    serial = itertools.count()

    @contextmanager
    def making() -> Iterator[MakeJob]:
        with ExitStack() as stack:

            def make(step_time_s: float, np: int = 2, *, detect_within_s: int = 10) -> ComposeJob:
                services = stack.enter_context(
                    get_docker_services(
                        f"NP={np} STEP_TIME_S={step_time_s} DETECT_WITHIN_S={detect_within_s} {docker_compose_command}",
                        docker_compose_file,
                        f"{docker_compose_project_name}-{next(serial)}",
                        [],  # the test starts what it needs
                        docker_cleanup,
                    )
                )
                return ComposeJob(services, tmp_path_factory.mktemp("job"))

            yield make

    return making


@pytest.fixture
def make_job(make_jobs: MakeJobs) -> Iterator[MakeJob]:
    with make_jobs() as make:
        yield make


@pytest.fixture(scope="session")
def reference(make_jobs: MakeJobs) -> Path:
    """Final weights of two nodes that nothing happened to."""
    with make_jobs() as make:
        undisturbed = make(0.0)
        undisturbed.up(nodes=2)
        assert undisturbed.finish() == [0, 0], undisturbed.log_text()
        return undisturbed.fetch("weights.pt")
