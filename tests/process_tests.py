"""Tests that start processes: they are recognised as they run, and get one second try.

What waits for real processes can fail because the machine was busy for a second. Such a failure must not cost a day,
and must not be hidden either. With `--rerun-alone FILE` a test that started a process and failed is run once more,
alone, after all others. If it passes then, it is *flaky*: its name is printed and added to FILE, and the outputs of
both runs are kept beside FILE. The run fails if a test fails twice, if a test fails that started no process, or if FILE
would hold more than three names. Several runs of pytest that share FILE share that limit. It also fails if a process
of pytest-xdist is lost, whatever it was doing.

Nothing is marked by hand. An audit hook sees what starts a process, in a test or in a fixture that the test uses.
"""

from __future__ import annotations

import re
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

import pytest

MAX_FLAKY = 3

_STARTS = frozenset({"subprocess.Popen", "os.fork", "os.forkpty", "os.posix_spawn", "os.spawn", "os.system"})
_SETUPS: list[pytest.FixtureDef[object]] = []
"""Fixtures that are being set up, the innermost last."""
_started_by: set[tuple[str, str]] = set()
"""Fixtures that outlive a test and started a process: where they are defined, and their names."""
_current: list[pytest.Item] = []
"""The test that runs, if one does."""
_has_started = pytest.StashKey[bool]()


def _on_audit_event(event: str, _arguments: tuple[object, ...]) -> None:
    if event not in _STARTS or not _current:
        return
    _current[-1].stash[_has_started] = True
    _started_by.update((each.baseid, each.argname) for each in _SETUPS if each.scope != "function")


@dataclass
class _Failure:
    """A test that failed: what was printed, and whether it started a process."""

    starts_process: bool = False
    printed: list[str] = field(default_factory=list)


class SecondTry:
    """Runs failed process tests again at the end of the session, and decides whether the session passes."""

    def __init__(self, names: Path) -> None:
        self._names = names
        self._failures: dict[str, _Failure] = {}
        self._is_incomplete = False
        """Whether a file could not be collected, or a process was lost: tests may not have run."""
        self._verdicts: list[str] = []

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        self._is_incomplete |= report.failed

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: object, error: object) -> None:
        if error is not None:
            self._is_incomplete = True
            self._verdicts.append(f"a process of pytest-xdist was lost: {node}: {error}")

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            failure = self._failures.setdefault(report.nodeid, _Failure())
            failure.starts_process |= getattr(report, "starts_process", False)
            failure.printed += [report.longreprtext, *(f"--- {name}\n{text}" for name, text in report.sections)]

    @pytest.hookimpl(trylast=True)  # the workers of pytest-xdist have ended then
    def pytest_sessionfinish(self, session: pytest.Session, exitstatus: int) -> None:
        if exitstatus == pytest.ExitCode.OK and self._is_incomplete:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED
        if exitstatus != pytest.ExitCode.TESTS_FAILED or not self._failures:
            return
        self._names.parent.mkdir(parents=True, exist_ok=True)
        before = len(self._names.read_text(encoding="utf-8").splitlines()) if self._names.exists() else 0
        strict = [name for name, failure in self._failures.items() if not failure.starts_process]
        if strict or before + len(self._failures) > MAX_FLAKY:
            self._verdicts += [f"not run again, for it starts no process: {name}" for name in strict]
            if not strict:
                self._verdicts.append(f"not run again: more than {MAX_FLAKY} tests would be flaky ({before} before)")
            return
        all_pass = all([self._passes_alone(session.config, name) for name in self._failures])  # noqa: C419 - each is tried
        if all_pass and not self._is_incomplete:
            session.exitstatus = pytest.ExitCode.OK

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        if self._verdicts:
            terminalreporter.section("second tries")
            for verdict in self._verdicts:
                terminalreporter.line(verdict)

    def _passes_alone(self, config: pytest.Config, name: str) -> bool:
        stem = re.sub(r"[^\w.-]+", "-", name)[-100:]
        first, second = (self._names.parent / f"{stem}.{which}.log" for which in ("first", "second"))
        first.write_text("\n".join(self._failures[name].printed), encoding="utf-8")
        began_at = time.monotonic()
        with second.open("wb") as output:
            argv = [sys.executable, "-m", "pytest", "-n0", "-p", "no:cacheprovider", name]
            code = subprocess.run(argv, cwd=config.rootpath, stdout=output, stderr=output, check=False).returncode
        if code == 0 and b"1 passed" not in second.read_bytes():
            code = pytest.ExitCode.NO_TESTS_COLLECTED  # it was skipped
        told = (
            f"{name}: failed, then {'passed' if code == 0 else 'failed'} alone in {time.monotonic() - began_at:.1f} s"
        )
        self._verdicts.append(f"{'FLAKY' if code == 0 else 'FAILED TWICE'} {told} ({first}, {second})")
        if code == 0:
            with self._names.open("a", encoding="utf-8") as names:
                names.write(f"{name}\n")
        return code == 0


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--rerun-alone",
        type=Path,
        metavar="FILE",
        help="run failed process tests once more, alone; add the names of those that pass then to FILE",
    )


def pytest_configure(config: pytest.Config) -> None:
    sys.addaudithook(_on_audit_event)
    names: Path | None = config.getoption("--rerun-alone")
    if names is not None and not hasattr(config, "workerinput"):
        config.pluginmanager.register(SecondTry(names))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> object:
    _current.append(item)
    try:
        return (yield)
    finally:
        _current.pop()


@pytest.hookimpl(wrapper=True)
def pytest_fixture_setup(fixturedef: pytest.FixtureDef[object]) -> object:
    _SETUPS.append(fixturedef)
    try:
        return (yield)
    finally:
        _SETUPS.pop()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> pytest.TestReport:
    report: pytest.TestReport = yield
    report.starts_process = item.stash.get(_has_started, False) or _uses_process(item)
    return report


def _uses_process(item: pytest.Item) -> bool:
    """Whether a fixture of this test started a process for an earlier one."""
    names = item._request.fixturenames if isinstance(item, pytest.Function) else []
    return any(name in names and item.nodeid.startswith(base) for base, name in _started_by)
