"""The certificate of this agent: given by options, or self-signed at the start.

The agent's record in etcd has the fingerprint of its certificate. Neighbours and log readers check the certificate
against it, so no authority is needed, and a self-signed certificate is as good as any other.
"""

from __future__ import annotations

import os
import ssl
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from agent.errors import ConfigError
from agent.links.frames import LinkTls
from agent.store.access import read_text
from agent.store.certificates import self_signed
from trainer_runtime import tls


def read_files(options: dict[str, Any], *, has_servers: bool) -> tls.TlsFiles | None:
    """Return the certificate files that the options name, after checking them; None: the options name none.

    Args:
        options: of the command line.
        has_servers: the job has parameter servers, whose processes check each other's certificates against `--tls_ca`
            and their addresses.

    Raises:
        ConfigError: the options are incomplete, or the files cannot be used.
    """
    cert, key, ca = (options[f"tls_{name}"] for name in tls.NAMES)
    if cert is None and key is None and ca is None:
        return None
    missing = "--tls_key" if key is None else "--tls_cert" if cert is None else None
    if missing is not None:
        raise ConfigError(
            f"{missing} is missing: a certificate and its key are given together, with or without an authority"
        )
    if has_servers and ca is None:
        raise ConfigError("--tls_ca is missing: workers and parameter servers know each other's certificates by it")
    # Absolute: the web page's process and the ranks read the files too, in other working directories.
    files = tls.TlsFiles(str(Path(cert).absolute()), str(Path(key).absolute()), ca and str(Path(ca).absolute()))
    read_text("--tls_key", key)  # refused if others may read it
    check_files(files)
    return files


def check_files(files: tls.TlsFiles, host: str | None = None) -> None:
    """Try a TLS connection in memory with these files, to `host` if given. Raises `ConfigError` if it fails."""
    try:
        tls.check(files, host, calls=files.ca is not None)
    except tls.TlsError as error:
        raise ConfigError(str(error)) from None


def link_tls(files: tls.TlsFiles | None) -> LinkTls:
    """Return the TLS contexts of links, from these files or a new self-signed certificate. Raises `ConfigError`."""
    try:
        if files is None:
            return _self_made()
        demands = files.ca is not None
        return LinkTls(
            # Log readers have no certificate: they prove that they know the job's secret, which only etcd has.
            tls.accepting(files, callers=ssl.CERT_OPTIONAL, checks_time=False),
            tls.check(files, None, calls=demands),
            tls.dialling(files, names_host=False) if demands else tls.dialling_pinned(),
            demands,
        )
    except tls.TlsError as error:
        raise ConfigError(str(error)) from None


def _self_made() -> LinkTls:
    made, secret = self_signed()
    with _memory("cert", made) as cert, _memory("key", secret) as key:
        files = tls.TlsFiles(f"/proc/self/fd/{cert}", f"/proc/self/fd/{key}", None)
        accepting = tls.accepting(files, callers=ssl.CERT_NONE)
    return LinkTls(accepting, tls.fingerprint(ssl.PEM_cert_to_DER_cert(made.decode())), tls.dialling_pinned())


@contextmanager
def _memory(name: str, content: bytes) -> Iterator[int]:
    """Yield a file descriptor of a file in memory: `ssl` reads only files, and the key must not reach a disk."""
    fd = os.memfd_create(f"elastic-agent:{name}", os.MFD_CLOEXEC)
    try:
        os.write(fd, content)
        yield fd
    finally:
        os.close(fd)
