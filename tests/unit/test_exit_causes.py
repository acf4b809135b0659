"""Causes of a worker's end from the kernel's log and counters.

The log's lines are as kernels and drivers wrote them.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from agent.workers import exit_causes
from agent.workers.exit_causes import ExitCauses, fatal_signal_of, gpu_error_in, oom_kill_in, parse_record

CGROUP_OOM = """\
4,2770,36863479099,-;python3 invoked oom-killer: gfp_mask=0xcc0(GFP_KERNEL), order=0, oom_score_adj=0
6,2771,36863479100,-;memory: usage 65536kB, limit 65536kB, failcnt 32
6,2775,36863479109,-;[  26353]     0 26353    55339    17913    16288     1625         0   204800        0             0 python3
6,2776,36863479115,-;oom-kill:constraint=CONSTRAINT_MEMCG,nodemask=(null),cpuset=/,mems_allowed=0,oom_memcg=/a,task_memcg=/a,task=python3,pid=26353,uid=0
3,2777,36863479149,-;Memory cgroup out of memory: Killed process 26353 (python3) total-vm:221356kB, anon-rss:65152kB, file-rss:6500kB, shmem-rss:0kB, UID:0 pgtables:200kB oom_score_adj:0
"""  # noqa: E501 - the kernel's
MACHINE_OOM = """\
3,1,500000,-;Out of memory: Killed process 26353 (python) total-vm:90221356kB, anon-rss:6515kB, UID:0 oom_score_adj:300
"""
OLD_MACHINE_OOM = "3,1,5000000,-;Out of memory: Kill process 26353 (python) score 905 or sacrifice child\n"


def entries(text: str) -> list[tuple[float, str]]:
    return [parse_record(line.encode()) for line in text.splitlines()]


def xid(text: str, at_s: float = 100.0) -> list[tuple[float, str]]:
    return [(at_s, f"NVRM: Xid ({text}")]


def test_a_record_has_its_time_and_its_text_without_details() -> None:
    record = b"6,339,5140900,-;NET: Registered; PF_INET\n SUBSYSTEM=net\n"
    assert parse_record(record) == (5.1409, "NET: Registered; PF_INET")


@pytest.mark.parametrize(
    ("log", "why"),
    [
        (CGROUP_OOM, "out of memory: its cgroup's limit of 64 MiB killed it"),
        (MACHINE_OOM, "out of memory: the kernel killed it"),
        (OLD_MACHINE_OOM, "out of memory: the kernel killed it"),
        ("6,1,5000000,-;oom_reaper: reaped process 26353 (python3), now anon-rss:0kB", ""),
    ],
)
def test_an_out_of_memory_kill_is_found_by_pid(log: str, why: str) -> None:
    assert oom_kill_in(entries(log), {26353}) == why
    assert not oom_kill_in(entries(log), {2635, 263530}), "another's"
    assert not oom_kill_in(entries(log), set())


@pytest.mark.parametrize(
    ("line", "why"),
    [
        (
            "PCI:0000:06:00): 79, GPU has fallen off the bus.",
            "GPU error Xid 79 (GPU has fallen off the bus) on PCI 0000:06:00",
        ),
        (
            "PCI:0000:3b:00): 79, pid='<unknown>', name=<unknown>, GPU has fallen off the bus.",
            "GPU error Xid 79 (GPU has fallen off the bus) on PCI 0000:3b:00",
        ),
        (
            "PCI:0000:10:1c): 63, pid=1896, Row Remapper: New row marked for remapping, reset gpu to activate.",
            "GPU error Xid 63 (ECC page retired or row remapped) on PCI 0000:10:1c",
        ),
        (
            "PCI:0000:3b:00): 31, pid=77, name=python, Ch 00000008, intr 00000000. MMU Fault: ENGINE GRAPHICS",
            "GPU error Xid 31 (GPU memory page fault) on PCI 0000:3b:00",
        ),
        (
            "0000:01:00): 31, Ch 0000000b, engmask 00000120",
            "GPU error Xid 31 (GPU memory page fault) on PCI 0000:01:00",
        ),
        (
            "PCI:0000:01:00): 62, 0096(1c54) 00000000 00000000",
            "GPU error Xid 62 (0096(1c54) 00000000 00000000) on PCI 0000:01:00",
        ),
        ("PCI:0000:3b:00): 31, pid=1234, name=python, Ch 00000008", ""),
        ("PCI:0000:3b:00): 45, pid=77, name=python, Ch 00000008", ""),
    ],
    ids=["79", "79-unknown", "63-of-another", "31", "31-old", "62", "31-of-another", "45"],
)
def test_a_gpu_error_is_reported_with_its_bus_id(line: str, why: str) -> None:
    """A hardware fault always counts; a process's fault only if it is this process; a cleanup never."""
    assert gpu_error_in(xid(line), {77}, now_s=101.0) == why


