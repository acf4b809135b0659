"""Opening of the checkpoint directory on rank 0: finds the starting point, and creates the writer."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from trainer_runtime import contract
from trainer_runtime.checkpoint import CheckpointError, first_free_group, warn
from trainer_runtime.dist import Shared, is_main
from trainer_runtime.manifest import EXTRA
from trainer_runtime.resume import StartingPoint, start_alone, start_under_agent
from trainer_runtime.writer import Writer

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from trainer_runtime.agent_channel import AgentChannel
    from trainer_runtime.manifest import Manifest
    from trainer_runtime.shared_directory_check import DirectorySight


class DirectoryOpener:
    """Opens a run's directory once, on rank 0; on the other ranks it stays unopened.

    Args:
        directory: directory of the checkpoints.
        run: name of this run.
        keep: number of checkpoints to keep.
        channel: channel to the agent; None without an agent.
        sight: which nodes see the directory.
    """

    def __init__(
        self, directory: Path, run: str, keep: int, channel: AgentChannel | None, sight: DirectorySight
    ) -> None:
        self._directory = directory
        self._run = run
        self._keep = keep
        self._channel = channel
        self._sight = sight
        self.writer: Writer | None = None
        self._found: Manifest | None = None

    def open(self) -> Shared:
        """Return the group's number, and the state to restore; no state at the first start.

        Raises:
            CheckpointError: without an agent, there are checkpoints but none to resume from.
            AgentGoneError: the agent has exited.
            OSError: without an agent, reading failed.
            SystemExit: the state cannot be read, which was reported to the agent; or this group is no longer current.
        """
        node = self._find_node()
        start = self._find_start(node)
        named_group = os.environ.get(contract.GROUP)
        group = int(named_group) if named_group else first_free_group(self._directory, self._run)
        self.writer = Writer(
            self._directory, self._run, group, keep=self._keep, start=start, channel=self._channel, node=node
        )
        if start.found is None:
            return Shared(group, None, start.is_in_memory)
        self._found = start.found.manifest
        return Shared(group, start.found.data)

    @property
    def committed_step(self) -> int:
        """Step of the newest checkpoint in the job's record; 0 if there is none."""
        committed = self._channel.ask_restore_point().checkpoint if self._channel is not None else None
        return committed.copy.step if committed is not None else 0

    def call_hooks(self, step: int, hooks: Sequence[Callable[[Path], object]]) -> None:
        """On rank 0: print what was resumed from, and let the hooks read the files that `on_save` hooks wrote.

        A snapshot in memory has no such files.
        """
        if not is_main():
            return
        if self._found is None:
            warn(f"resumed at step {step} from memory")
            return
        place = self._directory / self._found.stem
        warn(f"resumed at step {step} from {place}")
        for hook in hooks if (place / EXTRA).exists() else ():
            hook(place / EXTRA)

    def _find_node(self) -> str:
        """Return the node to name in the records of new checkpoints; empty if all nodes see the directory."""
        if self._sight.owner is not None or self._channel is None:
            return self._sight.owner or ""
        # Not checked. But if the record names a node, nodes share no directory, unless this node read it from there.
        resume, own = self._channel.ask_restore_point(), os.environ.get(contract.NODE_ID, "")
        named = resume.checkpoint.node if resume.checkpoint is not None else ""
        return own if named == own or (named and resume.is_in_memory) else ""

    def _find_start(self, node: str) -> StartingPoint:
        if self._channel is None:
            return self._choose_start(node)
        try:
            return self._choose_start(node)
        except (CheckpointError, OSError) as error:
            what = f"the checkpoint in {self._directory}: {error}"
            self._channel.report_unreadable(what)  # before the other ranks learn of it and exit
            warn(f"cannot read {what}")
            raise SystemExit(1) from error

    def _choose_start(self, node: str) -> StartingPoint:
        fresh = os.environ.get(contract.FRESH) == "1"
        if self._channel is None:
            start = start_alone(self._directory, self._run, fresh=fresh)
        else:
            start = start_under_agent(self._directory, self._run, self._channel, fresh=fresh, node=node)
        if start == StartingPoint() and self._sight.hidden and not fresh:
            raise CheckpointError(
                f"this node, where rank 0 is, has none, but {self._sight.hidden} of the other nodes have some under "
                "that name on disks of their own; give all nodes one directory, or start over with --fresh"
            )
        return start
