"""What is served: the page, its events, the scale control, metrics and probes.

| | who | what |
|---|---|---|
| GET / | anybody | the page, without anything of the job in it |
| POST /session | who shows the token | a session for the browser |
| GET /session | a session, or the token | nothing: that it is one |
| GET /events | the same | the job, then each change of it (server-sent events) |
| POST /np | the same | another number of nodes |
| GET /metrics | the same | for Prometheus |
| GET /healthz | anybody | 200: the agent works; 503: it hangs |
| GET /readyz | anybody | 200: this node can train; 503: it has not joined, or leaves |

A GET changes nothing. What changes something wants a header that a form of another site cannot send, beside the
cookie, which the browser does not give to other sites.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import socket
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from importlib import resources
from typing import TypeVar

import msgspec
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route

from agent.config import parse_np
from agent.errors import ConfigError, StoreUnavailable
from agent.observe.report.palette import DARK, LIGHT
from agent.operate.spec import change_spec
from agent.web import access
from agent.web.hub import Hub, Subscriber
from agent.web.metrics import Metrics

_BODY_BYTES = 4096
_BODY_WITHIN_S = 5.0
_VIEWERS = 32
_FILES = ("index.html", "page.css", "page.js", "uPlot.iife.min.js", "uPlot.min.css")
_KEEP_ALIVE_S = 15.0
_ASKED_BY = "x-elastic-agent"

Asked = TypeVar("Asked", bound=msgspec.Struct)
Handler = Callable[[Request], Awaitable[Response]]


class Np(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What POST /np wants."""

    np: str


