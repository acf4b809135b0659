"""The etcd that the agents of a job run themselves, where all machines are named and no etcd is provided.

Three machines run one member each, so that any one of them may be lost. With two machines, only one runs a member,
which forms the whole cluster. `Ensemble` says which machines do; etcd_members.py runs the member of this machine.

Access control: connection_filter.py admits connections by address. Where the machines share a secret, members and
clients also authenticate each other with certificates derived from it (agent/store/certificates.py), and connections
are encrypted.
"""

from __future__ import annotations

import ipaddress
import socket
from dataclasses import dataclass

from agent import node_facts
from agent.endpoints import endpoint_of
from agent.store.certificates import Tls

_MAX_MEMBERS = 3
_CONNECT_WITHIN_S = 0.5


@dataclass(frozen=True)
class Ensemble:
    """The machines of a job, and which of them run an etcd member."""

    job_id: str
    machines: tuple[str, ...]
    """All machines of the job, by IP address or name, as listed by the operator."""
    own: str
    """This machine, as in `machines`."""
    port: int
    """Port for clients, the same on all machines. Members connect to each other at the next port."""
    tls: Tls | None = None
    """This machine's certificate and the authority that it trusts, where the machines share a secret."""

    @property
    def scheme(self) -> str:
        """Scheme of the members' URLs."""
        return "http" if self.tls is None else "https"

    @property
    def members(self) -> tuple[str, ...]:
        """The machines that run a member, independent of the order in `machines`.

        Never two: a cluster of two members fails when either of them is lost.
        """
        count = _MAX_MEMBERS if len(self.machines) >= _MAX_MEMBERS else 1
        return tuple(sorted(self.machines, key=_sort_key)[:count])

    @property
    def node_ids(self) -> tuple[str, ...]:
        """Default node ids of all machines."""
        return tuple(map(node_id_of, self.machines))

    @property
    def position(self) -> int:
        """Position of this machine among all, from 1."""
        return self.machines.index(self.own) + 1

    @property
    def endpoints(self) -> tuple[str, ...]:
        """Endpoints of all members for clients."""
        return tuple(map(self.endpoint, self.members))

    def endpoint(self, machine: str) -> str:
        """Return the endpoint for clients of the member on a machine."""
        return endpoint_of(machine, self.port)

    @property
    def summary(self) -> str:
        """One line for the operator: where etcd runs, and which losses it tolerates."""
        location = f"etcd runs on {', '.join(self.members)}, port {self.port}"
        if len(self.members) == 1:
            return f"{location}: while that machine is lost, the job waits for it"
        return f"{location}: any one of them may be lost"

    def peer_url(self, machine: str) -> str:
        """Return the URL at which other members reach the member on a machine."""
        return f"{self.scheme}://{endpoint_of(machine, self.port + 1)}"

    def machine_ips(self) -> set[str]:
        """Resolve the IP addresses of all machines. May block on DNS."""
        return {ip for machine in self.machines for ip in node_facts.resolve_if_there(machine)}

    def unreachable_members(self) -> list[str]:
        """Return the machines whose member accepts no connection. Blocks for up to 0.5 s per machine."""
        return [machine for machine in self.members if not _accepts_connections(machine, self.port)]


def node_id_of(machine: str) -> str:
    """Return the default node id of a machine. Node ids contain no colons."""
    return machine.partition("%")[0].replace(":", "-")


def _accepts_connections(machine: str, port: int) -> bool:
    try:
        with socket.create_connection((machine, port), _CONNECT_WITHIN_S):
            return True
    except (OSError, UnicodeError):  # UnicodeError: of an invalid name such as 10.0.0..3
        return False


def _sort_key(machine: str) -> tuple[bool, int, str]:
    try:
        return False, int(ipaddress.ip_address(machine)), ""
    except ValueError:
        return True, 0, machine
