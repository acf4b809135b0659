"""Certificates from a secret: OpenSSL accepts them for their names, and none of another secret."""

from __future__ import annotations

import socket
import ssl
from contextlib import suppress
from pathlib import Path
from threading import Thread

import pytest

from agent.store.certificates import Tls, issue

SHARED = "sixteen letters!"


def context(side: int, tls: Tls, folder: Path) -> ssl.SSLContext:
    """Of a side that shows this certificate, and trusts its authority alone."""
    folder.mkdir()
    assert (tls.ca, tls.cert, tls.key) != (None, None, None)
    for name, text in (("cert", tls.cert), ("key", tls.key)):
        (folder / name).write_bytes(text or b"")
    made = ssl.SSLContext(side)
    made.load_verify_locations(cadata=(tls.ca or b"").decode())
    made.load_cert_chain(folder / "cert", folder / "key")
    made.verify_mode = ssl.CERT_REQUIRED
    return made


def shake_hands(server: Tls, client: Tls, name: str, folder: Path) -> str:
    """Return the client's error; empty: none."""
    ours, theirs = socket.socketpair()

    def serve() -> None:
        serving = context(ssl.PROTOCOL_TLS_SERVER, server, folder / "server")
        with theirs, suppress(OSError), serving.wrap_socket(theirs, server_side=True) as wrapped:
            wrapped.sendall(b"welcome")

    thread = Thread(target=serve)
    thread.start()
    try:
        with (
            ours,
            context(ssl.PROTOCOL_TLS_CLIENT, client, folder / "client").wrap_socket(
                ours, server_hostname=name
            ) as wrapped,
        ):
            return "" if wrapped.recv(100) == b"welcome" else "hung up"
    except OSError as error:
        return str(error)
    finally:
        thread.join()


@pytest.mark.parametrize("name", ["10.0.0.1", "fe80::1", "node-b", "127.0.0.1"])
def test_a_caller_with_the_secret_is_accepted(tmp_path: Path, name: str) -> None:
    """A member shows the names of all machines; a client knows only the secret."""
    server = issue(SHARED, ["10.0.0.1", "fe80::1%eth0", "node-b"])
    assert shake_hands(server, issue(SHARED), name, tmp_path) == ""


def test_a_caller_with_another_secret_is_refused(tmp_path: Path) -> None:
    assert "verify failed" in shake_hands(issue(SHARED), issue(SHARED + "!"), "127.0.0.1", tmp_path)


def test_a_client_of_another_secret_is_hung_up_on(tmp_path: Path) -> None:
    """Although it trusts the server."""
    mine, other = issue(SHARED), issue(SHARED + "!")
    assert shake_hands(mine, Tls(mine.ca, other.cert, other.key), "127.0.0.1", tmp_path) != ""


def test_another_name_is_not_the_members(tmp_path: Path) -> None:
    assert "mismatch" in shake_hands(issue(SHARED, ["10.0.0.1"]), issue(SHARED), "10.0.0.2", tmp_path)
