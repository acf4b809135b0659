"""TLS for network connections: contexts from PEM files, and a channel that leaves the transport to its user.

Links between agents, the web page and parameter servers use sockets in different ways: asyncio's streams, a protocol of
uvicorn's, threads. `TlsChannel` converts between plain bytes and the bytes on the wire, without a socket. So limits and
timeouts of connections stay with the code that owns the socket.

On links and at parameter servers both ends are this package: they speak TLS 1.3, or 1.2 if this OpenSSL has no 1.3.
Browsers may use 1.2.

Standard library only, because the agent imports this module too.
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
"""Environment variable of a file, by its name from `NAMES` in capitals; read by the agent's options and by scripts."""
READ_BYTES: Final = 1 << 16
"""Bytes to receive at a time."""
_NO_CHECK_TIME: Final = 0x200000  # X509_V_FLAG_NO_CHECK_TIME, which Python has no name for
_NEWEST: Final = ssl.TLSVersion.TLSv1_3 if ssl.HAS_TLSv1_3 else ssl.TLSVersion.TLSv1_2
_NOT_ACCEPTED: Final = "its certificate is not accepted: "
_WRITE_BYTES: Final = 1 << 20
_TOO_WEAK: Final = ("TOO_SMALL", "TOO_WEAK")
"""Parts of OpenSSL's error reasons for a key or a digest that its security level does not allow."""


class TlsError(Exception):
    """Certificate files cannot be used. The message is one line: wanted, got, what to do."""


class TlsBroken(Exception):  # noqa: N818 - says what became of the connection
    """A connection can no longer be used, by the rules of TLS. The message is a short phrase for people."""


@dataclass(frozen=True)
class TlsFiles:
    """Paths of PEM files, unchecked."""

    cert: str
    """The certificate, with the certificates between it and its authority."""
    key: str
    ca: str | None
    """The authority that signs the certificates of the job; None if it was not given."""
    label: str = "--tls_{}={}"
    """How messages name a file: a format of its name from `NAMES` and its path."""

    def named(self, name: str) -> str:
        """Return how messages name a file."""
        return self.label.format(name, getattr(self, name))


def files_of(environ: Mapping[str, str]) -> TlsFiles | None:
    """Return the files that a script's environment names; None if it names none. All three files are needed.

    Raises:
        TlsError: a file is not named.
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
    """Return the TLS context of an end that accepts connections.

    Args:
        files: our certificate; `ca` signs the certificates of callers.
        callers: whether callers must show a certificate.
        minimum: minimum version of TLS.
        checks_time: whether the validity period of callers' certificates is checked; see `dialling`.

    Raises:
        TlsError: a file cannot be used.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = minimum
    context.options |= ssl.OP_NO_RENEGOTIATION
    context.num_tickets = 0  # no session is ever resumed
    _load_cert(context, files)
    if files.ca is not None and callers is not ssl.CERT_NONE:
        _load_ca(context, files)
        context.verify_mode = callers
        if not checks_time:
            context.verify_flags |= _NO_CHECK_TIME
    return context


def dialling(files: TlsFiles, *, names_host: bool) -> ssl.SSLContext:
    """Return the TLS context of an end that connects, shows our certificate, and trusts `ca` alone.

    Args:
        files: all three files.
        names_host: whether the other end's certificate must name the host that is called, and be within its validity
            period. False: the certificate is verified by other means, and must only be signed by `ca`; a certificate
            that expires while a job runs then excludes nobody from the job.

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
    """Return the TLS context of an end that connects, and compares the other end's fingerprint itself."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = _NEWEST
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    return context


