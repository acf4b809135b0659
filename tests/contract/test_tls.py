"""etcd with TLS and its own authority: which clients are accepted, and the errors of those that are not."""

from __future__ import annotations

import datetime as dt
from collections.abc import Iterator
from pathlib import Path

import pytest
from authority import Authority
from clusters import Member, etcd_cluster, patient_store
from waiting import wait_for

from agent.errors import StoreUnavailable
from agent.store.access import CredentialOptions, read_access
from agent.store.api import KeyRange, Put, Snapshot
from agent.store.etcd import EtcdStore
from agent.store.lease import LeaseKeeper
from agent.store.mirror import Mirror

YESTERDAY = dt.datetime.now(dt.UTC) - dt.timedelta(days=1)
ALL = KeyRange("/job/", is_prefix=True)


@pytest.fixture(scope="module")
def secure(authority: Authority, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Member]:
    """It shows a certificate for 127.0.0.1, and wants one of every client."""
    asks = ("--client-cert-auth", "--trusted-ca-file", authority.ca)
    with _run(tmp_path_factory.mktemp("secure"), authority.issue("server", "127.0.0.1"), *asks) as member:
        yield member


class _run:  # noqa: N801 - used like a function
    """An etcd of one member with this certificate."""

    def __init__(self, folder: Path, certificate: tuple[str, str], *options: str) -> None:
        cert, key = certificate
        self._cluster = etcd_cluster(folder, 1, ("--cert-file", cert, "--key-file", key, *options), scheme="https")

    def __enter__(self) -> Member:
        return self._cluster.__enter__()[0]

    def __exit__(self, *error: object) -> None:
        self._cluster.__exit__(None, None, None)


def connect(server: str, **options: str) -> EtcdStore:
    access = read_access(server, CredentialOptions(**options))
    return EtcdStore(access.endpoints, access.credentials, retry_for_s=0.5)


def why_not(server: str, **options: str) -> str:
    """Return the error of a client that is rejected."""
    store = connect(server, **options)
    try:
        with pytest.raises(StoreUnavailable) as raised:
            store.read([])
        return str(raised.value).partition(" did not answer: ")[2]
    finally:
        store.close()


def expect_reported(said: str, server: str, **options: str) -> None:
    """Wait for it: etcd listens before it serves, and on a slow machine one try can end before the handshake does."""
    wait_for(lambda: why_not(server, **options) == said, said)


def test_with_a_client_certificate_all_goes_on_over_a_restart(authority: Authority, secure: Member) -> None:
    """Reads, writes, a lease and a mirror."""
    cert, key = authority.issue("client", "client")
    access = read_access(f"https://{secure.endpoint}", CredentialOptions(ca=authority.ca, cert=cert, key=key))
    store = patient_store(*access.endpoints, credentials=access.credentials)
    snapshots: list[Snapshot] = []
    lost: list[int] = []
    mirror, keeper = (
        Mirror(store, [ALL], snapshots.append, lambda _: None),
        LeaseKeeper(store, lambda: True, lost.append),
    )
    wait_for(lambda: _is_answering(store), "etcd serves")
    mirror.start()
    lease = store.grant(20)
    keeper.hold(lease)
    store.transact([], [Put("/job/a", b"1", lease.lease_id)])
    wait_for(lambda: bool(snapshots) and len(snapshots[-1].items) == 1, "the mirror shows the key")
    fresh_until = keeper.fresh_until() or 0.0
    secure.restart()
    wait_for(lambda: _is_answering(store), "etcd serves again")
    store.transact([], [Put("/job/b", b"2")])
    wait_for(lambda: len(snapshots[-1].items) == 2, "the mirror shows both keys")
    wait_for(lambda: (keeper.fresh_until() or 0.0) > fresh_until, "the lease is renewed")
    assert lost == []
    mirror.close()
    keeper.close()
    store.close()


def _is_answering(store: EtcdStore) -> bool:
    try:
        return store.read([]).revision > 0
    except StoreUnavailable:
        return False


def test_a_client_that_etcd_does_not_accept_gets_an_error_that_says_so(
    authority: Authority, stranger: Authority, secure: Member
) -> None:
    """Without a certificate, with an expired one, and with one signed by another authority."""
    server = f"https://{secure.endpoint}"
    refused = "it does not accept this client: --etcd_cert is missing, expired, or signed by another authority"
    expect_reported(refused, server, ca=authority.ca)
    for cert, key in (authority.issue("old", "old", not_after=YESTERDAY), stranger.issue("other", "other")):
        expect_reported(refused, server, ca=authority.ca, cert=cert, key=key)


def test_an_etcd_that_is_not_trusted_is_named(stranger: Authority, secure: Member) -> None:
    """Signed by another authority than the one given, or by no public one."""
    server = f"https://{secure.endpoint}"
    expect_reported("its certificate is not signed by --etcd_ca", server, ca=stranger.ca)
    expect_reported("its certificate is not signed by --etcd_ca", server)


@pytest.mark.parametrize(
    ("host", "not_after", "said"),
    [
        ("elsewhere", None, "its certificate is for another name than this endpoint's"),
        ("127.0.0.1", YESTERDAY, "its certificate has expired"),
    ],
)
def test_a_certificate_of_etcd_that_is_not_valid_is_named(
    authority: Authority, tmp_path: Path, host: str, not_after: dt.datetime | None, said: str
) -> None:
    """It must be for the endpoint's host as it was given."""
    with _run(tmp_path, authority.issue("server", host, not_after=not_after)) as member:
        expect_reported(said, f"https://{member.endpoint}", ca=authority.ca)


def test_the_wrong_scheme_is_named(authority: Authority, secure: Member, tmp_path: Path) -> None:
    expect_reported("it closed the connection at once: does it want https://?", secure.endpoint)
    with etcd_cluster(tmp_path, 1) as (member,):
        expect_reported("it does not speak TLS: want http://?", f"https://{member.endpoint}", ca=authority.ca)
