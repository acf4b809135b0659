"""A job on containers: one compose project, removed at the end whatever happened."""

from __future__ import annotations

import contextlib
import json
import os
import re
import secrets
import subprocess
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from subprocess import DEVNULL, PIPE
from typing import Any, Self

from chaos.ledger import Ledger

from agent.rehearse.cluster import Timeout, wait_for

ROOT = Path(__file__).resolve().parents[2]
IMAGE = "elastic-agent:dev"
JOB_ID = "chaos"
ETCD = ("etcd-1", "etcd-2", "etcd-3")
_WARM = re.compile(r"(\d+) of \1 warm, [^;]*$")
"""What a node says of its standbys when nothing of them is under way."""
_WITHIN_S = 120.0
_FOLLOW = (
    "exec 3<&0; elastic-agent status --watch --json & followed=$!; (cat <&3; kill $followed) >/dev/null 2>&1 & "
    "wait $followed"
)
"""Ends with whoever asked, whose end Docker does not tell to what runs in a container."""
_LABEL = "elastic-agent.chaos"
_ROOTED = ("--user=root", "--cap-add=NET_ADMIN")


class CommandFailed(Exception):  # noqa: N818 - says what happened
    """A docker command did; says which, and what it said."""


def run(*command: str, environ: Mapping[str, str] | None = None, within_s: float = _WITHIN_S) -> str:
    """Run a command to its end; return what it printed. Raises `CommandFailed`, and `TimeoutExpired`."""
    merged = {**os.environ, **(environ or {})}
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, timeout=within_s, env=merged, cwd=ROOT, stdin=DEVNULL
    )
    if done.returncode:
        raise CommandFailed(f"{' '.join(command)}: code {done.returncode}: {(done.stderr or done.stdout).strip()}")
    return done.stdout


