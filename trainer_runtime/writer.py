"""Writing durable checkpoints.

All of a checkpoint is written and flushed to disk in a directory with a private name, the manifest last. Then it is
committed, and one rename gives the directory its final name, under which nothing can be yet. Whatever happens before
leaves the older checkpoints as they were, and the attempt removes its private directory.

Under an agent the commit is a record of the job, written only while this group is the current one: see `channel.py`.
Training does not wait for it: the agent may have lost its store for an hour. A thread does, one checkpoint at a time.
No answer is neither yes nor no, so the files then stay. After a yes the checkpoint counts even if this process goes no
further: whoever resumes from it completes the rename. Without an agent the rename is the commit.

A writer deletes only what the record that it committed lists as superseded, or without an agent its own run's
manifests, never what it sees in the directory: another run, or a group that does not know that it is no longer the
current one, may be at work there. A name that is once listed never comes back into use, so that a writer that was
stopped for an hour can do no harm when it goes on. It deletes the private name before the final one: the rename leads
from the first to the second, so nothing slips through.

What nobody cleans up: private directories of writers that were killed before the commit.
"""

from __future__ import annotations

import contextlib
import hashlib
import shutil
import threading
import time
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from trainer_runtime.checkpoint import CheckpointError, warn
from trainer_runtime.contract import MAX_KEEP
from trainer_runtime.disk import delete_checkpoint, sync_directory, write_extra, write_state, write_synced
from trainer_runtime.manifest import MANIFEST, Manifest, encode, final_name, private_name, stem_of
from trainer_runtime.record import Checkpoint, Copy

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

    from trainer_runtime.channel import Channel
    from trainer_runtime.resume import Start

_PATIENCE_S = 1.0
"""A commit takes milliseconds; what takes longer may take an hour."""


