"""The process that watches a job, as the agent starts it: the agent continues whatever happens to the process."""

from __future__ import annotations

import subprocess
import threading
import urllib.request
from collections.abc import Iterator
from contextlib import closing, suppress
from pathlib import Path
from socket import socket
from typing import Any

import psutil
import pytest
from integration.conftest import PATIENCE_S
from ports import free_port
from structlog.testing import capture_logs

from agent.rehearse.cluster import wait_for
from agent.store.access import ANONYMOUS
from agent.web import page_process
from agent.web.address import listen
from agent.web.page_process import StartMessage

pytest.importorskip("uvicorn", reason="the extra `web` is not installed")


@pytest.fixture
def listener() -> Iterator[socket]:
    with listen("127.0.0.1", 0) as opened:
        yield opened


def start_message(listener: socket) -> StartMessage:
    """Return the start message for a job whose etcd does not run."""
    return StartMessage(
        listener=listener.fileno(),
        events=None,
        endpoints=(f"127.0.0.1:{free_port()}",),
        credentials=ANONYMOUS,
        job_id="job",
        node_id="a",
        since=0.0,
        is_restart=False,
        token=None,
    )


def is_served(listener: socket) -> bool:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{listener.getsockname()[1]}/healthz", timeout=1.0) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False


def watchers() -> list[psutil.Process]:
    """Return the page processes that this process has started."""
    found = []
    for each in psutil.Process().children():
        with suppress(psutil.NoSuchProcess):  # it has just ended
            if "agent.web" in each.cmdline():
                found.append(each)
    return found


def test_what_lies_in_the_working_directory_is_not_taken_for_ours(
    listener: socket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A project may have a package `agent` of its own."""
    for name in ("agent", "h11"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text("raise SystemExit('this is the project`s own')")
    monkeypatch.chdir(tmp_path)
    with closing(page_process._PageProcess(start_message(listener), {})):
        wait_for(lambda: is_served(listener), PATIENCE_S, "the page")


def test_one_that_cannot_be_started_or_dies_is_followed_by_another(
    listener: socket, monkeypatch: pytest.MonkeyPatch
) -> None:
    start, failures = subprocess.Popen, [BlockingIOError(11, "Resource temporarily unavailable")]

    def start_at_last(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - as Popen
        if failures:
            raise failures.pop()
        return start(*args, **kwargs)

    monkeypatch.setattr(page_process.subprocess, "Popen", start_at_last)
    monkeypatch.setattr(page_process, "_RESTART_DELAY_S", 0.05)
    monkeypatch.setattr(threading, "excepthook", lambda failed: pytest.fail(f"the agent would end: {failed}"))
    with capture_logs() as said, closing(page_process._PageProcess(start_message(listener), {})):
        wait_for(lambda: is_served(listener), PATIENCE_S, "the page")
        (first,) = watchers()
        first.kill()
        wait_for(lambda: watchers() not in ([], [first]) and is_served(listener), PATIENCE_S, "the page again")
    assert [each["event"].partition(";")[0] for each in said] == [
        "the process that watches the job cannot be started (Resource temporarily unavailable)",
        "the process that watches the job has ended with code -9",
    ]
    assert watchers() == []


def test_one_that_is_ended_at_once_leaves_nothing(listener: socket) -> None:
    for _ in range(3):
        page_process._PageProcess(start_message(listener), {}).close()
    assert watchers() == []
