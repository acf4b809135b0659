"""Writing durable checkpoints.

All files of a checkpoint are written and flushed to disk in a directory with a private name, the manifest last. Then
the checkpoint is committed, and one rename gives the directory its final name, which cannot be in use yet. Any failure
before that leaves the older checkpoints as they were, and the attempt removes its private directory.

Training does not wait: it hands over a copy of its state, and a thread does the rest, one checkpoint at a time. If the
next save is due while the disk is still busy with this one, training waits for the disk. If it is due while this one
waits for its verdict, or is being written to an object store, the next one is skipped, because that may take an hour.

Under an agent the commit is a record of the job, written only while this group is the current one: see
`agent_channel.py`. Without an answer the checkpoint may or may not be committed, so its files stay. Once committed, it
counts even if this process goes no further: the next group that restores it completes the rename. Without an agent the
rename is the commit.

A writer deletes only checkpoints that its committed record lists as superseded, or without an agent, that its own run's
manifests list. It never deletes what it merely finds in the directory: another run may be at work there, or a group
that does not know yet that it is no longer the current one. A name that was listed as superseded is never used again,
so a writer that was stopped for an hour does no harm when it continues. It deletes the private name before the final
one: the rename leads from the first to the second, so no checkpoint escapes. In an object store, where nothing is
renamed, it deletes the final name first, which leads to the files.

Nobody deletes the private directories of writers that were killed before the commit.
"""

from __future__ import annotations

import contextlib
import hashlib
import shutil
import threading
import time
import weakref
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from trainer_runtime.agent_channel import AgentGoneError
from trainer_runtime.checkpoint import limit_behind, warn
from trainer_runtime.checkpoint_files import (
    call_hooks,
    delete_superseded,
    exists,
    name_in_use,
    removed_on_error,
    rename_committed,
    rename_to_final,
    require_unused,
    seal,
    sync_directory,
    write_state,
    write_synced,
)
from trainer_runtime.contract import MAX_KEEP
from trainer_runtime.manifest import MANIFEST, SHARDS, Manifest, StoredFile, encode, private_name, stem_of
from trainer_runtime.object_store import call_at_exit, is_remote, make_directory, remove_tree
from trainer_runtime.rank_messages import NoMessageError
from trainer_runtime.record import CommittedCheckpoint, StateId
from trainer_runtime.sealed_store import ForgedError
from trainer_runtime.snapshot_copy import ChangedError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from trainer_runtime.agent_channel import AgentChannel
    from trainer_runtime.resume import StartingPoint

Completed = tuple[dict[str, Any], tuple[StoredFile, ...]]

SAVE_ERRORS = (OSError, NoMessageError, ForgedError, ChangedError)
"""Errors that prevent one checkpoint from being written, but possibly not the next."""

_VERDICT_WAIT_S = 1.0
"""Seconds to wait for a verdict. A commit takes milliseconds; if it takes longer than this, it may take an hour."""

_EXIT_WITHIN_S = 10.0
"""Seconds that the end of the script waits for a checkpoint that is being written."""


class Content:
    """What one checkpoint consists of.

    Args:
        whole: plain values and tensors only, which nobody changes any more.
    """

    def __init__(self, whole: dict[str, Any]) -> None:
        self._whole = whole

    def prepare(self, private: Path) -> None:
        """Prepare for writing, on the training thread, in the checkpoint's private directory."""

    def read(self, private: Path) -> Completed:
        """Return the content of the state file, and files that were written into the directory; on the thread."""
        del private
        return self._whole, ()

    def require_unchanged(self) -> None:
        """Raise ChangedError if what was read is not what was there at the commit; on the thread, after `read`."""

    def release(self) -> None:
        """Free the memory: everything is written, or will not be."""


@dataclass(frozen=True, slots=True)
class _Task:
    """A checkpoint to be written."""

    manifest: Manifest
    content: Content
    extra: Path | None
    """Directory of the files that hooks wrote."""
    kept: tuple[str, ...]
    superseded: tuple[str, ...]
    handoff: int
    began_at: float
    """Monotonic time."""


