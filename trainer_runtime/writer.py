"""Writing durable checkpoints.

All of a checkpoint is written and flushed to disk in a directory with a private name, the manifest last. Then it is
committed, and one rename gives the directory its final name, under which nothing can be yet. Whatever happens before
leaves the older checkpoints as they were, and the attempt removes its private directory.

Under an agent the commit is a record of the job, written only while this group is the current one: see `channel.py`.
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
import time
from dataclasses import replace
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

    def write(
        self,
        content: dict[str, Any],
        *,
        step: int,
        world_size: int,
        metrics: dict[str, float | None],
        hooks: Sequence[Callable[[Path], object]] = (),
    ) -> Manifest | None:
        """Write a checkpoint; when this returns it is on disk and will survive a power failure.

        Args:
            content: plain values and tensors only.
            step: steps committed; at most one checkpoint per step.
            world_size: number of ranks that trained it.
            metrics: noted in the manifest.
            hooks: called with an empty directory to write further files into.

        Returns:
            Its manifest, or None if it does not count and was removed: the group is no longer the current one.

        Raises:
            CheckpointError: this run and group already have a checkpoint of this step.
            AgentGoneError: the agent ended before it said whether this counts.
            OSError: it could not be written. The checkpoints before it are untouched, and it may be tried again.
        """
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
        is_in_place = True
        if self._channel is not None:
            if not self._is_committed(manifest, kept, superseded, self._channel):
                return None
            is_in_place = self._place_committed(private)
        self._kept, self._superseded = (*kept, private.name), superseded
        if is_in_place:
            self._superseded = tuple(name for name in superseded if not self._is_deleted(name))
        return manifest

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
