"""Access to etcd: endpoints, TLS, user and password, read and checked before any connection is opened.

The password comes from a file or from the environment, never from a command line, which every user of a machine can
read. Secrets are left out of every `repr`.
"""

from __future__ import annotations

import os
import ssl
import stat
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from agent.endpoints import SOCKET
from agent.errors import ConfigError
from agent.store.certificates import Tls, issue
from trainer_runtime.contract import MIN_SECRET

PASSWORD_VARIABLE = "ELASTIC_AGENT_ETCD_PASSWORD"  # noqa: S105 - the name of the variable, not a password

DEFAULT_SERVER = "127.0.0.1:2379"
DEFAULT_STORE_TIMEOUT_S = 30.0
"""How long to try to reach etcd."""

_DEFAULT_PORT = 2379
_SCHEMES = ("http://", "https://")


@dataclass(frozen=True)
class User:
    """A user of etcd, as created by `etcdctl user add`."""

    name: str
    password: str = field(repr=False)


@dataclass(frozen=True)
class Credentials:
    """TLS settings and the user of a connection."""

    tls: Tls | None = None
    """None: connections are not encrypted."""
    user: User | None = None
    """None: no user, or the one named by the client certificate."""


ANONYMOUS = Credentials()


@dataclass(frozen=True)
class Access:
    """Everything that is needed to reach etcd."""

    endpoints: tuple[str, ...]
    credentials: Credentials

    def __str__(self) -> str:
        return ",".join(self.endpoints)


@dataclass(frozen=True)
class CredentialOptions:
    """The options as given, not checked yet."""

    ca: str | None = None
    cert: str | None = None
    key: str | None = None
    user: str | None = None
    password: str | None = field(default=None, repr=False)
    password_file: str | None = None

    @property
    def has_secret(self) -> bool:
        """Whether a password without a user is set: the secret of a job that runs its own etcd (`--ips`)."""
        return self.user is None and (self.password is not None or self.password_file is not None)

    @property
    def names_for_other_etcds(self) -> tuple[str, ...]:
        """Names of the options that are set and do not apply to an etcd run by a job itself."""
        secret = ("--etcd_password_file", PASSWORD_VARIABLE) if self.has_secret else ()
        return tuple(name for name in self.given() if name not in secret)

    def given(self) -> tuple[str, ...]:
        """Return the names of the options that are set."""
        values = {
            "--etcd_ca": self.ca,
            "--etcd_cert": self.cert,
            "--etcd_key": self.key,
            "--etcd_user": self.user,
            "--etcd_password_file": self.password_file,
            PASSWORD_VARIABLE: self.password,
        }
        return tuple(name for name, value in values.items() if value is not None)


def parse_endpoints(text: str) -> tuple[str, ...]:
    """Split `host:port,host:port` (`http://` or `https://` allowed, port 2379 if missing) into gRPC targets.

    An endpoint may also be `unix:/path`, a socket on this machine, as used by an etcd that an agent runs.

    Raises:
        ConfigError: an endpoint is malformed, or there is none.
    """
    endpoints = tuple(_parse_endpoint(part) for part in _split(text))
    if not endpoints:
        raise ConfigError(f"no etcd endpoint in {text!r}: want host:port, several separated by commas")
    return endpoints


def read_access(server: str, given: CredentialOptions) -> Access:
    """Check the options against each other and against the endpoints, and read the files. Raises `ConfigError`."""
    endpoints = parse_endpoints(server)
    is_secure = [part.startswith("https://") for part in _split(server)]
    if any(is_secure) and not all(is_secure):
        raise ConfigError("--elastic_server mixes https:// with other endpoints: want all of them alike")
    if all(is_secure) and given.has_secret and not given.names_for_other_etcds:
        return Access(endpoints, Credentials(issue(read_secret(given))))
    return Access(endpoints, Credentials(_tls(given, is_secure=all(is_secure)), _user(given)))


def read_server(options: dict[str, Any]) -> Access:
    """Return endpoints and credentials of etcd from the options of a command. Raises `ConfigError`."""
    return read_access(options["elastic_server"] or DEFAULT_SERVER, read_credentials(options))


def read_credentials(options: dict[str, Any]) -> CredentialOptions:
    """Return the credentials for etcd from the options of a command.

    Removes the password from the environment, so that no child inherits it.
    """
    names = ("ca", "cert", "key", "user", "password_file")
    password = os.environ.pop(PASSWORD_VARIABLE, None)
    return CredentialOptions(password=password or None, **{name: options[f"etcd_{name}"] for name in names})


def read_secret(given: CredentialOptions) -> str:
    """Return the secret of a job that runs its own etcd. Raises `ConfigError`."""
    secret = _password(given) or ""
    if len(secret) < MIN_SECRET:
        where = f"--etcd_password_file={given.password_file}" if given.password_file else PASSWORD_VARIABLE
        raise ConfigError(
            f"{where} has {len(secret)} characters: the secret of a job with --ips must have {MIN_SECRET} or more (try "
            "openssl rand -hex 32)"
        )
    return secret


def _split(text: str) -> list[str]:
    return [part.strip() for part in text.split(",") if part.strip()]


