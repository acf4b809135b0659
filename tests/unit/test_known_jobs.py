"""How commands find a job whose etcd is run by an agent, and the records that remain after its end."""

from __future__ import annotations

import itertools
import os
import socket
import stat
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NoReturn

import pytest
from nodes import NODE
from reasons import FINISHED, LOST

from agent.core.incident import Incident, IncidentMember, Phases
from agent.core.model import Group, Result, Spec
from agent.errors import ConfigError, StoreUnavailable
from agent.local_etcd import known_jobs
from agent.local_etcd.kept_records import KeptStore, pack
from agent.local_etcd.known_jobs import JobNote, KnownJob
from agent.observe.status import job_status
from agent.operate.jobs import open_job, read_incidents, read_roles, read_view, suggest_job_ids
from agent.operate.target import Target, read_target
from agent.roles.model import RoleSpec
from agent.roles.store import RoleKeys
from agent.store.access import ANONYMOUS
from agent.store.api import Delete, KeyRange, Put
from agent.store.keys import JobKeys, encode
from agent.store.memory import MemoryStore

NOTHING: dict[str, Any] = {
    **dict.fromkeys(("elastic_server", "job_id", "store_timeout")),
    **dict.fromkeys(("etcd_ca", "etcd_cert", "etcd_key", "etcd_user", "etcd_password_file")),
}
KEYS = JobKeys("job")
SECRET = "5ec3e7" * 8
SPEC = Spec(run="r", np_min=1, np_max=1, secret=SECRET, changed_by="test", changed_at=0.0)
DONE = Result(run="r", group=1, succeeded=True, exit_code=0, reason=FINISHED)


@pytest.fixture(autouse=True)
def runtime(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The user's runtime directory."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "runtime"))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "temporary"))
    for name in ("runtime", "temporary"):
        (tmp_path / name).mkdir(mode=0o700)
    return tmp_path / "runtime"


@pytest.fixture
def note() -> Iterator[Callable[..., JobNote]]:
    """Note a job, as its agent does."""
    made: list[JobNote] = []

    def begin(job_id: str = "job", began_at: float = 1.0, **other: object) -> JobNote:
        fields: dict[str, Any] = {"endpoints": ("127.0.0.1:9",), "is_private": True, "directory": "/d", "log_dir": "/l"}
        job = KnownJob(job_id=job_id, began_at=began_at, **{**fields, **other})
        made.append(JobNote(job))
        return made[-1]

    yield begin
    for noted in made:
        if noted._lock >= 0:
            noted.close()


def end(noted: JobNote) -> None:
    """As when the agent has ended, however."""
    noted.close()
    noted._lock = -1


def names() -> list[tuple[str, bool]]:
    return [(found.job.job_id, found.is_alive) for found in known_jobs.known_jobs()]


def test_a_job_is_found_as_long_as_its_agent_lives_and_afterwards(note: Callable[..., JobNote]) -> None:
    """Jobs whose agents live first, then the newest. The lock shows whether an agent lives, not the file's content."""
    old, new, other = note("old", 1.0), note("new", 2.0), note("other", 3.0)
    assert names() == [("other", True), ("new", True), ("old", True)]
    other.keep(b"records")
    end(other)
    end(old)
    assert names() == [("new", True), ("other", False), ("old", False)]
    assert [found.records() for found in known_jobs.known_jobs()] == [b"", b"records", b""]
    assert new.is_there()


def test_of_a_jobs_agents_here_that_have_ended_the_last_to_keep_records_counts(
    note: Callable[..., JobNote], monkeypatch: pytest.MonkeyPatch
) -> None:
    """An agent that joined late and was drained has older records than the one that saw the job end."""
    pids = itertools.count(100)
    monkeypatch.setattr("os.getpid", lambda: next(pids))
    first, drained = note(began_at=1.0), note(began_at=2.0)
    drained.keep(b"the job trains")
    end(drained)
    first.keep(b"the job has ended")
    assert [found.records() for found in known_jobs.known_jobs()] == [b"the job has ended"]
    end(first)
    assert [found.records() for found in known_jobs.known_jobs()] == [b"the job has ended"]


def test_nobody_else_can_read_what_is_noted(note: Callable[..., JobNote], runtime: Path) -> None:
    note().keep(b"records")
    modes = {path.suffix: stat.S_IMODE(path.stat().st_mode) for path in (runtime / "elastic-agent").iterdir()}
    assert modes == {".job": 0o600, ".records": 0o600}
    assert stat.S_IMODE((runtime / "elastic-agent").stat().st_mode) == 0o700


def test_a_job_whose_directory_was_removed_is_noted_again(note: Callable[..., JobNote], runtime: Path) -> None:
    """The system removes the directory when the user logs out."""
    noted = note()
    for path in (runtime / "elastic-agent").iterdir():
        path.unlink()
    (runtime / "elastic-agent").rmdir()
    assert not noted.is_there()
    noted.keep(b"records")
    assert (noted.is_there(), names()) == (True, [("job", True)])


@pytest.mark.parametrize("value", [None, "", "relative", "{tmp}/missing", "{tmp}/open", "{tmp}/link"])
def test_without_a_runtime_directory_of_ones_own_the_temporary_one_is_taken(
    note: Callable[..., JobNote], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, value: str | None
) -> None:
    """What is noted there is also found by commands that have one."""
    before = os.environ["XDG_RUNTIME_DIR"]
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o777)
    (tmp_path / "link").symlink_to(tmp_path / "runtime")
    monkeypatch.delenv("XDG_RUNTIME_DIR")
    if value is not None:
        monkeypatch.setenv("XDG_RUNTIME_DIR", value.format(tmp=tmp_path))
    note()
    assert list((tmp_path / "temporary" / f"elastic-agent-{os.geteuid()}").iterdir())
    monkeypatch.setenv("XDG_RUNTIME_DIR", before)
    assert names() == [("job", True)]


