"""A process test that fails gets one second try, alone; nothing else does, and nothing is hidden."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parents[1]
FAILS_ONCE = """
import subprocess, sys
from pathlib import Path
SEEN = Path(__file__).with_suffix(".seen")
def test_fails_once():
    subprocess.run([sys.executable, "-c", ""], check=True)
    was_there = SEEN.exists()
    SEEN.touch()
    assert was_there, "the machine was busy"
"""
FAILS_TWICE = """
import subprocess, sys
def test_fails_twice():
    subprocess.run([sys.executable, "-c", ""], check=True)
    assert False
"""
PURE_FAILS = "def test_pure(): assert False"
USES_A_SESSIONS_PROCESS = """
import subprocess, sys
from pathlib import Path
import pytest
SEEN = Path(__file__).with_suffix(".seen")
@pytest.fixture(scope="session")
def server():
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        yield child
def test_first(server): pass
def test_second(server):
    was_there = SEEN.exists()
    SEEN.touch()
    assert was_there
"""

ENDS_ITS_PROCESS_LATER = """
import os, time, threading
def test_ends_later():
    if "PYTEST_XDIST_WORKER" in os.environ: threading.Timer(0.3, os._exit, [1]).start()
def test_meanwhile(): time.sleep(1)
"""


@pytest.fixture
def run(tmp_path: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Run a suite of such files; the names of flaky tests go to `flaky`."""
    (tmp_path / "conftest.py").write_text('pytest_plugins = ["process_tests"]', encoding="utf-8")

    def run(*sources: str, workers: int = 0) -> subprocess.CompletedProcess[str]:
        for number, source in enumerate(sources):
            (tmp_path / f"test_{number}.py").write_text(source, encoding="utf-8")
        environ = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
        return subprocess.run(
            [sys.executable, "-m", "pytest", f"-n{workers}", "--import-mode=importlib", "--rerun-alone=flaky"],
            cwd=tmp_path,
            env={**environ, "PYTHONPATH": f"{TESTS.parent}{os.pathsep}{TESTS}"},
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )

    return run


@pytest.mark.parametrize("workers", [0, 2])
def test_one_that_fails_once_is_named_flaky_and_passes(
    run: Callable[..., subprocess.CompletedProcess[str]], tmp_path: Path, workers: int
) -> None:
    done = run(FAILS_ONCE, workers=workers)
    assert done.returncode == 0, done.stdout
    assert "FLAKY test_0.py::test_fails_once: failed, then passed alone" in done.stdout
    assert (tmp_path / "flaky").read_text().splitlines() == ["test_0.py::test_fails_once"]
    assert "the machine was busy" in next(tmp_path.glob("*.first.log")).read_text()
    assert "1 passed" in next(tmp_path.glob("*.second.log")).read_text()


def test_a_file_that_cannot_be_collected_fails_the_run(run: Callable[..., subprocess.CompletedProcess[str]]) -> None:
    done = run("import no_such_module", FAILS_ONCE, workers=2)
    assert done.returncode != 0, done.stdout
    assert "no_such_module" in done.stdout


def test_a_second_try_that_is_skipped_does_not_pass(run: Callable[..., subprocess.CompletedProcess[str]]) -> None:
    done = run(
        FAILS_ONCE.replace(
            "    assert was_there", "    if was_there: import pytest; pytest.skip('no')\n    assert was_there"
        )
    )
    assert done.returncode == 1, done.stdout
    assert "FAILED TWICE test_0.py::test_fails_once" in done.stdout


def test_one_that_fails_twice_fails_the_run(run: Callable[..., subprocess.CompletedProcess[str]]) -> None:
    done = run(FAILS_ONCE, FAILS_TWICE)
    assert done.returncode == 1, done.stdout
    assert "FLAKY test_0.py::test_fails_once" in done.stdout
    assert "FAILED TWICE test_1.py::test_fails_twice" in done.stdout


def test_a_pure_one_is_never_run_again(run: Callable[..., subprocess.CompletedProcess[str]]) -> None:
    done = run(PURE_FAILS, FAILS_ONCE)
    assert done.returncode == 1, done.stdout
    assert "not run again, for it starts no process: test_0.py::test_pure" in done.stdout
    assert "FLAKY" not in done.stdout


def test_one_that_uses_a_process_of_its_session_is_a_process_test(
    run: Callable[..., subprocess.CompletedProcess[str]],
) -> None:
    done = run(USES_A_SESSIONS_PROCESS)
    assert done.returncode == 0, done.stdout
    assert "FLAKY test_0.py::test_second" in done.stdout


def test_a_process_that_is_lost_between_two_tests_fails_the_run(
    run: Callable[..., subprocess.CompletedProcess[str]],
) -> None:
    done = run(ENDS_ITS_PROCESS_LATER, ENDS_ITS_PROCESS_LATER, workers=2)
    assert done.returncode != 0, done.stdout
    assert "a process of pytest-xdist was lost" in done.stdout


def test_more_than_three_fail_the_run(run: Callable[..., subprocess.CompletedProcess[str]], tmp_path: Path) -> None:
    """Names of earlier runs count: one run of the suite is several runs of pytest."""
    (tmp_path / "flaky").write_text("one\ntwo\n", encoding="utf-8")
    done = run(FAILS_ONCE, FAILS_ONCE)
    assert done.returncode == 1, done.stdout
    assert "more than 3 tests would be flaky (2 before)" in done.stdout