class Token(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What POST /session wants."""

    token: str


class Site:
    """The handlers.

    Args:
        hub: what is known of the job.
        metrics: for scrapes.
        token: that lets in; None: the one that is derived from the job's secret.
    """

    def __init__(self, hub: Hub, metrics: Metrics, token: str | None) -> None:
        self._hub = hub
        self._metrics = metrics
        self._given_token = token
        self._tries = access.FailedLogins()
        self._page, self._headers = _page()
        self._cookie = f"elastic-agent-{hashlib.sha256(hub.keys.job_id.encode()).hexdigest()[:12]}"

    def app(self) -> Starlette:
        """The application."""
        routes = [
            Route("/", self._answer(self._index)),
            Route("/session", self._answer(self._known(self._has_session))),
            Route("/session", self._answer(self._session), methods=["POST"]),
            Route("/events", self._answer(self._known(self._events))),
            Route("/np", self._answer(self._known(self._np)), methods=["POST"]),
            Route("/metrics", self._answer(self._known(self._scrape))),
            Route("/healthz", self._answer(self._healthz)),
            Route("/readyz", self._answer(self._readyz)),
        ]
        return Starlette(routes=routes)

    # Who may

    @property
    def _token(self) -> str | None:
        known = self._hub.known
        return self._given_token or (access.token_of(known.secret) if known is not None else None)

    def _answer(self, handler: Handler) -> Handler:
        """With the headers that every answer has."""

        async def answer(request: Request) -> Response:
            response = await handler(request)
            response.headers.update(self._headers)
            return response

        return answer

    def _known(self, handler: Handler) -> Handler:
        """Only for who has a session, or shows the token."""

        async def answer(request: Request) -> Response:
            refused = self._refuse(request)
            return refused if refused is not None else await handler(request)

        return answer

    def _refuse(self, request: Request) -> Response | None:
        token, now = self._token, time.time()
        if token is None:
            return _sorry(503, "the job is not known yet: etcd has not told of it")
        if access.is_session(request.cookies.get(self._cookie, ""), token, now):
            if request.method != "GET" and _ASKED_BY not in request.headers:
                return _sorry(403, f"the header {_ASKED_BY} is missing")
            return None
        scheme, _, shown = request.headers.get("authorization", "").partition(" ")
        if scheme.lower() != "bearer":
            return _sorry(401, "no session: show the token, which `elastic-agent page` tells")
        return self._look_at(shown.strip(), token, _host(request), now)

    def _look_at(self, shown: str, token: str, host: str, now: float) -> Response | None:
        """A token that was shown; None: it is right. One that somebody chose might be guessed: tries are counted.

        The right one is let in whatever was shown before: behind a proxy all have one address.
        """
        if access.is_same(shown, token):
            return None
        if self._given_token is not None and not self._tries.may(host, now):
            return _sorry(429, "too many wrong tokens from there: wait a minute")
        self._tries.note(host, now)
        return _sorry(401, "wrong token: `elastic-agent page` tells the right one")

    # What is served

    async def _index(self, _request: Request) -> Response:
        return Response(self._page, media_type="text/html")

    async def _has_session(self, _request: Request) -> Response:
        return Response(status_code=204)

    async def _session(self, request: Request) -> Response:
        token, now = self._token, time.time()
        if token is None:
            return _sorry(503, "the job is not known yet: etcd has not told of it")
        asked = await _body(request, Token)
        if isinstance(asked, Response):
            return asked
        refused = self._look_at(asked.token.strip(), token, _host(request), now)
        if refused is not None:
            return refused
        response = Response(status_code=204)
        session = access.open_session(token, now)
        response.set_cookie(
            self._cookie,
            session,
            max_age=int(access.SESSION_S),
            httponly=True,
            samesite="strict",
            secure=request.url.scheme == "https",
            path="/",
        )
        return response

    async def _events(self, _request: Request) -> Response:
        if self._hub.listeners >= _VIEWERS:
            return _sorry(503, f"{_VIEWERS} browsers look already")
        return StreamingResponse(self._stream(), media_type="text/event-stream")

    async def _stream(self) -> AsyncIterator[bytes]:
        with self._hub.listening() as listener:
            yield b"retry: 1000\n\n"
            while True:
                for kind, said in await _news(listener):
                    yield b"event: " + kind.encode() + b"\ndata: " + said + b"\n\n"

    async def _np(self, request: Request) -> Response:
        asked = await _body(request, Np)
        if isinstance(asked, Response):
            return asked
        try:
            low, high = parse_np(asked.np)
            changed = await asyncio.to_thread(
                change_spec,
                self._hub.store,
                self._hub.keys,
                lambda _seen: {"np_min": low, "np_max": high},
                by=f"the web page of {socket.gethostname()}, from {_host(request)}",
            )
        except ConfigError as error:
            return _sorry(422, str(error))
        except StoreUnavailable as error:
            return _sorry(503, f"etcd cannot be reached: {error}")
        return JSONResponse({"np_before": changed.old.np, "np": changed.new.np})

    async def _scrape(self, _request: Request) -> Response:
        return Response(self._metrics.text(), media_type="text/plain; version=0.0.4; charset=utf-8")

    async def _healthz(self, _request: Request) -> Response:
        if self._hub.was_here is None:
            return PlainTextResponse("ok: the agent has not joined\n")
        pulse = await self._hub.look_here()
        if pulse is None or not pulse.is_alive:
            return _sorry(503, "the agent does not answer")
        return PlainTextResponse("ok\n")

    async def _readyz(self, _request: Request) -> Response:
        here = self._hub.here
        if here is None:
            return _sorry(503, "this node has not joined the job")
        if not here.is_eligible:
            return _sorry(503, "this node leaves" if here.is_draining else "this node cannot train")
        return PlainTextResponse("ok\n")


async def _news(listener: Subscriber) -> list[tuple[str, bytes]]:
    """What there is to tell; something at least from time to time, so that a dead connection is noticed."""
    try:
        async with asyncio.timeout(_KEEP_ALIVE_S):
            return await listener.next()
    except TimeoutError:
        return [("alive", b"{}")]


async def _body(request: Request, kind: type[Asked]) -> Asked | Response:
    said = b""
    try:
        async with asyncio.timeout(_BODY_WITHIN_S):
            async for part in request.stream():
                said += part
                if len(said) > _BODY_BYTES:
                    return _sorry(413, f"more than {_BODY_BYTES} bytes")
    except TimeoutError:
        return _sorry(408, f"not sent within {_BODY_WITHIN_S:g} s")
    except ClientDisconnect:
        return _sorry(400, "not sent whole")
    try:
        return msgspec.json.decode(said, type=kind)
    except ValueError as error:  # as msgspec says, or no UTF-8
        return _sorry(400, f"no such request: {error}")


def _sorry(code: int, why: str) -> Response:
    return JSONResponse({"error": why}, status_code=code)


def _host(request: Request) -> str:
    return request.client.host if request.client is not None else ""


def _page() -> tuple[bytes, dict[str, str]]:
    """The page, whole, and the headers of every answer: nothing may run on it but what is in it."""
    files = resources.files("agent.web").joinpath("page")
    text = {name: files.joinpath(name).read_text(encoding="utf-8") for name in _FILES}
    light, dark = (" ".join(f"--{name}: {colour};" for name, colour in each.items()) for each in (LIGHT, DARK))
    theme = f":root {{ {light} }}\n@media (prefers-color-scheme: dark) {{ :root {{ {dark} }} }}\n"
    style = theme + text["uPlot.min.css"] + text["page.css"]
    script = text["uPlot.iife.min.js"] + "\n" + text["page.js"]
    page = text["index.html"].replace("/*STYLE*/", style).replace("/*SCRIPT*/", script)
    policy = (
        f"default-src 'none'; script-src {_digest(script)}; style-src {_digest(style)}; connect-src 'self'; "
        "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )
    return page.encode(), {
        "Content-Security-Policy": policy,
        "X-Content-Type-Options": "nosniff",
        "X-Frame-Options": "DENY",
        "Referrer-Policy": "no-referrer",
        "Cross-Origin-Opener-Policy": "same-origin",
        "Cross-Origin-Resource-Policy": "same-origin",
        "Cache-Control": "no-store",
    }


def _digest(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
