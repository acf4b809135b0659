"""The page's transport by TLS: under the protocol that bounds connections, so that it counts from the first byte.

asyncio's own TLS shows a connection to its protocol only after the handshake. Until then nobody would bound how many
there are, nor for how long.
"""

from __future__ import annotations

import asyncio
import ssl
from typing import Any

from trainer_runtime.tls import TlsBroken, TlsChannel


class TlsTransport(asyncio.Transport):
    """What the protocol writes goes over the wire by TLS.

    Args:
        transport: the connection.
        context: our certificate.
    """

    def __init__(self, transport: asyncio.Transport, context: ssl.SSLContext) -> None:
        super().__init__()
        self._transport = transport
        self._context = context
        self._channel = TlsChannel(context, is_called=True)
        self._has_begun = False
        """The handshake is done."""

    def received(self, data: bytes) -> bytes:
        """Return what the other end has said by this; often nothing. One that breaks a rule is let go."""
        self._channel.take(data)
        try:
            self._has_begun = self._has_begun or self._channel.shake()
            said = self._channel.read() if self._has_begun else b""
        except TlsBroken:  # of what strangers send nothing is told
            self._flush()  # why, for the other end
            self._transport.close()
            return b""
        self._flush()
        if self._channel.is_over:
            self._transport.close()
        return said

    def write(self, data: bytes | bytearray | memoryview) -> None:
        """Send it."""
        if self._has_begun and not self._transport.is_closing():
            try:
                self._transport.write(self._channel.write(bytes(data)))
            except TlsBroken:
                self._transport.close()

    def close(self) -> None:
        """Send what was written, say that this is all, and close."""
        if self._has_begun and not self._transport.is_closing():
            self._transport.write(self._channel.end())
        self._transport.close()

    def abort(self) -> None:
        """Close at once."""
        self._transport.abort()

    def is_closing(self) -> bool:
        """Whether it is closed, or is to be."""
        return self._transport.is_closing()

    def get_extra_info(self, name: str, default: Any = None) -> Any:  # noqa: ANN401 - as asyncio has it
        """Of the connection; `sslcontext` says that it is encrypted."""
        return self._context if name == "sslcontext" else self._transport.get_extra_info(name, default)

    def pause_reading(self) -> None:
        """Take nothing for a while."""
        self._transport.pause_reading()

    def resume_reading(self) -> None:
        """Go on."""
        self._transport.resume_reading()

    def _flush(self) -> None:
        if answer := self._channel.give():
            self._transport.write(answer)
