"""How agents find each other, depending on the options: an etcd, machines, an allocation of Slurm's, or nothing."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from agent.cli import standalone
from agent.cli.rendezvous import Rendezvous, read_rendezvous
from agent.errors import ConfigError
from agent.local_etcd.known_jobs import JobNote, KnownJob

NOTHING: dict[str, Any] = {
    **dict.fromkeys(("elastic_server", "job_id", "np", "ips", "ctrl_port", "node_id", "address")),
    **dict.fromkeys(("etcd_ca", "etcd_cert", "etcd_key", "etcd_user", "etcd_password_file")),
    "standalone": False,
    "fresh": False,
    "command": ("train.py",),
    "log_dir": "log",
}
LIST = "127.0.0.1,127.0.0.2,127.0.0.3,127.0.0.4"


def meet(environ: dict[str, str] | None = None, **given: object) -> Rendezvous:
    return read_rendezvous({**NOTHING, **given}, environ or {})


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.chdir(tmp_path)
    yield
    let_go()


def let_go() -> None:
    """Release the locks, as the end of an agent does."""
    standalone.release_claims()


def test_a_job_without_options_runs_on_this_machine() -> None:
    for meeting in (meet(), meet(np="1"), meet(standalone=True), meet(ips="127.0.0.1")):
        assert meeting.access.endpoints == ()
        assert meeting.address == "127.0.0.1"
        assert meeting.job.job_id.startswith("standalone-")


def test_the_same_line_in_the_same_directory_is_the_same_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = meet().job.job_id
    let_go()
    assert meet(standalone=True, np="1").job.job_id == first
    let_go()
    assert meet(command=("train.py", "--lr=1")).job.job_id != first
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert meet().job.job_id != first


def test_a_second_one_at_the_same_time_is_another_job(capsys: pytest.CaptureFixture[str]) -> None:
    first, second, third = (meet().job.job_id for _ in range(3))
    assert (second, third) == (f"{first}-2", f"{first}-3")
    line = "elastic-agent: the job of this line in this directory runs, so this one is another job: "
    assert capsys.readouterr() == ("", f"{line}{second}\n{line}{third}\n")
    let_go()
    assert meet().job.job_id == first


def test_a_finished_job_is_started_over(tmp_path: Path) -> None:
    first = meet().job.job_id
    let_go()
    standalone.note_finished(first)
    assert meet().job.job_id == first, "it has saved nothing"
    let_go()
    (tmp_path / "checkpoints" / first).mkdir(parents=True)
    standalone.note_finished(first)
    assert meet().job.job_id == f"{first}-2"
    let_go()
    assert meet().job.job_id == f"{first}-2", "which has not"


def test_the_lock_file_is_removed_at_the_end(tmp_path: Path) -> None:
    meet()
    assert [path.suffix for path in (tmp_path / "log").iterdir()] == [".lock"]
    let_go()
    assert list((tmp_path / "log").iterdir()) == []


def test_a_lock_on_a_removed_file_is_not_accepted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another agent has opened the file before its holder removed it, and locks it after that."""
    lock, path = standalone.fcntl.flock, tmp_path / "lock"

    def remove_and_lock(fd: int, how: int) -> None:
        monkeypatch.undo()
        path.unlink()
        lock(fd, how)

    monkeypatch.setattr(standalone.fcntl, "flock", remove_and_lock)
    assert standalone._try_lock(path)
    assert path.exists()
    assert not standalone._try_lock(path)


def test_with_chosen_checkpoints_a_finished_one_goes_on_there_and_says_nothing_else(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first = meet().job.job_id
    let_go()
    (tmp_path / "checkpoints" / first).mkdir(parents=True)
    standalone.note_finished(first)
    assert meet(checkpoint_dir="/elsewhere").job.job_id == first
    assert capsys.readouterr().err == ""


def test_one_that_runs_with_another_log_directory_is_another_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "run").mkdir(mode=0o700)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "run"))
    first = meet().job.job_id
    note = JobNote(KnownJob(job_id=first, endpoints=(), is_private=True, directory="/", log_dir="/log", began_at=1.0))
    assert meet(log_dir="other").job.job_id == f"{first}-2"
    let_go()
    note.close()
    assert meet(log_dir="other").job.job_id == first


def test_where_no_lock_can_be_made_the_line_is_the_job_all_the_same(tmp_path: Path) -> None:
    (tmp_path / "log").write_text("no directory")
    assert meet().job.job_id == meet().job.job_id


