"""Sends large snapshot parts to the agent that is to hold them too. See part_stream.py.

One thread sends one part after another. A part that cannot be sent is given up after a while, so that its rank does not
wait for it; as long as sending fails, later ones are tried once.
"""

from __future__ import annotations

import mmap
import os
import socket
import ssl
import threading
import time
from collections import OrderedDict
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

from agent.links.frames import LinkBroken
from agent.links.part_stream import (
    STEP_S,
    TORN,
    WHOLE,
    PartHeader,
    encode_header,
    handshake_as_caller,
    receive_message,
    send_bytes,
    send_message,
)
from agent.observe.log import log
from trainer_runtime.tls import fingerprint

if TYPE_CHECKING:
    from collections.abc import Callable

    from agent.core.model import Identity
    from agent.links.frames import LinkTls
    from agent.links.handshake import Credential

_GIVE_UP_S = 10.0
"""How long a part is tried, if the one before it was sent."""
_BETWEEN_ATTEMPTS_S = 0.2


@dataclass(frozen=True)
class PartPlace:
    """Where an agent takes parts."""

    credential: Credential
    """Proves the identity of the agent that sends."""
    address: str
    port: int
    cert: str
    """Fingerprint of its certificate."""


@dataclass(frozen=True)
class LargePart:
    """A part in a rank's memory, to be sent."""

    header: PartHeader
    receiver: Identity
    """The agent that is to hold it."""
    descriptor: int
    """Of the memory; closed once the part was sent or given up."""
    at: int
    is_intact: Callable[[], bool]
    """Whether the rank has not replaced this snapshot."""
    on_end: Callable[[bool, float], None]
    """Called once, with whether the other agent holds the part, and the seconds that sending took."""


class PartSender:
    """Sends parts, on a thread that begins with the first one. Methods may be called from any thread.

    Args:
        place_of: returns where an agent takes parts; None: there is no link to it now.
        tls: encryption of the links.
    """

    def __init__(self, place_of: Callable[[Identity], PartPlace | None], tls: LinkTls) -> None:
        self._place_of = place_of
        self._tls = tls
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._pending: OrderedDict[int, LargePart] = OrderedDict()
        """By rank; of each rank only the newest part."""
        self._least_group = 0
        self._thread: threading.Thread | None = None
        self._is_closed = False
        self._connection: tuple[PartPlace, ssl.SSLSocket] | None = None
        self._failure = ""
        """Why the last part was not sent; empty: it was."""

    def send(self, part: LargePart) -> None:
        """Send a part as soon as the earlier ones of other ranks are sent. Returns at once."""
        with self._lock:
            replaced = part if self._is_closed else self._pending.pop(part.header.rank, None)
            if not self._is_closed:
                self._least_group = max(self._least_group, part.header.copy.group)
                self._pending[part.header.rank] = part
                if self._thread is None:
                    self._thread = threading.Thread(target=self._run, name="parts", daemon=True)
                    self._thread.start()
                self._changed.notify_all()
        if replaced is not None:
            _end(replaced, is_held=False, took_s=0.0)

    def wake(self) -> None:
        """Try again at once: a link has changed."""
        with self._lock:
            self._changed.notify_all()

    def close(self) -> None:
        """Send nothing more, and end the thread."""
        with self._lock:
            self._is_closed = True
            self._changed.notify_all()
        if self._thread is not None:
            self._disconnect()
            self._thread.join()

    def _run(self) -> None:
        while True:
            with self._lock:
                while not self._pending and not self._is_closed:
                    self._changed.wait()
                if self._is_closed:
                    left = [*self._pending.values()]
                    self._pending.clear()
                    break
                _, part = self._pending.popitem(last=False)
            began = time.monotonic()
            is_held = self._deliver(part)
            _end(part, is_held=is_held, took_s=time.monotonic() - began)
        for part in left:
            _end(part, is_held=False, took_s=0.0)
        self._disconnect()

    def _deliver(self, part: LargePart) -> bool:
        """Send a part; return whether the other agent holds it."""
        give_up_at = time.monotonic() + (0.0 if self._failure else _GIVE_UP_S)
        while True:
            failure = self._try(part)
            if failure is None:
                if self._failure:
                    log.info(f"node {part.receiver.node_id} holds copies of this node's snapshots again")
                self._failure = ""
                return True
            if not self._is_wanted(part):
                return False
            with self._lock:
                left_s = give_up_at - time.monotonic()
                if left_s > 0:
                    self._changed.wait(min(left_s, _BETWEEN_ATTEMPTS_S))
                    continue
            if not self._failure:
                log.warning(
                    f"node {part.receiver.node_id} holds no copies of this node's snapshots: {failure}. If this node "
                    "is lost, training resumes from the last checkpoint"
                )
            self._failure = failure
            return False

    def _is_wanted(self, part: LargePart) -> bool:
        return not self._is_closed and part.header.copy.group >= self._least_group and part.is_intact()

    def _try(self, part: LargePart) -> str | None:
        """Send a part once; return None, or why it was not sent."""
        place = self._place_of(part.receiver)
        if place is None:
            return "no link to it"
        try:
            connection = self._connect(place, part.receiver)
            self._announce(connection, part)
            self._send_bytes(connection, part)
            is_whole = part.is_intact()
            send_message(connection, WHOLE if is_whole else TORN)
            if not is_whole:
                return "the rank has replaced it"
            receive_message(connection)
        except LinkBroken as broken:
            self._disconnect()
            return str(broken)
        except OSError as error:
            self._disconnect()
            return error.strerror or str(error)
        return None

    def _announce(self, connection: ssl.SSLSocket, part: LargePart) -> None:
        send_message(connection, encode_header(part.header))
        refusal = receive_message(connection)
        if refusal:
            raise LinkBroken(refusal.decode(errors="replace"))

    def _send_bytes(self, connection: ssl.SSLSocket, part: LargePart) -> None:
        begin = part.at - part.at % mmap.ALLOCATIONGRANULARITY
        end = part.at + part.header.size_bytes
        # Not closed here: after an error, frames of the traceback still have views of it.
        memory = mmap.mmap(part.descriptor, end - begin, prot=mmap.PROT_READ, offset=begin)
        send_bytes(connection, memoryview(memory)[part.at - begin :], lambda: self._is_wanted(part))

    def _connect(self, place: PartPlace, receiver: Identity) -> ssl.SSLSocket:
        if self._connection is not None and self._connection[0] == place:
            return self._connection[1]
        self._disconnect()
        plain = socket.create_connection((place.address, place.port), STEP_S)
        try:
            connection = self._tls.dialling.wrap_socket(plain)
        except BaseException:
            plain.close()
            raise
        with self._lock:
            self._connection = place, connection
        if fingerprint(connection.getpeercert(binary_form=True) or b"") != place.cert:
            raise LinkBroken("it shows another certificate than its record in etcd names")
        handshake_as_caller(connection, place.credential, receiver)
        return connection

    def _disconnect(self) -> None:
        with self._lock:
            connection, self._connection = self._connection, None
        if connection is not None:
            with suppress(OSError):
                connection[1].shutdown(socket.SHUT_RDWR)  # wakes the thread, if another one calls this
            connection[1].close()


def _end(part: LargePart, *, is_held: bool, took_s: float) -> None:
    os.close(part.descriptor)
    part.on_end(is_held, took_s)
