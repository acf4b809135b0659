"""Certificates given by options: an error is reported in one line, before a connection is opened."""

from __future__ import annotations

import datetime as dt
import ssl
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from authority import Authority

from agent.errors import ConfigError
from agent.runtime.agent_certificates import link_tls, read_files
from trainer_runtime import tls
from trainer_runtime.tls import TlsBroken, TlsChannel, TlsError, TlsFiles

NOW = dt.datetime.now(dt.UTC)


@pytest.fixture(scope="module")
def good(authority: Authority) -> TlsFiles:
    return authority.files("good", "10.0.0.1", "node-a")


def option(**paths: str | None) -> dict[str, str | None]:
    return {f"tls_{name}": paths.get(name) for name in tls.NAMES}


@pytest.mark.parametrize("host", ["10.0.0.1", "node-a", None])
@pytest.mark.parametrize("has_ca", [True, False])
def test_files_that_are_in_order_are_taken(good: TlsFiles, host: str | None, has_ca: bool) -> None:  # noqa: FBT001 - a parameter
    files = good if has_ca else TlsFiles(good.cert, good.key, None)
    pem = Path(good.cert).read_text().partition("-----END CERTIFICATE-----\n")
    assert tls.check(files, host, calls=has_ca) == tls.fingerprint(ssl.PEM_cert_to_DER_cert("".join(pem[:2])))


@pytest.mark.parametrize(
    ("host", "said"),
    [
        ("10.0.0.2", "IP address mismatch, certificate is not valid for '10.0.0.2'"),
        ("node-b", "Hostname mismatch, certificate is not valid for 'node-b'"),
    ],
)
def test_a_certificate_for_another_host_is_refused(good: TlsFiles, host: str, said: str) -> None:
    with pytest.raises(TlsError, match=said) as refused:
        tls.check(good, host, calls=True)
    assert str(refused.value).startswith(f"--tls_cert={good.cert} cannot be used")


def _missing(good: TlsFiles, _: Authority) -> TlsFiles:
    return TlsFiles("/nowhere/cert", good.key, good.ca)


def _missing_ca(good: TlsFiles, _: Authority) -> TlsFiles:
    return TlsFiles(good.cert, good.key, "/nowhere/ca")


def _key_as_ca(good: TlsFiles, _: Authority) -> TlsFiles:
    return TlsFiles(good.cert, good.key, good.key)


def _other_key(good: TlsFiles, other: Authority) -> TlsFiles:
    return TlsFiles(good.cert, other.files("other", "10.0.0.1").key, good.ca)


def _other_ca(good: TlsFiles, other: Authority) -> TlsFiles:
    return TlsFiles(good.cert, good.key, other.ca)


def _no_key(good: TlsFiles, _: Authority) -> TlsFiles:
    return TlsFiles(good.cert, good.cert, good.ca)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (_missing, "--tls_cert=/nowhere/cert cannot be read: No such file or directory"),
        (_missing_ca, "--tls_ca=/nowhere/ca cannot be read: No such file or directory"),
        (_key_as_ca, "holds no certificate: want a PEM file"),
        (_other_key, "do not belong together: want a PEM certificate and its PEM key"),
        (_no_key, "cannot be used: want a PEM certificate and its PEM key without a passphrase"),
        (_other_ca, "cannot be used: unable to get local issuer certificate"),
    ],
)
def test_files_that_cannot_be_used_are_named(
    good: TlsFiles, stranger: Authority, change: Callable[[TlsFiles, Authority], TlsFiles], said: str
) -> None:
    with pytest.raises(TlsError) as refused:
        tls.check(change(good, stranger), None, calls=True)
    assert said in str(refused.value)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("has_ca", [True, False])
def test_a_certificate_that_has_expired_is_refused(authority: Authority, has_ca: bool) -> None:  # noqa: FBT001 - a parameter
    cert, key = authority.issue("old", "10.0.0.1", not_after=NOW - dt.timedelta(days=1))
    with pytest.raises(TlsError, match="certificate has expired"):
        tls.check(TlsFiles(cert, key, authority.ca if has_ca else None), None, calls=has_ca)


def test_a_key_that_is_too_short_is_reported(tmp_path: Path) -> None:
    made = "openssl req -x509 -newkey rsa:512 -nodes -subj /CN=x -keyout key -out cert"
    subprocess.run(made.split(), cwd=tmp_path, check=True, capture_output=True)
    with pytest.raises(TlsError, match=r"--tls_cert=.* cannot be used \(ee key too small\): .* wants a stronger one"):
        tls.check(TlsFiles(str(tmp_path / "cert"), str(tmp_path / "key"), None), None, calls=False)


