"""What an agent finds out about its own process and host."""

from __future__ import annotations

import os
import socket
from pathlib import Path

from agent.core.model import Node
from agent.errors import ConfigError


def host_identity() -> str:
    """Boot id and pid namespace. Two processes with the same one can look at each other's pids."""
    boot_id = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    return f"{boot_id}/{os.stat('/proc/self/ns/pid').st_ino}"  # noqa: PTH116 - of the link's target


def started_at(pid: int) -> int | None:
    """A process's start in clock ticks since boot; None if there is none, or only its corpse."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return None
    fields = stat.rpartition(")")[2].split()  # the name before it may hold anything, spaces too
    return None if fields[0] in "ZX" else int(fields[19])


def is_process_alive(node: Node) -> bool | None:
    """Whether an agent's process lives; None if it is of another host, or of another boot of this one."""
    if node.host != host_identity():
        return None
    return started_at(node.pid) == node.pid_started


def default_node_id() -> str:
    """The host's name (the pod's, in Kubernetes)."""
    return socket.gethostname()


def address_towards(endpoint: str) -> str:
    """The address of the interface that leads to etcd: other nodes are most likely reached by it too.

    Raises `ConfigError` if the endpoint's name does not resolve.
    """
    host, _, port = endpoint.rpartition(":")
    try:
        found = socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_DGRAM)
    except socket.gaierror as error:
        raise ConfigError(
            f"the address of etcd, {host!r}, cannot be resolved: {error.strerror}; see --elastic_server"
        ) from None
    for family, kind, _, _, address in found:
        with socket.socket(family, kind) as probe:
            try:
                probe.connect(address)  # sends nothing: a datagram socket only picks its route
            except OSError:
                continue
            return str(probe.getsockname()[0])
    raise ConfigError(f"no route to etcd at {endpoint}; give this node's own address with --address")
