"""Restoring a State: find what to begin from, load it on every rank, and set up saves, snapshots and handoffs.

All ranks call `Restorer.open` and then `Restorer.load`, which are collectives.
"""

from __future__ import annotations

import json
import os
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, cast

import torch
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from trainer_runtime import contract
from trainer_runtime.capture.capturing import CONTENT_VERSION, Capturer, CheckpointPlace
from trainer_runtime.checkpoint import CheckpointError, refuse
from trainer_runtime.contents import SHARDED, OtherWorldError
from trainer_runtime.dist import do_on_all, is_main, local_rank, open_control_page, rank, world_size
from trainer_runtime.exchange import Exchange
from trainer_runtime.handoff import HandoffParticipant
from trainer_runtime.hostcopy import HostCopier
from trainer_runtime.manifest import SHARDS, parse_stem, require_private_name
from trainer_runtime.object_store import is_remote
from trainer_runtime.position import NOT_SAVED
from trainer_runtime.rank_messages import open_rank_messages
from trainer_runtime.replication import open_replication
from trainer_runtime.resume import DirectoryOpener
from trainer_runtime.saving import Saver
from trainer_runtime.scaling import factor_of, rescale
from trainer_runtime.shared_directory_check import DirectorySight, check_shared_directory
from trainer_runtime.sharing import Shared, share_from_main
from trainer_runtime.snapshot_load import read_from_memory
from trainer_runtime.snapshots import SnapshotTaker, open_snapshot_memory

if TYPE_CHECKING:
    from collections.abc import Callable, Container, Iterator, Sequence

    from trainer_runtime.agent_channel import AgentChannel
    from trainer_runtime.capture.shard_writer import ShardWriter
    from trainer_runtime.contents import Contents
    from trainer_runtime.contract import ControlPage
    from trainer_runtime.node_memory import NodeMemory
    from trainer_runtime.position import Position
    from trainer_runtime.rank_messages import RankMessages
    from trainer_runtime.scaling import LrScaling


@dataclass(frozen=True, slots=True)
class Restored:
    """The objects that a State uses once it is restored."""

    saver: Saver
    snapshots: SnapshotTaker | None
    """None: no snapshots are taken."""
    handoff: HandoffParticipant | None
    """None without an agent."""
    has_loaded: bool
    """A saved state was loaded; else training begins at step 0."""