def test_a_key_with_a_passphrase_is_refused_and_nobody_is_asked(good: TlsFiles, tmp_path: Path) -> None:
    locked = tmp_path / "locked.key"
    subprocess.run(
        ["openssl", "pkey", "-in", good.key, "-aes256", "-passout", "pass:secret", "-out", locked], check=True
    )
    with pytest.raises(TlsError, match="without a passphrase"):
        tls.check(TlsFiles(good.cert, str(locked), good.ca), None, calls=True)


@pytest.mark.parametrize(
    ("missing", "has_servers", "said"),
    [
        ({"key"}, False, "--tls_key is missing"),
        ({"cert"}, False, "--tls_cert is missing"),
        ({"cert", "key"}, False, "--tls_key is missing"),
        ({"ca"}, True, "--tls_ca is missing: workers and parameter servers"),
    ],
)
def test_options_must_be_complete(good: TlsFiles, missing: set[str], has_servers: bool, said: str) -> None:  # noqa: FBT001 - a parameter
    given = {name: getattr(good, name) for name in tls.NAMES if name not in missing}
    with pytest.raises(ConfigError, match=said):
        read_files(option(**given), has_servers=has_servers)


def test_without_options_there_are_no_files(good: TlsFiles) -> None:
    assert read_files(option(), has_servers=True) is None
    assert read_files(option(cert=good.cert, key=good.key), has_servers=False) == TlsFiles(good.cert, good.key, None)


def test_a_script_gets_all_three_files_or_none() -> None:
    assert tls.files_of({"ELASTIC_AGENT_TLS_CERT": ""}) is None
    with pytest.raises(TlsError, match="ELASTIC_AGENT_TLS_KEY is not set: set all of"):
        tls.files_of({"ELASTIC_AGENT_TLS_CERT": "c", "ELASTIC_AGENT_TLS_CA": "a"})


def shaken(client: ssl.SSLContext, server: ssl.SSLContext, host: str = "") -> tuple[TlsChannel, TlsChannel]:
    here, there = TlsChannel(client, host=host), TlsChannel(server, is_called=True)
    done = [False, False]
    while not all(done):
        for at, (end, other) in enumerate(((here, there), (there, here))):
            done[at] = end.shake()
            other.take(end.give())
    return here, there


def test_a_channel_carries_what_is_written_in_both_directions() -> None:
    own = link_tls(None)
    assert own.accepting is not None
    here, there = shaken(own.dialling, own.accepting)
    assert (here.fingerprint(), there.fingerprint()) == (own.fingerprint, "")
    said = bytes(range(256)) * 20_000
    there.take(here.write(said))
    assert there.has_more
    assert there.read() == said
    assert not there.has_more
    here.take(there.write(b"an answer"))
    place = bytearray(100)
    assert here.read_into(memoryview(place)) == 9
    assert here.read_into(memoryview(place)) == 0
    assert not here.is_over
    here.take(there.end())
    assert here.read() == b""
    assert here.is_over


def test_what_was_changed_on_the_way_is_not_taken() -> None:
    own = link_tls(None)
    assert own.accepting is not None
    here, there = shaken(own.dialling, own.accepting)
    sealed = bytearray(here.write(b"a word"))
    sealed[-1] ^= 1
    there.take(bytes(sealed))
    with pytest.raises(TlsBroken, match="no TLS as it should be"):
        there.read()


def test_links_do_not_end_because_a_certificate_has_expired_meanwhile(authority: Authority) -> None:
    """It was checked when the agent started; which one it must be is in its record."""
    cert, key = authority.issue("meanwhile", "10.0.0.1", not_after=NOW - dt.timedelta(days=1))
    files = TlsFiles(cert, key, authority.ca)
    server = tls.accepting(files, callers=ssl.CERT_NONE)
    here, _ = shaken(tls.dialling(files, names_host=False), server)
    assert here.fingerprint()
    with pytest.raises(TlsBroken, match="certificate has expired"):
        shaken(tls.dialling(files, names_host=True), server, "10.0.0.1")


def test_links_do_not_end_because_the_callers_certificate_has_expired(authority: Authority) -> None:
    files = authority.files("called", "10.0.0.1")
    cert, key = authority.issue("calls", "10.0.0.2", not_after=NOW - dt.timedelta(days=1))
    called = link_tls(files)
    assert called.accepting is not None
    _, there = shaken(tls.dialling(TlsFiles(cert, key, authority.ca), names_host=False), called.accepting)
    assert there.fingerprint()
