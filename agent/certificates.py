"""The certificates of this agent: given by options, or made by itself at its start.

An agent's neighbours and readers know from its record in etcd which certificate it has, by its fingerprint. So no
authority is needed, and one that the agent makes itself is as good as another. There is no library for that among what
we need already: the program `openssl` makes it, which comes with the certificates of public authorities on most
systems. Where it is missing, links to this agent are not encrypted, and a line says so.
"""

from __future__ import annotations

import os
import ssl
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from agent.errors import ConfigError
from agent.observe.log import log
from agent.peers.wire import LinkTls
from agent.store.access import read_text
from trainer_runtime import tls

_MADE_WITHIN_S = 10.0
_REQUEST = b"[req]\ndistinguished_name = none\n[none]\n"  # the system's own configuration may be missing, or ask


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
    if files is None:
        return _self_made()
    try:
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
    with ExitStack() as opened:
        request, cert, key = (opened.enter_context(_memory(name)) for name in ("request", "cert", "key"))
        os.write(request, _REQUEST)
        why = _make(request, cert, key)
        if why is None:
            files = tls.TlsFiles(f"/proc/self/fd/{cert}", f"/proc/self/fd/{key}", None)
            try:
                accepting = tls.accepting(files, callers=ssl.CERT_NONE)
            except tls.TlsError:
                why = "has made a certificate that cannot be used"
        if why is not None:
            log.warning(
                f"links to this agent are not encrypted: openssl {why}; install it, or give --tls_cert and --tls_key"
            )
            return LinkTls(None, "", tls.dialling_pinned())
        der = ssl.PEM_cert_to_DER_cert(os.pread(cert, 1 << 16, 0).decode())
        return LinkTls(accepting, tls.fingerprint(der), tls.dialling_pinned())


def _make(request: int, cert: int, key: int) -> str | None:
    """Have openssl write a certificate and its key into these; return why it did not."""
    argv = ["openssl", "req", "-x509", "-config", f"/dev/fd/{request}", "-subj", "/CN=elastic-agent", "-nodes"]
    argv += ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-days", "36500"]
    argv += ["-keyout", f"/dev/fd/{key}", "-out", f"/dev/fd/{cert}"]
    try:
        made = subprocess.run(
            argv,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            pass_fds=(request, cert, key),
            timeout=_MADE_WITHIN_S,
            check=False,
        )
    except OSError as error:
        return f"cannot be started ({error.strerror})"
    except subprocess.TimeoutExpired:
        return f"has made no certificate within {_MADE_WITHIN_S:g} s"
    said = made.stderr.decode(errors="replace").split("\n")
    return f"has ended with code {made.returncode} ({said[0]})" if made.returncode else None


@contextmanager
def _memory(name: str) -> Iterator[int]:
    """A file that is nowhere but in memory: the key never reaches a disk."""
    fd = os.memfd_create(f"elastic-agent:{name}", os.MFD_CLOEXEC)
    try:
        yield fd
    finally:
        os.close(fd)