@dataclass(slots=True, kw_only=True)
class Restorer:
    """Restores one State, on every rank."""

    directory: Path
    """Directory of the checkpoints."""
    run: str
    """Name of this run."""
    keep: int
    """Number of checkpoints to keep."""
    channel: AgentChannel | None
    """None without an agent, as is the control page."""
    page: ControlPage | None
    contents: Contents
    pos: Position
    """The position, which is overwritten."""
    seed: int | None
    """The seed that the user gave, if any."""
    lr_scaling: LrScaling | None
    save_hooks: Sequence[Callable[[Path], object]]
    load_hooks: Sequence[Callable[[Path], object]]
    is_over: Callable[[], bool]
    """Whether the agent has said that the group is over."""
    _opener: DirectoryOpener = field(init=False)
    _start: Shared = field(init=False)

    def open(self) -> int:
        """Open the directory on rank 0 and find what to begin from; return the group's number.

        Raises:
            CheckpointError: the objects are sharded, and not all nodes see the directory; or as `DirectoryOpener.open`.
            PeerError: rank 0 failed.
        """
        sight = check_shared_directory(self.directory) if world_size() > 1 else DirectorySight()
        if sight.owner and self.contents.shards is not None:
            raise CheckpointError(
                f"wanted a directory that all nodes see, for each writes its own shards; {self.directory} is on the "
                "disk of rank 0's node: give another --checkpoint_dir"
            )
        self._opener = DirectoryOpener(self.directory, self.run, self.keep, self.channel, sight)
        self._start = share_from_main(self._opener.open)
        return self._start.number

    def load(self, *, turn: int) -> Restored:
        """Load what `open` found, and return what saves, takes snapshots and takes part in handoffs from now on.

        Args:
            turn: number of the State in this process, from 1.

        Raises:
            PeerError: another rank failed.
            ValueError, RuntimeError: the checkpoint does not fit the objects.
        """
        group, data, is_in_memory = self._start
        self.contents.note_given()
        messages = open_rank_messages(group, turn)
        if data is not None:
            try:
                with exit_without_restart(self.channel, OtherWorldError):
                    do_on_all(lambda: self._load(self._read_content(data), is_in_memory=False))
            finally:
                data.close()
        elif is_in_memory and self.channel is not None:
            with exit_without_restart(self.channel, OtherWorldError):
                content = read_from_memory(self.channel, messages, self.contents)
            do_on_all(lambda: self._load(content, is_in_memory=True))
            self.pos.saved = NOT_SAVED  # there is no checkpoint of this step
            self.pos.last_due = int(messages.broadcast("committed", lambda: str(self._opener.committed_step)))
        handoff = self._join_handoffs(messages)
        shards = self._open_shard_writer(messages, group, turn)
        seed = self._agree_on_seed(messages)
        descriptor = open_snapshot_memory(self.channel, messages, has_load_hooks=bool(self.load_hooks))
        # After the writers: at the exit of the process what was made last ends first, and they wait for the copy.
        capturer = Capturer(
            self.contents,
            self.pos,
            seed=seed,
            has_common=is_main() or (descriptor is not None and local_rank() == 0),
            descriptor=descriptor,
            report=_ignore if self.channel is None else self.channel.report_snapshot,
            place=self._agree_on_place(messages) if descriptor is not None else None,
        )
        saver = Saver(
            directory=self.directory,
            run=self.run,
            group=group,
            contents=self.contents,
            capturer=capturer,
            pos=self.pos,
            # On rank 0 a thread waits on it, so it needs a connection of its own.
            exchange=Exchange(
                open_rank_messages(group, turn) if is_main() else messages, rank(), world_size(), self.is_over
            ),
            writer=self._opener.writer,
            hooks=self.save_hooks,
            shards=shards,
        )
        capturer.expects_saves = saver.writes_copies
        snapshots = None
        if descriptor is not None and self.channel is not None:
            replication = open_replication(open_control_page())
            snapshots = SnapshotTaker(capturer, self.channel, messages, replication)
        return Restored(saver, snapshots, handoff, has_loaded=data is not None or is_in_memory)

    def _open_shard_writer(self, messages: RankMessages, group: int, turn: int) -> ShardWriter | None:
        if self.contents.shards is None:
            return None
        from trainer_runtime.capture.shard_writer import ShardWriter  # noqa: PLC0415 - takes a while

        of_thread = open_rank_messages(group, turn)
        return ShardWriter(
            self.contents.shards, self.directory, messages, of_thread, rank=rank(), world_size=world_size()
        )

    def _read_content(self, memory: NodeMemory) -> dict[str, Any]:
        """Return the content of a checkpoint; the states of modules are views of the memory, all else is a copy."""
        content = read_content(memory)
        objects = self.contents.copy_kept(content.pop("objects"))
        return {**HostCopier().copy(content), "objects": objects}

    def _load(self, content: dict[str, Any], *, is_in_memory: bool) -> None:
        self.seed = load_content(
            content,
            self.directory,
            self.contents,
            self.pos,
            is_in_memory=is_in_memory,
            seed=self.seed,
            lr_scaling=self.lr_scaling,
        )
        if self.pos.items:
            self.contents.note_committed()
        self._opener.call_hooks(self.pos.step, self.load_hooks)
        self.contents.parts.restore_random_states()  # undo what the hooks drew

    def _join_handoffs(self, messages: RankMessages) -> HandoffParticipant | None:
        if self.page is None or self.channel is None:
            return None
        return HandoffParticipant(
            messages,
            self.page,
            self.channel,
            rank=rank(),
            world_size=world_size(),
            wait_s=float(os.environ.get(contract.HANDOFF_WAIT_S, "1")),
        )

    def _agree_on_seed(self, messages: RankMessages) -> int:
        """Return the same seed on all ranks, because every node's local rank 0 writes a snapshot's common part."""
        if self.seed is not None:
            return self.seed
        return int(messages.broadcast("seed", lambda: str(torch.initial_seed())))

    def _agree_on_place(self, messages: RankMessages) -> CheckpointPlace:
        """Return where checkpoints are. The directory is that of this node, which may have one of its own."""
        (node,) = json.loads(messages.broadcast("place", lambda: json.dumps([self._opener.node])))
        shards = self.contents.shards
        return CheckpointPlace(
            str(self.directory.absolute()),
            self.keep,
            node,
            has_hooks=bool(self.save_hooks),
            aliases=[] if shards is None else [([*alias], [*path]) for alias, path in shards.aliases().items()],
        )


def _ignore(_step: int) -> None:
    """Report nothing."""