@dataclass
class Cluster:
    """Three members of etcd, and nodes that train `training.py`; use it as a context.

    A node is known by its host name, which is the beginning of its container's id, as it is to its agent.
    """

    directory: Path
    """For the ranks' ledgers; made here."""
    nodes: int = 3
    np: str = "2:3"
    step_time_s: float = 0.1
    is_plain: bool = False
    """Each group has new processes."""
    project: str = field(default_factory=lambda: f"elastic-agent-chaos-{secrets.token_hex(3)}")

    def __post_init__(self) -> None:
        self.directory.mkdir(parents=True)
        self.directory.chmod(0o777)  # the nodes' user is another one
        self.ledger = Ledger(self.directory)
        self.undisturbed_since = 0
        """So many lines had the ledger when the last fault was over."""
        self.settled_group = 0
        """In which all nodes trained when that was last waited for."""

    def __enter__(self) -> Self:
        try:
            self.compose("up", "-d", "--no-build", "--wait", *ETCD, "observer")
            self.up()
        except BaseException:
            self.remove()
            raise
        return self

    def __exit__(self, *_exc: object) -> None:
        self.remove()

    def remove(self) -> None:
        """Leave nothing: no container, network, volume, and no file of another user's. Raises `CommandFailed`."""
        beside = run("docker", "ps", "-a", "-q", "--filter", f"label={_LABEL}={self.project}").split()
        if beside:
            run("docker", "rm", "-f", "-v", *beside)
        with contextlib.suppress(CommandFailed, subprocess.TimeoutExpired):  # without an observer there are no files
            self.observe("find /ledger -mindepth 1 -delete")
        self.compose("kill")  # etcd takes seconds to leave in order
        self.compose("down", "-v", "--remove-orphans")
        mine = ("-q", "--filter", f"label=com.docker.compose.project={self.project}")
        left = [run("docker", *kind, *mine) for kind in (("ps", "-a"), ("network", "ls"), ("volume", "ls"))]
        if any(left):
            raise CommandFailed(f"of {self.project} something is left: {' '.join(left)}")

    def compose(self, *arguments: str) -> str:
        """Run a compose command in this project."""
        files = ("-f", "docker-compose.yml", "-f", "tests/chaos/cluster.yml")
        environ = {
            "NP": self.np,
            "NODES": str(self.nodes),
            "JOB_ID": JOB_ID,
            "STEP_TIME_S": str(self.step_time_s),
            "PLAIN": "--plain" if self.is_plain else "--no-plain",
            "LEDGER": str(self.directory),
        }
        return run("docker", "compose", "--progress=quiet", *files, "-p", self.project, *arguments, environ=environ)

    # Nodes

    def up(self) -> None:
        """Have as many nodes as there should be; those that are there stay as they are."""
        self.compose("up", "-d", "--no-build", "--no-recreate", "--no-deps", "--scale", f"node={self.nodes}", "node")

    def running(self) -> list[str]:
        """Nodes whose container runs."""
        return sorted(each[:12] for each in self._ids("node", "status=running"))

    def all(self) -> list[str]:
        """Nodes, also those whose container has ended."""
        return sorted(each[:12] for each in self._ids("node"))

    def status(self) -> dict[str, Any]:
        """What `elastic-agent status --json` says of the job."""
        found: dict[str, Any] = json.loads(self.ask("status", "--json"))
        return found

    def ask(self, command: str, *arguments: str) -> str:
        """Give one of elastic-agent's commands about the job."""
        return run(*self._asking("elastic-agent", command, *arguments))

    def follow_status(self, within_s: float, what: str) -> Iterator[dict[str, Any]]:
        """The job's status, now and at each change. Raises `Timeout`, with what was waited for, after so long."""
        give_up_at = time.monotonic() + within_s
        while (left_s := give_up_at - time.monotonic()) > 0:
            with subprocess.Popen(self._asking("sh", "-c", _FOLLOW), stdin=PIPE, stdout=PIPE, stderr=DEVNULL) as asked:
                assert asked.stdin is not None
                assert asked.stdout is not None
                timer = threading.Timer(left_s, asked.stdin.close)
                timer.start()
                try:
                    yield from map(json.loads, asked.stdout)
                finally:
                    timer.cancel()
                    asked.stdin.close()
        raise Timeout(f"not within {within_s:g} s: {what}")

    def _asking(self, *command: str) -> list[str]:
        told = ("-e", f"ELASTIC_AGENT_ELASTIC_SERVER={','.join(f'{name}:2379' for name in ETCD)}")
        where = (*told, "-e", f"ELASTIC_AGENT_JOB_ID={JOB_ID}", self.container("observer"))
        return ["docker", "exec", "-i", *where, *command]

    def node_of_rank(self, rank: int) -> str:
        """The node that has this rank now."""
        (node,) = (node["node_id"] for node in self.status()["nodes"] if rank in node["ranks"])
        return str(node)

    def leader(self) -> str:
        """The node that leads."""
        return str(self.record("shared/leader")["node_id"])

    def kill(self, *nodes: str) -> None:
        """End all processes of these, at once."""
        run("docker", "kill", "-s", "KILL", *nodes)

    def start(self, *nodes: str) -> None:
        """Start containers that have ended, under their names."""
        run("docker", "start", *nodes)

    def replace(self, node: str) -> None:
        """Another machine takes the place of one that is gone."""
        run("docker", "rm", "-f", "-v", node)
        self.up()

    def inside(self, node: str, script: str) -> str:
        """Run a script in a node; return what it printed."""
        return run("docker", "exec", node, "sh", "-ec", script)

    def address(self, container: str) -> str:
        """In the job's network."""
        found = json.loads(run("docker", "inspect", container))[0]["NetworkSettings"]["Networks"]
        return str(next(iter(found.values()))["IPAddress"])

    # Networks

    def in_network_of(self, node: str, script: str) -> str:
        """Run a script as root in a node's network, with which it may do anything; return what it printed."""
        beside = ("--network", f"container:{node}", "--label", f"{_LABEL}={self.project}")
        return run("docker", "run", "--rm", *beside, *_ROOTED, "--entrypoint=sh", IMAGE, "-ec", script)

    def cut(self, node: str, others: Iterable[str], *, ways: Iterable[str] = ("in", "out")) -> None:
        """Drop what a node receives from some addresses, or sends to them."""
        rules = []
        for other in others:
            rules += [f"iptables -A INPUT -s {other} -j DROP"] if "in" in ways else []
            rules += [f"iptables -A OUTPUT -d {other} -j DROP"] if "out" in ways else []
        self.in_network_of(node, "\n".join(rules))

    def mend(self, node: str) -> None:
        """Drop nothing any more."""
        self.in_network_of(node, "iptables -F INPUT; iptables -F OUTPUT")

    @contextlib.contextmanager
    def delay(self, node: str, seconds: float) -> Iterator[None]:
        """Each thing that is said on connections that this node opens, either way."""
        beside = ("--network", f"container:{node}", "--label", f"{_LABEL}={self.project}")
        mounted = ("-v", f"{ROOT / 'tests' / 'chaos'}:/chaos:ro", "--entrypoint=python")
        proxy = run("docker", "run", "-d", *beside, *_ROOTED, *mounted, IMAGE, "/chaos/delay.py", str(seconds)).strip()
        try:
            wait_for(lambda: "ready" in run("docker", "logs", proxy), _WITHIN_S, f"the proxy of {node}")
            yield
        finally:
            run("docker", "stop", proxy)
            run("docker", "rm", "-f", "-v", proxy)

    # Volumes

    def observe(self, script: str) -> str:
        """Run a script as root where the volumes are."""
        return run("docker", "exec", self.container("observer"), "sh", "-ec", script)

    # etcd

    def etcdctl(self, *arguments: str, at: Iterable[str] = ETCD) -> str:
        """Ask etcd."""
        where = f"--endpoints={','.join(f'{name}:2379' for name in at)}"
        return run("docker", "exec", self.container("observer"), "env", "ETCDCTL_API=3", "etcdctl", where, *arguments)

    def record(self, key: str) -> dict[str, Any]:
        """What etcd has under one of the job's keys."""
        found: dict[str, Any] = json.loads(self.etcdctl("get", "--print-value-only", f"/elastic-agent/{JOB_ID}/{key}"))
        return found

    def committed_step(self) -> int:
        """Of the newest checkpoint."""
        return int(self.record("shared/checkpoint")["copy"]["step"])

    def etcd_leader(self) -> str:
        """The name of the member that leads."""
        for name in ETCD:
            with contextlib.suppress(CommandFailed):
                told = json.loads(self.etcdctl("endpoint", "status", "-w", "json", at=[name]))[0]["Status"]
                if told["leader"] == told["header"]["member_id"]:
                    return name
        raise CommandFailed("no member of etcd leads")

    def wait_for_etcd(self) -> None:
        """Until every member answers."""

        def answers() -> bool:
            with contextlib.suppress(CommandFailed):
                self.etcdctl("endpoint", "health")
                return True
            return False

        wait_for(answers, _WITHIN_S, "etcd answers")

    def container(self, service: str) -> str:
        """The container of a service that has one. Raises `CommandFailed`."""
        found = self._ids(service)
        if len(found) != 1:
            raise CommandFailed(f"wanted one container of {service}, found {len(found)}")
        return found[0]

    def _ids(self, service: str, *filters: str) -> list[str]:
        of = (f"label=com.docker.compose.project={self.project}", f"label=com.docker.compose.service={service}")
        wanted = [part for each in (*of, *filters) for part in ("--filter", each)]
        return run("docker", "ps", "-a", "-q", "--no-trunc", *wanted).split()

    # Training

    def wait_until_settled(self, within_s: float = _WITHIN_S) -> None:
        """Until all nodes train in one group, with warm standbys."""
        what = f"all of {self.nodes} nodes train"
        group = next(each["group"] for each in self.follow_status(within_s, what) if self._is_settled(each))
        wait_for(
            lambda: self.ledger.follow() and self.ledger.newest_group >= group, within_s, f"a step of group {group}"
        )
        self.settled_group = group

    def _is_settled(self, status: Mapping[str, Any]) -> bool:
        nodes = status["nodes"]
        ranks = [rank for node in nodes for rank in node["ranks"]]
        is_warm = all(_WARM.match(node["standby"]) for node in nodes)
        # Until its group's first step a node says of its standbys what it had before they were taken.
        is_over = status["incident"].startswith(f"group {status['group']} after ")
        is_whole = is_warm and is_over and status["state"] == "training"
        return is_whole and len(nodes) == len(ranks) == self.nodes == len(self.running())

    def stop_training(self) -> None:
        """Have it end, in order, after an epoch: once all steps are done that were ever taken, lost or not."""
        self.ledger.follow()
        self.observe(f"echo {self.ledger.newest_step} >/ledger/.stop && mv /ledger/.stop /ledger/stop")

    def log_text(self) -> str:
        """What nodes and status say, for whoever looks for what went wrong."""
        parts = []
        for what in (lambda: self.ask("status"), lambda: self.compose("logs", "--no-color", "--timestamps", "node")):
            with contextlib.suppress(CommandFailed, subprocess.TimeoutExpired):
                parts.append(what())
        return "\n".join(parts)


def now() -> float:
    """On the clock that the ledgers' lines carry."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)