def test_without_comparable_pids_any_process_may_be_the_cause() -> None:
    line = xid("PCI:0000:3b:00): 31, pid=1234, name=python, Ch 00000008")
    assert "Xid 31" in gpu_error_in(line, set(), now_s=101.0)


@pytest.mark.parametrize(("age_s", "is_told"), [(0, True), (1790, True), (2000, False), (250_000, False)])
def test_a_gpu_error_that_was_survived_is_no_cause(age_s: float, is_told: bool) -> None:  # noqa: FBT001 - a row
    log = xid("PCI:0000:3b:00): 79, GPU has fallen off the bus.", at_s=1_000_000)
    assert bool(gpu_error_in(log, {77}, now_s=1_000_000 + age_s)) is is_told


def test_the_first_gpu_error_is_the_cause() -> None:
    log = [
        *xid("PCI:0000:3b:00): 45, pid=77, name=python, Ch 00000008"),
        *xid("PCI:0000:3b:00): 48, pid=77, name=python, DBE"),
        *xid("PCI:0000:3b:00): 79, GPU has fallen off the bus."),
    ]
    assert "Xid 48 (double-bit ECC error)" in gpu_error_in(log, {77}, now_s=101.0)


@pytest.mark.parametrize(
    ("status", "death"), [(9, 9), (137 << 8, 9), (135 << 8, 7), (1 << 8, 0), (255 << 8, 0), (0, 0)]
)
def test_a_shells_exit_code_shows_the_signal_of_its_child(status: int, death: int) -> None:
    assert fatal_signal_of(status) == death


class Host:
    """A file tree in place of /proc and /sys."""

    def __init__(self, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.root = root
        really = exit_causes._read

        def read(path: str) -> str:
            return really(path if path.startswith(str(root)) else f"{root}{path}")

        monkeypatch.setattr(exit_causes, "_read", read)
        monkeypatch.setattr(exit_causes, "_KERNEL_LOG", "/no/log")

    def write(self, path: str, text: str) -> None:
        file = self.root / path.lstrip("/")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)

    def v2(self, kills: int, *, hits: int, above: int) -> None:
        """A container of 1.5 GiB in a machine's cgroup of 4 GiB."""
        self.write("proc/self/cgroup", "0::/kube/job\n")
        self.write("proc/self/mountinfo", f"31 23 0:28 / {self.root}/cg rw - cgroup2 cgroup2 rw\n")
        self.write("cg/kube/job/memory.events", f"low 0\nhigh 0\nmax 9\noom {hits}\noom_kill {kills}\n")
        self.write("cg/kube/job/memory.max", f"{3 << 29}\n")
        self.write("cg/kube/memory.events", f"low 0\nhigh 0\nmax 9\noom {above}\noom_kill {kills}\n")
        self.write("cg/kube/memory.max", f"{4 << 30}\n")

    def v1(self, kills: int, *, hits: int) -> None:
        """As in Docker without a cgroup namespace: the mount shows only the container's part."""
        self.write("proc/self/cgroup", "9:name=systemd:/docker/f5\n4:memory:/docker/f5\n0::/\n")
        pids = f"31 23 0:27 /docker/f5 {self.root}/pids rw - cgroup cgroup rw,pids\n"
        self.write("proc/self/mountinfo", pids + f"31 23 0:28 /docker/f5 {self.root}/mem rw - cgroup x rw,memory\n")
        self.write("mem/memory.oom_control", f"oom_kill_disable 0\nunder_oom 0\noom_kill {kills}\n")
        self.write("mem/memory.failcnt", f"{hits}\n")
        self.write("mem/memory.limit_in_bytes", f"{512 << 20}\n")


@pytest.fixture
def host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Host:
    return Host(tmp_path, monkeypatch)