@contextmanager
def exit_without_restart(channel: AgentChannel | None, kind: type[RuntimeError] = RuntimeError) -> Iterator[None]:
    """Under an agent turn an error of this kind into an exit without restart: the script would fail in the same way."""
    try:
        yield
    except kind as error:
        if channel is None:
            raise
        raise refuse(str(error)) from error


def require_only_state(
    restored: Container[tuple[Path | None, str]],
    directory: Path,
    run: str,
    channel: AgentChannel | None,
    page: ControlPage | None,
) -> tuple[Path | None, str]:
    """Return (directory, run) of a State; RuntimeError if this process has restored another State with the same.

    Under an agent the directory is None: a job has one State. Nor may another process of the rank have restored one, as
    where each fold has a process of its own.
    """
    identity = (directory.resolve() if channel is None else None), run
    if identity in restored or (channel is not None and page is not None and page.restored):
        who = "this process" if identity in restored else "another process of this rank"
        where = f"in {directory}" if channel is None else "and a job has one"
        raise RuntimeError(
            f"{who} has restored a State already, {where}: this one would begin with what that one saved. "
            "Give all objects to one State; let trainings that follow each other run as jobs of their own"
            + (", or give each State a checkpoint_dir of its own" if channel is None else "")
        )
    return identity


def read_content(memory: NodeMemory) -> dict[str, Any]:
    """Return the content of a checkpoint's state file; its tensors are views of the memory if that has a descriptor."""
    path = f"/proc/self/fd/{memory.descriptor}"
    is_mapped = memory.descriptor >= 0 and Path(path).exists()
    # An mmap has all methods that torch.load uses, and is not copied like a BytesIO.
    file = path if is_mapped else cast("IO[bytes]", memory.data)
    with torch.device("cpu"):  # torch.load builds a sparse tensor on the default device, despite map_location
        content: dict[str, Any] = torch.load(file, weights_only=True, map_location="cpu", mmap=is_mapped)
    return content


def _own_name(content: dict[str, Any], directory: Path) -> str:
    """Return the name under which this content's files are; ValueError if it does not fit the position."""
    name, position = str(content["name"]), content["position"]
    _, _, *at = parse_stem(name) or ("", 0)
    if at != [position["step"], position["save"]]:
        raise ValueError(f"wanted the name of a checkpoint of step {position['step']}, got {name!r}")
    if is_remote(directory):
        require_private_name(str(content["private"]), name)
        return str(content["private"])
    return name


def load_content(
    content: dict[str, Any],
    directory: Path,
    contents: Contents,
    pos: Position,
    *,
    is_in_memory: bool,
    seed: int | None,
    lr_scaling: LrScaling | None,
) -> int:
    """Load objects, values, this rank's own part and the position.

    Args:
        content: the saved content.
        directory: directory of the checkpoints; used if objects are sharded and saved on disk.
        contents: the objects and values.
        pos: the position, which is overwritten.
        is_in_memory: the content is that of a snapshot, which has what is sharded as well.
        seed: the seed that the user gave, if any.
        lr_scaling: how learning rates follow the world size, if they do.

    Returns:
        The effective seed: the user's, else the one in the checkpoint.

    Raises:
        CheckpointError: the content has another version.
        OtherWorldError: it can only be loaded by as many ranks as have saved it.
        ValueError, RuntimeError: the content does not fit the objects.
    """
    if content["v"] != CONTENT_VERSION:
        raise CheckpointError(
            f"wanted a checkpoint of version {CONTENT_VERSION}, got {content['v']}: another version of trainer_runtime "
            "made it; continue with that version, or start over in another directory"
        )
    contents.require_world(content["world_size"], world_size())
    contents.load(content["objects"], next(part for part in content["ranks"] if part))
    if contents.shards is not None:
        if is_in_memory:
            contents.shards.load(content[SHARDED])
        else:
            from trainer_runtime.capture.shard_files import load_files  # noqa: PLC0415 - takes a while

            load_files(contents.shards, directory / _own_name(content, directory) / SHARDS, content[SHARDED])
    if lr_scaling is not None:
        factor = factor_of(lr_scaling, content["world_size"], world_size())
        rescale(contents.of_type(Optimizer), contents.of_type(LRScheduler), factor)
    pos.load(content["position"])
    if content["world_size"] != world_size():
        pos.item, pos.is_resized = "", True  # a rank may draw other items now
    holds = content["seed"] if seed is None else seed
    contents.parts.load(content["ranks"], rank(), world_size(), seed=holds, step=pos.step)
    return int(holds)
