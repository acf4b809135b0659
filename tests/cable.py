"""A cable that a test can pull."""

from __future__ import annotations

import socket
import threading
from contextlib import suppress

from ports import free_port


class Proxy:
    """A cable to etcd that can be pulled: connections are cut, and new ones refused."""

    def __init__(self, target: str) -> None:
        host, port = target.rsplit(":", 1)
        self._target = (host, int(port))
        self._ends: list[socket.socket] = []
        self._lock = threading.Lock()
        self._listener = socket.create_server(("127.0.0.1", free_port()))
        self.endpoint = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self._accept_on_thread()

    def pull(self) -> None:
        with self._lock:
            with suppress(OSError):
                self._listener.shutdown(socket.SHUT_RDWR)
            self._listener.close()
            for end in self._ends:
                with suppress(OSError):
                    end.shutdown(socket.SHUT_RDWR)
                end.close()
            self._ends.clear()

    def plug_in(self) -> None:
        host, port = self.endpoint.rsplit(":", 1)
        self._listener = socket.create_server((host, int(port)))
        self._accept_on_thread()

    def _accept_on_thread(self) -> None:
        threading.Thread(target=self._accept, args=(self._listener,), daemon=True).start()

    def _accept(self, listener: socket.socket) -> None:
        with suppress(OSError):
            while True:
                near, _ = listener.accept()
                far = socket.create_connection(self._target)
                with self._lock:
                    if listener.fileno() < 0:  # pulled meanwhile
                        near.close()
                        far.close()
                        return
                    self._ends += [near, far]
                for source, sink in ((near, far), (far, near)):
                    threading.Thread(target=_copy, args=(source, sink), daemon=True).start()


def _copy(source: socket.socket, sink: socket.socket) -> None:
    with suppress(OSError):
        while data := source.recv(65536):
            sink.sendall(data)
    with suppress(OSError):
        sink.shutdown(socket.SHUT_RDWR)
