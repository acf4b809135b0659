"""Finding a job in etcd, reading its records, and following their changes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from queue import Empty, SimpleQueue
from typing import Any, Generic, TypeVar

from agent.core.incident import Incident
from agent.core.view import ClusterView
from agent.errors import ConfigError, ElasticAgentError, RecordError, StoreRefused, StoreUnavailable
from agent.local_etcd.kept_records import KeptStore
from agent.local_etcd.known_jobs import known_jobs
from agent.observe.stderr import standard_error
from agent.operate.target import (
    Target,
    is_listening,
    kept_store_arguments,
    nothing_to_change,
    read_target,
    report_ended,
)
from agent.roles.model import RoleView
from agent.roles.store import RoleKeys
from agent.store.access import Access, read_server
from agent.store.api import KeyRange, Snapshot, Store
from agent.store.etcd import EtcdStore
from agent.store.keys import ROOT, JobKeys, check_id, decode, jobs_in, view_of
from agent.store.mirror import Mirror

V = TypeVar("V")

_SUGGEST_WITHIN_S = 1.0


@dataclass(frozen=True)
class JobEntry:
    """The records of a job in etcd; it has either ranks or parameter servers."""

    ranks: ClusterView
    roles: RoleView

    @property
    def is_known(self) -> bool:
        """Whether the job was started."""
        return self.ranks.spec is not None or self.roles.spec is not None

    @property
    def is_live(self) -> bool:
        """Whether agents of the job are registered and it has not ended."""
        return bool(self.ranks.nodes or self.roles.nodes) and not (self.ranks.result or self.roles.result)


class NoSuchJob(ConfigError):  # noqa: N818 - named like the fact
    """There is no job of this name, or no job at all."""


@contextmanager
def open_job(target: Target, *, only_live: bool, may_have_servers: bool = False) -> Iterator[tuple[Store, JobKeys]]:
    """Open the store that has the job's records, until the end of the block.

    The store is etcd, or the records that were kept of a job whose own etcd has ended.

    Args:
        target: the job.
        only_live: do not choose a job that has ended.
        may_have_servers: accept a job with parameter servers.

    Yields:
        The store, and the job's keys.

    Raises:
        ConfigError: there is no such job, or there are several; or it has parameter servers and must not.
        StoreUnavailable: etcd could not be reached in time.
        StoreRefused: etcd refuses this user.
    """
    store, job_id = _open(target, only_live=only_live)
    try:
        keys = JobKeys(job_id)
        if not may_have_servers and read_roles(store, keys).spec is not None:
            raise ConfigError(
                f"job {keys.job_id!r} has parameter servers: only status, stop and reset support such jobs"
            )
        yield store, keys
    finally:
        store.close()


def _open(target: Target, *, only_live: bool) -> tuple[Store, str]:
    ended = target.ended_job
    if ended is None or any(map(is_listening, target.server.endpoints)):
        try:
            store = connect(target)
            try:
                return store, _find(store, target, only_live=only_live)
            except BaseException:
                store.close()
                raise
        except (NoSuchJob, StoreUnavailable):
            if ended is None:
                raise
    if only_live:
        raise nothing_to_change(ended)
    kept = KeptStore(*kept_store_arguments(ended))
    report_ended(ended)
    return kept, ended.job.job_id


def connect(target: Target) -> EtcdStore:
    """Connect to etcd and try the connection. Raises `StoreUnavailable` or `StoreRefused`."""
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
    """Return the id of the job that is meant: the named job, else the only live one."""
    server = target.server
    if target.job_id is not None:
        return _find_named(store, server, target.job_id)
    jobs = all_jobs(store)
    known = [job_id for job_id, job in jobs.items() if job.is_known]
    live = [job_id for job_id in known if jobs[job_id].is_live]
    candidates = live or ([] if only_live else known)
    if len(candidates) == 1:
        return candidates[0]
    if candidates:
        raise ConfigError(f"several jobs at {server}: {', '.join(candidates)}; choose one with --job_id")
    raise NoSuchJob(f"no live job at {server}; jobs that have ended: {', '.join(known) or 'none'}")


def _find_named(store: Store, server: Access, job_id: str) -> str:
    if not store.read((KeyRange(JobKeys(job_id).spec), KeyRange(RoleKeys(job_id).spec))).items:
        raise NoSuchJob(f"no job {job_id!r} at {server}; jobs there: {_job_list(store)}")
    return job_id


def _job_list(store: Store) -> str:
    try:
        known = [job_id for job_id, job in all_jobs(store).items() if job.is_known]
    except StoreRefused:
        return "this user may not see them"
    return ", ".join(known) or "none"


# Reading


def all_jobs(store: Store) -> dict[str, JobEntry]:
    """Return all jobs that can be read. A job with a damaged record is left out with a warning."""
    jobs = {}
    for job_id, snapshot in jobs_in(store.read((KeyRange(ROOT, is_prefix=True),))).items():
        try:
            ranks = view_of(snapshot, JobKeys(job_id), is_whole=True)
            jobs[job_id] = JobEntry(ranks, RoleKeys(job_id).view(snapshot))
        except RecordError as error:
            standard_error().write(
                f"elastic-agent: warning: job {job_id!r} is left out: {' '.join(str(error).split())}"
            )
    return jobs


def read_view(store: Store, keys: JobKeys) -> ClusterView:
    """Read all records of a job from which decisions are made."""
    return view_of(store.read(keys.whole()), keys, is_whole=True)


def read_roles(store: Store, keys: JobKeys) -> RoleView:
    """Read all records of a job with parameter servers; the view of another job is empty."""
    roles = RoleKeys(keys.job_id)
    return roles.view(store.read(roles.everything()))


def read_incidents(store: Store, keys: JobKeys) -> list[Incident]:
    """Read the incidents that are kept, oldest first, including those of earlier runs."""
    items = store.read((KeyRange(keys.incidents, is_prefix=True),)).items
    return sorted((decode(item, Incident).value for item in items), key=lambda incident: incident.group)


def read_history(store: Store, keys: JobKeys) -> list[Incident]:
    """Read the incidents of a job's current run, in order."""
    spec = read_view(store, keys).spec
    run = spec.value.run if spec is not None else ""
    return [incident for incident in read_incidents(store, keys) if incident.run == run]


