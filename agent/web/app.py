"""The HTTP interface: the page, its updates, the control for np, metrics and probes.

| request | access | response |
|---|---|---|
| GET / | public | the page, without any data of the job |
| POST /session | token | a session cookie for the browser |
| GET /session | session or token | empty: confirms the access |
| GET /events | session or token | the job's state, then each change of it (server-sent events) |
| POST /np | session or token | changes the number of nodes |
| GET /metrics | session or token | metrics for Prometheus |
| GET /healthz | public | 200: the agent works; 503: it hangs |
| GET /readyz | public | 200: this node can train; 503: it has not joined, or is leaving |

A GET changes nothing. With a session, a request that changes something needs a header that a form of another site
cannot send. The cookie itself is not sent from other sites either.
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
from agent.store.spec import change_spec
from agent.web import access
from agent.web.hub import Hub, Subscriber
from agent.web.metrics import Metrics
from agent.web.rank_log import NoLog, read_end

_BODY_BYTES = 4096
_BODY_WITHIN_S = 5.0
_MAX_VIEWERS = 32
_FILES = ("index.html", "page.css", "page.js", "uPlot.iife.min.js", "uPlot.min.css")
_KEEP_ALIVE_S = 15.0
_RANK_DIGITS = 10
_REQUIRED_HEADER = "x-elastic-agent"

Body = TypeVar("Body", bound=msgspec.Struct)
Handler = Callable[[Request], Awaitable[Response]]


class Np(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Body of POST /np."""

    np: str


