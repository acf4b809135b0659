"""Finding a job in etcd, and reading it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from agent.core.incident import Incident
from agent.core.model import ClusterView
from agent.errors import ConfigError, RecordError, StoreRefused, StoreUnavailable
from agent.local_etcd.kept_records import KeptStore
from agent.observe.stderr import standard_error
from agent.operate.target import Target, listens, no_change, records_of, tell_of_left
from agent.roles.model import RoleView
from agent.roles.store import RoleKeys
from agent.store.access import Access
from agent.store.api import KeyRange, Store
from agent.store.etcd import EtcdStore
from agent.store.keys import ROOT, JobKeys, check_id, decode, jobs_in, view_of


@dataclass(frozen=True)
class JobEntry:
    """What etcd has of a job: it has ranks, or servers."""

    ranks: ClusterView
    roles: RoleView

    @property
    def is_known(self) -> bool:
        """It was begun."""
        return self.ranks.spec is not None or self.roles.spec is not None

    @property
    def is_live(self) -> bool:
        """Agents of it are there, and it has not ended."""
        return bool(self.ranks.nodes or self.roles.nodes) and not (self.ranks.result or self.roles.result)


class NoSuchJob(ConfigError):  # noqa: N818 - says what is the case
    """There is none of this name, or none at all."""


@contextmanager
def opened(target: Target, *, only_live: bool, may_have_servers: bool = False) -> Iterator[tuple[Store, JobKeys]]:
    """A connection to etcd, or what was kept of a job whose etcd has ended, and the keys of the job that is meant.

    Args:
        target: where it is.
        only_live: of several jobs there, those that have ended are not meant.
        may_have_servers: one with parameter servers is meant too.

    Raises:
        ConfigError: there is no such job, or several; or it has servers, and may not.
        StoreUnavailable: etcd could not be reached in time.
        StoreRefused: etcd answers, and does not let this user in.
    """
    store, job_id = _open(target, only_live=only_live)
    try:
        keys = JobKeys(job_id)
        if not may_have_servers and read_roles(store, keys).spec is not None:
            raise ConfigError(
                f"job {keys.job_id!r} has parameter servers: status, stop and reset are for it, and this is not"
            )
        yield store, keys
    finally:
        store.close()


def _open(target: Target, *, only_live: bool) -> tuple[Store, str]:
    left = target.left
    if left is None or any(map(listens, target.server.endpoints)):
        try:
            store = connect(target)
            try:
                return store, _find(store, target, only_live=only_live)
            except BaseException:
                store.close()
                raise
        except (NoSuchJob, StoreUnavailable):
            if left is None:
                raise
    if only_live:
        raise no_change(left)
    tell_of_left(left)
    return KeptStore(*records_of(left)), left.job.job_id


def read_view(store: Store, keys: JobKeys) -> ClusterView:
    """All of a job that decisions are made from."""
    return view_of(store.read(keys.whole()), keys, is_whole=True)


def read_roles(store: Store, keys: JobKeys) -> RoleView:
    """All of a job with parameter servers; of another one nothing."""
    roles = RoleKeys(keys.job_id)
    return roles.view(store.read(roles.everything()))


def read_incidents(store: Store, keys: JobKeys) -> list[Incident]:
    """What is kept of a job's changes of group, those of earlier runs included, the oldest first."""
    items = store.read((KeyRange(keys.incidents, is_prefix=True),)).items
    return sorted((decode(item, Incident).value for item in items), key=lambda incident: incident.group)


def read_history(store: Store, keys: JobKeys) -> list[Incident]:
    """The incidents of a job's current run, in order."""
    spec = read_view(store, keys).spec
    run = spec.value.run if spec is not None else ""
    return [incident for incident in read_incidents(store, keys) if incident.run == run]


def connect(target: Target) -> EtcdStore:
    """A connection to etcd that has been tried. Raises `StoreUnavailable`, or `StoreRefused`."""
    home = ROOT if target.job_id is None else JobKeys(check_id("--job_id", target.job_id)).prefix
    server = target.server
    store = EtcdStore(server.endpoints, server.credentials, home=home, retry_for_s=target.timeout_s)
    try:
        store.read(())
    except StoreRefused as error:
        store.close()
        hint = "" if target.job_id is not None else ", or name the job with --job_id"
        raise StoreRefused(f"{error}{hint}") from None
    except StoreUnavailable as error:
        store.close()
        raise StoreUnavailable(
            f"etcd at {server} could not be reached within {target.timeout_s:g} s ({error}): give its address with "
            "--elastic_server"
        ) from None
    return store


def _find(store: Store, target: Target, *, only_live: bool) -> str:
    """The job that is meant: the one named, else the only live one there."""
    server = target.server
    if target.job_id is not None:
        return _named(store, server, target.job_id)
    there = all_jobs(store)
    known = [each for each, job in there.items() if job.is_known]
    live = [each for each in known if there[each].is_live]
    candidates = live or ([] if only_live else known)
    if len(candidates) == 1:
        return candidates[0]
    if candidates:
        raise ConfigError(f"several jobs at {server}: {', '.join(candidates)}; say which one with --job_id")
    raise NoSuchJob(f"no live job at {server}; jobs that were there: {', '.join(known) or 'none'}")


def _named(store: Store, server: Access, job_id: str) -> str:
    if not store.read((KeyRange(JobKeys(job_id).spec), KeyRange(RoleKeys(job_id).spec))).items:
        raise NoSuchJob(f"no job {job_id!r} at {server}; jobs there: {_jobs_there(store)}")
    return job_id


def _jobs_there(store: Store) -> str:
    try:
        known = [each for each, job in all_jobs(store).items() if job.is_known]
    except StoreRefused:
        return "not for this user to see"
    return ", ".join(known) or "none"


def all_jobs(store: Store) -> dict[str, JobEntry]:
    """All jobs that can be read; of the others, a line each. One job's damage is no reason to fail for another's."""
    there = {}
    for job_id, snapshot in jobs_in(store.read((KeyRange(ROOT, is_prefix=True),))).items():
        try:
            ranks = view_of(snapshot, JobKeys(job_id), is_whole=True)
            there[job_id] = JobEntry(ranks, RoleKeys(job_id).view(snapshot))
        except RecordError as error:
            standard_error().write(
                f"elastic-agent: warning: job {job_id!r} is left out: {' '.join(str(error).split())}"
            )
    return there