# Following


class Follower(Generic[V]):
    """Watches key ranges in etcd, and returns what `read` makes of their newest snapshot."""

    def __init__(self, store: Store, ranges: Sequence[KeyRange], read: Callable[[Snapshot], V]) -> None:
        self._read = read
        self._arrived: SimpleQueue[Snapshot] = SimpleQueue()
        self.mirror = Mirror(store, ranges, self._arrived.put, _warn_of_outage)

    def next(self, timeout_s: float | None = None) -> V | None:
        """Wait for a change, and skip snapshots that are outdated by then. None: nothing changed in time.

        Raises:
            RecordError: a record cannot be read.
        """
        try:
            snapshot = self._arrived.get(timeout=timeout_s)
            while not self._arrived.empty():
                snapshot = self._arrived.get_nowait()
        except Empty:
            return None
        return self._read(snapshot)


@contextmanager
def follow_job(store: Store, keys: JobKeys) -> Iterator[Follower[ClusterView]]:
    """Follow a job of ranks until the end of the block. The first view comes at once."""
    with started(Follower(store, keys.whole(), lambda snapshot: view_of(snapshot, keys, is_whole=True))) as follower:
        yield follower


@contextmanager
def started(follower: Follower[V]) -> Iterator[Follower[V]]:
    """Run a follower until the end of the block."""
    follower.mirror.start()
    try:
        yield follower
    finally:
        follower.mirror.close()


def _warn_of_outage(reason: str) -> None:
    standard_error().write(f"elastic-agent: warning: etcd cannot be reached ({reason}); still trying")


# Suggestions for the shell's completion: quick, and silent about every error


def suggest_job_ids(options: dict[str, Any]) -> list[str]:
    """Return the ids of all jobs in etcd, and of jobs on this machine unless an etcd is named."""
    local = [] if options["elastic_server"] else [each.job.job_id for each in known_jobs()]
    try:
        store = connect(Target(read_server(options), None, _SUGGEST_WITHIN_S))
        try:
            return list(dict.fromkeys([*local, *all_jobs(store)]))
        finally:
            store.close()
    except ElasticAgentError:
        return local


def suggest_node_ids(options: dict[str, Any]) -> list[str]:
    """Return the ids of a job's registered and excluded nodes."""
    try:
        target = replace(read_target(options, is_silent=True), timeout_s=_SUGGEST_WITHIN_S)
        with open_job(target, only_live=True) as (store, keys):
            view = read_view(store, keys)
    except ElasticAgentError:
        return []
    excluded = view.spec.value.excluded if view.spec is not None else ()
    return sorted({*excluded, *(node.value.node_id for node in view.nodes)})
