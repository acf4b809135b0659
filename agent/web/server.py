"""The HTTP server: uvicorn, with bounds on who connects and says nothing."""

from __future__ import annotations

import asyncio
import logging
import socket
import ssl
import time
from collections.abc import Generator
from contextlib import contextmanager, suppress
from typing import Any

import h11
import uvicorn
from starlette.applications import Starlette
from uvicorn.protocols.http.h11_impl import H11Protocol

from agent.observe.log import Mishaps
from agent.web.tls_transport import TlsTransport

_CONNECTIONS = 256
_REQUEST_WITHIN_S = 10.0
_KEEP_ALIVE_S = 20
_HEADER_BYTES = 16 << 10
_LEAVE_WITHIN_S = 1
_LOGGER = "uvicorn.error"


class Bounded(H11Protocol):
    """A connection on which no whole request comes in time is closed; and, for each one too many, one that is idle.

    So those that only hold a place keep nobody out who asks something. uvicorn bounds how long a connection may rest
    between two requests, but neither how long the head and the body of one may take, nor how long its answer lies
    unread.
    """

    opened_at = 0.0
    is_dropped = False
    answered = 0
    """Requests so far."""

    encrypted: TlsTransport | None = None
    """None: what is said goes over the wire as it is."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Somebody connects."""
        context = self.config.tls if isinstance(self.config, Config) else None
        if context is not None:
            transport = self.encrypted = TlsTransport(transport, context)
        super().connection_made(transport)
        self.opened_at = time.monotonic()
        if len(self.connections) > _CONNECTIONS:
            others = (each for each in self.connections if isinstance(each, Bounded) and each is not self)
            idle = (each for each in others if each.is_idle and not each.is_dropped)
            min(idle, key=lambda each: each.opened_at, default=self).drop()
        self.loop.call_later(_REQUEST_WITHIN_S, self._close_if_mute, self.answered)

    def data_received(self, data: bytes) -> None:
        """Something comes."""
        said = data if self.encrypted is None else self.encrypted.received(data)
        if said:
            super().data_received(said)

    def drop(self) -> None:
        """Close at once, with what is not sent yet."""
        self.is_dropped = True
        self.transport.abort()

    def send_400_response(self, msg: str) -> None:
        """What came is no HTTP. uvicorn cannot say so where an answer has begun, or has no body: it raises then."""
        with suppress(h11.LocalProtocolError):
            super().send_400_response(msg)
        self.transport.close()

    def on_response_complete(self) -> None:
        """A request was answered."""
        super().on_response_complete()
        if self.conn.their_state is h11.SEND_BODY:  # it goes on sending what nobody reads
            self.transport.close()
        self.answered += 1
        self.loop.call_later(_KEEP_ALIVE_S + _REQUEST_WITHIN_S, self._close_if_mute, self.answered)

    @property
    def is_idle(self) -> bool:
        """Whether the other end has to do something first: send the rest of a request, read what was sent, or ask."""
        cycle: Any = self.cycle  # None before the first request, whatever uvicorn's types say
        return (
            cycle is None
            or cycle.response_complete
            or self.conn.their_state is h11.SEND_BODY
            or self.flow.write_paused
            or self.transport.is_closing()
        )

    def _close_if_mute(self, answered: int) -> None:
        """Nothing more than these requests was answered since, and nothing is now."""
        if self.answered == answered and self.is_idle:
            self.drop()


class Config(uvicorn.Config):
    """uvicorn's, and how the page is encrypted."""

    tls: ssl.SSLContext | None = None


class WebServer(uvicorn.Server):
    """Serves an application at a socket that listens already, given by its descriptor, until `leave`.

    Args:
        app: the application.
        listener: the descriptor.
        tls: by which alone it is served. None: in the clear.
    """

    def __init__(self, app: Starlette, listener: int, tls: ssl.SSLContext | None = None) -> None:
        self._listener = socket.socket(fileno=listener)
        logging.getLogger(_LOGGER).addHandler(_Notified())
        config = Config(
            app,
            http=Bounded,
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            proxy_headers=False,
            timeout_keep_alive=_KEEP_ALIVE_S,
            timeout_graceful_shutdown=_LEAVE_WITHIN_S,
            h11_max_incomplete_event_size=_HEADER_BYTES,
        )
        config.tls = tls
        super().__init__(config)

    async def run_until_told(self) -> None:
        """Serve until then."""
        await self.serve(sockets=[self._listener])

    def leave(self) -> None:
        """Take no more connections, and end soon: another agent may want the port."""
        for server in self.servers:
            server.close()
        self._listener.close()
        self.should_exit = True

    @contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        """Leave the signals alone: who started the process says when it ends."""
        yield


class _Notified(logging.Handler):
    """What uvicorn would log: errors of ours, each once. Of what strangers send nothing, or they would fill the log."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self._mishaps = Mishaps("the web page")

    def emit(self, record: logging.LogRecord) -> None:
        """Tell it."""
        failed = record.exc_info[1] if record.exc_info else None
        if isinstance(failed, Exception):
            self._mishaps.tell(failed)
