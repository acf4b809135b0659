"""Where training begins, and which checkpoints the next writer inherits.

Under an agent the job's records decide, never a listing of the directory: a group that was cut off may have left files
that look newer. The group's restore point names the state to begin from. The `checkpoint` record names the committed
checkpoint, with its names and its manifest's checksum. If the two differ, the state is a snapshot in memory. Files of
this run that no record names are neither read nor deleted.

- The publisher may have died between the commit and the rename: a reader that finds only the private name completes the
  rename.
- If the committed checkpoint is damaged or missing, the newest undamaged one of those kept replaces it, by a rollback
  that is committed through the same fence before the first step. No list contains the damaged checkpoint after that,
  so nobody deletes it: it is left for the operator.
- If nothing was ever committed, the newest checkpoint of another run is adopted: it is committed as this run's. This
  run never deletes it.
- If such a commit is refused, the group is no longer the current one: exit with `EXIT_RESTART`.
"""

from __future__ import annotations

import errno
import os
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from trainer_runtime import contract
from trainer_runtime.checkpoint import (
    CheckpointError,
    DamagedError,
    FoundCheckpoint,
    files_of,
    find,
    find_of_others,
    first_free_group,
    is_listed,
    read,
    refuse,
    warn,
)
from trainer_runtime.checkpoint_files import rename_to_final
from trainer_runtime.dist import is_main
from trainer_runtime.manifest import EXTRA, MANIFEST, final_name
from trainer_runtime.object_store import download, exists, is_remote
from trainer_runtime.record import CommittedCheckpoint, StateId
from trainer_runtime.shared_directory_check import require_writable
from trainer_runtime.sharing import Shared
from trainer_runtime.writer import Writer

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from trainer_runtime.agent_channel import AgentChannel
    from trainer_runtime.manifest import Manifest
    from trainer_runtime.shared_directory_check import DirectorySight


@dataclass(frozen=True, slots=True)
class StartingPoint:
    """The state to begin from, and the checkpoints that the writer inherits."""

    found: FoundCheckpoint | None = None
    """The checkpoint; None: begin at step 0, or from a snapshot in memory."""
    kept: tuple[str, ...] = ()
    """Private names of the run's checkpoints to keep for now, oldest first."""
    superseded: tuple[str, ...] = ()
    """Private names of checkpoints that may be deleted."""
    is_in_memory: bool = False
    """The nodes' agents hold the state; `snapshot_load` loads it."""


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
        self.node = ""
        """Id of the node whose own disk has the directory; empty if all nodes see it. Set by `open`."""
        self._found: Manifest | None = None

    def open(self) -> Shared:
        """Return the group's number, and the state to restore; no state at the first start.

        Raises:
            CheckpointError: without an agent, there are checkpoints but none to resume from.
            AgentGoneError: the agent has exited.
            OSError: without an agent, reading failed.
            SystemExit: the state cannot be read, which was reported to the agent; this group is no longer current; or,
                with `EXIT_NO_RESTART`, the directory is a file, or in one, or cannot be made or written.
        """
        node = self.node = self._find_node()
        start = self._find_start(node)
        named_group = os.environ.get(contract.GROUP)
        if named_group == "1" and start == StartingPoint() and not is_remote(self._directory):
            self._require_directory()
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
        other = "" if self._found.run == self._run else " (written by another run; --fresh begins at step 0)"
        warn(f"resumed at step {step} from {self._directory / self._found.stem}{other}")
        extra = files_of(self._directory, self._found) / EXTRA
        if not hooks or not exists(extra):
            return
        with tempfile.TemporaryDirectory(prefix="trainer_runtime-") as copy:
            if is_remote(extra):
                download(extra, Path(copy))
                extra = Path(copy)
            for hook in hooks:
                hook(extra)

    def _find_node(self) -> str:
        """Return the node to name in the records of new checkpoints; empty if all nodes see the directory."""
        if self._sight.owner is not None or self._channel is None:
            return self._sight.owner or ""
        # Not checked. But if the record names a node, nodes share no directory, unless this node read it from there.
        restore_point, own = self._channel.ask_restore_point(), os.environ.get(contract.NODE_ID, "")
        named = restore_point.checkpoint.node if restore_point.checkpoint is not None else ""
        return own if named == own or (named and restore_point.is_in_memory) else ""

    def _find_start(self, node: str) -> StartingPoint:
        if self._channel is None:
            return self._choose_start(node)
        try:
            return self._choose_start(node)
        except (CheckpointError, OSError) as error:
            if isinstance(error, NotADirectoryError) and not self.committed_step:  # no later try can find one there
                what = f"wanted a directory for checkpoints, and {self._directory} is a file, or in one: give another"
                raise refuse(what) from error
            what = f"the checkpoint in {self._directory}: {error}"
            self._channel.report_unreadable(what)  # before the other ranks learn of it and exit
            warn(f"cannot read {what}")
            raise SystemExit(1) from error

    def _require_directory(self) -> None:
        """At the first start, find out now, and not at the first save, whether checkpoints can be written.

        Raises:
            SystemExit: with `EXIT_NO_RESTART`, they cannot.
        """
        try:
            require_writable(self._directory)
        except OSError as error:
            if error.errno in {errno.ENOSPC, errno.EDQUOT}:  # somebody may make room
                return
            raise refuse(
                f"cannot write checkpoints in {self._directory}: {error.strerror}; give another directory"
            ) from error

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


