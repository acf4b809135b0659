"""Bounds on connections: an idle one cannot keep requests out, and is closed after a bounded time."""

from __future__ import annotations

import asyncio
import http.client
import socket
import ssl
import threading
import time
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress

import pytest
from authority import Authority
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from agent.web import server
from agent.web.server import WebServer
from trainer_runtime import tls

PLACES = 8
WITHIN_S = 1.0
SETTLED_S = 0.3
"""Time for the server to read what was sent, which cannot be observed from outside."""
LARGE = "x" * (8 << 20)
"""More than the buffers between client and server hold."""

HEAD = b"GET /large HTTP/1.1\r\nHost: h\r\n"
ASKED = b"GET /healthz HTTP/1.1\r\nHost: h\r\n\r\n"
HOLDERS = {
    "nothing": b"",
    "part of a head": HEAD,
    "no body": b"POST /read HTTP/1.1\r\nHost: h\r\nContent-Length: 100\r\n\r\n",
    "part of a body": b"POST /read HTTP/1.1\r\nHost: h\r\nContent-Length: 100\r\n\r\n{",
    "part of the next head": ASKED + HEAD,
    "reads no answer": HEAD + b"\r\n",
    "reads no last answer": HEAD + b"Connection: close\r\n\r\n",
}
MAY_STAY = {"reads no answer", "reads no last answer"}
"""As long as there are free connections: the client may be slow."""


async def _read(request: Request) -> Response:
    with suppress(ClientDisconnect):
        await request.body()
    return Response()


async def _healthz(_request: Request) -> Response:
    return PlainTextResponse("ok")


async def _large(_request: Request) -> Response:
    return PlainTextResponse(LARGE)


async def _scheme(request: Request) -> Response:
    return PlainTextResponse(request.url.scheme)


@pytest.fixture
def port(monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    """Port of a server with few connections."""
    with serving(monkeypatch, None) as found:
        yield found


@pytest.fixture
def encrypted_port(authority: Authority, monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    """The same with TLS."""
    files = authority.files("page", "localhost")
    context = tls.accepting(files, callers=ssl.CERT_NONE, minimum=ssl.TLSVersion.TLSv1_2)
    with serving(monkeypatch, context) as found:
        yield found


@contextmanager
def serving(monkeypatch: pytest.MonkeyPatch, context: ssl.SSLContext | None) -> Iterator[int]:
    monkeypatch.setattr(server, "_CONNECTIONS", PLACES)
    monkeypatch.setattr(server, "_REQUEST_WITHIN_S", WITHIN_S)
    monkeypatch.setattr(server, "_KEEP_ALIVE_S", WITHIN_S)
    routes = [
        Route("/healthz", _healthz),
        Route("/large", _large),
        Route("/scheme", _scheme),
        Route("/read", _read, methods=["POST"]),
    ]
    listener = socket.create_server(("127.0.0.1", 0), backlog=256)
    found: int = listener.getsockname()[1]
    serving = WebServer(Starlette(routes=routes), listener.detach(), context)
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_until_complete, args=(serving.serve_until_left(),))
    thread.start()
    yield found
    loop.call_soon_threadsafe(serving.leave)
    thread.join()
    loop.close()


def hold(port: int, said: bytes, opened: ExitStack) -> socket.socket:
    """Connect, send these bytes, and nothing more."""
    holder = opened.enter_context(socket.create_connection(("127.0.0.1", port), timeout=30.0))
    with suppress(OSError):  # the server closed it at once
        holder.sendall(said)
    return holder


def is_answered(port: int, browser: ssl.SSLContext | None = None) -> bool:
    if browser is None:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30.0)
    else:
        connection = http.client.HTTPSConnection("localhost", port, timeout=30.0, context=browser)
    try:
        connection.request("GET", "/healthz")
        return connection.getresponse().read() == b"ok"
    finally:
        connection.close()


@pytest.mark.parametrize("said", HOLDERS.values(), ids=HOLDERS.keys())
def test_idle_connections_are_dropped_first(port: int, said: bytes) -> None:
    with ExitStack() as opened:
        for _ in range(3 * PLACES):
            hold(port, said, opened)
        time.sleep(SETTLED_S)
        assert all(is_answered(port) for _ in range(3))


@pytest.mark.parametrize("said", [each for name, each in HOLDERS.items() if name not in MAY_STAY])
def test_a_complete_request_must_arrive_in_time(port: int, said: bytes) -> None:
    with ExitStack() as opened:
        holder = hold(port, said, opened)
        began_at = time.monotonic()
        with suppress(ConnectionResetError):
            while holder.recv(1 << 16):
                continue
        assert time.monotonic() - began_at < 15.0


@pytest.mark.parametrize("version", [ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3])
def test_the_same_responses_come_with_tls(encrypted_port: int, authority: Authority, version: ssl.TLSVersion) -> None:
    browser = ssl.create_default_context(cafile=authority.ca)
    browser.minimum_version = browser.maximum_version = version
    connection = http.client.HTTPSConnection("localhost", encrypted_port, timeout=30.0, context=browser)
    said = []
    for path in ("/scheme", "/large", "/healthz"):
        connection.request("GET", path)
        said.append(connection.getresponse().read().decode())
    connection.request("POST", "/read", body=b"x" * 100_000, headers={"Connection": "close"})
    assert connection.getresponse().read() == b""
    connection.close()
    assert said == ["https", LARGE, "ok"]


@pytest.mark.parametrize("said", [b"", b"\x16\x03\x01\x02", b"\x16\x03\x01\xff\xff" + b"x" * 1000, ASKED], ids=str)
def test_connections_without_tls_keep_nobody_out_and_are_closed(
    encrypted_port: int, authority: Authority, said: bytes
) -> None:
    browser = ssl.create_default_context(cafile=authority.ca)
    with ExitStack() as opened:
        holders = [hold(encrypted_port, said, opened) for _ in range(3 * PLACES)]
        time.sleep(SETTLED_S)
        assert all(is_answered(encrypted_port, browser) for _ in range(3))
        for holder in holders:
            with suppress(OSError):
                assert b"HTTP" not in holder.recv(4096), "nothing is answered in the clear"


def test_an_older_tls_is_refused(encrypted_port: int, authority: Authority) -> None:
    browser = ssl.create_default_context(cafile=authority.ca)
    with warnings.catch_warnings(action="ignore", category=DeprecationWarning):
        browser.minimum_version = browser.maximum_version = ssl.TLSVersion.TLSv1_1
    with pytest.raises(ssl.SSLError):
        is_answered(encrypted_port, browser)
    browser = ssl.create_default_context(cafile=authority.ca)
    assert is_answered(encrypted_port, browser)
