"""Messages between an agent and a process of a parameter-server job about which server has which shard.

They use the channel that an agent has to each of its workers (`contract`): packets of JSON. The agent sends
`{"map": …}`, as of `ShardMap.to_json`, whenever there is a new map, and `{"done": true}` before it stops the processes
of a job that has succeeded. A server sends `{"replica": {"map", "shard", "is_complete"}}`.
"""

from __future__ import annotations

import json
import os
import socket
import threading
from collections.abc import Callable
from contextlib import suppress

from trainer_runtime import contract
from trainer_runtime.shard_map import ShardMap, map_of


class ControlMessages:
    """The process's end of the channel.

    Args:
        descriptor: file descriptor of the channel.
        on_map: called with each map, in the order of arrival, on a thread of its own.
        on_error: called on that thread with an error that `on_map` raised; no map follows.
    """

    def __init__(
        self, descriptor: int, on_map: Callable[[ShardMap], None], on_error: Callable[[Exception], None]
    ) -> None:
        os.set_inheritable(descriptor, False)
        self._sock = socket.socket(fileno=descriptor)
        self._on_map = on_map
        self._on_error = on_error
        self._thread = threading.Thread(target=self._listen, name="ps-control", daemon=True)
        self._is_done = False

    def start(self) -> None:
        """Start to listen."""
        self._thread.start()

    def close(self) -> bool:
        """Handle the messages that have arrived, and stop to listen. Return whether the job has succeeded."""
        with suppress(OSError):  # the agent has exited
            self._sock.shutdown(socket.SHUT_RD)  # packets that have arrived can still be received
        self._thread.join()
        return self._is_done

    def report_replica(self, number: int, shard: int, is_complete: bool) -> None:  # noqa: FBT001 - one of three facts
        """Report to the agent whether the replica of a shard is complete, by the map of this number."""
        message = {"replica": {"map": number, "shard": shard, "is_complete": is_complete}}
        with suppress(OSError):  # the agent has exited, and this process is about to
            self._sock.send(json.dumps(message).encode())

    def _listen(self) -> None:
        while packet := self._receive():
            try:
                message = json.loads(packet)
                if "map" in message:
                    self._on_map(map_of(message["map"]))
                self._is_done |= message.get("done") is True
            except Exception as error:  # noqa: BLE001 - after any error this process cannot continue in the job
                self._on_error(error)
                break
        self._sock.close()

    def _receive(self) -> bytes:
        try:
            return self._sock.recv(contract.MESSAGE_BYTES)
        except OSError:
            return b""  # the agent has exited


def descriptor() -> int | None:
    """Return the file descriptor of the channel to the agent; None without an agent."""
    value = os.environ.get(contract.CHANNEL_FD)
    return None if value is None else int(value)
