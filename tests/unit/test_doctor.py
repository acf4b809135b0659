"""Findings of the doctor about a machine; each problem is provoked."""

from __future__ import annotations

import re
import socket
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import pytest
from ports import free_port

from agent.doctor import local_checks, network_checks
from agent.doctor.facts import Facts, Finding
from agent.doctor.network_checks import MachineChecks
from agent.store.access import ANONYMOUS, Access

INTERFACES = {
    "lo": ("127.0.0.1", "::1"),
    "eth0": ("10.0.0.1", "fe80::1"),
    "ib0": ("192.168.7.1",),
    "docker0": ("172.17.0.1",),
    "br-0123456789ab": ("172.18.0.1",),
}


def test_a_line_states_what_was_found_and_what_to_do() -> None:
    assert Finding("a", "b").line == "ok     a: b"
    assert Finding("a", "b", "c").line == "WRONG  a: b; do: c"


def test_the_address_and_the_other_interfaces_are_named() -> None:
    found = local_checks.network("10.0.0.1", ["10.0.0.1"], INTERFACES)
    assert found.is_fine
    assert found.found == "10.0.0.1 on eth0 (there are also ib0 192.168.7.1: --address chooses)"
    assert local_checks.network("localhost", ["127.0.0.1"], INTERFACES).is_fine


@pytest.mark.parametrize(("ip", "name"), [("172.17.0.1", "docker0"), ("172.18.0.1", "br-0123456789ab")])
def test_a_bridge_inside_the_machine_is_no_address(ip: str, name: str) -> None:
    found = local_checks.network(ip, [ip], INTERFACES)
    assert found.found == f"{ip} is on {name}, a bridge inside this machine, which other machines cannot reach"
    assert found.do == "give --address: eth0 10.0.0.1, ib0 192.168.7.1"


def test_an_address_of_another_machine_is_noticed() -> None:
    found = local_checks.network("10.9.9.9", ["10.9.9.9"], INTERFACES)
    assert (found.found, found.is_fine) == ("10.9.9.9 is on no interface of this machine", False)


@pytest.mark.parametrize("name", ["GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"])
def test_an_interface_that_was_set_by_hand_must_have_the_address(name: str) -> None:
    wrong = local_checks.interface_variables(["10.0.0.1"], {name: "ib0"}, INTERFACES)
    assert (wrong.found, wrong.do) == (f"{name}=ib0, and the address is on eth0", f"unset {name}, or {name}=eth0")
    for value in ("eth0", "eth", "=eth0", "ib0,eth0", "eth0:1", "^lo,docker0"):
        assert local_checks.interface_variables(["10.0.0.1"], {name: value}, INTERFACES).is_fine, value
    for value in ("^eth0", "^eth", "=eth", "ib"):
        assert not local_checks.interface_variables(["10.0.0.1"], {name: value}, INTERFACES).is_fine, value
    assert local_checks.interface_variables(["10.0.0.1"], {}, INTERFACES).is_fine
    assert local_checks.interface_variables(["127.0.0.1"], {name: "eth0"}, INTERFACES).is_fine, (
        "one machine: nobody minds"
    )


def test_a_proxy_without_exceptions_is_named() -> None:
    assert local_checks.proxies({}).is_fine
    assert local_checks.proxies({"http_proxy": "p", "no_proxy": "10.0.0.0/8"}).is_fine
    found = local_checks.proxies({"HTTPS_PROXY": "p", "http_proxy": "p", "all_proxy": ""})
    assert found.found.startswith("http_proxy, HTTPS_PROXY, without no_proxy")
    assert found.do == "set no_proxy to the machines of the job, or unset it"


def test_little_shared_memory_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Small:
        f_frsize, f_blocks = 4096, 16384

    class Large:
        f_frsize, f_blocks = 4096, 1 << 20

    monkeypatch.setattr("os.statvfs", lambda _: Small)
    found = local_checks.shared_memory(Path("/dev/shm"))
    assert found.found.startswith("/dev/shm has 64 MB")
    assert "--shm-size" in found.do
    monkeypatch.setattr("os.statvfs", lambda _: Large)
    assert local_checks.shared_memory(Path("/dev/shm")).found == "/dev/shm has 4.0 GB"
    monkeypatch.undo()
    assert local_checks.shared_memory(tmp_path / "none").found.endswith("does not exist: No such file or directory")