def check(files: TlsFiles, host: str | None, *, calls: bool) -> str:
    """Make a connection in memory between two ends that use these files, to find errors in the files early.

    Args:
        files: the files to check.
        host: name or IP address that the certificate must be valid for; None: any.
        calls: whether the certificate is also shown to the servers that this end connects to.

    Returns:
        The certificate's fingerprint.

    Raises:
        TlsError: a file cannot be read or used, key and certificate do not belong together, or the certificate has
            expired, is not signed by the authority, is for another host, or is not valid for this use.
    """
    server = accepting(files, callers=ssl.CERT_REQUIRED if calls and files.ca is not None else ssl.CERT_NONE)
    client = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    client.check_hostname = host is not None
    _load_cert(client, files)
    if files.ca is None:  # no authority is given: trust the certificate itself
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
    """One end of a TLS connection without a transport: bytes in, bytes out. Not thread-safe.

    Args:
        context: our certificate and the authorities to trust.
        is_called: whether the other end opened the connection.
        host: name or address that was called, if the context checks it.
    """

    def __init__(self, context: ssl.SSLContext, *, is_called: bool = False, host: str = "") -> None:
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = context.wrap_bio(
            self._incoming, self._outgoing, server_side=is_called, server_hostname=host or None
        )

    def take(self, came: bytes) -> None:
        """Take bytes that were received from the network."""
        self._incoming.write(came)

    def give(self) -> bytes:
        """Return the bytes to send to the network now; may be empty."""
        return self._outgoing.read()

    def shake(self) -> bool:
        """Continue the handshake; return whether it is complete on this end. Raises `TlsBroken`."""
        try:
            self._tls.do_handshake()
        except ssl.SSLWantReadError:
            return False
        except ssl.SSLError as error:
            raise TlsBroken(_reason(error)) from None
        return True

    def write(self, data: bytes | memoryview) -> bytes:
        """Encrypt `data`; return the bytes to send to the network. Raises `TlsBroken`."""
        rest = memoryview(data)
        try:
            while rest:
                rest = rest[self._tls.write(rest[:_WRITE_BYTES]) :]
        except ssl.SSLError as error:
            raise TlsBroken(_reason(error)) from None
        return self._outgoing.read()

    def read(self) -> bytes:
        """Return all decrypted data, possibly none; `is_over` tells whether more may come. Raises `TlsBroken`."""
        read = bytearray()
        try:
            while part := self._tls.read(READ_BYTES):
                read += part
        except ssl.SSLWantReadError:
            return bytes(read)
        except ssl.SSLError as error:
            raise TlsBroken(_reason(error)) from None
        self.is_over = True
        return bytes(read)

    def read_into(self, place: memoryview) -> int:
        """Copy decrypted data into `place`; return its size in bytes. Sets `is_over` as `read`. Raises `TlsBroken`."""
        try:
            read = self._tls.read(len(place), place)
        except ssl.SSLWantReadError:
            return 0
        except ssl.SSLError as error:
            raise TlsBroken(_reason(error)) from None
        self.is_over = not read
        return int(read)

    @property
    def has_more(self) -> bool:
        """Whether data was received that was not read yet."""
        return bool(self._incoming.pending or self._tls.pending())

    is_over = False
    """The other end has announced that it sends nothing more."""

    def fingerprint(self) -> str:
        """Return the fingerprint of the other end's certificate; empty if it has shown none."""
        shown = self._tls.getpeercert(binary_form=True)
        return fingerprint(shown) if shown else ""

    def end(self) -> bytes:
        """Return the bytes that announce the end of the connection."""
        with suppress(ssl.SSLError, ValueError):  # the other end has not announced its end, or there was no handshake
            self._tls.unwrap()
        return self._outgoing.read()


def fingerprint(certificate: bytes) -> str:
    """Return the SHA-256 of a certificate in DER form, in hexadecimal digits."""
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
    """Keep OpenSSL from asking for a passphrase at the terminal."""
    return ""


def _reason(error: ssl.SSLError) -> str:
    """Return the reason of an error, without OpenSSL's numbers and source locations."""
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"{_NOT_ACCEPTED}{error.verify_message.rstrip('.')}"
    reason = (error.reason or "").replace("_", " ").lower()
    if "alert" in reason:
        return f"it has ended the connection: {reason}"
    return f"no TLS as it should be ({reason or 'it ended'})"
