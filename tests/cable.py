"""A cable that a test can pull."""

from __future__ import annotations

import socket
import threading
from contextlib import suppress

from agent.ports import hold_port


class Proxy:
    """A cable to etcd that can be pulled: connections are cut, and new ones refused. And one of its wires can break."""

    def __init__(self, target: str) -> None:
        host, port = target.rsplit(":", 1)
        self._target = (host, int(port))
        self._ends: list[socket.socket] = []
        self._drops_received = threading.Event()
        self._held = hold_port("127.0.0.1")  # else another program could have it while the cable is pulled
        self.endpoint = f"127.0.0.1:{self._held.getsockname()[1]}"
        self._listener = self._listen()
        self._accept_on_thread()

    def pull(self) -> None:
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._acceptor.join()  # what it was just accepting is cut too
        self._listener.close()
        for end in self._ends:
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
            end.close()
        self._ends.clear()

    def drop_received(self) -> None:
        """From now on etcd's answers are lost. Until it is plugged in again."""
        self._drops_received.set()

    def plug_in(self) -> None:
        self._drops_received.clear()
        self._listener = self._listen()
        self._accept_on_thread()

    def close(self) -> None:
        """Pull it for good."""
        self.pull()
        self._held.close()

    def _listen(self) -> socket.socket:
        return socket.create_server(self._held.getsockname())

    def _accept_on_thread(self) -> None:
        self._acceptor = threading.Thread(target=self._accept, args=(self._listener,), daemon=True)
        self._acceptor.start()

    def _accept(self, listener: socket.socket) -> None:
        with suppress(OSError):
            while True:
                near, _ = listener.accept()
                try:
                    far = socket.create_connection(self._target)
                except OSError:  # nobody is there now: the next caller may find somebody
                    near.close()
                    continue
                self._ends += [near, far]
                for source, sink, is_lost in ((near, far, None), (far, near, self._drops_received)):
                    threading.Thread(target=_copy, args=(source, sink, is_lost), daemon=True).start()


def _copy(source: socket.socket, sink: socket.socket, is_lost: threading.Event | None) -> None:
    with suppress(OSError):
        while data := source.recv(65536):
            if is_lost is None or not is_lost.is_set():
                sink.sendall(data)
    with suppress(OSError):
        sink.shutdown(socket.SHUT_RDWR)