@pytest.mark.parametrize("kind", ["open", "link", "file", "another's"])
def test_a_directory_that_others_can_enter_is_neither_read_nor_written_to(
    note: Callable[..., JobNote], runtime: Path, tmp_path: Path, kind: str
) -> None:
    end(note())
    place = runtime / "elastic-agent"
    if kind == "open":
        place.chmod(0o755)
    elif kind == "another's":
        if os.geteuid() != 0:
            pytest.skip("only root can give a directory away")
        os.chown(place, 12345, 12345)
    else:
        place.rename(tmp_path / "moved")
        place.symlink_to(tmp_path / "moved") if kind == "link" else place.touch()
    assert names() == []
    with pytest.raises(OSError, match=r"0700|directory|symbolic|exists"):
        note("another")


def test_what_else_lies_there_is_not_waited_for_and_not_believed(note: Callable[..., JobNote], runtime: Path) -> None:
    note()
    place = runtime / "elastic-agent"
    (good,) = place.glob("*.job")
    os.mkfifo(place / "fifo.1.job")
    (place / "link.1.job").symlink_to(good)
    (place / "broken.1.job").write_text("{")
    (place / "other.1.job").write_text('{"job_id": "other"}')
    (place / "huge.1.job").write_bytes(b" " * (1 << 17) + good.read_bytes())
    (place / "noone.x.job").write_bytes(good.read_bytes())
    assert names() == [("job", True)]
    os.mkfifo(good.with_suffix(".records"))
    assert known_jobs.known_jobs()[0].records() == b""


def test_old_ones_are_forgotten(note: Callable[..., JobNote], monkeypatch: pytest.MonkeyPatch) -> None:
    """All of the same job, and others beyond a limit; never one whose agent lives."""
    monkeypatch.setattr(known_jobs, "_MAX_ENDED", 2)
    note("alive", 0.0)
    for number in range(4):
        noted = note(f"job-{number}", float(number))
        os.utime(known_jobs._usual_folder() / f"job-{number}.{os.getpid()}.job", (number, number))
        end(noted)
    end(note("job-2", 5.0))
    assert names() == [("alive", True), ("job-2", False), ("job-3", False), ("job-1", False)]