class Writer:
    """Writes one run's checkpoints and deletes those that it superseded."""

    def __init__(
        self, directory: Path, run: str, group: int, *, keep: int, start: Start, channel: Channel | None = None
    ) -> None:
        self._directory = directory
        self._run = run
        self._group = group
        self._keep = keep
        self._channel = channel
        # Inherited from the writer before us, so that restarts do not leave checkpoints that nobody deletes.
        self._kept = start.kept
        self._superseded = start.superseded
        self._thread: threading.Thread | None = None
        self._patience_s = _PATIENCE_S
        self._outcome: bool | Exception = True

    def write(
        self,
        content: dict[str, Any],
        *,
        step: int,
        world_size: int,
        metrics: dict[str, float | None],
        hooks: Sequence[Callable[[Path], object]] = (),
    ) -> None:
        """Write a checkpoint; when this returns it is on disk, and is being committed: `finish` waits for that.

        Args:
            content: plain values and tensors only.
            step: steps committed; at most one checkpoint per step.
            world_size: number of ranks that trained it.
            metrics: noted in the manifest.
            hooks: called with an empty directory to write further files into.

        Raises:
            CheckpointError: this run and group already have a checkpoint of this step.
            AgentGoneError: the agent ended before it said whether the one before this counts.
            OSError: it could not be written. The checkpoints before it are untouched, and it may be tried again.
        """
        self.finish()
        self._directory.mkdir(parents=True, exist_ok=True)
        stem = stem_of(self._run, self._group, step)
        self._require_unused(stem)
        private = self._directory / private_name(stem)
        kept, superseded = self._choose_kept()
        manifest = Manifest(
            run=self._run,
            group=self._group,
            step=step,
            private=private.name,
            files=(),
            world_size=world_size,
            saved_at=time.time(),
            metrics=metrics,
            previous=(*superseded, *kept),
        )
        with self._removed_on_error(private):
            manifest = self._write_private(private, manifest, content, hooks)
            if self._channel is None:
                self._place(private)
        if self._channel is None:
            self._count(private, kept, superseded)
            return
        commit = partial(self._commit, manifest, kept, superseded, self._channel)
        self._thread = threading.Thread(target=commit, name="checkpoint", daemon=True)
        self._thread.start()

    def is_busy(self) -> bool:
        """Whether the last checkpoint is still not committed, after a moment; no moment is lost on it twice."""
        if self._thread is None:
            return False
        self._thread.join(self._patience_s)
        self._patience_s = 0.0 if self._thread.is_alive() else _PATIENCE_S
        return self._thread.is_alive()

    def finish(self) -> bool:
        """Wait for the commit under way; return whether what was written last counts.

        If not, it was removed: the group is no longer the current one.

        Raises:
            AgentGoneError: the agent ended before it said whether it counts.
        """
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        outcome, self._outcome = self._outcome, True
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    def _commit(self, manifest: Manifest, kept: tuple[str, ...], superseded: tuple[str, ...], channel: Channel) -> None:
        """On the thread: have it committed, then put it in its place."""
        try:
            self._outcome = self._is_committed(manifest, kept, superseded, channel)
        except Exception as error:  # noqa: BLE001 - raised again by `finish`, where somebody can act
            self._outcome = error
            return
        private = self._directory / manifest.private
        if self._outcome and self._place_committed(private):
            self._count(private, kept, superseded)
        elif self._outcome:
            self._kept, self._superseded = (*kept, private.name), superseded

    def _count(self, private: Path, kept: tuple[str, ...], superseded: tuple[str, ...]) -> None:
        """It is in its place: those that it supersedes may go."""
        self._kept = (*kept, private.name)
        self._superseded = tuple(name for name in superseded if not self._is_deleted(name))

    def _write_private(
        self, private: Path, manifest: Manifest, content: dict[str, Any], hooks: Sequence[Callable[[Path], object]]
    ) -> Manifest:
        """Write all of it durably; return the manifest with the files listed."""
        private.mkdir()
        manifest = replace(manifest, files=(write_state(private, content), *write_extra(private, hooks)))
        write_synced(private / MANIFEST, encode(manifest))
        sync_directory(private)
        sync_directory(self._directory)
        return manifest

    def _choose_kept(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Return which older ones to keep beside the one to be written, and which it supersedes."""
        cut = max(0, len(self._kept) - (self._keep - 1))
        # Those that could not be deleted, for as long as they are there; no list grows without end.
        left = [name for name in self._superseded if self._is_there(name)][-MAX_KEEP:]
        return self._kept[cut:], (*left, *self._kept[:cut])

    def _is_there(self, private: str) -> bool:
        return (self._directory / private).exists() or (self._directory / final_name(private)).exists()

    def _require_unused(self, stem: str) -> None:
        path = self._directory / stem
        if path.exists():
            raise CheckpointError(
                f"wanted to write {path}, which exists; a name is never used twice: "
                "start every group of a run under a number of its own"
            )

    @contextlib.contextmanager
    def _removed_on_error(self, private: Path) -> Iterator[None]:
        """Until it is committed, nobody refers to it."""
        try:
            yield
        except BaseException as error:
            if isinstance(error, OSError):
                name = final_name(private.name)
                error.add_note(f"checkpoint {name} was NOT written in {self._directory}; the older ones are untouched")
            shutil.rmtree(private, ignore_errors=True)  # the error under way is the one to be told
            raise

    def _place(self, private: Path) -> None:
        final = self._directory / final_name(private.name)
        private.rename(final)  # which fails if there is anything under the final name
        try:
            sync_directory(self._directory)
        except OSError:
            with contextlib.suppress(OSError):
                final.rename(private)
            raise

    def _is_committed(
        self, manifest: Manifest, kept: tuple[str, ...], superseded: tuple[str, ...], channel: Channel
    ) -> bool:
        asked = Checkpoint(
            copy=Copy(manifest.run, manifest.group, manifest.step),
            name=manifest.stem,
            private=manifest.private,
            manifest_sha256=hashlib.sha256(encode(manifest)).hexdigest(),
            kept=kept,
            superseded=superseded,
        )
        verdict = channel.publish(asked)
        if verdict.checkpoint is not None:
            return True
        warn(f"step {asked.copy.step} was NOT saved: {verdict.reason}")
        shutil.rmtree(self._directory / asked.private, ignore_errors=True)
        return False

    def _place_committed(self, private: Path) -> bool:
        try:
            self._place(private)
        except FileNotFoundError:
            warn(f"{private.name} was put in its place, or superseded, by a later group")
        except OSError as error:
            warn(f"{private.name} is committed but could not be renamed ({error}); whoever resumes from it will do so")
        else:
            return True
        return False

    def _is_deleted(self, private: str) -> bool:
        for name in (private, final_name(private)):
            try:
                delete_checkpoint(self._directory / name)
            except FileNotFoundError:
                continue
            except OSError as error:
                warn(f"could not delete the superseded checkpoint {name} ({error}); the next save tries again")
                return False
        return True
