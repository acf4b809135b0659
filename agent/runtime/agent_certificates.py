"""The certificates of this agent: given by options, or made by itself at its start.

An agent's neighbours and readers know from its record in etcd which certificate it has, by its fingerprint. So no
authority is needed, and one that the agent makes itself is as good as another.
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
    """Return the files that the options name, checked; None: they name none.

    Args:
        options: the command line's.
        has_servers: of a job with parameter servers: its processes know each other by `--tls_ca` and their addresses.

    Raises:
        ConfigError: they are not complete, or cannot be used.
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
    # The page's and the ranks' processes read them too, wherever those are started.
    files = tls.TlsFiles(str(Path(cert).absolute()), str(Path(key).absolute()), ca and str(Path(ca).absolute()))
    read_text("--tls_key", key)  # refused if others may read it
    check_files(files)
    return files


def check_files(files: tls.TlsFiles, host: str | None = None) -> None:
    """Have a connection by these files in memory, to this host if one is given. Raises `ConfigError`: it fails."""
    try:
        tls.check(files, host, calls=files.ca is not None)
    except tls.TlsError as error:
        raise ConfigError(str(error)) from None


def link_tls(files: tls.TlsFiles | None) -> LinkTls:
    """Return how links are encrypted: by these files, or by a certificate that is made now. Raises `ConfigError`."""
    try:
        if files is None:
            return _self_made()
        demands = files.ca is not None
        return LinkTls(
            # Readers of logs have none: they prove that they know the job's secret, which only etcd tells.
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
    """A file that is nowhere but in memory: the key never reaches a disk, and `ssl` takes nothing but files."""
    fd = os.memfd_create(f"elastic-agent:{name}", os.MFD_CLOEXEC)
    try:
        os.write(fd, content)
        yield fd
    finally:
        os.close(fd)
