"""Changing what a job is asked to be: its `spec`, which its agents follow."""

from __future__ import annotations

import getpass
import socket
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import msgspec

from agent.core.model import ClusterView, Spec
from agent.errors import ConfigError
from agent.operate.jobs import read_view
from agent.store.api import Compare, Put, Store
from agent.store.keys import JobKeys, encode


class SpecView(NamedTuple):
    """A job that has not ended, and what it is asked to be."""

    spec: Spec
    view: ClusterView


class Changed(NamedTuple):
    """What a change has made of a spec."""

    old: Spec
    new: Spec
    """The same, if there was nothing to change."""
    view: ClusterView
    """Of the job just before."""


Edit = Callable[[SpecView], dict[str, Any]]
"""From what is seen, the fields of the spec that are to be others. May be asked again, if somebody else was first."""


def live_spec(store: Store, keys: JobKeys) -> SpecView:
    """What a job is asked to be. Raises `ConfigError` if it has ended."""
    view = read_view(store, keys)
    if view.spec is None or view.result is not None:
        raise ConfigError(f"job {keys.job_id!r} has ended: there is nothing to change")
    return SpecView(view.spec.value, view)


def change_spec(store: Store, keys: JobKeys, edit: Edit, *, by: str = "") -> Changed:
    """Change a live job's spec. Raises `ConfigError` if it has ended.

    Args:
        store: where it is.
        keys: the job's.
        edit: what is to be changed.
        by: who asks. Empty: the user of this process.
    """
    while True:
        seen = live_spec(store, keys)
        old, view = seen
        assert view.spec is not None  # noqa: S101 - it has just been read
        new = msgspec.structs.replace(old, **edit(seen))
        if new == old:
            return Changed(old, old, view)
        here = {node.value.member.identity for node in view.nodes}
        new = msgspec.structs.replace(
            new,
            drained=tuple(each for each in new.drained if each in here),  # who has left need not be told again
            revision=old.revision + 1,
            changed_by=by or who(),
            changed_at=time.time(),
        )
        unchanged = Compare(keys.spec, mod_revision=view.spec.mod_revision), Compare(keys.result, create_revision=0)
        if store.transact(unchanged, [Put(keys.spec, encode(new))]).succeeded:
            return Changed(old, new, view)


def if_paused(spec: Spec) -> str:
    """What is said with an order that a pause holds back; empty if there is none."""
    return f"; it is paused by {spec.paused_by}, so that comes once it is resumed" if spec.paused_by else ""


def who() -> str:
    """Who asks: `user@host`."""
    try:
        user = getpass.getuser()
    except (KeyError, OSError):  # a container's user may have no name
        user = "somebody"
    return f"{user}@{socket.gethostname()}"
