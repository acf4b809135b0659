"""Changes of a job's `spec`, the record of what users ask of the job, which its agents follow."""

from __future__ import annotations

import getpass
import socket
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import msgspec

from agent.core.model import Spec
from agent.core.view import ClusterView
from agent.errors import ConfigError
from agent.store.api import Compare, Put, Store
from agent.store.keys import JobKeys, encode, view_of


class SpecView(NamedTuple):
    """The spec of a job that has not ended, and the view that it was read with."""

    spec: Spec
    view: ClusterView


class SpecChange(NamedTuple):
    """A spec before and after a change."""

    old: Spec
    new: Spec
    """Equal to `old` if there was nothing to change."""
    view: ClusterView
    """The job just before the change."""


Edit = Callable[[SpecView], dict[str, Any]]
"""Returns the fields to change. Called again if another user changed the spec in the meantime."""


def live_spec(store: Store, keys: JobKeys) -> SpecView:
    """Read a job's spec. Raises `ConfigError` if the job has ended."""
    view = view_of(store.read(keys.whole()), keys, is_whole=True)
    if view.spec is not None and view.result is not None and view.result.value.is_reset:
        raise ConfigError(f"job {keys.job_id!r} was reset: the agents that start its next run choose its options")
    if view.spec is None or view.result is not None:
        raise ConfigError(f"job {keys.job_id!r} has ended: there is nothing to change")
    return SpecView(view.spec.value, view)


def change_spec(store: Store, keys: JobKeys, edit: Edit, *, by: str = "") -> SpecChange:
    """Change a live job's spec. Raises `ConfigError` if the job has ended.

    Args:
        store: the job's store.
        keys: the job's keys.
        edit: returns the fields to change.
        by: recorded as the user who changed it. Empty: the user of this process.
    """
    while True:
        seen = live_spec(store, keys)
        old, view = seen
        assert view.spec is not None  # noqa: S101 - it has just been read
        new = msgspec.structs.replace(old, **edit(seen))
        if new == old:
            return SpecChange(old, old, view)
        registered = {node.value.member.identity for node in view.nodes}
        new = msgspec.structs.replace(
            new,
            drained=tuple(each for each in new.drained if each in registered),  # agents that have left are forgotten
            revision=old.revision + 1,
            changed_by=by or current_user(),
            changed_at=time.time(),
        )
        unchanged = Compare(keys.spec, mod_revision=view.spec.mod_revision), Compare(keys.result, create_revision=0)
        if store.transact(unchanged, [Put(keys.spec, encode(new))]).succeeded:
            return SpecChange(old, new, view)


def pause_note(spec: Spec) -> str:
    """Return the end of a message on a change that a pause delays. Empty: the job is not paused."""
    return f"; the job is paused by {spec.paused_by}: this takes effect once it is resumed" if spec.paused_by else ""


def current_user() -> str:
    """Return the user of this process: `user@host`."""
    try:
        user = getpass.getuser()
    except (KeyError, OSError):  # a container's user may have no name
        user = "somebody"
    return f"{user}@{socket.gethostname()}"
