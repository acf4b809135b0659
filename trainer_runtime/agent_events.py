"""A thread that the agent wakes: because the rank's group is over, or to learn which collectives are unfinished."""

from __future__ import annotations

import functools
import os
import select
import threading
from contextlib import suppress
from typing import TYPE_CHECKING

from trainer_runtime import contract
from trainer_runtime.connections import connections
from trainer_runtime.unfinished import count_unfinished

if TYPE_CHECKING:
    from trainer_runtime.contract import ControlPage


class GroupOverError(BaseException):
    """The group is over. Not an `Exception`: a script that goes on after one would otherwise do so for ever."""


class AgentEvents:
    """Waits for the agent's signals, on a thread of its own.

    If the group of this process is over, its connections are broken.

    Args:
        page: this rank's control page.
        event: eventfd that signals a change of `page.over` or `page.question`.
    """

    def __init__(self, page: ControlPage, event: int) -> None:
        os.set_inheritable(event, False)  # child processes of the script must not inherit it
        self._page = page
        self._event = event
        self._lock = threading.Lock()
        self._group = 0
        self.is_over = False
        threading.Thread(target=self._listen, name="agent-events", daemon=True).start()

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
                if self._group and self._page.over == self._group:
                    self.is_over = True
                    connections.shut_down()
            number = self._page.question
            if number != self._page.answered:
                self._page.answer(number, count_unfinished())


@functools.cache
def _listen(event: int, page: int) -> AgentEvents:
    return AgentEvents(contract.ControlPage(page), event)


def listen_to_agent() -> AgentEvents | None:
    """Listen from the first call on; None if this process was not handed the descriptors by an agent."""
    event, page = os.environ.get(contract.OVER_FD), os.environ.get(contract.CONTROL_FD)
    return None if event is None or page is None else _listen(int(event), int(page))
