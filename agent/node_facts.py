"""Facts about this process and host: identity, process start times, addresses."""

from __future__ import annotations

import ipaddress
import os
import socket
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path

import psutil

from agent.core.model import Node
from agent.endpoints import SOCKET
from agent.errors import ConfigError

_PROBE_S = 0.3


def host_identity() -> str:
    """Return boot id and pid namespace. Processes with the same identity can look up each other's pids."""
    boot_id = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    return f"{boot_id}/{os.stat('/proc/self/ns/pid').st_ino}"  # noqa: PTH116 - of the link's target


def started_at(pid: int) -> int | None:
    """Return the start of a process in clock ticks since boot; None: there is no such process, or it is a zombie."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return None
    fields = stat.rpartition(")")[2].split()  # the name before the bracket may contain anything, also spaces
    return None if fields[0] in "ZX" else int(fields[19])


def is_agent_alive(node: Node) -> bool | None:
    """Whether the agent of a node record is alive; None: unknown, only its lease can show it. May wait for `_PROBE_S`.

    On the same host the process can be looked up. On another host, a refused connection to the agent's port shows that
    its process has ended: a container that was restarted often has the address of the one before it.
    """
    if node.host == host_identity():
        return started_at(node.pid) == node.pid_started
    return False if _is_refused(node.address, node.link) else None


def _is_refused(address: str, port: int) -> bool:
    try:
        if is_loopback(resolve(address)):
            return False  # a loopback address of another host: it would lead to this one
        with socket.create_connection((address, port), _PROBE_S):
            return False
    except ConnectionRefusedError:
        return True
    except (OSError, ConfigError):
        return False


def default_node_id() -> str:
    """Return the host name (in Kubernetes: the name of the pod)."""
    return socket.gethostname()


def resolve(address: str) -> tuple[str, ...]:
    """Return the IP addresses of a host name, or the IP address itself. May wait for DNS.

    Raises `ConfigError` if the name does not resolve, or to an address at which nodes only listen (0.0.0.0, ::).
    """
    try:
        found = socket.getaddrinfo(address, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        raise ConfigError(
            f"--address: {_unresolved(address, error)}; give an IP address or a name of this node"
        ) from None
    ips = tuple(str(info[4][0]) for info in found)
    if any(_parsed(ip).is_unspecified for ip in ips):
        raise ConfigError(f"--address={address} is where to listen, not where other nodes reach this one")
    return ips


def own_of(machines: Sequence[str], address: str | None) -> str:
    """Return which of the job's machines this one is. `address`: the value of --address, if it was given.

    Raises `ConfigError` if none of them is this machine, or several may be.
    """
    if address in machines:
        return str(address)
    given = f"--ips={','.join(machines)}"
    found = [found.address for each in psutil.net_if_addrs().values() for found in each]
    here = {ip.partition("%")[0] for ip in (resolve(address) if address is not None else found)}
    own = [machine for machine in machines if any(_is_one_of(ip, here, address) for ip in resolve_if_there(machine))]
    if address is not None and len(own) != 1:
        raise ConfigError(f"--address={address} is not in {given}")
    if len(own) != 1:
        wrong = f"{' and '.join(own)} are both this machine" if own else "none of them is this machine"
        raise ConfigError(f"{given}: {wrong}; say which one is, with --address")
    return own[0]


def _is_one_of(ip: str, here: Collection[str], address: str | None) -> bool:
    return ip.partition("%")[0] in here or (address is None and _parsed(ip).is_loopback)


def resolve_if_there(machine: str) -> tuple[str, ...]:
    """Return the IP addresses of another machine; none if its name does not resolve now, such as a stopped pod's."""
    try:
        return resolve(machine)
    except ConfigError:
        return ()


def is_loopback(ips: Iterable[str]) -> bool:
    """Whether all addresses are loopback addresses, which only their own host reaches."""
    return all(_parsed(ip).is_loopback for ip in ips)


def is_on_loopback(endpoint: str) -> bool:
    """Whether an endpoint is on the loopback interface or a Unix socket of this host."""
    if endpoint.startswith(SOCKET):
        return True
    host, _, port = endpoint.rpartition(":")
    try:
        found = socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        return False
    return is_loopback(str(info[4][0]) for info in found)


def address_towards(endpoint: str) -> str:
    """Return the address of the interface that leads to etcd: most likely other nodes reach this one by it, too.

    Raises `ConfigError` if the endpoint's name does not resolve.
    """
    if endpoint.startswith(SOCKET):
        return "127.0.0.1"
    host, _, port = endpoint.rpartition(":")
    try:
        found = socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_DGRAM)
    except (OSError, UnicodeError) as error:
        raise ConfigError(f"--elastic_server: {_unresolved(host, error)}; give the address of etcd") from None
    for family, kind, _, _, address in found:
        with socket.socket(family, kind) as probe:
            try:
                probe.connect(address)  # sends nothing: a datagram socket only chooses a route
            except OSError:
                continue
            return str(probe.getsockname()[0])
    raise ConfigError(f"no route to etcd at {endpoint}; give this node's own address with --address")


def _unresolved(host: str, error: OSError | UnicodeError) -> str:
    """Explain the error. A `UnicodeError` means that the text is no host name, such as `a..b`."""
    reason = error.strerror if isinstance(error, OSError) else "that is no host name"
    return f"{host!r} cannot be resolved: {reason}"


def _parsed(ip: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address:
    return ipaddress.ip_address(ip.partition("%")[0])