def _parse_endpoint(part: str) -> str:
    if part.startswith(f"{SOCKET}/"):
        return part
    scheme = next((each for each in _SCHEMES if part.startswith(each)), "")
    address = part.removeprefix(scheme).rstrip("/")
    if "@" in address:  # it may contain a password, so the message does not repeat it
        raise ConfigError("an etcd endpoint has an @ in it: want host:port; users are given by --etcd_user")
    bracketed, closing, rest = address.rpartition("]")
    name, colon, port = rest.partition(":")
    host = bracketed + closing + name
    # Brackets enclose the whole host or do not occur. An IPv6 address without them has no number after its first colon.
    is_host = bracketed.startswith("[") and not name if closing else bool(name) and "[" not in name
    is_port = not colon or (port.isascii() and port.isdigit() and 0 < int(port) < 65536)
    if not is_host or not is_port or set(address) & set("/?# "):
        raise ConfigError(
            f"bad etcd endpoint {part!r}: want host:port, http://host:port or https://host:port, IPv6 in brackets, or "
            "unix:/path"
        )
    return f"{host}:{port or _DEFAULT_PORT}"


def _tls(given: CredentialOptions, *, is_secure: bool) -> Tls | None:
    files = {"--etcd_ca": given.ca, "--etcd_cert": given.cert, "--etcd_key": given.key}
    named = [name for name, value in files.items() if value is not None]
    if not is_secure:
        if named:
            raise ConfigError(f"{named[0]} is for TLS: give --elastic_server endpoints that begin with https://")
        return None
    if (given.cert is None) != (given.key is None):
        missing = "--etcd_key" if given.key is None else "--etcd_cert"
        raise ConfigError(f"{missing} is missing: a client certificate and its key are given together")
    ca, cert, key = (
        None if value is None else _read(name, value, is_secret=value is given.key) for name, value in files.items()
    )
    _check_pem(given)
    return Tls(ca, cert, key)


def _check_pem(given: CredentialOptions) -> None:
    """Parse the files now: gRPC accepts anything, and its errors while connecting are of no use to an operator."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    if given.ca is not None:
        try:
            context.load_verify_locations(given.ca)
        except ssl.SSLError:
            raise ConfigError(f"--etcd_ca={given.ca} holds no certificate: want a PEM file") from None
    if given.cert is not None:
        try:
            context.load_cert_chain(given.cert, given.key, password=_no_passphrase)
        except ssl.SSLError as error:
            wrong = "do not belong together" if "MISMATCH" in (error.reason or "") else "cannot be used"
            raise ConfigError(
                f"--etcd_cert={given.cert} and --etcd_key={given.key} {wrong}: want a PEM certificate and its "
                "PEM key without a passphrase"
            ) from None


def _no_passphrase() -> str:
    """Return an empty passphrase; otherwise OpenSSL would ask for one at the terminal."""
    return ""


def _password(given: CredentialOptions) -> str | None:
    if given.password is not None and given.password_file is not None:
        raise ConfigError(f"both --etcd_password_file and {PASSWORD_VARIABLE} are set: want one of them")
    if given.password_file is not None:
        return read_text("--etcd_password_file", given.password_file)
    if given.password is not None and not _is_text(given.password):
        raise ConfigError(f"{PASSWORD_VARIABLE} is not UTF-8 text")
    return given.password


def _is_text(value: str) -> bool:
    """Whether a value can be encoded as UTF-8; an environment variable may hold other bytes."""
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


def _user(given: CredentialOptions) -> User | None:
    password = _password(given)
    if given.user is None and password is None:
        return None
    if password is None:
        raise ConfigError(
            f"--etcd_user={given.user} has no password: give it in {PASSWORD_VARIABLE} or by --etcd_password_file"
        )
    if given.user is None:
        raise ConfigError(
            "a password for etcd is given but no user: want --etcd_user, or, for a job with --ips, endpoints that "
            "begin with https://"
        )
    return User(given.user, password)


def read_text(option: str, path: str) -> str:
    """Return the secret in a file, without the newline that editors append. Raises `ConfigError`."""
    try:
        text = _read(option, path, is_secret=True).decode().removesuffix("\n").removesuffix("\r")
    except UnicodeDecodeError:
        raise ConfigError(f"{option}={path} is not UTF-8 text") from None
    if not text:
        raise ConfigError(f"{option}={path} is empty")
    return text


def _read(option: str, path: str, *, is_secret: bool) -> bytes:
    try:
        with Path(path).open("rb") as file:
            status = os.fstat(file.fileno())
            content = file.read()
    except OSError as error:
        raise ConfigError(f"{option}={path} cannot be read: {error.strerror}") from None
    mode = stat.S_IMODE(status.st_mode)
    if is_secret and mode & _forbidden_mode(status):
        raise ConfigError(
            f"{option}={path} is a secret, and other users may read or change it (mode {mode:04o}): chmod 600 {path}, "
            "or give a container's secret mode 0400"
        )
    return content


def _forbidden_mode(status: os.stat_result) -> int:
    """Return the mode bits that a secret's file must not have: as for ssh keys, but root may share it with a group."""
    may_share_with_group = status.st_uid == 0 or status.st_uid != os.geteuid()
    return stat.S_IRWXO if may_share_with_group else stat.S_IRWXO | stat.S_IRWXG
