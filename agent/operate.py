"""Commands on a job from anywhere that reaches its etcd."""

from __future__ import annotations

import getpass
import socket
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import click
import msgspec

from agent.core.drafts import nodes
from agent.core.model import ClusterView, Result, Spec
from agent.errors import ConfigError, RecordError, StoreRefused, StoreUnavailable
from agent.observe.status import job_status, print_status
from agent.observe.stderr import standard_error
from agent.store.access import Access
from agent.store.api import Compare, KeyRange, Put, Store
from agent.store.etcd import EtcdStore
from agent.store.keys import ROOT, JobKeys, check_id, encode, jobs_in, view_of


def scale_job(server: Access, job_id: str | None, np: tuple[int, int], timeout_s: float) -> int:
    """Change a live job's desired number of nodes. Raises `ConfigError` if there is no such job."""
    with _opened(server, job_id, timeout_s, only_live=True) as (store, keys):
        old, new, view = _change_spec(store, keys, np_min=np[0], np_max=np[1])
    have = len(view.nodes)
    missing = f"; {np[0] - have} more needed" if have < np[0] else ""
    click.echo(f"job {keys.job_id}: np {old.np} -> {new.np} ({nodes(have)} there{missing})")
    return 0


def pause_job(server: Access, job_id: str | None, timeout_s: float, *, is_paused: bool) -> int:
    """Stop a live job's changes of group, or let them go on. Raises `ConfigError` if there is no such job."""
    with _opened(server, job_id, timeout_s, only_live=True) as (store, keys):
        _change_spec(store, keys, paused_by=_who() if is_paused else "")
    now = "paused: it trains on, and nothing changes until it is resumed" if is_paused else "resumed"
    click.echo(f"job {keys.job_id}: {now}")
    return 0


def reset_job(server: Access, job_id: str | None, timeout_s: float) -> int:
    """Let an ended, or abandoned, job begin anew. Raises `ConfigError` if it is alive, or not there."""
    with _opened(server, job_id, timeout_s, only_live=False) as (store, keys):
        while not _reset(store, keys):
            pass
    click.echo(f"job {keys.job_id}: reset; its next agents begin a new run (from the newest checkpoint, if any)")
    return 0


def _reset(store: Store, keys: JobKeys) -> bool:
    view = _view(store, keys)
    if view.spec is None:
        raise ConfigError(f"job {keys.job_id!r} is gone: there is nothing to reset")
    if view.nodes:
        alive = ", ".join(node.value.node_id for node in view.nodes)
        raise ConfigError(f"job {keys.job_id!r} is alive: stop its agents first (nodes: {alive})")
    number = view.group.value.number if view.group is not None else 0
    # The record stays, as a tombstone: an agent of the old run that was cut off must not revive it.
    ended = Result(
        run=view.spec.value.run, group=number, succeeded=False, exit_code=1, reason=f"reset by {_who()}", is_reset=True
    )
    unchanged = [
        Compare(keys.spec, mod_revision=view.spec.mod_revision),
        Compare(keys.result, mod_revision=view.result.mod_revision if view.result is not None else 0),
    ]
    return store.transact(unchanged, [Put(keys.result, encode(ended))]).succeeded


def _change_spec(store: Store, keys: JobKeys, **changes: Any) -> tuple[Spec, Spec, ClusterView]:  # noqa: ANN401
    """Change a live job's spec; return it as it was and is, with the view that it was changed in."""
    while True:
        view = _view(store, keys)
        if view.spec is None or view.result is not None:
            raise ConfigError(f"job {keys.job_id!r} has ended: there is nothing to change")
        old = view.spec.value
        by = {"revision": old.revision + 1, "changed_by": _who(), "changed_at": time.time()}
        new = msgspec.structs.replace(old, **by, **changes)
        unchanged = Compare(keys.spec, mod_revision=view.spec.mod_revision)
        if store.transact([unchanged], [Put(keys.spec, encode(new))]).succeeded:
            return old, new, view


def show_status(server: Access, job_id: str | None, timeout_s: float, *, as_json: bool) -> int:
    """Print a job's state. Raises `ConfigError` if there is no such job."""
    with _opened(server, job_id, timeout_s, only_live=False) as (store, keys):
        status = job_status(keys.job_id, _view(store, keys))
    if as_json:
        click.echo(msgspec.json.format(msgspec.json.encode(status)))
    else:
        print_status(status, sys.stdout)
    return 0


@contextmanager
def _opened(
    server: Access, job_id: str | None, timeout_s: float, *, only_live: bool
) -> Iterator[tuple[EtcdStore, JobKeys]]:
    store = _connect(server, job_id, timeout_s)
    try:
        yield store, JobKeys(_find(store, server, job_id, only_live=only_live))
    finally:
        store.close()


def _connect(server: Access, job_id: str | None, timeout_s: float) -> EtcdStore:
    home = ROOT if job_id is None else JobKeys(check_id("--job_id", job_id)).prefix
    store = EtcdStore(server.endpoints, server.credentials, home=home, retry_for_s=timeout_s)
    try:
        store.read(())
    except StoreRefused as error:
        store.close()
        hint = "" if job_id is not None else ", or name the job with --job_id"
        raise StoreRefused(f"{error}{hint}") from None
    except StoreUnavailable as error:
        store.close()
        raise StoreUnavailable(
            f"etcd at {server} could not be reached within {timeout_s:g} s ({error}): give its address with "
            "--elastic_server"
        ) from None
    return store


def _view(store: Store, keys: JobKeys) -> ClusterView:
    return view_of(store.read(keys.whole()), keys, is_whole=True)


def _find(store: Store, server: Access, job_id: str | None, *, only_live: bool) -> str:
    """The job that is meant: the one named, else the only live one there."""
    if job_id is not None:
        return _named(store, server, job_id)
    views = _all_jobs(store)
    known = [each for each, view in views.items() if view.spec is not None]
    live = [each for each in known if views[each].result is None and views[each].nodes]
    candidates = live or ([] if only_live else known)
    if len(candidates) == 1:
        return candidates[0]
    if candidates:
        raise ConfigError(f"several jobs at {server}: {', '.join(candidates)}; say which one with --job_id")
    raise ConfigError(f"no live job at {server}; jobs that were there: {', '.join(known) or 'none'}")


def _named(store: Store, server: Access, job_id: str) -> str:
    keys = JobKeys(job_id)
    if not store.read((KeyRange(keys.spec),)).items:
        raise ConfigError(f"no job {job_id!r} at {server}; jobs there: {_jobs_there(store)}")
    return job_id


def _jobs_there(store: Store) -> str:
    try:
        known = [each for each, view in _all_jobs(store).items() if view.spec is not None]
    except StoreRefused:
        return "not for this user to see"
    return ", ".join(known) or "none"


def _all_jobs(store: Store) -> dict[str, ClusterView]:
    """All jobs that can be read; of the others, a line each. One job's damage is no reason to fail for another's."""
    views = {}
    for job_id, snapshot in jobs_in(store.read((KeyRange(ROOT, is_prefix=True),))).items():
        try:
            views[job_id] = view_of(snapshot, JobKeys(job_id), is_whole=True)
        except RecordError as error:
            standard_error().write(
                f"elastic-agent: warning: job {job_id!r} is left out: {' '.join(str(error).split())}"
            )
    return views


def _who() -> str:
    try:
        user = getpass.getuser()
    except (KeyError, OSError):  # a container's user may have no name
        user = "somebody"
    return f"{user}@{socket.gethostname()}"
