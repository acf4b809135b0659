"""Commands on a job from anywhere that reaches its etcd: `scale` and `status`."""

from __future__ import annotations

import getpass
import socket
import sys
import time

import click
import msgspec

from agent.core.membership import nodes
from agent.core.model import ClusterView
from agent.errors import ConfigError, RecordError, StoreRefused, StoreUnavailable
from agent.observe.status import job_status, print_status
from agent.observe.stderr import standard_error
from agent.store.access import Access
from agent.store.api import Compare, KeyRange, Put, Store
from agent.store.etcd import EtcdStore
from agent.store.keys import ROOT, JobKeys, check_id, encode, jobs_in, view_of


def scale_job(server: Access, job_id: str | None, np: tuple[int, int], timeout_s: float) -> int:
    """Change a live job's desired number of nodes. Raises `ConfigError` if there is no such job."""
    store = _connect(server, job_id, timeout_s)
    try:
        keys = JobKeys(_find(store, server, job_id, only_live=True))
        while True:
            view = _view(store, keys)
            if view.spec is None or view.result is not None:
                raise ConfigError(f"job {keys.job_id!r} has ended: there is nothing to scale")
            old = view.spec.value
            new = msgspec.structs.replace(
                old, revision=old.revision + 1, np_min=np[0], np_max=np[1], changed_by=_who(), changed_at=time.time()
            )
            unchanged = Compare(keys.spec, mod_revision=view.spec.mod_revision)
            if store.transact([unchanged], [Put(keys.spec, encode(new))]).succeeded:
                break
    finally:
        store.close()
    have = len(view.nodes)
    missing = f"; {np[0] - have} more needed" if have < np[0] else ""
    click.echo(f"job {keys.job_id}: np {old.np} -> {new.np} ({nodes(have)} there{missing})")
    return 0


def show_status(server: Access, job_id: str | None, timeout_s: float, *, as_json: bool) -> int:
    """Print a job's state. Raises `ConfigError` if there is no such job."""
    store = _connect(server, job_id, timeout_s)
    try:
        keys = JobKeys(_find(store, server, job_id, only_live=False))
        status = job_status(keys.job_id, _view(store, keys))
    finally:
        store.close()
    if as_json:
        click.echo(msgspec.json.format(msgspec.json.encode(status)))
    else:
        print_status(status, sys.stdout)
    return 0


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