def test_without_a_named_etcd_the_newest_that_runs_here_is_used_and_printed(
    note: Callable[..., JobNote], capsys: pytest.CaptureFixture[str]
) -> None:
    end(note("over", 9.0))
    note("first", 1.0, endpoints=("127.0.0.1:1",))
    assert read_target(NOTHING).server.endpoints == ("127.0.0.1:1",)
    assert capsys.readouterr().err == ""
    note("second", 2.0, endpoints=("unix:/a b/client:1",), directory="/there")
    target = read_target(NOTHING)
    assert (target.server.endpoints, target.job_id, target.ended_job) == (("unix:/a b/client:1",), "second", None)
    told = capsys.readouterr().err
    assert "2 jobs run here" in told
    assert "second (in /there); choose another with --job_id: first (in /d)" in told
    with pytest.raises(ConfigError, match=r"2 jobs run here .*: second \(in /there\), first \(in /d\); choose one"):
        read_target(NOTHING, changes=True)
    assert read_target({**NOTHING, "job_id": "first"}, changes=True).server.endpoints == ("127.0.0.1:1",)
    assert capsys.readouterr().err == ""


def test_a_change_needs_a_named_etcd_if_there_are_several(
    note: Callable[..., JobNote], monkeypatch: pytest.MonkeyPatch
) -> None:
    note("ours", 1.0)
    with socket.create_server(("127.0.0.1", 0)) as other:
        monkeypatch.setattr("agent.operate.target.DEFAULT_SERVER", f"127.0.0.1:{other.getsockname()[1]}")
        with pytest.raises(ConfigError, match=r"job ours \(in /d\) has an etcd of its own, and there is another"):
            read_target(NOTHING, changes=True)
        assert read_target(NOTHING).job_id == "ours", "what changes nothing need not ask"
        assert read_target({**NOTHING, "job_id": "ours"}, changes=True).job_id == "ours"
    assert read_target(NOTHING, changes=True).job_id == "ours"


def test_a_secret_is_for_the_job_here_that_has_one(
    note: Callable[..., JobNote], monkeypatch: pytest.MonkeyPatch
) -> None:
    note("secret", 1.0, is_private=False, has_secret=True)
    with pytest.raises(ConfigError, match=r"'secret' needs the secret .* ELASTIC_AGENT_ETCD_PASSWORD or with"):
        read_target(NOTHING)
    monkeypatch.setenv("ELASTIC_AGENT_ETCD_PASSWORD", "sixteen letters!")
    assert read_target(NOTHING).server.credentials.tls is not None
    note("open", 2.0)
    monkeypatch.setenv("ELASTIC_AGENT_ETCD_PASSWORD", "sixteen letters!")
    assert read_target({**NOTHING, "job_id": "open"}).server.credentials == ANONYMOUS


def test_where_etcd_is_named_or_the_job_is_not_known_here_it_is_looked_for_in_etcd(
    note: Callable[..., JobNote],
) -> None:
    note()
    for given in ({"elastic_server": "h:1"}, {"elastic_server": "127.0.0.1:2379", "job_id": "job"}, {"job_id": "else"}):
        target = read_target({**NOTHING, **given})
        assert target.server.endpoints == (given.get("elastic_server", "127.0.0.1:2379"),)
        assert (target.job_id, target.ended_job) == (given.get("job_id"), None)


