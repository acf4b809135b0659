"""TLS for what crosses the network: contexts from PEM files, and a channel whose bytes somebody else carries.

Links between agents, the web page and parameter servers each have their own way with sockets: asyncio's streams, a
protocol of uvicorn's, threads. `TlsChannel` turns what they send into what goes over the wire, and back, and knows no
socket. So who is bounded, waited for and given up stays where it is decided already.

Both ends are ours on links and at parameter servers: they speak TLS 1.3, or 1.2 where this OpenSSL has no other.
Browsers may come with 1.2.

Standard library only, since the agent imports it too.
"""

from __future__ import annotations

import hashlib
import ssl
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Mapping

NAMES: Final = ("cert", "key", "ca")
VARIABLE: Final = "ELASTIC_AGENT_TLS_{}"
"""Of a file, by one of `NAMES` in capitals: the agent's options are read from there, and so are a script's."""
READ_BYTES: Final = 1 << 16
"""To receive at a time."""
_NO_CHECK_TIME: Final = 0x200000  # X509_V_FLAG_NO_CHECK_TIME, which Python has no name for
_NEWEST: Final = ssl.TLSVersion.TLSv1_3 if ssl.HAS_TLSv1_3 else ssl.TLSVersion.TLSv1_2
_NOT_ACCEPTED: Final = "its certificate is not accepted: "
_WRITE_BYTES: Final = 1 << 20
_TOO_WEAK: Final = ("TOO_SMALL", "TOO_WEAK")
"""In OpenSSL's words for a key or a digest that its rules do not allow."""


class TlsError(Exception):
    """What is wrong, in one line: wanted, got, what to do."""


class TlsBroken(Exception):  # noqa: N818 - says what became of the connection
    """A connection is of no use any more, by the rules of TLS. The message is a short phrase for people."""


@dataclass(frozen=True)
class TlsFiles:
    """PEM files that somebody has given, unchecked."""

    cert: str
    """With what stands between it and its authority."""
    key: str
    ca: str | None
    """Who signs the certificates of the job. None: it was not given."""
    label: str = "--tls_{}={}"
    """How messages name a file: by one of `NAMES`, and the path."""

    def named(self, name: str) -> str:
        """Return a file as messages name it."""
        return self.label.format(name, getattr(self, name))


def files_of(environ: Mapping[str, str]) -> TlsFiles | None:
    """Return what a script's environment names; None: nothing. All three files are needed.

    Raises:
        TlsError: one is missing.
    """
    variables = {name: VARIABLE.format(name.upper()) for name in NAMES}
    given = {name: environ[variable] for name, variable in variables.items() if environ.get(variable)}
    if not given:
        return None
    missing = [variables[name] for name in NAMES if name not in given]
    if missing:
        raise TlsError(f"{missing[0]} is not set: set all of {', '.join(variables.values())}, or none of them")
    return TlsFiles(given["cert"], given["key"], given["ca"], "ELASTIC_AGENT_TLS_{}={}")


def accepting(
    files: TlsFiles, *, callers: ssl.VerifyMode, minimum: ssl.TLSVersion = _NEWEST, checks_time: bool = True
) -> ssl.SSLContext:
    """Return the context of an end that is called.

    Args:
        files: our certificate; `ca` is who signs those of callers.
        callers: whether these must show one.
        minimum: version of TLS.
        checks_time: whether callers' certificates must be of these days; see `dialling`.

    Raises:
        TlsError: a file cannot be used.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = minimum
    context.options |= ssl.OP_NO_RENEGOTIATION
    context.num_tickets = 0  # a connection is opened once, and nobody resumes one
    _load_cert(context, files)
    if files.ca is not None and callers is not ssl.CERT_NONE:
        _load_ca(context, files)
        context.verify_mode = callers
        if not checks_time:
            context.verify_flags |= _NO_CHECK_TIME
    return context


def dialling(files: TlsFiles, *, names_host: bool) -> ssl.SSLContext:
    """Return the context of an end that calls, shows our certificate, and trusts `ca` alone.

    Args:
        files: all three.
        names_host: whether the other end's certificate must name the address that is called, and be of these days.
            False: something better says which certificate it is, and `ca` must only have signed it. Then one that
            expires while a job runs takes nobody out of it.

    Raises:
        TlsError: a file cannot be used.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = _NEWEST
    context.check_hostname = names_host
    _load_cert(context, files)
    _load_ca(context, files)
    if not names_host:
        context.verify_flags |= _NO_CHECK_TIME
    return context


