"""Binds ranks to CPUs near their GPUs, like torchrun's `--numa-binding` (torch 2.13).

    node            all CPUs of the NUMA node of its GPU
    socket          all CPUs of that node's socket
    exclusive       whole cores of that node, divided among the ranks whose GPUs are there
    core-complex    CPUs of that node that share a last-level cache, another one for each rank if there are as many

A rank with several GPUs is placed by the first one. Ranks without GPUs are distributed over the nodes.
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from agent.errors import ConfigError

NumaBinding = Literal["node", "socket", "exclusive", "core-complex"]
_SYSTEM = Path("/sys/devices/system")
_PCI = Path("/sys/bus/pci/devices")


@dataclass(frozen=True)
class Cpu:
    """A logical CPU, and the hardware that it shares with others."""

    number: int
    node: int
    socket: int
    core: tuple[int, ...]
    """All logical CPUs of its core."""
    cache: tuple[int, ...]
    """All logical CPUs that share its last-level cache."""


def read_cpus(allowed: Iterable[int], system: Path = _SYSTEM) -> tuple[Cpu, ...]:
    """Return the usable CPUs of this machine. Raises `ConfigError` if the system does not list its NUMA nodes."""
    found = []
    usable = set(allowed)
    for place in sorted((system / "node").glob("node[0-9]*"), key=lambda path: int(path.name[4:])):
        numbers = [number for number in parse_cpus((place / "cpulist").read_text()) if number in usable]
        found += [_read_cpu(system / "cpu" / f"cpu{number}", number, int(place.name[4:])) for number in numbers]
    if not found:
        raise ConfigError(f"--numa_binding: wanted NUMA nodes in {system}/node, found none; leave the option out")
    return tuple(found)


def node_of_gpu(bus_id: str, pci: Path = _PCI) -> int:
    """Return the NUMA node of a GPU, by its PCI bus id in the form of `nvidia-smi` (`00000000:3B:00.0`)."""
    domain, _, rest = bus_id.lower().partition(":")
    try:
        node = int((pci / f"{domain[-4:]}:{rest}" / "numa_node").read_text())
    except (OSError, ValueError):
        node = -1
    return max(node, 0)  # -1: the machine has a single node, or does not report it


def bind(how: NumaBinding, rank_nodes: Sequence[int], cpus: Sequence[Cpu]) -> list[tuple[int, ...]]:
    """Return the CPUs of each rank.

    Args:
        how: the kind of binding.
        rank_nodes: each rank's NUMA node.
        cpus: all usable CPUs of this machine.
    """
    ranks_of: dict[int, list[int]] = defaultdict(list)
    for rank, node in enumerate(rank_nodes):
        ranks_of[node].append(rank)
    bound: list[tuple[int, ...]] = [()] * len(rank_nodes)
    for node, ranks in ranks_of.items():
        local_cpus = [cpu for cpu in cpus if cpu.node == node] or list(cpus)
        for place, rank in enumerate(ranks):
            bound[rank] = _choose_cpus(how, local_cpus, cpus, place, len(ranks))
    return bound


def bind_ranks(how: NumaBinding, nproc: int, bus_ids: Sequence[str]) -> list[tuple[int, ...]]:
    """Return the CPUs of each rank on this machine.

    Args:
        how: the kind of binding.
        nproc: number of ranks.
        bus_ids: bus ids of the GPUs, which the ranks share evenly; empty: no GPUs.

    Raises:
        ConfigError: the binding is impossible here.
    """
    cpus = read_cpus(os.sched_getaffinity(0))
    nodes = sorted({cpu.node for cpu in cpus})
    each = len(bus_ids) // nproc
    rank_nodes = [
        node_of_gpu(bus_ids[rank * each]) if each else nodes[rank * len(nodes) // nproc] for rank in range(nproc)
    ]
    return bind(how, rank_nodes, cpus)


def parse_cpus(text: str) -> list[int]:
    """Parse a CPU list: `0-2,8` is 0, 1, 2, 8."""
    found: list[int] = []
    for part in filter(None, text.strip().split(",")):
        first, _, last = part.partition("-")
        found += range(int(first), int(last or first) + 1)
    return found


def _choose_cpus(
    how: NumaBinding, local_cpus: Sequence[Cpu], cpus: Sequence[Cpu], place: int, count: int
) -> tuple[int, ...]:
    match how:
        case "node":
            chosen = local_cpus
        case "socket":
            chosen = [cpu for cpu in cpus if cpu.socket in {each.socket for each in local_cpus}]
        case "core-complex":
            caches = _groups(cpu.cache for cpu in local_cpus)
            chosen = [cpu for cpu in local_cpus if cpu.cache == caches[place % len(caches)]]
        case "exclusive":
            cores = _groups(cpu.core for cpu in local_cpus)
            if len(cores) < count:
                raise ConfigError(
                    f"--numa_binding=exclusive: {count} ranks share a NUMA node with {len(cores)} cores; choose another"
                )
            mine = cores[place * len(cores) // count : (place + 1) * len(cores) // count]
            chosen = [cpu for cpu in local_cpus if cpu.core in mine]
    return tuple(cpu.number for cpu in chosen)


def _groups(of_each: Iterable[tuple[int, ...]]) -> list[tuple[int, ...]]:
    return sorted(set(of_each))


def _read_cpu(place: Path, number: int, node: int) -> Cpu:
    last_cache = max(place.glob("cache/index[0-9]*"), key=lambda path: path.name, default=None)
    return Cpu(
        number=number,
        node=node,
        socket=int(_text(place / "topology" / "physical_package_id", "0")),
        core=tuple(parse_cpus(_text(place / "topology" / "thread_siblings_list", str(number)))),
        cache=tuple(parse_cpus(_text(last_cache / "shared_cpu_list", str(number)))) if last_cache else (number,),
    )


def _text(path: Path, default: str) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return default
