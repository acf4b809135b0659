"""The agent's end of a worker's channel, for tests of the runtime: a real socket, answered on a thread."""

from __future__ import annotations

import json
import os
import socket
import threading
from typing import TYPE_CHECKING, Any

from trainer_runtime import contract
from trainer_runtime.channel import Channel

if TYPE_CHECKING:
    from collections.abc import Callable


class FakeAgent:
    """Commits whatever is asked, unless it is told to refuse."""

    def __init__(self, committed: dict[str, Any] | None = None) -> None:
        self.committed = committed
        """The job's record."""
        self.refuses = ""
        self.is_mute = False
        self.is_over = True
        """The group is, for those that ask whether to leave."""
        self.asked: list[dict[str, Any]] = []
        """What workers wanted to publish."""
        self.unreadable: list[str] = []
        """What workers said that they could not read."""
        self.began: list[dict[str, Any]] = []
        """What workers said of their first step."""
        self.on_publish: Callable[[dict[str, Any]], object] = lambda _asked: None
        self._channels: list[Channel] = []
        self._sock, self.theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def open(self) -> Channel:
        """A worker's end; one at a time may be in use."""
        self._channels.append(Channel(os.dup(self.theirs.fileno())))
        return self._channels[-1]

    def end(self) -> None:
        """End, as an agent does that is killed."""
        self._sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Let go of both ends."""
        self.end()
        self._thread.join()
        for end in (self._sock, self.theirs, *(channel._sock for channel in self._channels)):
            end.close()

    def _serve(self) -> None:
        while packet := self._sock.recv(contract.MESSAGE_BYTES):
            answer = self._answer(json.loads(packet))
            if answer is not None and not self.is_mute:
                self._sock.send(json.dumps(answer).encode())

    def _answer(self, message: dict[str, Any]) -> dict[str, Any] | None:
        if "publish" in message:
            return self._verdict(message["publish"])
        if "unreadable" in message:
            self.unreadable.append(message["unreadable"])
            return None
        if "began" in message:
            self.began.append(message["began"])
            return None
        if message == {"ask": "leave"}:
            return {"leave": True} if self.is_over else None
        assert message == {"ask": "resume"}
        return self._resume()

    def _resume(self) -> dict[str, Any]:
        return {"resume": {"copy": self.committed and self.committed["copy"], "checkpoint": self.committed}}

    def _verdict(self, asked: dict[str, Any]) -> dict[str, Any]:
        self.asked.append(asked)
        self.on_publish(asked)
        if not self.refuses and not self.is_mute:
            number = self.committed["number"] + 1 if self.committed else 1
            self.committed = {"v": 1, **asked, "number": number}
        checkpoint = None if self.refuses else self.committed
        return {"verdict": {"copy": asked["copy"], "checkpoint": checkpoint, "reason": self.refuses}}
