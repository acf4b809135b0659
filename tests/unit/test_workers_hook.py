"""Which commands can be held before their script, and how much memory there is for those that wait."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from agent.workers import exit_causes, node_memory
from agent.workers.standby_hook import StandbyHook, takes_hook

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
def test_only_a_command_of_which_python_surely_runs_the_hook_is_held(argv: tuple[str, ...], *, is_taken: bool) -> None:
    """Else a process that should wait would run the script unasked."""
    assert takes_hook(argv) == is_taken


def test_what_a_script_wrote_into_the_list_of_its_imports_is_left_out() -> None:
    hook = StandbyHook(None)
    (fd,) = hook.fds.values()
    text = b"json\ntorch.nn\n; rm -rf\n../x\n\n"
    with open(fd, "wb", closefd=False) as file:
        file.write(len(text).to_bytes(8, "little") + text)
    assert hook.imports().modules == ("json", "torch.nn")
    hook.close()


@pytest.mark.parametrize(
    ("is_v2", "files", "room"),
    [
        (True, {"memory.max": "1000", "memory.current": "700", "memory.stat": "anon 1\ninactive_file 200\n"}, 500),
        (True, {"memory.max": "1000", "memory.current": "1100"}, 0),
        (True, {"memory.max": "max", "memory.current": "700"}, (1 << 60) - 700),
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
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    assert exit_causes.Level(str(tmp_path), is_v2=is_v2).room_bytes() == room


def test_the_narrowest_cgroup_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    levels = []
    for name, limit in (("inner", 5000), ("outer", 900)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "memory.max").write_text(str(limit))
        levels.append(exit_causes.Level(str(tmp_path / name), is_v2=True))
    monkeypatch.setattr(node_memory, "memory_levels", lambda: levels)
    assert node_memory.available_bytes() == 900
    monkeypatch.undo()
    assert node_memory.available_bytes() > 1 << 20