class Writer:
    """Writes one run's checkpoints and deletes those that they supersede.

    Args:
        directory: directory of the checkpoints.
        run: name of the run, part of the checkpoints' names.
        group: number of the group, part of the checkpoints' names.
        keep: number of checkpoints to keep.
        start: the starting point, with the checkpoints to inherit.
        channel: channel to the agent; None without an agent.
        node: node whose own disk has the directory; empty if all nodes see it.
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
        # Inherited from the previous writer, so that restarts leave no checkpoints that nobody deletes.
        self._kept = start.kept
        self._superseded = start.superseded
        self._thread: threading.Thread | None = None
        self._is_on_disk = threading.Event()
        self._awaits_verdict = False
        self._verdict_due = 0.0
        self._outcome: bool | Exception = True
        self._is_abandoned = False
        call_at_exit(directory, partial(_finish_at_exit, weakref.ref(self)))

    def write(
        self,
        content: Content,
        *,
        step: int,
        save: int = 0,
        world_size: int,
        metrics: dict[str, float | None],
        hooks: Sequence[Callable[[Path], object]] = (),
        handoff: int = 0,
    ) -> None:
        """Begin to write a checkpoint; a thread does the rest. Waits first for the previous checkpoint.

        Args:
            content: what to write; released in any case.
            step: number of committed steps.
            save: number of the save of this step; there is at most one checkpoint for each.
            world_size: number of ranks that trained it.
            metrics: metrics for the manifest.
            hooks: called at once, with an empty directory into which they write further files.
            handoff: number of the handoff that the checkpoint is made for, or 0.

        Raises:
            CheckpointError: this run and group already have a checkpoint of this step and save.
            AgentGoneError: the agent exited before it answered whether the previous checkpoint is committed.
            OSError: writing could not begin. The older checkpoints are untouched, and a retry is possible.
        """
        with contextlib.suppress(*SAVE_ERRORS):  # errors of the previous checkpoint, reported when they happened
            self.finish()
        began_at = time.monotonic()
        if not self._kept:  # otherwise a mount is away: a new directory would hide its checkpoints when it is back
            make_directory(self._directory, parents=True)
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
        try:
            with removed_on_error(private):
                make_directory(private)
                extra = call_hooks(private, hooks)
                try:
                    content.prepare(private)
                except BaseException:
                    self._discard(extra)
                    raise
        except BaseException:
            content.release()
            raise
        task = _Task(manifest, content, extra, kept, superseded, handoff, began_at)
        self._is_on_disk.clear()
        self._thread = threading.Thread(target=self._run_task, args=(task,), name="checkpoint", daemon=True)
        self._thread.start()

    def why_busy(self, *, may_skip: bool) -> str:
        """Wait for the disk; then return why no other checkpoint can be written, after a short wait. Empty: one can.

        A save that is due later than that wait is not skipped. An object store is not waited for: it may be away.

        Args:
            may_skip: the save that is due may be left out, so that it is not worth waiting for an object store.
        """
        if self._thread is None:
            return ""
        if may_skip and is_remote(self._directory) and self._thread.is_alive() and not self._awaits_verdict:
            return "is still being written to the object store, or older ones are being deleted there"
        self._is_on_disk.wait()
        self._thread.join(max(0.0, self._verdict_due - time.monotonic()))
        if self._thread.is_alive() and not self._awaits_verdict:
            self._thread.join()  # it is deleting superseded checkpoints, so it uses the disk
        if not self._thread.is_alive():
            return ""
        return (
            "still waits to be committed, because the agent cannot reach etcd, or cannot read a record of the job there"
        )

    def finish(self, within_s: float | None = None) -> bool:
        """Wait for the outcome of the last checkpoint; return whether it is committed. The same until the next `write`.

        False: it was removed because the group is no longer the current one; or `within_s` is set, and no verdict came
        in time.

        Raises:
            AgentGoneError: the agent exited before it answered whether the checkpoint is committed.
            NoMessageError: a rank did not hand over its part.
            ForgedError: a stranger has changed a rank's part in the ranks' store.
            ChangedError: the copy is not what was there at the commit.
            OSError: the checkpoint could not be written.
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
        """Wait a moment for the last checkpoint, so that a script that ends right after a save does not lose it."""
        if self._thread is None or self._is_abandoned:
            return
        self._thread.join(_EXIT_WITHIN_S)
        if self._thread.is_alive():
            warn(f"the script ends, but its last checkpoint was not settled within {_EXIT_WITHIN_S:g} s")

    def abandon(self) -> None:
        """Do not commit a checkpoint that is still being written: its ranks go on in another group."""
        self._is_abandoned = True

    def wait_for_disk(self) -> None:
        """Wait until the last checkpoint is on disk, or has failed."""
        if self._thread is not None:
            self._is_on_disk.wait()

    def _run_task(self, task: _Task) -> None:
        """On the thread: write and commit a checkpoint; `finish` has the outcome."""
        try:
            self._outcome = self._save(task)
        except AgentGoneError as error:
            self._outcome = error
        except Exception as error:  # noqa: BLE001 - raised again by `finish`, where the caller can act
            self._outcome = error
            if not self._is_abandoned:
                warn_not_saved(task.manifest.step, self._directory, error)
        finally:
            self._awaits_verdict = False
            self._is_on_disk.set()

    def _save(self, task: _Task) -> bool:
        private = self._directory / task.manifest.private
        with removed_on_error(private):
            manifest = self._write_files(private, task)
            if self._channel is None:
                try:
                    rename_to_final(private)
                except FileExistsError as error:
                    raise name_in_use(private.with_name(task.manifest.stem)) from error
        if self._channel is None:
            self._count(private, task)
            return True
        is_committed = self._is_committed(manifest, task, self._channel)
        if is_committed and rename_committed(private):
            self._count(private, task)
        elif is_committed:
            self._kept, self._superseded = (*task.kept, private.name), task.superseded
        return is_committed

    def _write_files(self, private: Path, task: _Task) -> Manifest:
        """Write all files durably; return the manifest with the list of files."""
        try:
            content, shards = task.content.read(private)
            named = {**content, "name": task.manifest.stem, "private": task.manifest.private}
            files = write_state(private, named), *seal(private, task.extra), *shards
            task.content.require_unchanged()
        finally:
            task.content.release()  # as large as the model, and the verdict may be an hour away
            self._discard(task.extra)
        manifest = replace(task.manifest, files=files)
        write_synced(private / MANIFEST, encode(manifest))
        for each in (*([private / SHARDS] if shards else []), private, self._directory):
            sync_directory(each)
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
        self._awaits_verdict, self._verdict_due = True, time.monotonic() + _VERDICT_WAIT_S
        self._is_on_disk.set()
        verdict = channel.publish(asked, lambda: self._is_abandoned)
        self._awaits_verdict = False
        if verdict.checkpoint is not None:
            return True
        if not verdict.is_saved and not self._is_abandoned:
            warn(f"step {asked.copy.step} was NOT saved: {verdict.reason}")
        remove_tree(self._directory / asked.private)
        return False

    def _discard(self, extra: Path | None) -> None:
        """Delete the files that hooks wrote, if they are not in the checkpoint's own directory."""
        if extra is not None and is_remote(self._directory):
            shutil.rmtree(extra, ignore_errors=True)

    def _count(self, private: Path, task: _Task) -> None:
        """Take over the lists of a checkpoint that has its final name, and delete those that it supersedes."""
        self._kept = (*task.kept, private.name)
        self._superseded = tuple(name for name in task.superseded if not delete_superseded(self._directory / name))

    def _choose_kept(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Return which older checkpoints to keep beside the one to be written, and which it supersedes."""
        cut = max(0, len(self._kept) - (self._keep - 1))
        # Checkpoints that could not be deleted, while they exist; bounded, so that no list grows without end.
        left = [name for name in self._superseded if exists(self._directory / name)][-MAX_KEEP:]
        return self._kept[cut:], (*left, *self._kept[:cut])


def warn_not_saved(step: int, directory: Path, error: Exception) -> None:
    """Print one line that training continues without this checkpoint."""
    warn(
        f"step {step} was NOT saved in {directory}: {error}{limit_behind(error)}; what was saved before is kept, and "
        "later saves are tried as usual"
    )


def _finish_at_exit(reference: weakref.ref[Writer]) -> None:
    writer = reference()
    if writer is not None:
        writer.finish_at_exit()
