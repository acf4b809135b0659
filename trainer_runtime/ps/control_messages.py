"""What an agent tells a process of a parameter-server job, and is told by it: which server has which shard.

Over the channel that each worker of an agent has (`contract`): packets of JSON. From the agent `{"map": …}`, as of
`ShardMap.to_json`, whenever there is a new one, and `{"done": true}` before it ends the process of a job that has
succeeded; from a server `{"copy": {"map", "shard", "is_whole"}}`.
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
    """The process's end of it.

    Args:
        descriptor: of the channel.
        on_map: called on a thread of its own with each map, in the order in which they come.
        on_error: called there with what `on_map` has raised; no map follows.
    """

    def __init__(
        self, descriptor: int, on_map: Callable[[ShardMap], None], on_error: Callable[[Exception], None]
    ) -> None:
        os.set_inheritable(descriptor, False)
        self._sock = socket.socket(fileno=descriptor)
        self._on_map = on_map
        self._on_error = on_error
        self._thread = threading.Thread(target=self._listen, name="ps-orders", daemon=True)
        self._is_done = False

    def begin(self) -> None:
        """Listen from now on."""
        self._thread.start()

    def close(self) -> bool:
        """Take in what was sent until now, and listen no more. Return whether the job has succeeded."""
        with suppress(OSError):  # the agent has ended
            self._sock.shutdown(socket.SHUT_RD)  # packets that have arrived are still received
        self._thread.join()
        return self._is_done

    def say(self, number: int, shard: int, is_whole: bool) -> None:  # noqa: FBT001 - one of three facts
        """Tell the agent whether the copy of a shard is whole, going by the map of this number."""
        told = {"copy": {"map": number, "shard": shard, "is_whole": is_whole}}
        with suppress(OSError):  # the agent has ended, and this process is about to
            self._sock.send(json.dumps(told).encode())

    def _listen(self) -> None:
        while packet := self._receive():
            try:
                told = json.loads(packet)
                if "map" in told:
                    self._on_map(map_of(told["map"]))
                self._is_done |= told.get("done") is True
            except Exception as error:  # noqa: BLE001 - whatever it is, this process has no part in the job then
                self._on_error(error)
                break
        self._sock.close()

    def _receive(self) -> bytes:
        try:
            return self._sock.recv(contract.MESSAGE_BYTES)
        except OSError:
            return b""  # the agent has ended


def descriptor() -> int | None:
    """Of the channel to the agent; None without one."""
    told = os.environ.get(contract.CHANNEL_FD)
    return None if told is None else int(told)
