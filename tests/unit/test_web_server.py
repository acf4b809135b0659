"""Places at the page's server: who only holds one keeps nobody out, and has it for a bounded time."""

from __future__ import annotations

import asyncio
import http.client
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, suppress

import pytest
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from agent.web import server
from agent.web.server import Server

PLACES = 8
WITHIN_S = 1.0
SETTLED_S = 0.3
"""Until the server has read what was sent to it; nobody can see that from outside."""
LARGE = "x" * (8 << 20)
"""More than what lies between the two ends."""

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
"""As long as nobody wants the place: it may be a slow line."""


async def _read(request: Request) -> Response:
    with suppress(ClientDisconnect):
        await request.body()
    return Response()


async def _healthz(_request: Request) -> Response:
    return PlainTextResponse("ok")


async def _large(_request: Request) -> Response:
    return PlainTextResponse(LARGE)


@pytest.fixture
def port(monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    """Where one serves that has few places."""
    monkeypatch.setattr(server, "_CONNECTIONS", PLACES)
    monkeypatch.setattr(server, "_REQUEST_WITHIN_S", WITHIN_S)
    monkeypatch.setattr(server, "_KEEP_ALIVE_S", WITHIN_S)
    routes = [
        Route("/healthz", _healthz),
        Route("/large", _large),
        Route("/read", _read, methods=["POST"]),
    ]
    listener = socket.create_server(("127.0.0.1", 0), backlog=256)
    found: int = listener.getsockname()[1]
    serving = Server(Starlette(routes=routes), listener.detach())
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_until_complete, args=(serving.run_until_told(),))
    thread.start()
    yield found
    loop.call_soon_threadsafe(serving.leave)
    thread.join()
    loop.close()


def hold(port: int, said: bytes, opened: ExitStack) -> socket.socket:
    """Connect, say that, and no more."""
    holder = opened.enter_context(socket.create_connection(("127.0.0.1", port), timeout=30.0))
    with suppress(OSError):  # it had to go at once
        holder.sendall(said)
    return holder


def is_answered(port: int) -> bool:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30.0)
    try:
        connection.request("GET", "/healthz")
        return connection.getresponse().read() == b"ok"
    finally:
        connection.close()


@pytest.mark.parametrize("said", HOLDERS.values(), ids=HOLDERS.keys())
def test_who_only_holds_a_place_is_the_first_to_go(port: int, said: bytes) -> None:
    with ExitStack() as opened:
        for _ in range(3 * PLACES):
            hold(port, said, opened)
        time.sleep(SETTLED_S)
        assert all(is_answered(port) for _ in range(3))


@pytest.mark.parametrize("said", [each for name, each in HOLDERS.items() if name not in MAY_STAY])
def test_a_whole_request_must_come_in_time(port: int, said: bytes) -> None:
    with ExitStack() as opened:
        holder = hold(port, said, opened)
        began_at = time.monotonic()
        with suppress(ConnectionResetError):
            while holder.recv(1 << 16):
                continue
        assert time.monotonic() - began_at < 15.0
