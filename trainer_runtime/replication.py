"""Waiting until another node holds this rank's large part of a snapshot.

A rank keeps its newest two snapshots. If it replaced the older one while parts of the newer one are still on their way
to other nodes, and a node was lost then, no snapshot would be complete. So each rank waits at the end of the step
before a snapshot until its last one has arrived. A rank that takes the next snapshot has completed a step with the
others, and therefore knows that they have waited too.
"""

from __future__ import annotations

import os
import select
from contextlib import suppress
from typing import TYPE_CHECKING

from trainer_runtime import contract

if TYPE_CHECKING:
    from trainer_runtime.contract import ControlPage


class Replication:
    """What the agent tells this rank of its large parts.

    Args:
        page: this rank's control page.
        event: eventfd that signals a change of `page.replicated`.
    """

    def __init__(self, page: ControlPage, event: int) -> None:
        os.set_inheritable(event, False)  # child processes of the script must not inherit it
        self._page = page
        self._event = event

    @property
    def took_s(self) -> float:
        """Seconds until the slowest part of this node's ranks had arrived, as last measured; 0: none is sent."""
        return self._page.replicating_us / 1e6

    def is_over(self, step: int) -> bool:
        """Return whether the agent is done with this rank's part of the snapshot of this step."""
        return self._page.replicated >= step

    def wait(self, step: int) -> None:
        """Wait until the agent is done with this rank's part of the snapshot of this step."""
        poll = select.poll()
        poll.register(self._event, select.POLLIN)
        while not self.is_over(step):
            poll.poll()
            with suppress(BlockingIOError):
                os.eventfd_read(self._event)


def open_replication(page: ControlPage | None) -> Replication | None:
    """Return what the agent tells of this rank's large parts; None if no other node is to hold them."""
    event = os.environ.get(contract.REPLICATED_FD)
    is_alone = os.environ.get("WORLD_SIZE") == os.environ.get("LOCAL_WORLD_SIZE")
    return None if page is None or event is None or is_alone else Replication(page, int(event))
