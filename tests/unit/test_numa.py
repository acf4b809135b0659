"""The CPUs of ranks, on a machine with two sockets, each with two nodes of two cores with two threads."""

from __future__ import annotations

from pathlib import Path

import pytest

from agent.errors import ConfigError
from agent.workers.numa import Cpu, bind, node_of_gpu, parse_cpus, read_cpus

ALL = range(16)


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text + "\n")


@pytest.fixture
def system(tmp_path: Path) -> Path:
    """CPU n and n + 8 are threads of one core; cores 2m and 2m + 1 belong to node m, and share a cache."""
    for node in range(4):
        first = 2 * node
        write(tmp_path / "node" / f"node{node}" / "cpulist", f"{first}-{first + 1},{first + 8}-{first + 9}")
    for cpu in ALL:
        core = cpu % 8
        place = tmp_path / "cpu" / f"cpu{cpu}"
        write(place / "topology" / "physical_package_id", str(core // 4))
        write(place / "topology" / "thread_siblings_list", f"{core},{core + 8}")
        write(place / "cache" / "index0" / "shared_cpu_list", f"{core},{core + 8}")
        write(place / "cache" / "index3" / "shared_cpu_list", f"{core},{core + 8}")
    return tmp_path


def test_a_list_of_cpus() -> None:
    assert parse_cpus("0-2,8\n") == [0, 1, 2, 8]
    assert parse_cpus("\n") == []


def test_the_machine_is_read(system: Path) -> None:
    cpus = read_cpus(ALL, system)
    assert {cpu.number for cpu in cpus} == set(ALL)
    assert Cpu(number=13, node=2, socket=1, core=(5, 13), cache=(5, 13)) in cpus
    assert {cpu.number for cpu in read_cpus([0, 5], system)} == {0, 5}, "a container may have only some"
    with pytest.raises(ConfigError, match=r"found none; leave the option out"):
        read_cpus(ALL, system / "none")


@pytest.mark.parametrize(
    ("how", "expected"),
    [
        ("node", [(0, 1, 8, 9), (0, 1, 8, 9), (4, 5, 12, 13)]),
        ("socket", [(0, 1, 2, 3, 8, 9, 10, 11)] * 2 + [(4, 5, 6, 7, 12, 13, 14, 15)]),
        ("exclusive", [(0, 8), (1, 9), (4, 5, 12, 13)]),
        ("core-complex", [(0, 8), (1, 9), (4, 12)]),
    ],
)
def test_ranks_near_their_gpus(system: Path, how: str, expected: list[tuple[int, ...]]) -> None:
    """Two GPUs at node 0, one at node 2."""
    bound = bind(how, [0, 0, 2], read_cpus(ALL, system))  # type: ignore[arg-type]
    assert [tuple(sorted(each)) for each in bound] == expected


def test_more_ranks_than_cores_cannot_be_bound_exclusively(system: Path) -> None:
    with pytest.raises(ConfigError, match="3 ranks share a NUMA node with 2 cores"):
        bind("exclusive", [0, 0, 0], read_cpus(ALL, system))
    assert bind("core-complex", [0, 0, 0], read_cpus(ALL, system))[2] == (0, 8), "these may be shared"


def test_for_a_node_without_usable_cpus_all_cpus_are_used(system: Path) -> None:
    assert bind("node", [3], read_cpus([0, 1], system)) == [(0, 1)]


def test_the_numa_node_of_a_gpu(tmp_path: Path) -> None:
    write(tmp_path / "0000:3b:00.0" / "numa_node", "2")
    write(tmp_path / "0001:00:00.0" / "numa_node", "-1")
    assert node_of_gpu("00000000:3B:00.0", tmp_path) == 2
    assert node_of_gpu("00000001:00:00.0", tmp_path) == 0
    assert node_of_gpu("00000000:FF:00.0", tmp_path) == 0
