"""Writing durable checkpoints.

All of a checkpoint is written and flushed to disk in a directory with a private name, the manifest last. Then it is
committed, and one rename gives the directory its final name, under which nothing can be yet. Whatever happens before
leaves the older checkpoints as they were, and the attempt removes its private directory.

Training does not wait: it hands over a copy of its state, and a thread does the rest, one checkpoint at a time. So
there is one copy at most. Where the next one falls due while the disk still has to write this one, training waits for
the disk; where this one awaits its verdict, the next is left out, since that may take an hour.

Under an agent the commit is a record of the job, written only while this group is the current one: see
`agent_channel.py`. No answer is neither yes nor no, so the files then stay. After a yes the checkpoint counts even if
this process goes no further: whoever resumes from it completes the rename. Without an agent the rename is the commit.

A writer deletes only what the record that it committed lists as superseded, or without an agent its own run's
manifests, never what it sees in the directory: another run, or a group that does not know that it is no longer the
current one, may be at work there. A name that is once listed never comes back into use, so that a writer that was
stopped for an hour can do no harm when it goes on. It deletes the private name before the final one: the rename leads
from the first to the second, so nothing slips through.

What nobody cleans up: private directories of writers that were killed before the commit.
"""

from __future__ import annotations

import atexit
import contextlib
import errno
import hashlib
import resource
import shutil
import threading
import time
import weakref
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from trainer_runtime.agent_channel import AgentGoneError
from trainer_runtime.checkpoint import warn
from trainer_runtime.checkpoint_rename import (
    is_deleted,
    is_there,
    place,
    place_committed,
    removed_on_error,
    require_unused,
)
from trainer_runtime.contract import MAX_KEEP
from trainer_runtime.disk import call_hooks, seal, sync_directory, write_state, write_synced
from trainer_runtime.manifest import EXTRA, MANIFEST, SHARDS, Manifest, encode, private_name, stem_of
from trainer_runtime.rank_messages import NoMessageError
from trainer_runtime.record import CommittedCheckpoint, StateId

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from trainer_runtime.agent_channel import AgentChannel
    from trainer_runtime.resume import StartingPoint

SAVE_ERRORS = (OSError, NoMessageError)
"""What keeps one checkpoint from being written, and maybe not the next."""

_PATIENCE_S = 1.0
"""A commit takes milliseconds; what takes longer may take an hour."""

_EXIT_WITHIN_S = 10.0
"""How long the end of the script waits for a checkpoint that is being written."""


@dataclass(frozen=True, slots=True)
class _Task:
    """A checkpoint to be written."""

    manifest: Manifest
    content: dict[str, Any]
    complete: Callable[[], dict[str, Any]]
    kept: tuple[str, ...]
    superseded: tuple[str, ...]
    handoff: int
    began_at: float
    """Monotonic."""


