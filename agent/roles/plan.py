"""Which processes a parameter-server job has, and where: as its command line describes it, the same on all machines.

On one machine numbers are enough (`--server_num`, `--worker_num`). On several, each process is listed by its machine's
address (`--servers`, `--workers`), servers with the port at which workers reach them. Heterogeneous workers are one
more role. As with Paddle's fleetrun, whose options these are.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from agent.endpoints import endpoint_of
from agent.errors import ConfigError

Kind = Literal["server", "worker", "heter"]
OPTIONS = (
    "server_num",
    "servers",
    "worker_num",
    "workers",
    "heter_worker_num",
    "heter_workers",
    "heter_devices",
    "http_port",
    "ps_replicas",
)
_FIRST_PORT = 6170
_LOOPBACK = "127.0.0.1"


@dataclass(frozen=True, order=True)
class RoleProcess:
    """The place of one process."""

    kind: Kind
    index: int
    """Among those of its kind, from 0."""
    machine: str
    port: int
    """0: any that is free there, which is still to be found."""

    @property
    def name(self) -> str:
        """As `worker-3`."""
        return f"{self.kind}-{self.index}"

    @property
    def endpoint(self) -> str:
        """Its address and port."""
        return endpoint_of(self.machine, self.port)


@dataclass(frozen=True)
class RolePlan:
    """All processes of a job."""

    posts: tuple[RoleProcess, ...]
    heter_device: str = "gpu"
    http_port: int = 0
    """Where the workers may meet in a process group of their own. 0: any."""
    replicas: int = 0
    """Copies of each server's rows on another one."""

    def of(self, kind: Kind) -> tuple[RoleProcess, ...]:
        """Those of a kind, by their index."""
        return tuple(post for post in self.posts if post.kind == kind)

    @property
    def machines(self) -> tuple[str, ...]:
        """Each once, in the order in which they are listed."""
        return tuple(dict.fromkeys(post.machine for post in self.posts))

    def endpoints(self, kind: Kind) -> str:
        """A list of them."""
        return ",".join(post.endpoint for post in self.of(kind))

    def with_ports(self, find: Callable[[str], int]) -> RolePlan:
        """The same, where `find` has found the ports that are still to be found, each on its machine."""
        return replace(self, posts=tuple(replace(post, port=post.port or find(post.machine)) for post in self.posts))

    def is_with_ports(self, other: RolePlan) -> bool:
        """Whether the other is this one, with all ports found."""
        if len(self.posts) != len(other.posts):
            return False
        ports = iter([their.port for mine, their in zip(self.posts, other.posts, strict=True) if not mine.port])
        return self.with_ports(lambda _machine: next(ports)) == other


def is_asked_for(options: Mapping[str, Any]) -> bool:
    """Whether the command line describes a job with servers."""
    return any(options[name] is not None for name in OPTIONS)


def plan(options: Mapping[str, Any]) -> RolePlan:
    """The job that is described. Raises `ConfigError`."""
    servers = _posts("server", options["servers"], options["server_num"], "--servers", "--server_num")
    workers = _posts("worker", options["workers"], options["worker_num"], "--workers", "--worker_num")
    heter = _posts(
        "heter", options["heter_workers"], options["heter_worker_num"], "--heter_workers", "--heter_worker_num"
    )
    for name, posts in (("server", servers), ("worker", workers)):
        if not posts:
            raise ConfigError(
                f"a job with servers has both roles: say how many with --{name}_num, or which with --{name}s"
            )
    if options["ps_replicas"] and len(servers) < 2:
        raise ConfigError("--ps_replicas=1 needs two servers or more: copies are on another one")
    posts = _with_ports([*servers, *workers, *heter])
    taken: dict[str, RoleProcess] = {}
    for post in (post for post in posts if post.port):
        other = taken.setdefault(post.endpoint, post)
        if other is not post:
            raise ConfigError(
                f"{post.endpoint} is given to {other.name} and to {post.name}: give each a port of its own"
            )
    machines = {post.machine for post in posts}
    if len({_is_loopback(machine) for machine in machines}) > 1:
        raise ConfigError(f"{', '.join(sorted(machines))}: the others do not reach a loopback address")
    return RolePlan(
        tuple(posts), options["heter_devices"] or "gpu", options["http_port"] or 0, options["ps_replicas"] or 0
    )


def _posts(kind: Kind, listed: str | None, count: int | None, list_option: str, count_option: str) -> list[RoleProcess]:
    if listed is None:
        return [RoleProcess(kind, index, _LOOPBACK, 0) for index in range(count or 0)]
    parsed = [_address(part, list_option) for part in listed.split(",") if part.strip()]
    if count is not None and count != len(parsed):
        raise ConfigError(
            f"{count_option}={count} is not the number of those in {list_option}, {len(parsed)}: leave it out"
        )
    return [RoleProcess(kind, index, machine, port) for index, (machine, port) in enumerate(parsed)]


def _address(text: str, option: str) -> tuple[str, int]:
    """Machine and port; 0: none is said."""
    text = text.strip()
    machine, port = text, ""
    if text.startswith("["):
        machine, _, port = text[1:].partition("]")
        port = port.removeprefix(":")
    elif text.count(":") == 1:
        machine, _, port = text.partition(":")
        if not port:
            raise ConfigError(f"{option}: {text!r} has no port after its colon")
    if not machine or (port and not (port.isdecimal() and 1 <= int(port) <= 65535)):
        raise ConfigError(f"{option}: {text!r} is no address as 10.0.0.1:6170, or 10.0.0.1")
    return machine, int(port or 0)


def _with_ports(posts: Sequence[RoleProcess]) -> list[RoleProcess]:
    """Give those without a port the first that no other has on their machine, from the usual one on.

    All machines must come to the same. Where there is only this one, it can look for one that is free.
    """
    taken = {(post.machine, post.port) for post in posts}
    found = []
    for post in posts:
        port = post.port
        if not port and not _is_loopback(post.machine):
            port = next(port for port in range(_FIRST_PORT, 65536) if (post.machine, port) not in taken)
            taken.add((post.machine, port))
        found.append(RoleProcess(post.kind, post.index, post.machine, port))
    return found


def _is_loopback(machine: str) -> bool:
    try:
        return ipaddress.ip_address(machine).is_loopback
    except ValueError:
        return machine == "localhost"
