"""etcd with users: forgotten tokens, changed passwords, and the errors for users without permission."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import grpc
import pytest
from clusters import PATIENCE_S, etcd_cluster, patient_store
from secured_etcd import HOME, QUICK, SECRET, SecuredEtcd, is_answering
from waiting import wait_for

from agent.errors import StoreRefused, StoreUnavailable
from agent.store import connections
from agent.store.access import ANONYMOUS, Credentials, User
from agent.store.api import KeyRange, Put, Snapshot
from agent.store.etcd import EtcdStore
from agent.store.lease import LeaseKeeper
from agent.store.mirror import Mirror

ALL = KeyRange(HOME, is_prefix=True)


@pytest.fixture
def secured(tmp_path: Path) -> Iterator[SecuredEtcd]:
    with etcd_cluster(tmp_path, 1, QUICK) as (member,):
        running = SecuredEtcd(member)
        yield running
        running.close()


Connect = Callable[..., EtcdStore]


@pytest.fixture
def connect(secured: SecuredEtcd) -> Iterator[Connect]:
    opened: list[EtcdStore] = []

    def start(credentials: Credentials | None = None, home: str = HOME) -> EtcdStore:
        as_user = credentials or Credentials(user=User("train", SECRET))
        opened.append(patient_store(secured.member.endpoint, credentials=as_user, home=home))
        return opened[-1]

    yield start
    for store in opened:
        store.close()


class Calls:
    """Counts how often a store authenticates."""

    def __init__(self, store: EtcdStore) -> None:
        self.count = 0
        self._link = store._pool.current()
        self._real = self._link.auth.Authenticate
        self._link.auth.Authenticate = self._authenticate

    def _authenticate(self, *args: object, **kwargs: object) -> object:
        self.count += 1
        return self._real(*args, **kwargs)


def test_a_user_does_all_that_a_job_needs_under_its_prefix(connect: Connect) -> None:
    """With readwrite on the job's prefix and nothing else: also the read of nothing, and leases."""
    store = connect()
    calls = Calls(store)
    lease = store.grant(5)
    assert store.transact([], [Put(HOME + "a", b"1", lease.lease_id)]).succeeded
    assert store.read([]).revision == store.read([ALL]).revision
    assert store.refresh(lease.lease_id) == lease.ttl_s
    store.revoke(lease.lease_id)
    assert store.read([ALL]).items == ()
    assert calls.count == 1


def test_a_restart_of_etcd_loses_the_token_and_nothing_else(secured: SecuredEtcd, connect: Connect) -> None:
    """In the middle of a watch and of a lease: the mirror and the keeper go on, and so does a write."""
    store = connect()
    snapshots: list[Snapshot] = []
    outages: list[str] = []
    lost: list[int] = []
    mirror, keeper = (
        Mirror(store, [ALL], snapshots.append, outages.append),
        LeaseKeeper(store, lambda: True, lost.append),
    )
    mirror.start()
    lease = store.grant(20)
    keeper.hold(lease)
    store.transact([], [Put(HOME + "a", b"1", lease.lease_id)])
    wait_for(lambda: bool(snapshots) and len(snapshots[-1].items) == 1, "the mirror shows the key")
    fresh_until = keeper.fresh_until() or 0.0
    calls = Calls(store)
    secured.restart()
    store.transact([], [Put(HOME + "b", b"2")])
    wait_for(lambda: len(snapshots[-1].items) == 2, "the mirror shows both keys")
    wait_for(lambda: (keeper.fresh_until() or 0.0) > fresh_until, "the lease is renewed")
    assert (lost, len(outages)) == ([], 1)
    assert calls.count == 1, "one token serves all threads"
    mirror.close()
    keeper.close()


@pytest.mark.parametrize("call", ["read", "transact", "grant", "refresh", "revoke"])
def test_every_call_brings_another_token_when_its_own_is_forgotten(
    secured: SecuredEtcd, connect: Connect, call: str
) -> None:
    store = connect()
    lease = store.grant(60)
    secured.restart()
    calls: dict[str, Callable[[], object]] = {
        "read": lambda: store.read([ALL]),
        "transact": lambda: store.transact([], [Put(HOME + "a", b"1")]),
        "grant": lambda: store.grant(5),
        "refresh": lambda: store.refresh(lease.lease_id),
        "revoke": lambda: store.revoke(lease.lease_id),
    }
    calls[call]()


def test_a_watch_with_a_forgotten_token_fails_and_the_next_one_does_not(secured: SecuredEtcd, connect: Connect) -> None:
    """Without any other call between them."""
    store = connect()
    revision = store.read([ALL]).revision
    secured.restart()
    grpc.channel_ready_future(store._pool.current().channel).result(PATIENCE_S)
    with pytest.raises(StoreUnavailable, match="invalid auth token"):
        next(iter(store.watch([ALL], revision)))
    watch = store.watch([ALL], revision)
    written = store.transact([], [Put(HOME + "a", b"1")]).revision
    assert next(iter(watch)).revision == written
    watch.cancel()


