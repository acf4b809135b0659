"""Real etcd clusters that a test may harm: several members, TLS, users, all on loopback."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import grpc
from ports import held_ports
from waiting import freeze, wait_for

from agent.children import at_parents_end
from agent.local_etcd.etcd_program import find_binary
from agent.store import connections
from agent.store.access import ANONYMOUS, Credentials
from agent.store.etcd import EtcdStore
from agent.store.etcd_protocol import Stub, message
from agent.store.keys import ROOT

_ESTABLISHED = "01"
PATIENCE_S = 60.0
_ELECTION = ("--heartbeat-interval", "50", "--election-timeout", "500")


def patient_store(*endpoints: str, credentials: Credentials = ANONYMOUS, home: str = ROOT) -> EtcdStore:
    """A client whose calls a busy machine does not fail."""
    return EtcdStore(endpoints, credentials, home=home, attempt_timeout_s=PATIENCE_S, retry_for_s=PATIENCE_S)


class Member:
    """One etcd process, which can be killed, frozen and started again on its data."""

    def __init__(self, folder: Path, name: str, arguments: Sequence[str], port: int) -> None:
        self.name, self.port = name, port
        self.endpoint = f"127.0.0.1:{port}"
        self._log = folder / f"{name}.log"
        self._arguments = [str(find_binary()), "--name", name, "--data-dir", str(folder / name), *arguments]
        self.process = self._start()

    def _start(self) -> subprocess.Popen[bytes]:
        with self._log.open("ab") as log:
            return subprocess.Popen(
                self._arguments,
                stdout=log,
                stderr=log,
                env={"PATH": os.environ["PATH"]},
                preexec_fn=at_parents_end(signal.SIGKILL),  # noqa: PLW1509 - it calls nothing that takes a lock
            )

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def restart(self) -> None:
        """Stop it and start it again: what it held in memory is lost, after a kill it would read that in its log."""
        self.process.terminate()
        self.process.wait()
        self.process = self._start()

    def freeze(self) -> None:
        """Stop every thread of it; until then it may answer once more."""
        freeze(self.process.pid)

    def thaw(self) -> None:
        self.process.send_signal(signal.SIGCONT)

    def has_unread(self) -> bool:
        """Whether a client has sent something that it has not read: it stands in the kernel's table of connections."""
        connections = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
        mine = [each for each in connections if each[1].endswith(f":{self.port:04X}") and each[3] == _ESTABLISHED]
        return any(int(each[4].partition(":")[2], 16) > 0 for each in mine)

    def is_listening(self) -> bool:
        assert self.process.poll() is None, self._log.read_text(errors="replace")[-2000:]
        with socket.socket() as probe:
            return probe.connect_ex(("127.0.0.1", self.port)) == 0


@contextmanager
def etcd_cluster(
    folder: Path, size: int, options: Sequence[str] = (), *, scheme: str = "http"
) -> Iterator[list[Member]]:
    """Run a cluster of plain processes; each member listens before this returns."""
    with held_ports(2 * size) as ports:
        yield from _run_cluster(folder, size, options, scheme, ports)


def _run_cluster(
    folder: Path, size: int, options: Sequence[str], scheme: str, ports: list[int]
) -> Iterator[list[Member]]:
    peers = [f"http://127.0.0.1:{port}" for port in ports[size:]]
    together = ",".join(f"m{number}={peer}" for number, peer in enumerate(peers))
    members: list[Member] = []
    try:
        for number, (port, peer) in enumerate(zip(ports[:size], peers, strict=True)):
            client = f"{scheme}://127.0.0.1:{port}"
            arguments = [
                *("--listen-client-urls", client, "--advertise-client-urls", client),
                *("--listen-peer-urls", peer, "--initial-advertise-peer-urls", peer),
                *("--initial-cluster", together, *_ELECTION, *options),
            ]
            members.append(Member(folder, f"m{number}", arguments, port))
        for member in members:
            wait_for(member.is_listening, f"{member.name} listens")
        yield members
    finally:
        for member in members:
            member.kill()


def leader_first(members: list[Member]) -> list[Member]:
    """Ask each member who leads; the client will be connected to the first of these."""
    found: list[bool] = []

    def ask() -> bool:
        with suppress(grpc.RpcError):  # it listens before it serves
            found[:] = [_is_leader(member) for member in members]
        return sum(found) == 1

    wait_for(ask, "a leader")
    return sorted(members, key=lambda member: not found[members.index(member)])


def _is_leader(member: Member) -> bool:
    link = connections.EtcdConnection(member.endpoint)
    try:
        status: Any = Stub(link.channel, "Maintenance").Status(message("StatusRequest")(), timeout=20)
    finally:
        link.channel.close()
    return bool(status.leader == status.header.member_id)
