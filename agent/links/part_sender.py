"""Sends large snapshot parts to the agent that is to hold them too. See part_stream.py.

Each rank has a thread and a connection of its own, because one thread cannot encrypt as much as a network carries. A
part that cannot be sent is given up, so that its rank does not wait for it for long. Then the parts for that agent are
given up at once for a while, until a link changes or the next one is tried.
"""

from __future__ import annotations

import os
import socket
import ssl
import threading
import time
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

from agent.links.frames import LinkBroken
from agent.links.part_stream import (
    OUTDATED,
    STALL_S,
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

    from agent.core.records import Identity
    from agent.links.frames import LinkTls
    from agent.links.handshake import Credential

_GIVE_UP_S = 10.0
"""How long a part is tried that cannot be sent."""
_CONNECT_S = 2.0
"""How long one attempt may take until the first byte of a part is sent."""
_BETWEEN_ATTEMPTS_S = 0.2
_RETRY_AFTER_S = 30.0
"""How long the parts for an agent are given up at once, after one could not be sent."""
_CLOSE_WITHIN_S = 1.0


@dataclass(frozen=True)
class PartAddress:
    """Where an agent takes parts."""

    credential: Credential
    """Proves the identity of the agent that sends."""
    host: str
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
    on_end: Callable[[bool], None]
    """Called once, with whether the other agent holds the part."""

    def end(self, *, is_held: bool) -> None:
        """Close the descriptor, and call `on_end`."""
        os.close(self.descriptor)
        self.on_end(is_held)


class PartSender:
    """Sends parts, on threads that begin with the first ones. Methods may be called from any thread.

    Args:
        address_of: returns where an agent takes parts; None: there is no link to it now.
        tls: encryption of the links.
    """

    def __init__(self, address_of: Callable[[Identity], PartAddress | None], tls: LinkTls) -> None:
        self.address_of = address_of
        self.tls = tls
        self.changed = threading.Condition()
        """Holds the lock of all that follows."""
        self.is_closed = False
        self.least_group = 0
        """Parts of older groups are not wanted any more."""
        self.retry_at: dict[Identity, float] = {}
        """Agents that could not be sent a part; until then, parts for them are given up at once."""
        self._lanes: dict[int, _Lane] = {}
        """By rank."""

    def send(self, part: LargePart) -> None:
        """Send a part, unless a newer one of its rank comes before its turn. Returns at once."""
        with self.changed:
            if self.is_closed:
                replaced: LargePart | None = part
            else:
                self.least_group = max(self.least_group, part.header.copy.group)
                lane = self._lanes.get(part.header.rank)
                if lane is None:
                    lane = self._lanes[part.header.rank] = _Lane(self)
                replaced, lane.pending = lane.pending, part
                self.changed.notify_all()
        if replaced is not None:
            replaced.end(is_held=False)

    def end_group(self, group: int) -> None:
        """Give up the parts of this group, and of older ones: its ranks have ended."""
        with self.changed:
            self.least_group = max(self.least_group, group + 1)
            self.changed.notify_all()

    def wake(self) -> None:
        """Try again at once: a link has changed."""
        with self.changed:
            self.retry_at = dict.fromkeys(self.retry_at, 0.0)
            self.changed.notify_all()

    def close(self) -> None:
        """Send nothing more. Threads that wait for an answer of the network end later."""
        with self.changed:
            self.is_closed = True
            self.changed.notify_all()
            lanes = [*self._lanes.values()]
        give_up_at = time.monotonic() + _CLOSE_WITHIN_S
        for lane in lanes:
            lane.interrupt()
        for lane in lanes:
            lane.thread.join(max(0.0, give_up_at - time.monotonic()))


class _OutdatedError(LinkBroken):
    """The other agent is in a later group."""


class _Lane:
    """The thread that sends the parts of one rank."""

    def __init__(self, sender: PartSender) -> None:
        self._sender = sender
        self.pending: LargePart | None = None
        """The part to be sent next; the sender's lock is held to change it."""
        self._connection: tuple[PartAddress, ssl.SSLSocket] | None = None
        self._connection_lock = threading.Lock()
        self.thread = threading.Thread(target=self._run, name="parts", daemon=True)
        self.thread.start()

    def interrupt(self) -> None:
        """From another thread: end what the thread sends or waits for."""
        with self._connection_lock, suppress(OSError):
            if self._connection is not None:
                # Not `SSLSocket`'s method, which would take the encryption away from the thread.
                socket.socket.shutdown(self._connection[1], socket.SHUT_RDWR)

    def _disconnect(self) -> None:
        with self._connection_lock:
            if self._connection is not None:
                self._connection[1].close()
                self._connection = None

    def _run(self) -> None:
        sender = self._sender
        while True:
            with sender.changed:
                sender.changed.wait_for(lambda: self.pending is not None or sender.is_closed)
                part, self.pending = self.pending, None
            if part is not None:
                part.end(is_held=not sender.is_closed and self._deliver(part))
            elif sender.is_closed:
                break
        self._disconnect()

    def _deliver(self, part: LargePart) -> bool:
        """Send a part; return whether the other agent holds it."""
        sender, receiver = self._sender, part.receiver
        with sender.changed:
            retry_at = sender.retry_at.get(receiver)
        if retry_at is not None and time.monotonic() < retry_at:
            return False
        give_up_at = time.monotonic() + (_GIVE_UP_S if retry_at is None else 0.0)
        while (reason := self._try(part)) is not None:
            if not reason or not self._is_wanted(part):
                return False
            with sender.changed:
                left_s = give_up_at - time.monotonic()
                if left_s > 0:
                    sender.changed.wait(min(left_s, _BETWEEN_ATTEMPTS_S))
                    continue
                is_new = receiver not in sender.retry_at
                sender.retry_at[receiver] = time.monotonic() + _RETRY_AFTER_S
            if is_new:
                log.warning(
                    f"node {receiver.node_id} holds no copies of this node's snapshots: {reason}. If this node is "
                    "lost, training resumes from the last checkpoint"
                )
            return False
        with sender.changed:
            has_failed = sender.retry_at.pop(receiver, None) is not None
        if has_failed:
            log.info(f"node {receiver.node_id} holds copies of this node's snapshots again")
        return True

    def _is_wanted(self, part: LargePart) -> bool:
        sender = self._sender
        return not sender.is_closed and part.header.copy.group >= sender.least_group and part.is_intact()

    def _try(self, part: LargePart) -> str | None:
        """Send a part once; return None, or why it was not sent. Empty: it is not wanted any more."""
        address = self._sender.address_of(part.receiver)
        if address is None:
            return "there is no link to it"
        try:
            connection = self._connect(address, part.receiver)
            self._announce(connection, part)
            self._send_bytes(connection, part)
            is_whole = part.is_intact()
            send_message(connection, WHOLE if is_whole else TORN)
            if not is_whole:
                return "the rank has replaced it"
            receive_message(connection)
        except _OutdatedError:
            self._disconnect()
            return ""
        except (LinkBroken, OSError) as error:
            self._disconnect()
            reason = str(error) if isinstance(error, LinkBroken) else error.strerror or str(error)
            return f"{reason} ({address.host}:{address.port})"
        return None

    def _announce(self, connection: ssl.SSLSocket, part: LargePart) -> None:
        connection.settimeout(_CONNECT_S)
        send_message(connection, encode_header(part.header))
        refusal = receive_message(connection)
        if refusal == OUTDATED:
            raise _OutdatedError
        if refusal:
            raise LinkBroken(refusal.decode(errors="replace"))
        connection.settimeout(STALL_S)

    def _send_bytes(self, connection: ssl.SSLSocket, part: LargePart) -> None:
        send_bytes(connection, part.descriptor, part.at, part.header.size_bytes, lambda: self._is_wanted(part))

    def _connect(self, address: PartAddress, receiver: Identity) -> ssl.SSLSocket:
        if self._connection is not None and self._connection[0] == address:
            return self._connection[1]
        self._disconnect()
        plain = socket.create_connection((address.host, address.port), _CONNECT_S)
        try:
            connection = self._sender.tls.dialling.wrap_socket(plain, do_handshake_on_connect=False)
        except BaseException:
            plain.close()
            raise
        with self._connection_lock:
            self._connection = address, connection
        connection.do_handshake()
        if fingerprint(connection.getpeercert(binary_form=True) or b"") != address.cert:
            raise LinkBroken("it shows another certificate than its record in etcd names")
        handshake_as_caller(connection, address.credential, receiver)
        return connection
