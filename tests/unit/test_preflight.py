"""Checks before the start: a limit that is too low, or a missing directory, is named in one line."""

from __future__ import annotations

import errno
import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from agent.errors import ConfigError
from agent.runtime import preflight
from agent.runtime.preflight import limit_behind, require_directory, require_room
from agent.workers import exit_causes
from agent.workers.exit_causes import limit_reached

FREE = resource.RLIM_INFINITY
NO_PROCESS = "its user may have no more than 99 processes and threads (ulimit -u)"


def room(nproc: int, *, brings_etcd: bool, **limits: int) -> str:
    """The error message about these limits; empty: they suffice."""
    told = {getattr(resource, f"RLIMIT_{name}"): value for name, value in limits.items()}
    try:
        require_room(nproc, brings_etcd=brings_etcd, limit=lambda which: (told.get(which, FREE),) * 2)
    except ConfigError as error:
        return str(error)
    return ""


def test_a_limit_without_room_is_named_with_what_to_do() -> None:
    assert room(1, brings_etcd=True, FSIZE=8192) == (
        "the limit of the size of a file is 8192 bytes; the agent and the etcd that it brings need 128 MiB, and the "
        "script more: ulimit -f unlimited, before the start"
    )
    assert "ulimit -v unlimited" in room(1, brings_etcd=True, AS=4 << 30)
    assert "the limit of open files is 64" in room(1, brings_etcd=True, NOFILE=64)
    assert "152: ulimit -n 152 or more" in room(8, brings_etcd=False, NOFILE=64)


def test_what_suffices_without_an_etcd_of_its_own_is_taken() -> None:
    assert not room(1, brings_etcd=False, NOFILE=40, AS=4 << 30, FSIZE=1 << 30, NPROC=100)
    assert not room(8, brings_etcd=True, NOFILE=1024)
    assert not room(8, brings_etcd=True)


def test_an_error_that_comes_of_a_limit_is_no_fault_of_ours() -> None:
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    said = limit_behind(OSError(errno.EMFILE, "Too many open files", "/proc/1/stat"))
    assert said.startswith(f"the limit of open files is {files}, which the agent has reached (")
    assert said.endswith("raise it (ulimit -n) before the start")
    assert not limit_behind(OSError(errno.ENOENT, "No such file or directory"))
    assert not limit_behind(ValueError("no such thing"))


def test_a_full_pipe_or_a_locked_file_is_no_limit_of_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    """These errors have the same errno as a fork that fails because of a limit."""
    monkeypatch.setattr(preflight.resource, "getrlimit", lambda _which: (77, 77))
    says = "raise BlockingIOError(11, 'Resource temporarily unavailable')"
    with pytest.raises(BlockingIOError) as raised:
        exec(says, {"__name__": "click"})  # noqa: S102 - as if raised there
    assert not limit_behind(raised.value)
    with pytest.raises(BlockingIOError) as raised:
        exec(says, {"__name__": "subprocess"})  # noqa: S102 - as above
    assert limit_behind(raised.value).startswith("the limit of processes and threads is 77")


def test_a_removed_working_directory_is_reported_in_one_line(tmp_path: Path) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    asks = f"""
import os
os.chdir({os.fspath(gone)!r})
os.rmdir({os.fspath(gone)!r})
from agent.errors import ConfigError
from agent.runtime.preflight import require_directory
try:
    require_directory()
except ConfigError as error:
    print(error)
"""
    environ = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    # -P: Python 3.13.0 cannot import modules if the removed directory is in its path, as it is of `-c` only
    line = [sys.executable, "-P", "-c", asks]
    said = subprocess.run(line, env=environ, capture_output=True, text=True, check=True)
    assert said.stdout == "the working directory has been removed: change to one that is there\n"
    require_directory()


@pytest.mark.parametrize(
    ("death", "words", "why"),
    [
        (0, "OSError: [Errno 24] Too many open files: 'x'", "it may have no more than 77 files open (ulimit -n)"),
        (0, "OSError: [Errno 27] File too large", "a file may have no more than 8192 bytes (ulimit -f)"),
        (25, "", "a file may have no more than 8192 bytes (ulimit -f)"),
        (0, "ImportError: x.so: failed to map segment from shared object", ""),  # there is no such limit
        (24, "", ""),
        (0, "bash: fork: retry: Resource temporarily unavailable", NO_PROCESS),
        (0, "RuntimeError: can't start new thread", NO_PROCESS),
        (
            0,
            "    self.pid = _fork_exec(\n        args)\nBlockingIOError: [Errno 11] Resource temporarily unavailable",
            NO_PROCESS,
        ),
        (0, "OSError: unable to lock file, errno = 11, error message = 'Resource temporarily unavailable'", ""),
        (0, "ValueError: no such thing", ""),
    ],
)
def test_the_end_of_a_worker_at_a_limit_names_the_limit(
    monkeypatch: pytest.MonkeyPatch, death: int, words: str, why: str
) -> None:
    limits = {resource.RLIMIT_NOFILE: 77, resource.RLIMIT_NPROC: 99, resource.RLIMIT_FSIZE: 8192}
    monkeypatch.setattr(exit_causes.resource, "getrlimit", lambda which: (limits.get(which, FREE), FREE))
    assert limit_reached(death, words) == why
