"""A node leaves in order once its cloud announces a preemption: real commands, a server that speaks the protocols."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from integration.conftest import PATIENCE_S, ROOT, Job
from waiting import has_ended, wait_for

from agent.core.events import StopAsked
from agent.errors import EXIT_TIMEOUT
from agent.rehearse.cluster import read_trace
from agent.runtime import stop_requests
from agent.runtime.stop_requests import StopRequests, noticing_preemption

COMMANDS = ROOT / "deploy" / "preemption"
CLOUDS = ("aws", "azure", "gcp")
TOKEN = "AQAEANoRpgM="  # noqa: S105 - of the test's server
TERM, INT, QUIT = signal.SIGTERM, signal.SIGINT, signal.SIGQUIT


class Metadata(ThreadingHTTPServer):
    """The metadata services of three clouds, which refuse requests as those do."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Answer)
        self.is_preempted = False

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def events(self) -> dict[str, Any]:
        """Azure's scheduled events: always one of another machine, and one of another kind."""
        evicted = [("Preempt", "vm_7"), ("Freeze", "vm_1")] + [("Preempt", "vm_1")] * self.is_preempted
        return {
            "DocumentIncarnation": 2,
            "Events": [
                {"EventId": "A123BC45", "EventType": kind, "ResourceType": "VirtualMachine", "Resources": [name]}
                for kind, name in evicted
            ],
        }


class Answer(BaseHTTPRequestHandler):
    """Answers one request."""

    server: Metadata

    def do_PUT(self) -> None:
        """AWS: a token for the requests that follow."""
        is_right = self.path == "/latest/api/token" and self.headers["X-aws-ec2-metadata-token-ttl-seconds"]
        self.answer(200 if is_right else 400, TOKEN)

    def do_GET(self) -> None:
        match self.path:
            case "/latest/meta-data/spot/instance-action" if self.headers["X-aws-ec2-metadata-token"] != TOKEN:
                self.answer(401)
            case "/latest/meta-data/spot/instance-action" if not self.server.is_preempted:
                self.answer(404)
            case "/latest/meta-data/spot/instance-action":
                self.answer(200, json.dumps({"action": "terminate", "time": "2026-11-29T08:22:00Z"}))
            case "/computeMetadata/v1/instance/preempted" if self.headers["Metadata-Flavor"] != "Google":
                self.answer(403)
            case "/computeMetadata/v1/instance/preempted":
                self.answer(200, str(self.server.is_preempted).upper())
            case path if path.startswith("/metadata/") and self.headers["Metadata"] != "true":
                self.answer(400)
            case "/metadata/instance/compute/name?api-version=2021-02-01&format=text":
                self.answer(200, "vm_1")
            case "/metadata/scheduledevents?api-version=2020-07-01":
                self.answer(200, json.dumps(self.server.events(), indent=2))
            case _:
                self.answer(404)

    def answer(self, status: int, body: str = "") -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body.encode())

    def log_message(self, *_args: object) -> None:
        """Say nothing."""


@pytest.fixture
def metadata() -> Iterator[Metadata]:
    with Metadata() as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server
        server.shutdown()


@pytest.mark.parametrize("cloud", CLOUDS)
def test_the_command_for_a_cloud_ends_with_0_once_the_machine_is_to_be_preempted(
    metadata: Metadata, cloud: str
) -> None:
    def ask() -> int:
        command, environ = COMMANDS / f"{cloud}.sh", {**os.environ, "METADATA_URL": metadata.url}
        return subprocess.run([command], env=environ, check=False, capture_output=True, timeout=60).returncode

    assert ask() != 0
    metadata.is_preempted = True
    assert ask() == 0
    metadata.shutdown()
    metadata.server_close()
    assert ask() != 0, "a service that does not answer announces nothing"


def test_a_node_that_is_to_be_preempted_leaves_by_a_handoff(job: Callable[..., Job], metadata: Metadata) -> None:
    """No step is lost, also if the machine is shut down right after the notice, which sends SIGTERM."""
    running = job("--settle=60")
    running.join("a", "1:2")
    running.environ |= {"METADATA_URL": metadata.url, "JOB_COMPLETION_INDEX": "1"}
    leaver = running.join("b", "1:2", f"--preemption_notice={COMMANDS / 'gcp.sh'}")
    group = running.wait_for_step(10, world=2)
    assert "no preemption notice so far" in leaver.text()
    metadata.is_preempted = True
    wait_for(lambda: "this machine is to be preempted" in leaver.text(), "the notice", PATIENCE_S)
    leaver.terminate()
    assert leaver.wait(PATIENCE_S) == EXIT_TIMEOUT, "a Job of Kubernetes replaces the pod"
    running.wait_for_step(1, after_group=group, world=1)
    running.finish()
    steps = Counter(line.step for line in read_trace(running.trace))
    assert steps == Counter(range(1, running.steps + 1)), running.log_text()
    assert [change["cause"] for change in running.history()] == ["start", "drain"]


@pytest.mark.parametrize(
    ("requests", "passed"),
    [
        (["notice"], [TERM]),
        (["notice", TERM], [TERM]),
        ([TERM, "notice"], [TERM]),
        (["notice", QUIT, TERM], [TERM, TERM]),
        ([TERM, "notice", TERM], [TERM, TERM]),
        (["notice", "notice"], [TERM]),
        (["notice", INT], [TERM, INT]),
        ([INT, "notice"], [INT]),
    ],
)
def test_a_notice_and_one_sigterm_are_a_single_request(requests: list[Any], passed: list[int]) -> None:
    events: list[StopAsked] = []
    stop = StopRequests(events.append)
    for request in requests:
        if request == "notice":
            stop.on_notice()
        else:
            stop.on_signal(request)
    assert events == [StopAsked(number) for number in passed]


def test_the_command_is_repeated_until_it_ends_with_0(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It may also wait itself; without the secrets of the agent."""
    monkeypatch.setattr(stop_requests, "_REPEAT_S", 0.01)
    notices: list[float] = []
    script = f'echo "${{ELASTIC_AGENT_ETCD_USER:-nobody}}" >> {tmp_path}/runs; test $(wc -l < {tmp_path}/runs) = 3'
    environ = {**os.environ, "ELASTIC_AGENT_ETCD_USER": "root"}
    with noticing_preemption(("sh", "-c", script), environ, lambda: notices.append(time.monotonic())):
        wait_for(lambda: notices, "the notice")
    assert (tmp_path / "runs").read_text() == "nobody\n" * 3


def test_a_command_that_waits_is_ended_with_the_agent(tmp_path: Path) -> None:
    pid = tmp_path / "pid"
    notices: list[None] = []
    with ExitStack() as stack:
        command = ("sh", "-c", f"echo $$ > {pid}; exec sleep 1000")
        stack.enter_context(noticing_preemption(command, os.environ, lambda: notices.append(None)))
        wait_for(lambda: pid.exists() and pid.read_text(), "the command to run")
    wait_for(lambda: has_ended(int(pid.read_text())), "it to be gone")
    assert notices == []