class Token(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Body of POST /session."""

    token: str


class Site:
    """The request handlers.

    Args:
        hub: the state of the job.
        metrics: the metrics to serve.
        token: the token that grants access. None: the token that is derived from the job's secret.
    """

    def __init__(self, hub: Hub, metrics: Metrics, token: str | None) -> None:
        self._hub = hub
        self._metrics = metrics
        self._given_token = token
        self._failed_logins = access.FailedLogins()
        self._page, self._headers = _page()
        self._cookie = f"elastic-agent-{hashlib.sha256(hub.keys.job_id.encode()).hexdigest()[:12]}"

    def app(self) -> Starlette:
        """Return the application."""
        routes = [
            Route("/", self._with_headers(self._index)),
            Route("/session", self._with_headers(self._authenticated(self._has_session))),
            Route("/session", self._with_headers(self._session), methods=["POST"]),
            Route("/events", self._with_headers(self._authenticated(self._events))),
            Route("/np", self._with_headers(self._authenticated(self._np)), methods=["POST"]),
            Route("/log", self._with_headers(self._authenticated(self._log))),
            Route("/metrics", self._with_headers(self._authenticated(self._scrape))),
            Route("/healthz", self._with_headers(self._healthz)),
            Route("/readyz", self._with_headers(self._readyz)),
        ]
        return Starlette(routes=routes)

    # Access

    @property
    def _token(self) -> str | None:
        known = self._hub.known
        return self._given_token or (access.token_of(known.secret) if known is not None else None)

    def _with_headers(self, handler: Handler) -> Handler:
        """Add the headers that every response has."""

        async def answer(request: Request) -> Response:
            response = await handler(request)
            response.headers.update(self._headers)
            return response

        return answer

    def _authenticated(self, handler: Handler) -> Handler:
        """Require a session or the token."""

        async def answer(request: Request) -> Response:
            refused = self._refuse(request)
            return refused if refused is not None else await handler(request)

        return answer

    def _refuse(self, request: Request) -> Response | None:
        token, now = self._token, time.time()
        if token is None:
            return _error(503, "the job is not known yet: etcd has not returned its records")
        if access.is_session(request.cookies.get(self._cookie, ""), token, now):
            if request.method != "GET" and _REQUIRED_HEADER not in request.headers:
                return _error(403, f"the header {_REQUIRED_HEADER} is missing")
            return None
        scheme, _, given = request.headers.get("authorization", "").partition(" ")
        if scheme.lower() != "bearer":
            return _error(401, "no session: send the token that `elastic-agent page` prints")
        return self._check_token(given.strip(), token, _host(request), now)

    def _check_token(self, given: str, token: str, host: str, now: float) -> Response | None:
        """Return None if the token is right, else the error response.

        Wrong tokens are limited per address if an operator chose the token, since it might be guessed. The right token
        is accepted regardless of earlier failures: behind a proxy all clients have one address.
        """
        if access.tokens_match(given, token):
            return None
        if self._given_token is not None and not self._failed_logins.may_try(host, now):
            return _error(429, "too many wrong tokens from your address: wait a minute")
        self._failed_logins.record(host, now)
        return _error(401, "wrong token: `elastic-agent page` prints the right one")

    # Handlers

    async def _index(self, _request: Request) -> Response:
        return Response(self._page, media_type="text/html")

    async def _has_session(self, _request: Request) -> Response:
        return Response(status_code=204)

    async def _session(self, request: Request) -> Response:
        token, now = self._token, time.time()
        if token is None:
            return _error(503, "the job is not known yet: etcd has not returned its records")
        body = await _body(request, Token)
        if isinstance(body, Response):
            return body
        refused = self._check_token(body.token.strip(), token, _host(request), now)
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
        if self._hub.subscribers >= _MAX_VIEWERS:
            return _error(503, f"{_MAX_VIEWERS} browsers follow the page already")
        return StreamingResponse(self._stream(), media_type="text/event-stream")

    async def _stream(self) -> AsyncIterator[bytes]:
        with self._hub.subscribe() as subscriber:
            yield b"retry: 1000\n\n"
            while True:
                for kind, data in await _next_updates(subscriber):
                    yield b"event: " + kind.encode() + b"\ndata: " + data + b"\n\n"

    async def _np(self, request: Request) -> Response:
        body = await _body(request, Np)
        if isinstance(body, Response):
            return body
        try:
            low, high = parse_np(body.np)
            changed = await asyncio.to_thread(
                change_spec,
                self._hub.store,
                self._hub.keys,
                lambda _seen: {"np_min": low, "np_max": high},
                by=f"the web page of {socket.gethostname()}, from {_host(request)}",
            )
        except ConfigError as error:
            return _error(422, str(error))
        except StoreUnavailable as error:
            return _error(503, f"etcd cannot be reached: {error}")
        return JSONResponse({"np_before": changed.old.np, "np": changed.new.np})

    async def _log(self, request: Request) -> Response:
        known, rank = self._hub.known, request.query_params.get("rank", "")
        if not (rank.isascii() and rank.isdigit() and len(rank) < _RANK_DIGITS):
            return _error(400, f"wanted a rank as /log?rank=0, got {rank!r}")
        if known is None:
            return _error(503, "the job is not known yet: etcd has not returned its records")
        try:
            end = await read_end(known, int(rank))
        except NoLog as error:
            return _error(404, str(error))
        return Response(end, media_type="text/plain; charset=utf-8")

    async def _scrape(self, _request: Request) -> Response:
        return Response(self._metrics.text(), media_type="text/plain; version=0.0.4; charset=utf-8")

    async def _healthz(self, _request: Request) -> Response:
        if self._hub.last_node is None:
            return PlainTextResponse("ok: the agent has not joined\n")
        live = await self._hub.probe()
        if live is None or not live.is_alive:
            return _error(503, "the agent does not answer")
        return PlainTextResponse("ok\n")

    async def _readyz(self, _request: Request) -> Response:
        node = self._hub.node
        if node is None:
            return _error(503, "this node has not joined the job")
        if not node.is_eligible:
            return _error(503, "this node is leaving" if node.is_draining else "this node cannot train")
        return PlainTextResponse("ok\n")


async def _next_updates(subscriber: Subscriber) -> list[tuple[str, bytes]]:
    """Wait for updates; return `alive` if none come for a while, so that a dead connection is noticed."""
    try:
        async with asyncio.timeout(_KEEP_ALIVE_S):
            return await subscriber.next()
    except TimeoutError:
        return [("alive", b"{}")]


async def _body(request: Request, kind: type[Body]) -> Body | Response:
    """Read and decode the body of a request, or return the error response."""
    data = b""
    try:
        async with asyncio.timeout(_BODY_WITHIN_S):
            async for part in request.stream():
                data += part
                if len(data) > _BODY_BYTES:
                    return _error(413, f"more than {_BODY_BYTES} bytes")
    except TimeoutError:
        return _error(408, f"not sent within {_BODY_WITHIN_S:g} s")
    except ClientDisconnect:
        return _error(400, "the request is incomplete")
    try:
        return msgspec.json.decode(data, type=kind)
    except ValueError as error:  # not the expected fields, or not UTF-8
        return _error(400, f"malformed request: {error}")


def _error(code: int, why: str) -> Response:
    return JSONResponse({"error": why}, status_code=code)


def _host(request: Request) -> str:
    return request.client.host if request.client is not None else ""


def _page() -> tuple[bytes, dict[str, str]]:
    """Return the complete page, and the headers of every response, which allow only the code in the page to run."""
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
