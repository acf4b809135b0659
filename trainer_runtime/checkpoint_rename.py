"""Renaming a checkpoint to its final name, and deleting superseded checkpoints; see `writer`."""

from __future__ import annotations

import contextlib
import shutil
from typing import TYPE_CHECKING

from trainer_runtime.checkpoint import CheckpointError, warn
from trainer_runtime.disk import delete_checkpoint, sync_directory
from trainer_runtime.manifest import final_name

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


def require_unused(path: Path) -> None:
    """Raise CheckpointError if a checkpoint's final name is in use."""
    if path.exists():
        raise CheckpointError(
            f"wanted to write {path}, which exists; a checkpoint's name is never used twice: "
            "start every group of a run under a number of its own"
        )


@contextlib.contextmanager
def removed_on_error(private: Path) -> Iterator[None]:
    """Remove the checkpoint's directory if the block fails: nothing refers to it before it is committed."""
    try:
        yield
    except BaseException as error:
        if isinstance(error, OSError):
            name = final_name(private.name)
            error.add_note(f"checkpoint {name} was NOT written in {private.parent}; the older ones are untouched")
        shutil.rmtree(private, ignore_errors=True)  # the original error is the one to report
        raise


def rename_to_final(private: Path) -> None:
    """Rename the directory to its final name, durably; OSError if that fails or the final name is in use."""
    final = private.with_name(final_name(private.name))
    private.rename(final)
    try:
        sync_directory(private.parent)
    except OSError:
        with contextlib.suppress(OSError):
            final.rename(private)
        raise


def rename_committed(private: Path) -> bool:
    """Rename a committed checkpoint to its final name; return whether that succeeded."""
    try:
        rename_to_final(private)
    except FileNotFoundError:
        warn(f"{private.name} was renamed, or superseded, by a later group")
    except OSError as error:
        warn(f"{private.name} is committed but could not be renamed ({error}); the next group will do so")
    else:
        return True
    return False


def exists(private: Path) -> bool:
    """Return whether the checkpoint exists, under its private or its final name."""
    return private.exists() or private.with_name(final_name(private.name)).exists()


def delete_superseded(private: Path) -> bool:
    """Delete a superseded checkpoint, under its private or its final name; return whether it is gone."""
    for path in (private, private.with_name(final_name(private.name))):
        try:
            delete_checkpoint(path)
        except FileNotFoundError:
            continue
        except OSError as error:
            warn(f"could not delete the superseded checkpoint {path.name} ({error}); the next save tries again")
            return False
    return True
