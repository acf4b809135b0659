"""The processes of a parameter-server job, as the command line describes them, the same on all machines.

On one machine numbers are enough (`--server_num`, `--worker_num`). On several, each process is listed by its machine's
address (`--servers`, `--workers`), servers with the port at which workers reach them. Heterogeneous workers are a
third role. The options are those of Paddle's fleetrun.
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
    """One process of the plan, whatever its incarnation."""

    kind: Kind
    index: int
    """Index among the processes of its kind, from 0."""
    machine: str
    port: int
    """0: a free port of the machine, which is still to be found."""

    @property
    def name(self) -> str:
        """Kind and index, such as `worker-3`."""
        return f"{self.kind}-{self.index}"

    @property
    def endpoint(self) -> str:
        """Machine and port."""
        return endpoint_of(self.machine, self.port)


@dataclass(frozen=True)
class RolePlan:
    """All processes of a job."""

    processes: tuple[RoleProcess, ...]
    heter_device: str = "gpu"
    http_port: int = 0
    """Port at which the workers may form a process group of their own. 0: any."""
    replicas: int = 0
    """Replicas of each server's rows on another server."""

    def of(self, kind: Kind) -> tuple[RoleProcess, ...]:
        """Return the processes of a kind, by index."""
        return tuple(process for process in self.processes if process.kind == kind)

    @property
    def machines(self) -> tuple[str, ...]:
        """The machines, each once, in the order of the command line."""
        return tuple(dict.fromkeys(process.machine for process in self.processes))

    def endpoints(self, kind: Kind) -> str:
        """Return the endpoints of a kind, separated by commas."""
        return ",".join(process.endpoint for process in self.of(kind))

    def with_ports(self, find: Callable[[str], int]) -> RolePlan:
        """Return the plan with the missing ports as `find` returns them for a machine."""
        return replace(
            self,
            processes=tuple(replace(process, port=process.port or find(process.machine)) for process in self.processes),
        )

    def is_with_ports(self, other: RolePlan) -> bool:
        """Whether the other plan is this one with its missing ports filled in."""
        if len(self.processes) != len(other.processes):
            return False
        ports = iter([their.port for mine, their in zip(self.processes, other.processes, strict=True) if not mine.port])
        return self.with_ports(lambda _machine: next(ports)) == other


def is_asked_for(options: Mapping[str, Any]) -> bool:
    """Whether the command line describes a job with parameter servers."""
    return any(options[name] is not None for name in OPTIONS)


def plan(options: Mapping[str, Any]) -> RolePlan:
    """Return the plan that the options describe. Raises `ConfigError`."""
    servers = _processes("server", options["servers"], options["server_num"], "--servers", "--server_num")
    workers = _processes("worker", options["workers"], options["worker_num"], "--workers", "--worker_num")
    heter = _processes(
        "heter", options["heter_workers"], options["heter_worker_num"], "--heter_workers", "--heter_worker_num"
    )
    for name, processes in (("server", servers), ("worker", workers)):
        if not processes:
            raise ConfigError(
                f"a job with servers has both roles: say how many with --{name}_num, or which with --{name}s"
            )
    if options["ps_replicas"] and len(servers) < 2:
        raise ConfigError("--ps_replicas=1 needs two servers or more: copies are on another one")
    processes = _with_ports([*servers, *workers, *heter])
    taken: dict[str, RoleProcess] = {}
    for process in (process for process in processes if process.port):
        other = taken.setdefault(process.endpoint, process)
        if other is not process:
            raise ConfigError(
                f"{process.endpoint} is given to {other.name} and to {process.name}: give each a port of its own"
            )
    machines = {process.machine for process in processes}
    if len({_is_loopback(machine) for machine in machines}) > 1:
        raise ConfigError(f"{', '.join(sorted(machines))}: the others do not reach a loopback address")
    return RolePlan(
        tuple(processes), options["heter_devices"] or "gpu", options["http_port"] or 0, options["ps_replicas"] or 0
    )


def _processes(
    kind: Kind, listed: str | None, count: int | None, list_option: str, count_option: str
) -> list[RoleProcess]:
    if listed is None:
        return [RoleProcess(kind, index, _LOOPBACK, 0) for index in range(count or 0)]
    parsed = [_address(part, list_option) for part in listed.split(",") if part.strip()]
    if count is not None and count != len(parsed):
        raise ConfigError(
            f"{count_option}={count} is not the number of those in {list_option}, {len(parsed)}: leave it out"
        )
    return [RoleProcess(kind, index, machine, port) for index, (machine, port) in enumerate(parsed)]


def _address(text: str, option: str) -> tuple[str, int]:
    """Return machine and port; port 0: none is given."""
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


def _with_ports(processes: Sequence[RoleProcess]) -> list[RoleProcess]:
    """Give each process without a port the first one from `_FIRST_PORT` on that no other has on its machine.

    All machines must come to the same ports, so nothing is probed here. A job on the loopback address is on one machine
    only: its ports stay 0, and free ones are looked for later.
    """
    taken = {(process.machine, process.port) for process in processes}
    found = []
    for process in processes:
        port = process.port
        if not port and not _is_loopback(process.machine):
            port = next(port for port in range(_FIRST_PORT, 65536) if (process.machine, port) not in taken)
            taken.add((process.machine, port))
        found.append(RoleProcess(process.kind, process.index, process.machine, port))
    return found


def _is_loopback(machine: str) -> bool:
    try:
        return ipaddress.ip_address(machine).is_loopback
    except ValueError:
        return machine == "localhost"