def test_few_open_files_are_named() -> None:
    assert local_checks.descriptors(1024, 1024).do == "raise the hard limit (ulimit -Hn) to 4096"
    assert local_checks.descriptors(1024, 1 << 20).found == "the limit is 1024, which a process may raise to 1048576"
    assert local_checks.descriptors(65536, 65536).is_fine


@pytest.mark.parametrize(
    ("ips", "words"),
    [
        (["127.0.1.1"], "node-7 resolves to 127.0.1.1, where other"),
        (["10.0.0.1"], "node-7 is 10.0.0.1"),
        (None, "node-7 does not resolve"),
    ],
)
def test_where_the_host_name_leads_is_noted(monkeypatch: pytest.MonkeyPatch, ips: list[str] | None, words: str) -> None:
    """The agent does not use the host name."""

    def resolve(*_: object, **__: object) -> list[tuple[object, ...]]:
        if ips is None:
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (ip, 0)) for ip in ips]

    monkeypatch.setattr("socket.getaddrinfo", resolve)
    found = local_checks.host_name("node-7")
    assert found.is_fine
    assert words in found.found
    monkeypatch.undo()
    assert "does not resolve" in local_checks.host_name("x" * 64).found, "no label of a name is so long"


def test_all_of_this_machine_is_examined_in_no_time() -> None:
    abouts = [found.about for found in local_checks.examine("127.0.0.1", ["127.0.0.1"], {})]
    assert abouts == [
        "address",
        "GLOO_SOCKET_IFNAME, NCCL_SOCKET_IFNAME",
        "proxy variables",
        "shared memory",
        "open files",
    ]


def test_a_missing_etcd_is_reported() -> None:
    found = network_checks.etcd(Access((f"127.0.0.1:{free_port()}",), ANONYMOUS), "job", within_s=0.2)
    assert "does not answer" in found.found
    assert found.do == "start it, open its port, or correct --elastic_server"


FACTS = Facts({"python": "3.11.2", "torch": "2.13.0"}, {"train.py": "aaa", "model.py": "bbb"})
MACHINES = ("127.0.0.21", "127.0.0.22", "127.0.0.23")


class Bound(MachineChecks):
    """Calls from its own address, which the loopback interface would not choose by itself."""

    def _connect(self, name: str, port: int) -> socket.socket:
        return socket.create_connection((name, port), 1.0, source_address=(self._own, 0))