def start_alone(directory: Path, run: str, *, fresh: bool) -> StartingPoint:
    """Choose by the content of the directory; raises as `find`."""
    found = find(directory, run, fresh=fresh)
    if found is None or found.manifest.run != run:
        return StartingPoint(found)
    return StartingPoint(found, (*found.manifest.previous, found.manifest.private))


def start_under_agent(
    directory: Path, run: str, channel: AgentChannel, *, fresh: bool, node: str = ""
) -> StartingPoint:
    """Return the starting point that the job's records name.

    Args:
        directory: directory of the checkpoints.
        run: name of this run.
        channel: channel to the agent.
        fresh: do not adopt a checkpoint of another run.
        node: node whose own disk has the directory; empty if all nodes see it.

    Raises:
        AgentGoneError: the agent has exited.
        CheckpointError: the checkpoint that the records name cannot be used here.
        OSError: the directory or a file cannot be read. This is not damage: another node, or a later try, may succeed.
        SystemExit: with `EXIT_RESTART`: the group is no longer the current one.
    """
    restore_point = channel.ask_restore_point()
    if restore_point.copy is None and restore_point.checkpoint is None:
        return StartingPoint() if fresh else _adopt(directory, run, channel, node)
    if restore_point.checkpoint is None or restore_point.is_in_memory:
        return inherit(restore_point.checkpoint)
    try:
        found = _read_committed(directory, restore_point.checkpoint)
    except DamagedError as damage:
        warn(f"COMMITTED checkpoint {directory / restore_point.checkpoint.name} cannot be used: {damage}")
        return _roll_back(directory, restore_point.checkpoint, channel, node)
    return _started(found, restore_point.checkpoint)


def inherit(committed: CommittedCheckpoint | None) -> StartingPoint:
    """Return the start from a snapshot in memory. Checkpoints on another node's disk are not this writer's to keep."""
    if committed is None or committed.node not in {"", os.environ.get(contract.NODE_ID, "")}:
        return StartingPoint(is_in_memory=True)
    return replace(_started(None, committed), is_in_memory=True)


def _started(found: FoundCheckpoint | None, committed: CommittedCheckpoint) -> StartingPoint:
    own = (committed.private,) if committed.private else ()
    return StartingPoint(found, (*committed.kept, *own), committed.superseded)


def _adopt(directory: Path, run: str, channel: AgentChannel, node: str) -> StartingPoint:
    found = find_of_others(directory, run)
    if found is None:
        return StartingPoint()
    return _started(found, _commit(_record(found, node, private="", kept=(), superseded=()), channel))


def _roll_back(directory: Path, damaged: CommittedCheckpoint, channel: AgentChannel, node: str) -> StartingPoint:
    for place in reversed(range(len(damaged.kept))):
        private = damaged.kept[place]
        name = final_name(private)
        try:
            _complete(directory, name, private)
            found = read(directory, name)
        except DamagedError as damage:
            warn(f"skipped checkpoint {directory / name}: {damage}")
            continue
        older = _record(
            found, node, private=private, kept=damaged.kept[:place], superseded=damaged.superseded, is_rollback=True
        )
        committed = _commit(older, channel)
        warn(f"ROLLED BACK to {directory / name}; the damaged {damaged.name} is left for you to look at or remove")
        return _started(found, committed)
    raise CheckpointError(
        f"wanted the committed checkpoint {directory / damaged.name}; it and the {len(damaged.kept)} older ones that "
        "were kept cannot be used here (see above); restore one of them, make the directory visible on this node, or "
        "start over with --fresh"
    )


def _record(
    found: FoundCheckpoint,
    node: str,
    *,
    private: str,
    kept: tuple[str, ...],
    superseded: tuple[str, ...],
    is_rollback: bool = False,
) -> CommittedCheckpoint:
    manifest = found.manifest
    return CommittedCheckpoint(
        copy=StateId(manifest.run, manifest.group, manifest.step, manifest.save),
        name=manifest.stem,
        private=private,
        manifest_sha256=found.manifest_sha256,
        kept=kept,
        superseded=superseded,
        is_rollback=is_rollback,
        node=node,
    )


def _commit(asked: CommittedCheckpoint, channel: AgentChannel) -> CommittedCheckpoint:
    verdict = channel.publish(asked)
    if verdict.checkpoint is None:
        warn(f"may not resume from {asked.name}: {verdict.reason}")
        raise SystemExit(contract.EXIT_RESTART)
    return verdict.checkpoint


def _read_committed(directory: Path, committed: CommittedCheckpoint) -> FoundCheckpoint:
    if committed.private:
        _complete(directory, committed.name, committed.private)
    return read(directory, committed.name, committed.manifest_sha256)


def _complete(directory: Path, name: str, private: str) -> None:
    """Rename the checkpoint if the publisher did not. Two processes that do so at once do no harm.

    Raises:
        OSError: it cannot be renamed; or this node's mount does not show it under its final name yet.
    """
    if exists(directory / name / MANIFEST if is_remote(directory) else directory / name):
        return
    try:
        rename_to_final(directory / private)
    except (FileNotFoundError, FileExistsError):
        # A network file system may remember for a minute that a name was not there. That is no damage.
        if not is_remote(directory) and is_listed(directory, name) and not exists(directory / name):
            raise OSError(errno.ESTALE, "this node sees its name, but cannot open it yet", name) from None
    else:
        warn(f"renamed the committed checkpoint {directory / name} to its final name; its writer exited before that")
