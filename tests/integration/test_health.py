"""Whether a node is fit to train, with real commands that pass, fail, hang, leave processes behind, and recover."""

from __future__ import annotations

import errno
import os
import queue
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from integration.conftest import PATIENCE_S, Job
from waiting import has_ended, wait_for

from agent.config import HealthConfig, parse_command
from agent.core.events import Event, HealthChecked
from agent.core.failures import Failure
from agent.diagnose import commands, health
from agent.diagnose.health import Health, gpu_query
from agent.errors import ConfigError
from agent.runtime.collective import _is_nodes_own

DEADLINE_S = 60


class Bench:
    """The health checks of a node, their results, and a directory for their commands."""

    def __init__(self, tmp: Path) -> None:
        self.tmp = tmp
        self.events: queue.Queue[Event] = queue.Queue()
        self.health: Health | None = None
        self.environ = {**os.environ, "PLACE": str(tmp), "ELASTIC_AGENT_ETCD_USER": "root"}

    def start(self, script: str = "", **changed: float) -> Health:
        command = ("sh", "-c", script) if script else ()
        self.health = Health(HealthConfig(command, **changed), self.environ, self.events.put)
        self.health.start()
        return self.health

    def trouble(self) -> str:
        event = self.events.get(timeout=DEADLINE_S)
        assert isinstance(event, HealthChecked)
        return event.trouble

    def program(self, name: str, script: str) -> None:
        """Install a program of that name first on PATH."""
        path = self.tmp / "bin" / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(f"#!/bin/sh\n{script}\n")
        path.chmod(0o755)

    def count(self, name: str = "runs") -> int:
        """Return how often a script has written a line to that file."""
        path = self.tmp / name
        return len(path.read_text().splitlines()) if path.exists() else 0


@pytest.fixture
def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Bench]:
    made = Bench(tmp_path)
    monkeypatch.setattr(health, "_DEVICES", tmp_path)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    made.environ["PATH"] = os.environ["PATH"]
    yield made
    if made.health:
        made.health.close()


def with_gpu(bench: Bench, script: str) -> None:
    (bench.tmp / "nvidia0").touch()
    bench.program("nvidia-smi", script)


def test_a_node_without_anything_to_examine_is_fit(bench: Bench) -> None:
    bench.start()
    assert bench.trouble() == ""


def test_a_check_that_passes_is_reported_once(bench: Bench) -> None:
    """However often it runs, and whatever it prints."""
    examined = bench.start("echo run >> $PLACE/runs; echo fine; exit 0")
    assert bench.trouble() == ""
    for count in (2, 3):
        examined.check_again()
        wait_for(lambda: bench.count() == count, "the next run")  # noqa: B023 - called at once
    examined.close()
    bench.health = None
    assert bench.events.empty()


def test_a_failed_check_is_reported_with_its_last_line(bench: Bench) -> None:
    bench.start("echo looking; echo 'GPU 3:   too   hot' >&2; echo; exit 4")
    assert bench.trouble() == "GPU 3: too hot"


def test_a_check_that_fails_silently_is_reported_with_its_code(bench: Bench) -> None:
    bench.start("exit 4")
    assert bench.trouble() == "ended with code 4"


def test_a_check_that_is_killed_has_failed(bench: Bench) -> None:
    bench.start("kill -9 $$")
    assert bench.trouble() == "ended with code -9"


def test_a_check_that_cannot_be_run_has_failed(bench: Bench) -> None:
    bench.health = Health(HealthConfig(("/etc/passwd",)), bench.environ, bench.events.put)
    bench.health.start()
    assert bench.trouble() == "/etc/passwd cannot be run: Permission denied"


def test_a_check_that_hangs_is_ended_with_all_that_it_started(bench: Bench) -> None:
    bench.start("trap '' TERM; sleep 1000 & echo $! $$ >> $PLACE/pids; wait", timeout_s=10)
    assert bench.trouble() == "did not end within 10 s"
    child, own = map(int, (bench.tmp / "pids").read_text().split())
    wait_for(lambda: has_ended(child) and has_ended(own), "both to be gone")