class Doctors:
    """One doctor for each machine, all running at the same time."""

    def __init__(self, stack: ExitStack) -> None:
        self._stack = stack
        self.port = free_port()
        self._rounds: list[MachineChecks] = []

    def add(self, machine: str, facts: Facts = FACTS, *, kind: type[MachineChecks] = Bound) -> None:
        checks = kind(MACHINES, machine, (self.port,), facts)
        self._rounds.append(self._stack.enter_context(checks))

    def examine(self, within_s: float) -> list[dict[str, Finding]]:
        """Return what each doctor finds about the others, by machine."""
        found: list[dict[str, Finding]] = [{} for _ in self._rounds]

        def one(number: int) -> None:
            for each in self._rounds[number].examine(within_s):
                found[number][each.about.removeprefix("machine ")] = each

        threads = [threading.Thread(target=one, args=(number,)) for number in range(len(found))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return found


@pytest.fixture
def doctors() -> Iterator[Doctors]:
    with ExitStack() as stack:
        yield Doctors(stack)


def test_machines_that_reach_each_other_are_compared(doctors: Doctors) -> None:
    doctors.add(MACHINES[0])
    doctors.add(MACHINES[1])
    doctors.add(MACHINES[2], Facts({"python": "3.12.1", "torch": "2.13.0"}, {"train.py": "aaa", "model.py": "ccc"}))
    first, second, third = doctors.examine(within_s=30.0)
    assert first[MACHINES[1]].is_fine
    assert second[MACHINES[0]].found.startswith("reached both ways, the same versions, clocks ")
    assert first[MACHINES[2]].found == "python 3.11.2 here, 3.12.1 there; different contents of model.py"
    assert third[MACHINES[0]].found == "python 3.12.1 here, 3.11.2 there; different contents of model.py"


def test_a_machine_that_nobody_has_started_is_named(doctors: Doctors) -> None:
    doctors.add(MACHINES[0])
    doctors.add(MACHINES[1])
    first, _ = doctors.examine(within_s=1.0)
    missing = first[MACHINES[2]]
    assert missing.found == f"cannot be reached at port {doctors.port} within 1 s: Connection refused"
    assert missing.do == f"start the same elastic-agent doctor there, or open port {doctors.port}"


def test_several_addresses_of_one_machine_reach_each_other(doctors: Doctors) -> None:
    """The system chooses the source address, as in a job on that machine."""

    class FromTheFirst(MachineChecks):
        def _connect(self, name: str, port: int) -> socket.socket:
            return socket.create_connection((name, port), 1.0, source_address=(MACHINES[0], 0))

    class FromTheCalled(MachineChecks):
        def _connect(self, name: str, port: int) -> socket.socket:
            return socket.create_connection((name, port), 1.0, source_address=(name, 0))

    doctors.add(MACHINES[0], kind=FromTheFirst)
    doctors.add(MACHINES[1], kind=FromTheFirst)
    doctors.add(MACHINES[2], kind=FromTheCalled)
    assert all(found.is_fine for each in doctors.examine(within_s=30.0) for found in each.values())


def test_a_connection_in_one_direction_only_is_recognized(doctors: Doctors, monkeypatch: pytest.MonkeyPatch) -> None:
    """As with a firewall: the second machine cannot call the first."""
    doctors.add(MACHINES[0])
    doctors.add(MACHINES[1])
    doctors.add(MACHINES[2])
    ask = MachineChecks._query

    def ask_if_let(checks: MachineChecks, name: str, port: int) -> tuple[Facts, float, float]:
        if (checks._own, name) == (MACHINES[1], MACHINES[0]):
            raise TimeoutError(110, "timed out")
        return ask(checks, name, port)

    monkeypatch.setattr(MachineChecks, "_query", ask_if_let)
    first, second, _ = doctors.examine(within_s=1.0)
    assert first[MACHINES[1]].found == "can be reached, but does not reach this machine"
    assert first[MACHINES[1]].do == f"open port {doctors.port} at {MACHINES[0]} for {MACHINES[1]}"
    assert second[MACHINES[0]].found == "reaches this machine, but cannot be reached from it: timed out"


def test_a_clock_that_is_off_is_named(doctors: Doctors, monkeypatch: pytest.MonkeyPatch) -> None:
    for machine in MACHINES:
        doctors.add(machine)
    ask = MachineChecks._query

    def ask_the_late(checks: MachineChecks, name: str, port: int) -> tuple[Facts, float, float]:
        facts, ahead_s, error_s = ask(checks, name, port)
        return facts, ahead_s - 60.0 if name == MACHINES[1] else ahead_s, error_s

    monkeypatch.setattr(MachineChecks, "_query", ask_the_late)
    first, _, _ = doctors.examine(within_s=30.0)
    assert re.fullmatch(r"its clock differs from this one's by -[56]\d\.\d s", first[MACHINES[1]].found)
    assert first[MACHINES[2]].is_fine


def test_callers_from_other_machines_get_no_answer(doctors: Doctors) -> None:
    doctors.add(MACHINES[0])
    with socket.create_connection((MACHINES[0], doctors.port), source_address=("127.0.0.99", 0)) as stranger:
        stranger.settimeout(30.0)
        assert stranger.recv(100) == b""


def test_the_script_and_the_modules_that_it_imports_are_compared(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("from nets import big")
    (tmp_path / "nets.py").write_text("import model, train")
    (tmp_path / "model.py").write_text("b")
    before = Facts.here(tmp_path / "train.py")
    assert before.differences(Facts.here(tmp_path / "train.py")) == []
    (tmp_path / "notes.py").write_text("nobody imports this")
    assert before.differences(Facts.here(tmp_path / "train.py")) == []
    (tmp_path / "model.py").write_text("c")
    assert before.differences(Facts.here(tmp_path / "train.py")) == ["different contents of model.py"]
    assert replace(before, files={}).differences(Facts.here(None)) == []
    other = replace(before, files={}).differences(Facts({**before.packages}, {}, "other.py"))
    assert other == ["script train.py here, other.py there"]
