"""The HTTP server: uvicorn, with bounds on connections that send nothing or read nothing, and its TLS transport."""

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

from agent.observe.log import InternalErrors
from trainer_runtime.tls import TlsBroken, TlsChannel

_CONNECTIONS = 256
_REQUEST_WITHIN_S = 10.0
_KEEP_ALIVE_S = 20
_HEADER_BYTES = 16 << 10
_LEAVE_WITHIN_S = 1
_LOGGER = "uvicorn.error"


class TlsTransport(asyncio.Transport):
    """A TLS layer below the protocol that bounds connections, so that the bounds apply from the first byte.

    asyncio's own TLS shows a connection to its protocol only after the handshake. Until then neither the number of
    connections nor their duration would be bounded.

    Args:
        transport: the TCP connection.
        context: our certificate.
    """

    def __init__(self, transport: asyncio.Transport, context: ssl.SSLContext) -> None:
        super().__init__()
        self._transport = transport
        self._context = context
        self._channel = TlsChannel(context, is_called=True)
        self._has_begun = False
        """Whether the handshake is done."""

    def receive(self, data: bytes) -> bytes:
        """Decrypt received bytes; often returns nothing. A connection that violates the protocol is closed."""
        self._channel.take(data)
        try:
            self._has_begun = self._has_begun or self._channel.shake()
            plain = self._channel.read() if self._has_begun else b""
        except TlsBroken:  # not logged: strangers could fill the log
            self._flush()  # the TLS alert tells the other end why
            self._transport.close()
            return b""
        self._flush()
        if self._channel.is_over:
            self._transport.close()
        return plain

    def write(self, data: bytes | bytearray | memoryview) -> None:
        """Encrypt and send data."""
        if self._has_begun and not self._transport.is_closing():
            try:
                self._transport.write(self._channel.write(bytes(data)))
            except TlsBroken:
                self._transport.close()

    def close(self) -> None:
        """Send what was written and the TLS close notification, then close."""
        if self._has_begun and not self._transport.is_closing():
            self._transport.write(self._channel.end())
        self._transport.close()

    def abort(self) -> None:
        """Close at once."""
        self._transport.abort()

    def is_closing(self) -> bool:
        """Whether the connection is closed or closing."""
        return self._transport.is_closing()

    def get_extra_info(self, name: str, default: Any = None) -> Any:  # noqa: ANN401 - as asyncio has it
        """Return information on the connection; a value for `sslcontext` shows that it is encrypted."""
        return self._context if name == "sslcontext" else self._transport.get_extra_info(name, default)

    def pause_reading(self) -> None:
        """Pause reading."""
        self._transport.pause_reading()

    def resume_reading(self) -> None:
        """Resume reading."""
        self._transport.resume_reading()

    def _flush(self) -> None:
        if answer := self._channel.give():
            self._transport.write(answer)


class Bounded(H11Protocol):
    """A connection with time limits, and with a place that it can lose.

    A connection is closed if no complete request arrives in time. If there are too many connections, each new one
    replaces an idle one, so that connections that only hold a place cannot keep requests out. uvicorn bounds how long a
    connection may rest between two requests, but neither how long the head and the body of a request may take nor how
    long a response may stay unread.
    """

    opened_at = 0.0
    is_dropped = False
    answered = 0
    """Number of requests answered so far."""

    tls: TlsTransport | None = None
    """None: the connection is not encrypted."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Accept a connection; drop an idle one if there are too many."""
        context = self.config.tls if isinstance(self.config, Config) else None
        if context is not None:
            transport = self.tls = TlsTransport(transport, context)
        super().connection_made(transport)
        self.opened_at = time.monotonic()
        if len(self.connections) > _CONNECTIONS:
            others = (each for each in self.connections if isinstance(each, Bounded) and each is not self)
            idle = (each for each in others if each.is_idle and not each.is_dropped)
            min(idle, key=lambda each: each.opened_at, default=self).drop()
        self.loop.call_later(_REQUEST_WITHIN_S, self._drop_if_stalled, self.answered)

    def data_received(self, data: bytes) -> None:
        """Process received bytes."""
        plain = data if self.tls is None else self.tls.receive(data)
        if plain:
            super().data_received(plain)

    def drop(self) -> None:
        """Close at once, without sending what is pending."""
        self.is_dropped = True
        self.transport.abort()

    def send_400_response(self, msg: str) -> None:
        """Answer what is not HTTP. uvicorn raises if a response has begun or has no body; then only close."""
        with suppress(h11.LocalProtocolError):
            super().send_400_response(msg)
        self.transport.close()

    def on_response_complete(self) -> None:
        """Start the time limit for the next request."""
        super().on_response_complete()
        if self.conn.their_state is h11.SEND_BODY:  # the client is still sending a body that nobody reads
            self.transport.close()
        self.answered += 1
        self.loop.call_later(_KEEP_ALIVE_S + _REQUEST_WITHIN_S, self._drop_if_stalled, self.answered)

    @property
    def is_idle(self) -> bool:
        """Whether the client has to act next: finish a request, read a response, or send another request."""
        cycle: Any = self.cycle  # None before the first request, unlike its declared type
        return (
            cycle is None
            or cycle.response_complete
            or self.conn.their_state is h11.SEND_BODY
            or self.flow.write_paused
            or self.transport.is_closing()
        )

    def _drop_if_stalled(self, answered: int) -> None:
        """Drop the connection if no request was answered since `answered` was read, and none is in progress."""
        if self.answered == answered and self.is_idle:
            self.drop()


class Config(uvicorn.Config):
    """uvicorn's configuration, and the TLS context."""

    tls: ssl.SSLContext | None = None


class WebServer(uvicorn.Server):
    """Serves an application on a socket that listens already, until `leave`.

    Args:
        app: the application.
        listener: descriptor of the listening socket.
        tls: TLS context; the page is then served by https only. None: without TLS.
    """

    def __init__(self, app: Starlette, listener: int, tls: ssl.SSLContext | None = None) -> None:
        self._listener = socket.socket(fileno=listener)
        logging.getLogger(_LOGGER).addHandler(_ErrorHandler())
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

    async def serve_until_left(self) -> None:
        """Serve until `leave` is called."""
        await self.serve(sockets=[self._listener])

    def leave(self) -> None:
        """Accept no more connections, and end soon: another agent may need the port."""
        for server in self.servers:
            server.close()
        self._listener.close()
        self.should_exit = True

    @contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        """Do not handle signals: the agent decides when this process ends."""
        yield


class _ErrorHandler(logging.Handler):
    """Logs our own errors from uvicorn's log, each once. Errors that clients cause are not logged."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self._internal_errors = InternalErrors("the web page")

    def emit(self, record: logging.LogRecord) -> None:
        """Log the exception of a record."""
        error = record.exc_info[1] if record.exc_info else None
        if isinstance(error, Exception):
            self._internal_errors.report(error)
