"""A thread that waits for the agent's signal that the group is over, and breaks the rank's connections then."""

from __future__ import annotations

import os
import select
import threading
from contextlib import suppress
from typing import TYPE_CHECKING

from trainer_runtime import contract
from trainer_runtime.connections import connections

if TYPE_CHECKING:
    from trainer_runtime.contract import ControlPage


class GroupOverError(BaseException):
    """The group is over. Not an `Exception`: a script that goes on after one would otherwise do so for ever."""


class GroupEnd:
    """Whether the group of this process is over.

    Args:
        page: this rank's control page.
        event: eventfd that signals a change of `page.over`.
    """

    def __init__(self, page: ControlPage, event: int) -> None:
        os.set_inheritable(event, False)  # child processes of the script must not inherit it
        self._page = page
        self._event = event
        self._lock = threading.Lock()
        self.begin_group()
        threading.Thread(target=self._listen, name="group-end", daemon=True).start()

    def begin_group(self) -> None:
        """Note that this process belongs to the group that the environment names, before it joins the group."""
        with self._lock:
            self._group = int(os.environ[contract.GROUP])
            self.is_over = False

    def _listen(self) -> None:
        poll = select.poll()
        poll.register(self._event, select.POLLIN)
        while True:
            poll.poll()
            with suppress(BlockingIOError):
                os.eventfd_read(self._event)
            with self._lock:  # a late event must not break the connections of the next group
                if self._page.over == self._group:
                    self.is_over = True
                    connections.shut_down()


def listen_for_group_end(page: ControlPage) -> GroupEnd | None:
    """Listen from now on; None if this process was not handed the descriptor."""
    event = os.environ.get(contract.OVER_FD)
    return None if event is None else GroupEnd(page, int(event))
