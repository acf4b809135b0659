"""Giving a checkpoint its final name, and deleting those that it supersedes; see `writer`."""

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
    """Raise CheckpointError if there is something under a checkpoint's final name."""
    if path.exists():
        raise CheckpointError(
            f"wanted to write {path}, which exists; a name is never used twice: "
            "start every group of a run under a number of its own"
        )


@contextlib.contextmanager
def removed_on_error(private: Path) -> Iterator[None]:
    """Remove a checkpoint if what is done with it fails: until it is committed, nobody refers to it."""
    try:
        yield
    except BaseException as error:
        if isinstance(error, OSError):
            name = final_name(private.name)
            error.add_note(f"checkpoint {name} was NOT written in {private.parent}; the older ones are untouched")
        shutil.rmtree(private, ignore_errors=True)  # the error under way is the one to be told
        raise


def place(private: Path) -> None:
    """Give it its final name, durably; OSError if that did not work or there is anything under that name."""
    final = private.with_name(final_name(private.name))
    private.rename(final)
    try:
        sync_directory(private.parent)
    except OSError:
        with contextlib.suppress(OSError):
            final.rename(private)
        raise


def place_committed(private: Path) -> bool:
    """Give one that counts its final name; tell whether that worked."""
    try:
        place(private)
    except FileNotFoundError:
        warn(f"{private.name} was put in its place, or superseded, by a later group")
    except OSError as error:
        warn(f"{private.name} is committed but could not be renamed ({error}); whoever resumes from it will do so")
    else:
        return True
    return False


def is_there(private: Path) -> bool:
    """Tell whether a checkpoint is there, under either name."""
    return private.exists() or private.with_name(final_name(private.name)).exists()


def is_deleted(private: Path) -> bool:
    """Delete a superseded checkpoint, under either name; tell whether it is gone."""
    for path in (private, private.with_name(final_name(private.name))):
        try:
            delete_checkpoint(path)
        except FileNotFoundError:
            continue
        except OSError as error:
            warn(f"could not delete the superseded checkpoint {path.name} ({error}); the next save tries again")
            return False
    return True