def test_without_the_kernels_log_the_cgroups_counter_is_used(host: Host) -> None:
    host.v2(kills=3, hits=1, above=1)
    examined = ExitCauses()
    assert not examined.explain(77, 9, ""), "nothing of the kind happened since"
    host.v2(kills=4, hits=2, above=2)
    assert examined.explain(77, 9, "") == "out of memory: its cgroup's limit of 1.5 GiB killed it"
    assert not examined.explain(77, 1 << 8, ""), "it was not killed"


def test_the_limit_that_was_hit_may_be_one_further_up(host: Host) -> None:
    host.v2(kills=3, hits=1, above=1)
    examined = ExitCauses()
    host.v2(kills=4, hits=1, above=2)
    assert examined.explain(77, 9, "") == "out of memory: its cgroup's limit of 4 GiB killed it"


def test_the_machines_memory_may_be_what_ran_out(host: Host) -> None:
    host.v2(kills=3, hits=1, above=1)
    examined = ExitCauses()
    host.v2(kills=4, hits=1, above=1)
    assert examined.explain(77, 9, "") == "out of memory: the kernel killed it"


def test_the_counters_of_cgroup_v1_are_used_too(host: Host) -> None:
    host.v1(kills=0, hits=7)
    examined = ExitCauses()
    host.v1(kills=1, hits=8)
    for status in (9, 137 << 8):
        assert examined.explain(77, status, "") == "out of memory: its cgroup's limit of 512 MiB killed it"


def test_the_kill_of_a_data_loader_counts_as_the_workers_own(host: Host) -> None:
    host.v1(kills=0, hits=7)
    examined = ExitCauses()
    host.v1(kills=1, hits=8)
    words = "RuntimeError: DataLoader worker (pid 4711) is killed by signal: Killed. "
    assert "limit of 512 MiB" in examined.explain(77, 1 << 8, words)


def test_without_sources_no_cause_is_known(host: Host) -> None:
    examined = ExitCauses()
    assert not examined.explain(77, 9, "")
    assert not list(host.root.iterdir())


def test_the_kernels_log_overrides_the_counter(host: Host, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A helper in the same container may have been killed, but a shell's child is known only by the counter."""
    log = tmp_path / "kmsg"
    log.write_text(MACHINE_OOM.replace("26353", "77"))
    monkeypatch.setattr(exit_causes, "_KERNEL_LOG", str(log))
    monkeypatch.setattr(exit_causes, "_are_kernel_pids", lambda: True)
    host.v1(kills=0, hits=7)
    examined = [ExitCauses() for _ in range(3)]
    host.v1(kills=1, hits=8)
    log.write_text(log.read_text() + MACHINE_OOM.replace("26353", "78"))
    monkeypatch.setattr(exit_causes._KernelLog, "read", whole(exit_causes._KernelLog.read))
    assert examined[0].explain(77, 9, "") == "", "what was said before its start is not of it"
    assert examined[1].explain(78, 9, "") == "out of memory: the kernel killed it"
    assert "limit of 512 MiB" in examined[2].explain(79, 137 << 8, "")


def whole(read: Callable[..., Any]) -> Callable[..., Any]:
    """A file has an end where the kernel's log has no more entries yet."""
    return lambda log: (read(log)[0], True)


@pytest.mark.parametrize(
    ("blocks", "free", "why"),
    [
        (16_384, 0, "out of shared memory: /dev/shm is full (64 MiB)"),
        (16_384, 16_000, "most likely out of shared memory: /dev/shm has no more than 64 MiB"),
        (1 << 22, 1 << 21, ""),
    ],
)
def test_a_bus_error_is_explained_by_full_shared_memory(
    host: Host, monkeypatch: pytest.MonkeyPatch, blocks: int, free: int, why: str
) -> None:
    """SIGBUS of the rank or of its data loader.

    Its own memory is free again by then, so a small file system is suspected.
    """
    seen = os.statvfs_result((4096, 4096, blocks, free, free, 0, 0, 0, 0, 255))
    monkeypatch.setattr(os, "statvfs", lambda _path: seen)
    loader = "RuntimeError: DataLoader worker (pid 4711) is killed by signal: Bus error. It is possible that"
    assert ExitCauses().explain(77, 7, "") == why
    assert ExitCauses().explain(77, 1 << 8, loader) == why
    assert ExitCauses().explain(77, 1 << 8, "ERROR: Unexpected bus error encountered in worker. This") == why
    assert not ExitCauses().explain(77, 11, "")
    assert not list(host.root.iterdir())