@cache
def dialling_pinned() -> ssl.SSLContext:
    """Return the context of an end that calls, and compares the other's fingerprint itself."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = _NEWEST
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    return context


def check(files: TlsFiles, host: str | None, *, calls: bool) -> str:
    """Have a connection between two ends that use these files, in memory: what would fail later fails now.

    Args:
        files: to be checked.
        host: name or IP address that the certificate must be for; None: any.
        calls: our end shows the certificate to those that it calls, too.

    Returns:
        The certificate's fingerprint.

    Raises:
        TlsError: a file cannot be read or used, key and certificate do not belong together, the certificate has
            expired, is not signed by the authority, is for another host, or not for this use.
    """
    server = accepting(files, callers=ssl.CERT_REQUIRED if calls and files.ca is not None else ssl.CERT_NONE)
    client = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    client.check_hostname = host is not None
    _load_cert(client, files)
    if files.ca is None:  # nobody says whom to trust: only what the certificate says itself counts
        client.load_verify_locations(files.cert)
        client.verify_flags |= ssl.VerifyFlags.VERIFY_X509_PARTIAL_CHAIN
    else:
        _load_ca(client, files)
    here, there = TlsChannel(client, host=host or ""), TlsChannel(server, is_called=True)
    ends = [(here, there), (there, here)]
    try:
        is_done = False
        while not is_done:
            is_done = True
            for end, other in ends:
                is_done &= end.shake()
                other.take(end.give())
        there.take(here.give())
        there.read()
    except TlsBroken as broken:
        raise TlsError(f"{files.named('cert')} cannot be used: {str(broken).removeprefix(_NOT_ACCEPTED)}") from None
    return here.fingerprint()


class TlsChannel:
    """One end of a connection by TLS: bytes in, bytes out. One thread at a time.

    Args:
        context: with what to prove ourselves, and whom to believe.
        is_called: the other end called this one.
        host: name or address that was called, if the context checks it.
    """

    def __init__(self, context: ssl.SSLContext, *, is_called: bool = False, host: str = "") -> None:
        self._came, self._goes = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = context.wrap_bio(self._came, self._goes, server_side=is_called, server_hostname=host or None)

    def take(self, came: bytes) -> None:
        """Take what came over the wire."""
        self._came.write(came)

    def give(self) -> bytes:
        """Return what is to be sent now; may be nothing."""
        return self._goes.read()

    def shake(self) -> bool:
        """Go on with the handshake, and say whether it is done here. Raises `TlsBroken`."""
        try:
            self._tls.do_handshake()
        except ssl.SSLWantReadError:
            return False
        except ssl.SSLError as error:
            raise TlsBroken(_words(error)) from None
        return True

    def write(self, data: bytes | memoryview) -> bytes:
        """Return what is to be sent for this. Raises `TlsBroken`."""
        rest = memoryview(data)
        try:
            while rest:
                rest = rest[self._tls.write(rest[:_WRITE_BYTES]) :]
        except ssl.SSLError as error:
            raise TlsBroken(_words(error)) from None
        return self._goes.read()

    def read(self) -> bytes:
        """Return what has come whole, perhaps nothing; `is_over` says whether more may come. Raises `TlsBroken`."""
        read = bytearray()
        try:
            while part := self._tls.read(READ_BYTES):
                read += part
        except ssl.SSLWantReadError:
            return bytes(read)
        except ssl.SSLError as error:
            raise TlsBroken(_words(error)) from None
        self.is_over = True
        return bytes(read)

    def read_into(self, place: memoryview) -> int:
        """Put what has come whole there, and say how many bytes that is; `is_over` likewise. Raises `TlsBroken`."""
        try:
            read = self._tls.read(len(place), place)
        except ssl.SSLWantReadError:
            return 0
        except ssl.SSLError as error:
            raise TlsBroken(_words(error)) from None
        self.is_over = not read
        return int(read)

    @property
    def has_more(self) -> bool:
        """Whether something has come that was not read."""
        return bool(self._came.pending or self._tls.pending())

    is_over = False
    """The other end has said that nothing more comes."""

    def fingerprint(self) -> str:
        """Of the certificate that the other end has shown; empty: none."""
        shown = self._tls.getpeercert(binary_form=True)
        return fingerprint(shown) if shown else ""

    def end(self) -> bytes:
        """Return what says that nothing more will come."""
        with suppress(ssl.SSLError, ValueError):  # it waits for the other end's, which nobody needs; or it never began
            self._tls.unwrap()
        return self._goes.read()


def fingerprint(certificate: bytes) -> str:
    """Of a certificate in DER: SHA-256, in hexadecimal digits."""
    return hashlib.sha256(certificate).hexdigest()


def _load_cert(context: ssl.SSLContext, files: TlsFiles) -> None:
    _check_readable(files, "cert", "key")
    try:
        context.load_cert_chain(files.cert, files.key, password=_no_passphrase)
    except ssl.SSLError as error:
        reason = error.reason or ""
        if any(word in reason for word in _TOO_WEAK):
            why = reason.replace("_", " ").lower()
            raise TlsError(
                f"{files.named('cert')} cannot be used ({why}): this system's OpenSSL wants a stronger one"
            ) from None
        wrong = "do not belong together" if "MISMATCH" in reason else "cannot be used"
        raise TlsError(
            f"{files.named('cert')} and {files.named('key')} {wrong}: want a PEM certificate and its PEM key without "
            "a passphrase"
        ) from None


def _load_ca(context: ssl.SSLContext, files: TlsFiles) -> None:
    _check_readable(files, "ca")
    try:
        context.load_verify_locations(files.ca)
    except ssl.SSLError:
        raise TlsError(f"{files.named('ca')} holds no certificate: want a PEM file") from None


def _check_readable(files: TlsFiles, *names: str) -> None:
    for name in names:
        try:
            Path(getattr(files, name)).open("rb").close()
        except OSError as error:
            raise TlsError(f"{files.named(name)} cannot be read: {error.strerror}") from None


def _no_passphrase() -> str:
    """Without it OpenSSL would ask for one at the terminal."""
    return ""


def _words(error: ssl.SSLError) -> str:
    """Say it in words, without OpenSSL's own numbers and places in its source."""
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"{_NOT_ACCEPTED}{error.verify_message.rstrip('.')}"
    reason = (error.reason or "").replace("_", " ").lower()
    if "alert" in reason:
        return f"it has ended the connection: {reason}"
    return f"no TLS as it should be ({reason or 'it ended'})"
