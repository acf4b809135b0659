"""Which commands can be held before their script, and how much memory is free for standbys."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from agent.workers.standby_hook import StandbyHook, takes_hook
from trainer_runtime.free_memory import free_memory

PYTHON = sys.executable


@pytest.mark.parametrize(
    ("argv", "is_taken"),
    [
        ((PYTHON, "train.py"), True),
        ((PYTHON, "-u", "-W", "error", "-Xdev", "-OO", "train.py", "-c"), True),
        ((PYTHON, "-X", "utf8", "-m", "package.train", "--np=2"), True),
        ((PYTHON, "-c", "print()"), False),
        ((PYTHON, "-I", "train.py"), False),
        ((PYTHON, "-E", "train.py"), False),
        ((PYTHON, "-uS", "train.py"), False),
        ((PYTHON, "-i", "train.py"), False),
        ((PYTHON, "-"), False),
        ((PYTHON,), False),
        ((PYTHON, "-W"), False),
        (("python-of-another-environment", "train.py"), False),
        (("/bin/sh", "train.sh"), False),
    ],
)
def test_only_a_command_for_which_python_surely_runs_the_hook_is_held(argv: tuple[str, ...], *, is_taken: bool) -> None:
    """Otherwise a standby would run the script unasked."""
    assert takes_hook(argv) == is_taken


def test_invalid_names_in_the_list_of_imports_are_left_out() -> None:
    hook = StandbyHook(None)
    (fd,) = hook.fds.values()
    text = b"json\ntorch.nn\n; rm -rf\n../x\n\n"
    with open(fd, "wb", closefd=False) as file:
        file.write(len(text).to_bytes(8, "little") + text)
    assert hook.imports().modules == ("json", "torch.nn")
    hook.close()


def write_files(root: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


@pytest.mark.parametrize(
    ("is_v2", "files", "room"),
    [
        (True, {"memory.max": "1000", "memory.current": "700", "memory.stat": "anon 1\ninactive_file 200\n"}, 500),
        (True, {"memory.max": "1000", "memory.current": "1100", "memory.stat": "inactive_file 0\n"}, 0),
        (True, {"memory.max": "max", "memory.current": "700", "memory.stat": "inactive_file 0\n"}, 9 << 20),
        (
            False,
            {
                "memory.limit_in_bytes": "1000",
                "memory.usage_in_bytes": "700",
                "memory.stat": "inactive_file 1\ntotal_inactive_file 100\n",
            },
            400,
        ),
    ],
)
def test_room_in_a_cgroup(tmp_path: Path, files: dict[str, str], room: int, *, is_v2: bool) -> None:
    write_files(
        tmp_path,
        {"proc/meminfo": "MemAvailable: 9216 kB\n", "proc/self/cgroup": "0::/job\n" if is_v2 else "5:memory:/job\n"},
    )
    write_files(tmp_path / "sys/fs/cgroup" / ("job" if is_v2 else "memory/job"), files)
    assert free_memory(tmp_path) == room


def test_the_narrowest_cgroup_counts(tmp_path: Path) -> None:
    write_files(tmp_path, {"proc/meminfo": "MemAvailable: 9216 kB\n", "proc/self/cgroup": "0::/outer/inner\n"})
    for name, limit in (("outer/inner", 5000), ("outer", 900)):
        files = {"memory.max": str(limit), "memory.current": "0", "memory.stat": "inactive_file 0\n"}
        write_files(tmp_path / "sys/fs/cgroup" / name, files)
    assert free_memory(tmp_path) == 900
    assert free_memory() > 1 << 20


def test_without_cgroups_the_kernels_estimate_counts(tmp_path: Path) -> None:
    write_files(tmp_path, {"proc/meminfo": "MemAvailable: 9216 kB\n"})
    assert free_memory(tmp_path) == 9 << 20