def test_a_wrong_password_is_reported_once_and_not_tried_at_every_call(
    connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each try costs etcd work; the sentence has no password in it."""
    monkeypatch.setattr(connections, "_AUTH_RETRY_S", 600.0)
    store = connect(Credentials(user=User("train", "wrong")))
    calls = Calls(store)
    for _ in range(5):
        with pytest.raises(StoreRefused, match="does not accept user 'train' with this password") as raised:
            store.read([ALL])
        assert "wrong" not in str(raised.value)
    assert calls.count == 1


def test_a_password_that_changes_ends_no_work(
    secured: SecuredEtcd, connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The token stays valid. Once etcd has forgotten it, the mirror reports the reason once, and retries slowly."""
    monkeypatch.setattr(connections, "_AUTH_RETRY_S", 600.0)
    store = connect()
    snapshots: list[Snapshot] = []
    outages: list[str] = []
    mirror = Mirror(store, [ALL], snapshots.append, outages.append)
    mirror.start()
    wait_for(lambda: len(snapshots) > 0, "a snapshot")
    secured.log_in()
    secured.change_password("other")
    calls = Calls(store)
    refused: list[str] = []
    read = store.read

    def noted(ranges: Sequence[KeyRange]) -> Snapshot:
        try:
            return read(ranges)
        except StoreRefused as error:
            refused.append(str(error))
            raise

    monkeypatch.setattr(store, "read", noted)
    secured.restart()
    with pytest.raises(StoreRefused):
        read([ALL])
    wait_for(lambda: len(refused) > 2, "the mirror tries again, and again")
    assert calls.count == 1
    assert len(outages) == 1
    mirror.close()


def test_a_missing_permission_names_the_prefix(connect: Connect) -> None:
    """What the operator has to grant."""
    other = connect(home="/elastic-agent/other/")
    wanted = r"does not permit this to user 'train': grant a role with readwrite on the prefix /elastic-agent/other/$"
    calls: list[Callable[[], object]] = [
        lambda: other.read([]),
        lambda: other.read([KeyRange("/elastic-agent/other/shared/spec")]),
        lambda: other.transact([], [Put("/elastic-agent/other/shared/spec", b"")]),
    ]
    for call in calls:
        with pytest.raises(StoreRefused, match=wanted):
            call()


def test_a_permission_that_is_taken_away_and_given_back(secured: SecuredEtcd, connect: Connect) -> None:
    """The mirror reports it once, waits, and delivers everything again by itself."""
    store = connect()
    snapshots: list[Snapshot] = []
    outages: list[str] = []
    secured.log_in()
    secured.forbid(HOME)
    mirror = Mirror(store, [ALL], snapshots.append, outages.append)
    mirror.start()
    wait_for(lambda: len(outages) == 1, "it is told")
    assert "prefix /elastic-agent/mine/" in outages[0]
    secured.permit(HOME)
    wait_for(lambda: len(snapshots) > 0, "it is back")
    assert len(outages) == 1
    mirror.close()


def test_a_client_without_permission_for_the_job_keeps_no_lease(secured: SecuredEtcd, connect: Connect) -> None:
    """A lease is renewed for any caller, even with a forgotten token: this agent would stay a member for ever."""
    secured.log_in()
    store = connect()
    lease = store.grant(60)
    secured.forbid(HOME)
    store._probe_at = 0.0
    with pytest.raises(StoreRefused, match="does not permit this"):
        store.refresh(lease.lease_id)
    secured.permit(HOME)
    assert store.refresh(lease.lease_id) == 60.0
    secured.change_password("other")
    secured.restart()
    store._probe_at = 0.0
    with pytest.raises(StoreRefused, match="does not accept user 'train'"):
        store.refresh(lease.lease_id)


def test_a_request_without_credentials_is_answered_with_the_option(connect: Connect) -> None:
    with pytest.raises(StoreRefused, match="--etcd_user"):
        connect(ANONYMOUS).read([])


def test_a_user_is_no_hindrance_where_etcd_has_none(tmp_path: Path) -> None:
    """As with etcd's own client: an etcd without authentication accepts a password."""
    with etcd_cluster(tmp_path, 1, QUICK) as (member,):
        wait_for(lambda: is_answering(member), "etcd serves")
        store = patient_store(member.endpoint, credentials=Credentials(user=User("train", SECRET)))
        assert store.transact([], [Put(HOME + "a", b"1")]).succeeded
        secured = SecuredEtcd(member)
        assert [item.value for item in store.read([ALL]).items] == [b"1"], "users were enabled while it ran"
        secured.close()
        store.close()


@pytest.mark.parametrize("command", ["status", "scale --np=2", "true.py"])
def test_the_command_line_reports_refused_credentials_in_one_line(
    secured: SecuredEtcd, tmp_path: Path, command: str
) -> None:
    """Code 2, at once: waiting would not help. The password is nowhere."""
    (tmp_path / "true.py").touch()
    as_user = ("--job_id=mine", "--etcd_user=train", *command.split())
    code, output = _command(secured, tmp_path, *as_user, ELASTIC_AGENT_ETCD_PASSWORD="top secret")
    assert (code, output.count("\n")) == (2, 1)
    assert "does not accept user 'train' with this password" in output
    assert "top secret" not in output


def test_the_password_may_come_from_a_file(secured: SecuredEtcd, tmp_path: Path) -> None:
    """As a container's secrets do. The job is not there, which this user may see."""
    (tmp_path / "password").touch(0o600)
    (tmp_path / "password").write_text(f"{SECRET}\n")
    known = ("--etcd-user=train", f"--etcd-password-file={tmp_path / 'password'}", "status")
    assert "no job 'mine'" in _command(secured, tmp_path, "--job_id=mine", *known)[1]
    code, output = _command(secured, tmp_path, *known)
    assert code == 2
    assert "readwrite on the prefix /elastic-agent/, or name the job with --job_id" in output


def _command(secured: SecuredEtcd, folder: Path, *arguments: str, **environ: str) -> tuple[int, str]:
    done = subprocess.run(
        [sys.executable, "-m", "agent", f"--elastic_server={secured.member.endpoint}", *arguments],
        env={**os.environ, **environ},
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    return done.returncode, done.stdout + done.stderr
