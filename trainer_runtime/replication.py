"""Waiting until another node has this rank's part of a snapshot.

A large part is sent to the next node. A small one is sent to both neighbours, and one of them must have stored it,
unless neither answers; that takes so little time that no rank usually waits. But if an agent is stopped, or cannot run,
its ranks wait, and with them all others: their steps would be lost if the agent lost its lease.
"""

from __future__ import annotations

import os
import select
from contextlib import suppress
from typing import TYPE_CHECKING

from trainer_runtime import contract
from trainer_runtime.agent_events import GroupOverError

if TYPE_CHECKING:
    from trainer_runtime.contract import ControlPage


class Replication:
    """What the agent reports of this rank's parts.

    Args:
        page: this rank's control page.
        event: eventfd that signals a change of `page.replicated` or `page.over`.
    """

    def __init__(self, page: ControlPage, event: int) -> None:
        os.set_inheritable(event, False)  # child processes of the script must not inherit it
        self._page = page
        self._event = event
        self._group = int(os.environ.get(contract.GROUP, "0"))

    @property
    def took_s(self) -> float:
        """Seconds until the slowest part of this node's ranks was sent, as last measured; 0: none was."""
        return self._page.replicating_us / 1e6

    def is_over(self, step: int) -> bool:
        """Return whether the agent is done with this rank's part of the snapshot of this step."""
        return self._page.replicated >= step

    def wait(self, step: int) -> None:
        """Wait until the agent is done with this rank's part of the snapshot of this step.

        Raises:
            GroupOverError: the agent has said that the group is over.
        """
        poll = select.poll()
        poll.register(self._event, select.POLLIN)
        while not self.is_over(step):
            if self._group and self._page.over == self._group:
                raise GroupOverError
            poll.poll()
            with suppress(BlockingIOError):
                os.eventfd_read(self._event)


def open_replication(page: ControlPage | None) -> Replication | None:
    """Return what the agent reports of this rank's parts; None if no other node is to hold them."""
    event = os.environ.get(contract.REPLICATED_FD)
    is_alone = os.environ.get("WORLD_SIZE") == os.environ.get("LOCAL_WORLD_SIZE")
    return None if page is None or event is None or is_alone else Replication(page, int(event))
