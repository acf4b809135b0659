"""Options about etcd: bad ones are refused before a connection is opened, and no secret is shown."""

from __future__ import annotations

import os
from contextlib import nullcontext
from pathlib import Path

import pytest
import trustme

from agent.errors import ConfigError
from agent.store.access import CredentialOptions, User, parse_endpoints, read_access


def options(folder: Path, **given: str) -> CredentialOptions:
    """Those given; a value that is the name of a file there becomes its path."""
    return CredentialOptions(
        **{name: str(folder / value) if (folder / value).exists() else value for name, value in given.items()}
    )


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    ca = trustme.CA()
    ca.cert_pem.write_to_path(tmp_path / "ca")
    for name in ("one", "two"):
        leaf = ca.issue_cert(name)
        leaf.cert_chain_pems[0].write_to_path(tmp_path / f"{name}.crt")
        leaf.private_key_pem.write_to_path(tmp_path / f"{name}.key")
    (tmp_path / "noise").write_text("no certificate")
    (tmp_path / "empty").touch()
    (tmp_path / "bytes").write_bytes(b"\xff\xfe")
    (tmp_path / "password").write_text("pass word\n")
    for name in ("one.key", "two.key", "empty", "bytes", "password"):
        (tmp_path / name).chmod(0o600)
    return tmp_path


SECURE = "https://a,https://b:1"


@pytest.mark.parametrize(
    ("server", "given", "said"),
    [
        ("https://a,b", {}, "mixes https"),
        ("https://a,http://b", {}, "mixes https"),
        ("a", {"ca": "ca"}, "--etcd_ca is for TLS.*https://"),
        ("a", {"cert": "one.crt", "key": "one.key"}, "--etcd_cert is for TLS"),
        (SECURE, {"cert": "one.crt"}, "--etcd_key is missing"),
        (SECURE, {"key": "one.key"}, "--etcd_cert is missing"),
        (SECURE, {"ca": "none"}, "--etcd_ca=.*none cannot be read: No such file"),
        (SECURE, {"ca": "."}, "cannot be read: Is a directory"),
        (SECURE, {"ca": "noise"}, "holds no certificate"),
        (SECURE, {"ca": "empty"}, "holds no certificate"),
        (SECURE, {"cert": "noise", "key": "one.key"}, "cannot be used: want a PEM"),
        (SECURE, {"cert": "one.crt", "key": "two.key"}, "do not belong together"),
        ("a", {"user": "u"}, "has no password: give it in ELASTIC_AGENT_ETCD_PASSWORD or by --etcd_password_file"),
        ("a", {"password": "pass word"}, "want --etcd_user"),
        (SECURE, {"password": "pass word", "ca": "ca"}, "want --etcd_user"),
        (SECURE, {"password": "pass word"}, "ETCD_PASSWORD has 9 characters.*16 or more"),
        (SECURE, {"password_file": "password"}, "--etcd_password_file=.*password has 9 characters"),
        ("a", {"user": "u", "password": "pass word", "password_file": "password"}, "want one of them"),
        ("a", {"user": "u", "password_file": "none"}, "--etcd_password_file=.* cannot be read"),
        ("a", {"user": "u", "password_file": "empty"}, "is empty"),
        ("a", {"user": "u", "password_file": "bytes"}, "UTF-8"),
        ("a", {"user": "u", "password": "\udcff" * 20}, "ELASTIC_AGENT_ETCD_PASSWORD is not UTF-8 text"),
        (SECURE, {"password": "\udcff" * 20}, "ELASTIC_AGENT_ETCD_PASSWORD is not UTF-8 text"),
        ("http://u:pass word@a", {}, "@ in it.*--etcd_user"),
    ],
)
def test_what_does_not_fit_is_refused_in_one_line(folder: Path, server: str, given: dict[str, str], said: str) -> None:
    """The option is named, and no password is repeated."""
    with pytest.raises(ConfigError, match=said) as raised:
        read_access(server, options(folder, **given))
    assert "\n" not in str(raised.value)
    assert "pass word" not in str(raised.value)


@pytest.mark.parametrize("mode", [0o644, 0o604, 0o602])
@pytest.mark.parametrize("name", ["key", "password_file"])
def test_a_secret_that_other_users_can_read_is_refused(folder: Path, name: str, mode: int) -> None:
    """As ssh refuses such a key. Certificates are public."""
    given = {"cert": "one.crt", "key": "one.key", "user": "u", "password_file": "password"}
    (folder / "one.crt").chmod(0o644)
    (folder / given[name]).chmod(mode)
    with pytest.raises(ConfigError, match=rf"--etcd_{name}=\S+ is a secret.*mode {mode:04o}.*chmod 600") as raised:
        read_access(SECURE, options(folder, **given))
    assert "pass word" not in str(raised.value)


@pytest.mark.skipif(os.geteuid() != 0, reason="gives files to other users")
@pytest.mark.parametrize(("owner", "mode", "is_taken"), [(0, 0o640, True), (65534, 0o640, True), (65534, 0o644, False)])
def test_root_may_hand_a_secret_to_a_group(folder: Path, owner: int, mode: int, *, is_taken: bool) -> None:
    os.chown(folder / "password", owner, 0)
    (folder / "password").chmod(mode)
    with nullcontext() if is_taken else pytest.raises(ConfigError, match="is a secret"):
        read_access("a", options(folder, user="u", password_file="password"))


def test_what_fits_is_read(folder: Path) -> None:
    given = options(folder, ca="ca", cert="one.crt", key="one.key", user="u", password_file="password")
    access = read_access(SECURE, given)
    tls = access.credentials.tls
    assert tls is not None
    assert (tls.ca, tls.cert, tls.key) == tuple((folder / each).read_bytes() for each in ("ca", "one.crt", "one.key"))
    assert access.credentials.user == User("u", "pass word"), "the line's end is not part of it"
    assert access.endpoints == parse_endpoints(SECURE) == ("a:2379", "b:1")


def test_tls_without_files_trusts_public_authorities() -> None:
    tls = read_access("https://a", CredentialOptions()).credentials.tls
    assert tls is not None
    assert (tls.ca, tls.cert, tls.key) == (None, None, None)


def test_a_password_without_a_user_is_the_secret_of_a_job_that_brings_its_etcd() -> None:
    """A command needs no other credentials."""
    access = read_access("https://10.0.0.1:9988", CredentialOptions(password="sixteen letters!"))
    tls = access.credentials.tls
    assert access.credentials.user is None
    assert tls is not None
    assert b"BEGIN CERTIFICATE" in (tls.cert or b"")


def test_nothing_secret_is_shown(folder: Path) -> None:
    """Neither where a configuration is printed, nor in the text of the server for the operator."""
    given = options(folder, cert="one.crt", key="one.key", user="u", password="pass word")
    access = read_access(SECURE, given)
    shown = f"{given!r} {access!r} {access}"
    assert "pass word" not in shown
    assert "PRIVATE KEY" not in shown