def test_processes_left_by_a_check_delay_nothing_and_are_killed(bench: Bench) -> None:
    """One of its children keeps the output open, so it has no end."""
    began = time.monotonic()
    bench.start("sleep 1000 & echo $! >> $PLACE/pids; exit 0")
    assert bench.trouble() == ""
    assert time.monotonic() - began < DEADLINE_S / 2
    wait_for(lambda: has_ended(int((bench.tmp / "pids").read_text())), "it to be gone")


def test_a_check_that_prints_without_end_is_ended_in_time(bench: Bench) -> None:
    bench.start("yes", timeout_s=0.5)
    assert bench.trouble() == "did not end within 0.5 s"


def test_a_node_that_recovers_is_reported_and_one_that_fails_again_too(bench: Bench) -> None:
    """The node is checked again by itself while it is unfit, and only then."""
    (bench.tmp / "bad").touch()
    examined = bench.start("echo run >> $PLACE/runs; test ! -e $PLACE/bad", retry_s=0.05)
    assert bench.trouble() == "ended with code 1"
    wait_for(lambda: bench.count() >= 3, "it to be looked at again")
    (bench.tmp / "bad").unlink()
    assert bench.trouble() == ""
    seen = bench.count()
    (bench.tmp / "bad").touch()
    with pytest.raises(queue.Empty):
        bench.events.get(timeout=0.5)
    assert bench.count() == seen, "nobody asked"
    examined.check_again()
    assert bench.trouble() == "ended with code 1"


def test_a_request_during_a_check_is_answered_by_another(bench: Bench) -> None:
    """The check under way may have run before the failure."""
    os.mkfifo(bench.tmp / "go")
    examined = bench.start("echo run >> $PLACE/runs; read line < $PLACE/go")
    wait_for(lambda: bench.count() == 1, "the first run")
    examined.check_again()
    (bench.tmp / "go").write_text("go\n")
    assert bench.trouble() == ""
    wait_for(lambda: bench.count() == 2, "the second run")


def test_close_ends_a_check_at_once_and_posts_nothing(bench: Bench) -> None:
    examined = bench.start("echo $$ >> $PLACE/pids; exec sleep 1000")
    wait_for(lambda: bench.count("pids") == 1, "the check to run")
    began = time.monotonic()
    examined.close()
    bench.health = None
    assert time.monotonic() - began < DEADLINE_S / 2
    wait_for(lambda: has_ended(int((bench.tmp / "pids").read_text())), "it to be gone")
    assert bench.events.empty()


def test_a_check_gets_the_users_environment_without_the_keys_to_etcd(bench: Bench) -> None:
    bench.start('echo "$PLACE and ${ELASTIC_AGENT_ETCD_USER:-nobody}"; exit 1')
    assert bench.trouble() == f"{bench.tmp} and nobody"