@pytest.mark.parametrize("given", [{"np": "2"}, {"elastic_server": "127.0.0.1:2379"}, {"etcd_user": "u"}])
def test_what_hints_at_several_machines_needs_a_name(given: dict[str, object], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ELASTIC_AGENT_ETCD_PASSWORD", raising=False)
    with pytest.raises(ConfigError, match="--job_id is missing"):
        meet(**given)


def test_machines_bring_an_etcd_in_whatever_order_they_are_listed() -> None:
    one = meet(ips=LIST, address="127.0.0.4").ensemble
    other = meet(ips="127.0.0.3, 127.0.0.4,127.0.0.1,127.0.0.2", address="127.0.0.4").ensemble
    assert one is not None
    assert other is not None
    assert one.members == other.members == ("127.0.0.1", "127.0.0.2", "127.0.0.3")
    assert (one.job_id, one.endpoints) == (other.job_id, other.endpoints)
    assert (one.position, other.position) == (4, 2)
    assert one.endpoints[0] == "127.0.0.1:9988"


def test_addresses_are_ordered_as_numbers() -> None:
    ensemble = meet(ips="127.0.0.10,127.0.0.9", address="127.0.0.10").ensemble
    assert ensemble is not None
    assert ensemble.members == ("127.0.0.9",)


def test_another_script_is_another_job() -> None:
    ids = {
        meet(ips=LIST, address="127.0.0.1", command=(script, "--lr=1")).job.job_id
        for script in ("train.py", "/home/me/train.py", "other.py")
    }
    assert len(ids) == 2


def test_ipv6_addresses_are_machines_too() -> None:
    meeting = meet(ips="fd00::1,fd00::2", address="fd00::1")
    assert (meeting.node_id, meeting.job.np_max) == ("fd00--1", 2)
    assert meeting.access.endpoints == ("[fd00::1]:9988",)


def test_machines_that_share_a_secret_show_each_other_certificates(monkeypatch: pytest.MonkeyPatch) -> None:
    """By a file or the variable, which no child inherits. One machine has nobody to show any to."""
    Path("shared").touch(0o600)
    Path("shared").write_text("a secret of the machines\n")
    for machines in (LIST, "127.0.0.1"):
        monkeypatch.setenv("ELASTIC_AGENT_ETCD_PASSWORD", "a secret of the machines")
        by_variable = meet(ips=machines, address="127.0.0.1")
        assert "ELASTIC_AGENT_ETCD_PASSWORD" not in os.environ
        by_file = meet(ips=machines, address="127.0.0.1", etcd_password_file="shared")
        for meeting in (by_variable, by_file):
            tls = meeting.ensemble.tls if meeting.ensemble else None
            assert (tls is not None) == (machines == LIST)
            assert meeting.access.credentials.tls == tls
            assert "PRIVATE" not in repr(meeting)
    assert meet(ips=LIST, address="127.0.0.1").access.credentials.tls is None


def test_np_is_their_number_or_less() -> None:
    assert (meet(ips=LIST, address="127.0.0.1").job.np_min, meet(ips=LIST, address="127.0.0.1").job.np_max) == (4, 4)
    assert meet(ips=LIST, address="127.0.0.1", np="2:3").job.np_min == 2
    with pytest.raises(ConfigError, match="--np=5 is more than the 4 machines in --ips"):
        meet(ips=LIST, address="127.0.0.1", np="5")


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"ips": "127.0.0.1,127.0.0.1"}, "names a machine twice"),
        ({"ips": LIST}, "both this machine; say which one is, with --address"),
        ({"ips": "198.51.100.1,198.51.100.2"}, "none of them is this machine"),
        ({"ips": LIST, "address": "127.0.0.9"}, "--address=127.0.0.9 is not in --ips"),
        ({"ips": LIST, "standalone": True}, "leave out one of them"),
        ({"ips": LIST, "address": "127.0.0.1", "elastic_server": "a:1"}, "--ips brings an etcd of its own: leave out"),
        ({"ips": "127.0.0.1,192.0.2.2", "address": "127.0.0.1"}, "leads to a loopback address on this machine"),
    ],
)
def test_mistakes(given: dict[str, object], words: str) -> None:
    with pytest.raises(ConfigError) as refused:
        meet(**given)
    assert words in str(refused.value)


TASK = {
    "SLURM_JOB_ID": "4711",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NODELIST": "127.0.0.[1-3]",
    "SLURM_STEP_NUM_TASKS": "3",
    "SLURMD_NODENAME": "127.0.0.2",
}


def test_an_allocation_of_slurm_s_needs_no_word() -> None:
    meeting = meet(TASK)
    assert meeting.ensemble is not None
    assert (meeting.job.job_id, meeting.node_id, meeting.job.np_max) == ("slurm-4711", "127.0.0.2", 3)
    assert (meeting.address, meeting.preempted_code, meeting.ensemble.position) == ("127.0.0.2", 75, 2)


def test_an_indexed_job_of_kubernetes_replaces_a_node_that_a_signal_asked_to_leave() -> None:
    """With code 0 its index would count as done."""
    given = {"job_id": "mine", "elastic_server": "127.0.0.1:1"}
    assert meet({"JOB_COMPLETION_INDEX": "0"}, **given).preempted_code == 75
    assert meet({}, **given).preempted_code == 0


def test_what_is_given_counts_under_slurm() -> None:
    meeting = meet(TASK, ctrl_port=7000, address="127.0.0.9", np="1:3")
    assert meeting.ensemble is not None
    assert (meeting.ensemble.port, meeting.address, meeting.job.np_min) == (7000, "127.0.0.9", 1)
    assert meet(TASK, standalone=True).preempted_code == 0
    assert meet(TASK, job_id="mine", elastic_server="127.0.0.1:1").job.job_id == "mine"