def test_jobs_that_are_known_here_are_suggested(note: Callable[..., JobNote], monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where there is no etcd but theirs."""

    def refuse(_target: Target) -> NoReturn:
        raise StoreUnavailable("refused")

    monkeypatch.setattr("agent.operate.jobs.connect", refuse)
    note("alive")
    assert suggest_job_ids(NOTHING) == ["alive"]
    assert suggest_job_ids({**NOTHING, "elastic_server": "h:1"}) == []


def records(*more: Put) -> MemoryStore:
    made = MemoryStore()
    lease = made.grant(60.0).lease_id
    group = Group(run="r", number=3, members=(NODE.member,), cause="start", reason=LOST, restarts=0, step=0, reached=1)
    incident = Incident(run="r", group=3, cause="start", reason=LOST, members=(), phases=Phases())
    puts = [Put(KEYS.spec, encode(SPEC)), Put(KEYS.group, encode(group)), Put(KEYS.incident(3), encode(incident))]
    made.transact([], [*puts, Put(KEYS.node("a"), encode(NODE), lease), *more])
    return made


def packed(store: MemoryStore, exit_code: int | None = None) -> bytes:
    return pack("job", store.read((KeyRange(KEYS.prefix, is_prefix=True),)).items, 7.0, exit_code)


def left(content: bytes) -> KeptStore:
    return KeptStore("job", content, "the same line goes on", Path("/l"))


def test_kept_records_show_the_result_and_the_incidents_and_no_secret() -> None:
    content = packed(records(Put(KEYS.result, encode(DONE))), 0)
    assert SECRET.encode() not in content
    store = left(content)
    view = read_view(store, KEYS)
    status = job_status("job", view)
    assert (status.state, status.reason, status.group, status.nodes) == (
        "succeeded",
        "all 2 ranks finished in group 1",
        3,
        [],
    )
    assert [incident.group for incident in read_incidents(store, KEYS)] == [3]


def test_kept_records_of_many_nodes_can_be_read() -> None:
    """Large ones are compressed in etcd."""
    members = tuple(IncidentMember(node_id=f"node-{number}", nproc=1) for number in range(1000))
    incident = Incident(run="r", group=4, cause="start", reason=LOST, members=members, phases=Phases())
    content = packed(records(Put(KEYS.incident(4), encode(incident))), 0)
    assert read_incidents(left(content), KEYS)[-1] == incident
    assert packed(records(Put(KEYS.incident(4), encode(incident)[:100])), 0), "a damaged one is kept as it is"


@pytest.mark.parametrize(
    ("exit_code", "state", "reason"),
    [
        (None, "failed", "its agent was killed before the job had ended; the same line goes on"),
        (130, "failed", "its agent left with exit code 130 before the job had ended; the same line goes on"),
        (0, "stopped", "its agent left with exit code 0 before the job had ended; the same line goes on"),
    ],
)
def test_for_a_job_that_did_not_end_the_end_of_its_agent_is_shown(
    exit_code: int | None, state: str, reason: str
) -> None:
    """Never that it trains."""
    status = job_status("job", read_view(left(packed(records(), exit_code)), KEYS))
    assert (status.state, status.reason) == (state, reason)


def test_that_is_so_with_parameter_servers_too() -> None:
    made = MemoryStore()
    spec = RoleSpec(run="r", secret=SECRET, processes=(), heter_device="gpu", http_port=0)
    made.transact([], [Put(RoleKeys("job").spec, encode(spec))])
    content = packed(made)
    assert SECRET.encode() not in content
    view = read_roles(left(content), KEYS)
    assert view.result is not None
    assert "was killed" in view.result.sentence


def test_what_is_kept_cannot_be_changed() -> None:
    store = left(packed(records()))
    for writes in ([Put(KEYS.result, b"")], [Delete(KEYS.spec)]):
        with pytest.raises(ConfigError, match="there is nothing to change"):
            store.transact([], writes)


@pytest.mark.parametrize(
    "content",
    [b"", b"{", b"[]", b'{"items": [], "at": 1.0}', b'{"items": [["/elastic-agent/job/shared/spec", "{"]], "at": 1.0}'],
)
def test_an_unreadable_directory_is_reported_in_one_line(content: bytes) -> None:
    with pytest.raises(ConfigError, match="job 'job' has ended, and nothing is left of its records"):
        left(content)


def test_a_job_that_has_ended_is_shown_as_ended_and_changes_are_refused(
    note: Callable[..., JobNote], capsys: pytest.CaptureFixture[str]
) -> None:
    noted = note(is_private=False)  # no etcd answers: not there either where several machines had it
    noted.keep(packed(records(Put(KEYS.result, encode(DONE))), 0))
    end(noted)
    with open_job(read_target(NOTHING), only_live=False) as (store, keys):
        assert read_view(store, keys).result is not None
    assert "job job (in /d) no longer runs here: showing its last records" in capsys.readouterr().err
    with (
        pytest.raises(ConfigError, match="has ended: there is nothing to change"),
        open_job(read_target(NOTHING), only_live=True),
    ):
        pass