def test_a_check_that_cannot_be_killed_has_failed_and_is_not_repeated(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Like a command that waits in the kernel for a driver. Here it is simply not killed."""
    monkeypatch.setattr(os, "killpg", lambda *_args: None)
    monkeypatch.setattr(commands, "_DIES_WITHIN_S", 0.05)
    os.mkfifo(bench.tmp / "go")
    bench.start("echo run >> $PLACE/runs; read line < $PLACE/go", timeout_s=0.2, retry_s=0.05)
    assert bench.trouble() == "did not end within 0.2 s"
    assert bench.trouble() == "hangs, and cannot be killed"
    wait_for(lambda: bench.count() == 1, "the shell to have come so far")
    (bench.tmp / "go").write_text("go\n" * 3)
    monkeypatch.undo()
    wait_for(lambda: bench.count() == 2, "the next run, once that one has ended")


def test_a_check_that_ends_as_another_user_does_not_end_the_agent(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`sudo` does: the kernel does not let other users send a signal to its zombie."""

    def refuse(*_args: object) -> None:
        raise PermissionError(errno.EPERM, os.strerror(errno.EPERM))

    monkeypatch.setattr(os, "killpg", refuse)
    bench.start("true")
    assert bench.trouble() == ""


UUID = "8f2ab6a4-3f0b-7f1c-9d1e-0c6a4b5d7e90"
GOOD = "0, GPU-5a, 34, 81559 MiB\n1, GPU-6b, 35, 81559 MiB"


@pytest.mark.parametrize(
    ("script", "trouble"),
    [
        (f"echo '{GOOD}'", ""),
        (f"echo '{GOOD}'; exit 15", "nvidia-smi: 1, GPU-6b, 35, 81559 MiB"),
        ("echo '0, GPU-5a, ERR!, 81559 MiB'", "nvidia-smi: 0, GPU-5a, ERR!, 81559 MiB"),
        ("echo '0, GPU-5a, [Unknown Error], [GPU is lost]'", "nvidia-smi: 0, GPU-5a, [Unknown Error], [GPU is lost]"),
        (
            "echo 'Unable to determine the device handle for GPU0000:3B:00.0: Unknown Error'; exit 255",
            "nvidia-smi: Unable to determine the device handle for GPU0000:3B:00.0: Unknown Error",
        ),
        ("exit 9", "nvidia-smi: ended with code 9"),
    ],
)
def test_gpus_must_answer(bench: Bench, script: str, trouble: str) -> None:
    """With messages of `nvidia-smi`, played by a script."""
    with_gpu(bench, script)
    bench.start()
    assert bench.trouble() == trouble


def test_gpus_that_do_not_answer_in_time_have_failed(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(health, "_GPU_WITHIN_S", 0.3)
    with_gpu(bench, "exec sleep 1000")
    bench.start()
    assert bench.trouble() == "nvidia-smi: did not end within 0.3 s"


def test_both_checks_must_pass(bench: Bench) -> None:
    with_gpu(bench, "exit 9")
    bench.start("exit 0")
    assert bench.trouble() == "nvidia-smi: ended with code 9"


@pytest.mark.parametrize(
    ("visible", "asked"),
    [
        (None, ""),
        ("0,1", "--id=0,1"),
        (f"GPU-{UUID}", f"--id=GPU-{UUID}"),
        ("GPU-5a", ""),
        (f"MIG-{UUID}", ""),
        ("", None),
        ("-1", None),
    ],
)
def test_only_gpus_that_workers_may_use_are_queried(bench: Bench, visible: str | None, asked: str | None) -> None:
    """No GPU is visible: the driver is not asked. Names that `nvidia-smi` does not know: all GPUs are checked."""
    with_gpu(bench, "exit 0")
    query = gpu_query({} if visible is None else {"CUDA_VISIBLE_DEVICES": visible})
    if asked is None:
        assert query == ()
    else:
        assert query[0] == "nvidia-smi"
        assert [word for word in query if word.startswith("--id")] == ([asked] if asked else [])


def test_without_a_gpu_nothing_is_queried(bench: Bench) -> None:
    """The program may exist anyway: images are often the same for all machines."""
    bench.program("nvidia-smi", "exit 9")
    assert gpu_query({}) == ()


SLEEP = ("--no_python", "sleep", "1000")
"""The command that nodes run here: they need not learn anything."""


def note_on(job: Job, name: str) -> str:
    """Return the remark of `status` on a node; empty if the node is missing."""
    return next((str(node["note"]) for node in job.status()["nodes"] if node["node_id"] == name), "")


def members(job: Job) -> list[str]:
    """Return the nodes that train."""
    return [str(node["node_id"]) for node in job.status()["nodes"] if node["ranks"]]


def test_an_unfit_node_joins_as_such_and_the_others_train(job: Callable[..., Job]) -> None:
    """It reports itself as unfit, and leaves when it is asked to."""
    cluster = job()
    bad = cluster.start("bad", "1:2", SLEEP, ["--health_check=sh -c 'echo too hot; exit 1'"])
    wait_for(lambda: "waiting for" in bad.text(), "it to be registered, and to lead", PATIENCE_S)
    assert "its health check failed: too hot" in note_on(cluster, "bad"), bad.text()
    assert "this node is not fit to train" in bad.text()
    good = cluster.start("good", "1:2", SLEEP, ["--health_check=true"])
    wait_for(lambda: "1 rank on good" in good.text(), "the other to train alone", PATIENCE_S)
    assert members(cluster) == ["good"]
    bad.terminate()
    assert bad.wait(PATIENCE_S) == 0


def test_a_node_that_is_found_unfit_after_a_failure_is_left_out(job: Callable[..., Job], tmp_path: Path) -> None:
    cluster = job()
    check = f"--health_check=sh -c 'test ! -e {tmp_path}/broken || {{ echo memory errors; exit 1; }}'"
    nodes = {name: cluster.start(name, "1:2", SLEEP, [check] if name == "b" else []) for name in "ab"}
    wait_for(lambda: "2 ranks on " in nodes["b"].text(), "both to train", PATIENCE_S)
    (tmp_path / "broken").touch()
    nodes["b"].kill_worker()
    wait_for(lambda: "1 rank on a" in nodes["a"].text(), "it to be left out", PATIENCE_S)
    assert members(cluster) == ["a"]
    assert "its health check failed: memory errors" in note_on(cluster, "b")


@pytest.mark.parametrize(
    ("changed", "is_examined"),
    [
        ({}, True),
        ({"exit_code": None, "signal": 9}, True),
        ({"exit_code": 93}, True),
        ({"exit_code": 101}, False),
        ({"is_peer_lost": True}, False),
        ({"is_port_taken": True}, False),
        ({"unreadable": "the checkpoint"}, False),
    ],
)
def test_a_node_is_examined_after_failures_of_its_own(changed: dict[str, Any], *, is_examined: bool) -> None:
    """Not if another node's loss ended its worker, nor if the script asked for a restart."""
    failure = Failure(rank=0, local_rank=0, exit_code=1, signal=None, is_peer_lost=False, tail="", at=0.0)
    assert _is_nodes_own(msgspec.structs.replace(failure, **changed)) is is_examined
    assert not _is_nodes_own(None)


def test_a_node_leaves_on_request_during_its_first_check(job: Callable[..., Job], tmp_path: Path) -> None:
    """It never joined, and ends the check that is under way."""
    cluster = job()
    check = f"--health_check=sh -c 'echo $$ > {tmp_path}/pid; exec sleep 1000'"
    node = cluster.start("a", "1", SLEEP, [check])
    wait_for(lambda: (tmp_path / "pid").exists() and (tmp_path / "pid").read_text(), "the check", PATIENCE_S)
    node.terminate()
    node.wait(PATIENCE_S)
    wait_for(lambda: has_ended(int((tmp_path / "pid").read_text())), "the check to be gone")
    assert "joined" not in node.text()


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("no-such-program -x", "--health_check: no program 'no-such-program' on PATH"),
        ("sh -c 'x", """--health_check must be a command, not "sh -c 'x": No closing quotation"""),
        (" ", "--health_check: no program ' ' on PATH"),
    ],
)
def test_an_invalid_check_is_refused(text: str, words: str) -> None:
    with pytest.raises(ConfigError) as refused:
        parse_command("--health_check", text)
    assert str(refused.value) == words


@pytest.mark.parametrize("timeout_s", [0, -1, float("inf"), float("nan")])
def test_a_check_has_a_time_limit(timeout_s: float) -> None:
    with pytest.raises(ConfigError, match="--health_timeout must be more than 0 s, not"):
        HealthConfig(("true",), timeout_s)


def test_a_check_is_split_as_a_shell_would() -> None:
    assert parse_command("--health_check", "sh -c 'exit 1'") == ("sh", "-c", "exit 1")
    assert parse_command("--health_check", None) == ()