class Writer:
    """Writes one run's checkpoints and deletes those that it superseded.

    Args:
        directory: where they are.
        run: part of their names, as is the next.
        group: the same.
        keep: how many to keep.
        start: what was begun from.
        channel: to the agent; None without one.
        node: whose own disk has the directory; empty if all nodes see it.
    """

    def __init__(
        self,
        directory: Path,
        run: str,
        group: int,
        *,
        keep: int,
        start: StartingPoint,
        channel: AgentChannel | None = None,
        node: str = "",
    ) -> None:
        self._directory = directory
        self._run = run
        self._group = group
        self._keep = keep
        self._channel = channel
        self._node = node
        # Inherited from the writer before us, so that restarts do not leave checkpoints that nobody deletes.
        self._kept = start.kept
        self._superseded = start.superseded
        self._thread: threading.Thread | None = None
        self._is_on_disk = threading.Event()
        self._awaits_verdict = False
        self._verdict_due = 0.0
        self._outcome: bool | Exception = True
        atexit.register(_finish_at_exit, weakref.ref(self))

    def write(  # noqa: PLR0913 - all that one checkpoint is made of
        self,
        content: dict[str, Any],
        *,
        step: int,
        save: int = 0,
        world_size: int,
        metrics: dict[str, float | None],
        hooks: Sequence[Callable[[Path], object]] = (),
        handoff: int = 0,
        shard: Callable[[Path], dict[str, Any]] = lambda _place: {},
        complete: Callable[[], dict[str, Any]] = dict,
    ) -> None:
        """Begin to write a checkpoint; a thread does the rest. First waits for the one before.

        Args:
            content: plain values and tensors only, which nobody changes any more.
            step: steps committed.
            save: number of the save of this step; at most one checkpoint for each.
            world_size: number of ranks that trained it.
            metrics: noted in the manifest.
            hooks: called at once, with an empty directory to write further files into.
            handoff: number of the handoff that it is made for, or 0.
            shard: called at once, to write shards into the directory; returns what is to be added to the content.
            complete: called on the thread; returns what is to be added to the content.

        Raises:
            CheckpointError: this run and group already have a checkpoint of this step and save.
            AgentGoneError: the agent ended before it said whether the one before this counts.
            OSError: it could not be begun. The checkpoints before it are untouched, and it may be tried again.
        """
        with contextlib.suppress(*SAVE_ERRORS):  # of the one before, and told when it happened
            self.finish()
        began_at = time.monotonic()
        if not self._kept:  # else it is away, and another in its place would hide what was saved when it is back
            self._directory.mkdir(parents=True, exist_ok=True)
        stem = stem_of(self._run, self._group, step, save)
        require_unused(self._directory / stem)
        private = self._directory / private_name(stem)
        kept, superseded = self._choose_kept()
        manifest = Manifest(
            run=self._run,
            group=self._group,
            step=step,
            save=save,
            private=private.name,
            files=(),
            world_size=world_size,
            saved_at=time.time(),
            metrics=metrics,
            previous=(*superseded, *kept),
        )
        with removed_on_error(private):
            private.mkdir()
            call_hooks(private, hooks)
            content = {**content, "name": stem, **shard(private)}
        task = _Task(manifest, content, complete, kept, superseded, handoff, began_at)
        self._is_on_disk.clear()
        self._thread = threading.Thread(target=self._run_task, args=(task,), name="checkpoint", daemon=True)
        self._thread.start()

    def is_busy(self) -> bool:
        """Wait for the disk; then tell whether the last checkpoint still awaits its verdict, a moment after asking.

        Where the next save falls due later than that, nothing is lost on it.
        """
        if self._thread is None:
            return False
        self._is_on_disk.wait()
        self._thread.join(max(0.0, self._verdict_due - time.monotonic()))
        if self._thread.is_alive() and not self._awaits_verdict:
            self._thread.join()  # it deletes what is superseded: the disk again
        return self._thread.is_alive()

    def finish(self, within_s: float | None = None) -> bool:
        """Wait until what was written last is settled; return whether it counts. Says the same until the next `write`.

        If not, it was removed, for the group is no longer the current one; or, where the time is bounded, nobody has
        said so in time.

        Raises:
            AgentGoneError: the agent ended before it said whether it counts.
            NotPostedError: a rank did not hand over its part of it.
            OSError: it could not be written.
        """
        if self._thread is not None:
            self._thread.join(within_s)
            if self._thread.is_alive():
                return False
            self._thread = None
        if isinstance(self._outcome, Exception):
            raise self._outcome
        return self._outcome

    def finish_at_exit(self) -> None:
        """Give what is being written a moment: a script that ends right after a step that was due has not lost it."""
        if self._thread is None:
            return
        self._thread.join(_EXIT_WITHIN_S)
        if self._thread.is_alive():
            warn(f"the script ends, but its last checkpoint was not settled within {_EXIT_WITHIN_S:g} s")

    def wait_for_disk(self) -> None:
        """Wait until what was written last is on disk, or has failed."""
        if self._thread is not None:
            self._is_on_disk.wait()

    def _run_task(self, task: _Task) -> None:
        """On the thread: do all of it; `finish` has what comes of it."""
        try:
            self._outcome = self._save(task)
        except AgentGoneError as error:
            self._outcome = error
        except Exception as error:  # noqa: BLE001 - raised again by `finish`, where somebody can act
            self._outcome = error
            warn_not_saved(task.manifest.step, self._directory, error)
        finally:
            self._awaits_verdict = False
            self._is_on_disk.set()

    def _save(self, task: _Task) -> bool:
        private = self._directory / task.manifest.private
        with removed_on_error(private):
            manifest = self._write_files(private, task)
            if self._channel is None:
                place(private)
        if self._channel is None:
            self._count(private, task)
            return True
        is_committed = self._is_committed(manifest, task, self._channel)
        if is_committed and place_committed(private):
            self._count(private, task)
        elif is_committed:
            self._kept, self._superseded = (*task.kept, private.name), task.superseded
        return is_committed

    def _write_files(self, private: Path, task: _Task) -> Manifest:
        """Write all of it durably; return the manifest with the files listed."""
        try:
            task.content.update(task.complete())
            files = write_state(private, task.content), *seal(private, EXTRA), *seal(private, SHARDS)
        finally:
            task.content.clear()  # it is as large as the model, and the verdict may be an hour away
        manifest = replace(task.manifest, files=files)
        write_synced(private / MANIFEST, encode(manifest))
        sync_directory(private)
        sync_directory(self._directory)
        return manifest

    def _is_committed(self, manifest: Manifest, task: _Task, channel: AgentChannel) -> bool:
        asked = CommittedCheckpoint(
            copy=StateId(manifest.run, manifest.group, manifest.step, manifest.save),
            name=manifest.stem,
            private=manifest.private,
            manifest_sha256=hashlib.sha256(encode(manifest)).hexdigest(),
            kept=task.kept,
            superseded=task.superseded,
            handoff=task.handoff,
            node=self._node,
            size_bytes=sum(file.bytes for file in manifest.files),
            took_s=time.monotonic() - task.began_at,
            at=manifest.saved_at,
        )
        self._awaits_verdict, self._verdict_due = True, time.monotonic() + _PATIENCE_S
        self._is_on_disk.set()
        verdict = channel.publish(asked)
        self._awaits_verdict = False
        if verdict.checkpoint is not None:
            return True
        warn(f"step {asked.copy.step} was NOT saved: {verdict.reason}")
        shutil.rmtree(self._directory / asked.private, ignore_errors=True)
        return False

    def _count(self, private: Path, task: _Task) -> None:
        """It is in its place: those that it supersedes may go."""
        self._kept = (*task.kept, private.name)
        self._superseded = tuple(name for name in task.superseded if not is_deleted(self._directory / name))

    def _choose_kept(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Return which older ones to keep beside the one to be written, and which it supersedes."""
        cut = max(0, len(self._kept) - (self._keep - 1))
        # Those that could not be deleted, for as long as they are there; no list grows without end.
        left = [name for name in self._superseded if is_there(self._directory / name)][-MAX_KEEP:]
        return self._kept[cut:], (*left, *self._kept[:cut])


def warn_not_saved(step: int, directory: Path, error: Exception) -> None:
    """Say in one line that training goes on without this checkpoint."""
    warn(
        f"step {step} was NOT saved in {directory}: {error}{_limit(error)}; the older checkpoint is kept, "
        "and the next save is due as usual"
    )


def _limit(error: Exception) -> str:
    """The limit of this process that it comes of; empty: none."""
    size_bytes, _ = resource.getrlimit(resource.RLIMIT_FSIZE)
    if not isinstance(error, OSError) or error.errno != errno.EFBIG or size_bytes == resource.RLIM_INFINITY:
        return ""
    return f" (a file may have no more than {size_bytes >> 20} MiB: ulimit -f)"


def _finish_at_exit(reference: weakref.ref[Writer]) -> None:
    writer = reference()
    if writer is not None:
        writer.finish_at_exit()
